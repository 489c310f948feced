"""Who plays a task type: ``registry.py`` finds the files, ``base_generator.py`` is what they implement.

Importing a module below this one loads nothing beside it. ``BaseGenerator`` and ``query_single_turn``, which slime's
plain generators import from here, come when they are asked for.
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
