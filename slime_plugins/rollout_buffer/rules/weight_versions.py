"""Pure: the order of the weight versions that sampled a trajectory.

Versions are ordered within one run of the trainer: a trainer that resumes counts from 0 again, while results of its
earlier run may still arrive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from slime_plugins.rollout_buffer.types import Generation, version_number

MAX_STEP = 1000
"""A version further ahead of the newest known version is an outlier: a timestamp, or another counter."""
MAX_FIRST_VERSION = 1_000_000
"""A first version above this is an outlier; a run may begin at the number of the previous run's last step."""
MAX_STRAGGLER_DISTANCE = 16
"""A late result of the earlier run is at most this many versions behind the end of that run."""

VersionRange = tuple[int, int]
"""The oldest and the newest weight version that sampled some of the tokens."""


def versions_of(generations: Iterable[Generation]) -> VersionRange | None:
    """Returns the oldest and newest version over all spans; None if no generation names one."""
    numbers = [number for text in _reported(generations) if (number := version_number(text)) is not None]
    return (min(numbers), max(numbers)) if numbers else None


def _reported(generations: Iterable[Generation]) -> Iterable[str | None]:
    for generation in generations:
        yield generation.weight_version
        yield from (span.weight_version for span in generation.weight_version_spans)


class VersionOrigin(Enum):
    """The run of the trainer that a weight version belongs to."""

    OF_THIS_RUN = auto()
    OF_AN_EARLIER_RUN = auto()
    OUTLIER = auto()  # too far ahead of the newest: it does not become the newest


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownVersions:
    """The newest version that a job knows of its trainer's present run, and of the run before.

    ``trainer_run`` counts the runs of the trainer; ``began_at`` is when the present run started.
    """

    trainer_run: int
    began_at: float | None
    newest: int | None
    newest_before: int | None


def origin_of(version: int, known: KnownVersions, *, attempt_began_at: float | None = None) -> VersionOrigin:
    """Returns the run that a version belongs to; ``attempt_began_at`` is None if unknown.

    A version belongs to the earlier run if its attempt began before the present run, or if it is near the end of the
    earlier run and far ahead of the present run. If the latter is wrong, it makes no group stale.
    """
    if attempt_began_at is not None and known.began_at is not None and attempt_began_at < known.began_at:
        return VersionOrigin.OF_AN_EARLIER_RUN
    near_limit = 1 if known.newest is None else known.newest + MAX_STRAGGLER_DISTANCE
    before = known.newest_before
    if before is not None and near_limit < version <= before and version >= before - MAX_STRAGGLER_DISTANCE:
        return VersionOrigin.OF_AN_EARLIER_RUN
    limit = MAX_FIRST_VERSION if known.newest is None else known.newest + MAX_STEP
    return VersionOrigin.OUTLIER if version > limit else VersionOrigin.OF_THIS_RUN
