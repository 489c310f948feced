"""Pure: how old the weights are that sampled a trajectory.

The trainer counts its weight versions up from 1, and the engine reports them as text; before the first update it says
``default``, which is version 0. What is no number, or one beyond ``MAX_VERSION``, has no age. Versions are ordered
within one run of the trainer: one that resumes counts from 0 again, while results of the run before may still come.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from slime_plugins.rollout_buffer.types import Generation

MAX_VERSION = 2**53
"""What JSON readers hold exactly. Whoever counts further counts nothing that ages."""
MAX_STEP = 1000
"""What is further ahead of the newest known version is a timestamp, or counts something else."""
MAX_FIRST_VERSION = 1_000_000
"""The same, where none is known yet: a run may begin at the number of its last step."""
STRAGGLERS_WITHIN = 16
"""Versions of the end of the run before, named by whoever brings a result late."""

VersionRange = tuple[int, int]
"""The oldest and the newest weight version that sampled some of the tokens."""


def version_number(text: str | None) -> int | None:
    """Returns a weight version as a number, None for what is none: the one reader of versions, wherever they stand."""
    if text == "default":
        return 0
    if text is None or not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_VERSION)):
        return None
    number = int(text)
    return number if number <= MAX_VERSION else None


def versions_of(generations: Iterable[Generation]) -> VersionRange | None:
    """Returns the oldest and newest version over all spans; None when no generation tells one."""
    numbers = [number for text in _reported(generations) if (number := version_number(text)) is not None]
    return (min(numbers), max(numbers)) if numbers else None


def _reported(generations: Iterable[Generation]) -> Iterable[str | None]:
    for generation in generations:
        yield generation.weight_version
        yield from (span.weight_version for span in generation.weight_version_spans)


class Standing(Enum):
    """What a weight version is, beside those that a job knows."""

    OF_THIS_RUN = auto()
    OF_AN_EARLIER_RUN = auto()
    OUTLIER = auto()  # absurdly far ahead: it counts for nothing but itself


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownVersions:
    """What a job knows of its trainer's present run, and the last version of the run before."""

    trainer_run: int
    began_at: float | None
    newest: int | None
    newest_before: int | None


def standing_of(version: int, known: KnownVersions, *, sampled_from: float | None = None) -> Standing:
    """Tells to which run a version belongs; ``sampled_from`` is when its sampling began, None when it is unknown.

    Without that time, a version out of the end of the run before is a straggler of it when nothing in the present run
    comes near. It makes no group stale, which is the milder error.
    """
    if sampled_from is not None and known.began_at is not None and sampled_from < known.began_at:
        return Standing.OF_AN_EARLIER_RUN
    near = 1 if known.newest is None else known.newest + STRAGGLERS_WITHIN
    before = known.newest_before
    if before is not None and near < version <= before and version >= before - STRAGGLERS_WITHIN:
        return Standing.OF_AN_EARLIER_RUN
    limit = MAX_FIRST_VERSION if known.newest is None else known.newest + MAX_STEP
    return Standing.OUTLIER if version > limit else Standing.OF_THIS_RUN
