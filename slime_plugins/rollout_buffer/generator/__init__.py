"""Who plays a task type: ``registry.py`` finds the files, ``base_generator.py`` is what they implement.

Importing a module below this one loads nothing beside it. ``BaseGenerator`` and ``query_single_turn``, which slime's
plain generators import from here, ``load`` and ``Plugin`` come when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.generator.plain_generator import BaseGenerator, query_single_turn
    from slime_plugins.rollout_buffer.generator.registry import Catalog, Plugin, discover, load

__all__ = ["BaseGenerator", "Catalog", "Plugin", "discover", "load", "query_single_turn"]

_HOMES = {
    "BaseGenerator": "plain_generator",
    "Catalog": "registry",
    "Plugin": "registry",
    "discover": "registry",
    "load": "registry",
    "query_single_turn": "plain_generator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
