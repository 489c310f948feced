"""Pure: whether the weight versions of a job stand still, so that its lag says nothing of how old its tokens are.

A bound on the lag holds only while somebody counts: the engine says which version sampled a token, the trainer which it
is at. Where one of them never moves, groups of any age are trained without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from slime_plugins.rollout_buffer.rules.admission import VersionSeen, version_at

EPISODES_LOOKED_AT = 32
ENOUGH_EPISODES = 12
ENOUGH_GROUPS = 4
"""One instance or two may be odd in themselves."""
UNBOUNDED_LAG = 2
"""What is looked for in a job that has no bound."""


class StuckParty(StrEnum):
    """Whose weight version does not move."""

    ENGINE = "engine"  # the trainer goes on, and episodes that begin are sampled by what it had long before
    TRAINER = "trainer"  # it takes one step's groups after the other at one version
    UNKNOWN = "unknown"  # nothing that was sampled names one


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledEpisode:
    """An episode that brought a trajectory. ``began_at`` is None where nobody here began it."""

    group_key: int | None
    began_at: float | None
    oldest_version: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckWeights:
    """What was seen in ``count`` of ``looked_at`` episodes, or of steps; ``version`` is where it stands."""

    who: StuckParty
    count: int
    looked_at: int
    version: int | None = None
    trainers_version: int | None = None


def stuck_weights(
    lag: int | None, seen: Sequence[VersionSeen], newest: Sequence[SampledEpisode], *, steps: int
) -> StuckWeights | None:
    """Returns whose weight version stands still; None when nobody's does, or too little was seen.

    ``seen`` are the trainer's versions, oldest first, ``newest`` the newest episodes, and ``steps`` how often the
    trainer left and came back for more at its newest version. An episode counts against the engine when it *began*
    after the trainer had reached a version more than ``lag`` + 1 beyond what sampled it: how long it took is no matter.
    """
    beyond = (UNBOUNDED_LAG if lag is None else lag) + 2
    named = [one for one in newest if one.oldest_version is not None]
    behind = [one for one in named if _began_behind(seen, one) >= beyond]
    if _are_enough(behind) and len(behind) * 4 >= len(named) * 3:
        newest_of_them = max(one.oldest_version or 0 for one in behind)
        return StuckWeights(
            who=StuckParty.ENGINE,
            count=len(behind),
            looked_at=len(named),
            version=newest_of_them,
            trainers_version=seen[-1].version,
        )
    if lag is None:
        return None  # nobody asked for versions
    if not named and _are_enough(newest):
        return StuckWeights(who=StuckParty.UNKNOWN, count=len(newest), looked_at=len(newest))
    if len(seen) == 1 and steps >= beyond:
        return StuckWeights(who=StuckParty.TRAINER, count=steps, looked_at=steps, version=seen[0].version)
    return None


def _began_behind(seen: Sequence[VersionSeen], episode: SampledEpisode) -> int:
    """How many versions the trainer had gone beyond an episode's weights when it began; 0 where that is unknown."""
    if episode.began_at is None or episode.oldest_version is None:
        return 0
    at_begin = version_at(seen, episode.began_at)
    return 0 if at_begin is None else at_begin - episode.oldest_version


def _are_enough(episodes: Sequence[SampledEpisode]) -> bool:
    return len(episodes) >= ENOUGH_EPISODES and len({one.group_key for one in episodes}) >= ENOUGH_GROUPS
