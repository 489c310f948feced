"""Pure: decides which group may begin now, under a bound on the lag of weight versions.

A group that begins now is trained within the bound if

* the groups ahead of it do not fill more versions than the bound (``room_for_groups``);
* it is played before the trainer has passed the bound, by an estimate from earlier durations (``GroupTimes``) and the
  trainer's pace. While the trainer works off a backlog, slow groups are deferred in favour of quick groups
  (``should_defer``);
* later groups do not overtake it: groups are delivered oldest first, and a poll waits for a group that the next step
  would make too old, as long as this wait leaves no device idle (``should_wait_for_slow_groups``).

No rule blocks a group forever: a waiting trainer is always served, an unknown pace blocks nothing, and a group that
exceeds the bound whenever it begins is played anyway and handled as stale at delivery.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

QUANTILE = 0.9
"""The quantile of durations taken as the expected one of a group: they have a heavy tail, so a mean is too low."""
MIN_SAMPLES = 8
"""With fewer episodes of an instance, the episodes of its task are used; with fewer of its task, those of all tasks."""
MAX_VERSIONS = 9
"""The pace is the median over this many versions: one pause for an evaluation does not change it."""
MAX_KEYS = 4096
"""Maximum number of instances and tasks with stored durations; that without a new duration for longest is evicted."""
MAX_WAIT_IN_VERSIONS = 2.0
"""Longest wait of a trainer for slow groups, in typical durations of a version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSeen:
    """One weight version, from the trainer's polls. Times are seconds on one clock."""

    version: int
    since: float
    """Time of the trainer's first poll with this version."""
    last_taken_at: float
    """Time of the trainer's last delivery with this version."""
    groups: int
    """Groups that the trainer took with this version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The trainer's speed; None is unknown."""

    version_s: float | None = None
    """Seconds from one weight version to the next."""
    step_s: float | None = None
    """The same, without the time in which the trainer waited for groups."""
    groups_per_version: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsAhead:
    """The backlog ahead of a group that would begin now, in groups."""

    taken: int
    """Groups delivered since the newest version."""
    ready: int
    running: int
    """Groups that have begun and are not ready."""
    trainer_waits: bool
    """True if the trainer polls and no group is ready."""


def pace_of(seen: Sequence[VersionSeen]) -> Pace:
    """Returns the trainer's pace from its versions, oldest first; unknown with fewer than two."""
    newest = list(seen)[-MAX_VERSIONS:]
    steps = [(earlier, later, later.version - earlier.version) for earlier, later in pairwise(newest)]
    steps = [(earlier, later, gap) for earlier, later, gap in steps if gap > 0]
    if not steps:
        return Pace()
    return Pace(
        version_s=statistics.median(max(0.0, later.since - earlier.since) / gap for earlier, later, gap in steps),
        step_s=statistics.median(max(0.0, later.since - earlier.last_taken_at) / gap for earlier, later, gap in steps),
        groups_per_version=statistics.median(earlier.groups / gap for earlier, _, gap in steps),
    )


def version_at(seen: Sequence[VersionSeen], moment: float) -> int | None:
    """Returns the weight version at a moment; before the first poll, the first known version; None if there is none."""
    begun = [one for one in seen if one.since <= moment] or seen[:1]
    return begun[-1].version if begun else None


def _groups_per_version(pace: Pace, ahead: GroupsAhead) -> float | None:
    """Returns how many groups the trainer takes for each version; None if unknown.

    A trainer that has taken its usual number of groups and waits for more is expected to take twice what it has taken.
    """
    usual = pace.groups_per_version
    if usual is None or usual <= 0:
        return None
    return max(usual, 2.0 * ahead.taken) if ahead.trainer_waits and ahead.taken >= usual else usual


def room_for_groups(lag: int, pace: Pace, ahead: GroupsAhead) -> int | None:
    """Returns how many groups may begin now so that each is trained at most ``lag`` versions later.

    None is unlimited: the number of groups per version is not known yet. Never 0 if the trainer waits and no group is
    ready or running.
    """
    per_version = _groups_per_version(pace, ahead)
    if per_version is None:
        return None
    room = math.floor((lag + 1) * per_version + 1e-9) - ahead.taken - ahead.ready - ahead.running
    if ahead.trainer_waits and not ahead.ready and not ahead.running:
        return max(1, room)
    return max(0, room)


def should_defer(lag: int, pace: Pace, ahead: GroupsAhead, expected_s: float | None) -> bool:
    """Returns True if a group should begin later, because it would be too old with the present backlog.

    With a smaller backlog the trainer publishes fewer versions while the group plays. A group that would be too old
    even with an empty backlog is not deferred: it gains nothing by beginning later.
    """
    if expected_s is None or not pace.version_s or not pace.groups_per_version:
        return False
    backlog_versions = (ahead.taken + ahead.ready) / pace.groups_per_version
    max_versions = expected_s / pace.step_s if pace.step_s else math.inf
    without_backlog = min(max_versions, expected_s / pace.version_s)
    with_backlog = min(max_versions, expected_s / pace.version_s + backlog_versions)
    return without_backlog <= lag < with_backlog


def should_wait_for_slow_groups(
    lag: int, pace: Pace, ahead: GroupsAhead, *, oldest_is_behind: int | None, waited_s: float
) -> bool:
    """Returns True if a poll should wait for a running group that began ``oldest_is_behind`` versions ago.

    True only if the next step would make that group too old, and only while there is room for all groups that the
    devices can begin during the trainer's next step, so that no device becomes idle.
    """
    if oldest_is_behind is None or oldest_is_behind < lag or lag < 1:
        return False
    if not pace.version_s or pace.step_s is None or waited_s >= MAX_WAIT_IN_VERSIONS * pace.version_s:
        return False
    if ahead.taken >= (pace.groups_per_version or 0.0):
        return False  # the trainer has taken the groups of a step and asks for more: the pace is out of date
    room = room_for_groups(lag, pace, ahead)
    per_version = pace.groups_per_version or 0.0
    return room is not None and room > per_version * min(1.0, pace.step_s / pace.version_s)


class GroupTimes:
    """Durations of episodes by instance, by task and overall, and the duration of a group estimated from them."""

    def __init__(self, *, group_size: int, of_instance: int = 32, of_task: int = 128, of_all: int = 512) -> None:
        """``of_instance``, ``of_task`` and ``of_all`` limit the stored episodes of each key."""
        self._share: float = QUANTILE ** (1.0 / group_size)
        self._limits = (of_instance, of_task, of_all)
        self._seen: dict[tuple[str, str], deque[float]] = {}  # newest last

    def add(self, instance_id: str, task: str, seconds: float) -> None:
        """Records the duration of an episode."""
        for key, limit in zip(self._keys(instance_id, task), self._limits, strict=True):
            times = self._seen.pop(key, None) or deque[float](maxlen=limit)
            times.append(seconds)
            self._seen[key] = times
        while len(self._seen) > MAX_KEYS:
            del self._seen[next(iter(self._seen))]

    def expected_s(self, instance_id: str, task: str) -> float | None:
        """Returns the seconds in which nine of ten groups of the instance are complete; None with too few durations.

        A group is complete when the slowest of its n episodes is: that is the quantile 0.9 ** (1 / n) of one episode.
        """
        for key in self._keys(instance_id, task):
            times = self._seen.get(key) or ()
            if len(times) >= MIN_SAMPLES:
                rank = math.ceil(self._share * len(times)) - 1
                return sorted(times)[min(len(times) - 1, rank)]
        return None

    @staticmethod
    def _keys(instance_id: str, task: str) -> tuple[tuple[str, str], ...]:
        return ("instance", instance_id), ("task", task), ("all", "")
