"""Pure: how old the weights are that sampled a trajectory.

The trainer counts its weight versions up from 1, and the engine reports them as text; before the first update it says
``default``, which counts as version 0. What is no number has no age.
"""

from __future__ import annotations

from collections.abc import Iterable

from slime_plugins.rollout_buffer.types import Generation

__all__ = ["VersionRange", "version_number", "versions_of"]

VersionRange = tuple[int, int]
"""The oldest and the newest weight version that sampled some of the tokens."""


def version_number(text: str | None) -> int | None:
    """Returns a weight version as a number; None for what is none."""
    if text == "default":
        return 0
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        return None
    return int(text)


def versions_of(generations: Iterable[Generation]) -> VersionRange | None:
    """Returns the oldest and newest version over all spans; None when no generation tells one."""
    numbers = [number for text in _reported(generations) if (number := version_number(text)) is not None]
    return (min(numbers), max(numbers)) if numbers else None


def _reported(generations: Iterable[Generation]) -> Iterable[str | None]:
    for generation in generations:
        yield generation.weight_version
        yield from (span.weight_version for span in generation.weight_version_spans)
