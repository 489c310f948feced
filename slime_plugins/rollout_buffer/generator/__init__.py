"""Generators of task types: ``registry.py`` finds them, ``base_generator.py`` is their protocol.

Importing a submodule imports nothing else. ``BaseGenerator`` and ``query_single_turn``, which slime's
plain generators import from here, are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.generator.plain_generator import BaseGenerator, query_single_turn

__all__ = ["BaseGenerator", "query_single_turn"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from slime_plugins.rollout_buffer.generator import plain_generator

    return getattr(plain_generator, name)
