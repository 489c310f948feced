"""Android World with slime's multi-turn environment interface: ``AndroidWorldEnv`` is a ``BaseInteractionEnv``."""

from __future__ import annotations

import importlib
from typing import Any

from slime_plugins.rollout_buffer.generator.android_world.custom_generate import build_env as build_env_of
from slime_plugins.rollout_buffer.generator.android_world.interaction_env import AndroidWorldEnv as Environment

__all__ = ["AndroidWorldEnv", "BaseInteractionEnv", "build_env"]


def _base() -> Any:
    """Returns slime's base class of environments; outside of a slime checkout a placeholder of the same name."""
    try:
        return importlib.import_module("examples.geo3k_vlm_multi_turn.base_env").BaseInteractionEnv
    except ImportError:
        return type("BaseInteractionEnv", (), {})


BaseInteractionEnv = _base()


class AndroidWorldEnv(Environment, BaseInteractionEnv):  # type: ignore[misc, valid-type]  # typed by slime
    """One task on a leased device. ``reset``, ``step`` and ``compute_final_reward`` are coroutines."""


def build_env(sample: Any = None, args: Any = None, **_: Any) -> AndroidWorldEnv:
    """Returns the environment of a Sample's task; ignores other arguments, as slime's own ``build_env``."""
    return build_env_of(sample, args, kind=AndroidWorldEnv)
