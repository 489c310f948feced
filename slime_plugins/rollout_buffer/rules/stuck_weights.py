"""Pure: detects a job whose weight versions do not change, so that the lag does not measure the age of its tokens.

A bound on the lag works only while both counters advance: the engine's, which names the version that sampled a token,
and the trainer's. If one of them does not, groups of any age pass the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slime_plugins.rollout_buffer.rules.admission import VersionSeen, version_at

MAX_EPISODES = 32
"""Number of newest episodes that are examined."""
MIN_EPISODES = 12
MIN_GROUPS = 4
"""Episodes of fewer instances are no evidence."""
UNBOUNDED_LAG = 2
"""The lag that is assumed for a job without a bound."""


class StuckCounter(StrEnum):
    """Whose weight version does not change."""

    ENGINE = "engine"  # the trainer's version advances, and new episodes are sampled by old versions
    TRAINER = "trainer"  # the trainer takes the groups of several steps at one version
    UNKNOWN = "unknown"  # no episode names a version


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledEpisode:
    """An episode with a trajectory. ``began_at`` is None for an episode that an external program played."""

    group_key: int | None
    began_at: float | None
    oldest_version: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckWeights:
    """Evidence from ``count`` of ``examined`` episodes or steps; ``version`` is the version that does not change."""

    who: StuckCounter
    count: int
    examined: int
    version: int | None = None
    trainers_version: int | None = None


def stuck_weights(
    lag: int | None, seen: Sequence[VersionSeen], newest: Sequence[SampledEpisode], *, steps: int
) -> StuckWeights | None:
    """Returns whose weight version does not change; None if both change, or if there is too little evidence.

    ``seen`` are the trainer's versions, oldest first, ``newest`` the newest episodes, and ``steps`` the number of
    training steps that the trainer made at its newest version. An episode counts against the engine if, when it
    *began*, the trainer was already more than ``lag`` + 1 versions ahead of the version that sampled it. How long
    the episode played does not matter.
    """
    beyond = (UNBOUNDED_LAG if lag is None else lag) + 2
    named = [one for one in newest if one.oldest_version is not None]
    behind = [one for one in named if _began_behind(seen, one) >= beyond]
    if _are_enough(behind) and len(behind) * 4 >= len(named) * 3:
        newest_of_them = max(one.oldest_version or 0 for one in behind)
        return StuckWeights(
            who=StuckCounter.ENGINE,
            count=len(behind),
            examined=len(named),
            version=newest_of_them,
            trainers_version=seen[-1].version,
        )
    if lag is None:
        return None  # the job has no bound
    if not named and _are_enough(newest):
        return StuckWeights(who=StuckCounter.UNKNOWN, count=len(newest), examined=len(newest))
    if len(seen) == 1 and steps >= beyond:
        return StuckWeights(who=StuckCounter.TRAINER, count=steps, examined=steps, version=seen[0].version)
    return None


def _began_behind(seen: Sequence[VersionSeen], episode: SampledEpisode) -> int:
    """Returns by how many versions the trainer was ahead of an episode's weights when it began; 0 if unknown."""
    if episode.began_at is None or episode.oldest_version is None:
        return 0
    at_begin = version_at(seen, episode.began_at)
    return 0 if at_begin is None else at_begin - episode.oldest_version


def _are_enough(episodes: Sequence[SampledEpisode]) -> bool:
    return len(episodes) >= MIN_EPISODES and len({one.group_key for one in episodes}) >= MIN_GROUPS
