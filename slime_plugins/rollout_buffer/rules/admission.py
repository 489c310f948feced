"""Pure: which group may begin, so that the trainer gets it before its weights are too old.

With a bound on the lag of weight versions, a group that begins now is trained within the bound when

* those ahead of it do not fill more versions than that: room is counted, in groups (``room_for_groups``);
* it does not play for longer than that: expected from what was seen (``GroupTimes``) and the trainer's pace. While a
  backlog makes the trainer quick, slow groups let quicker ones begin first (``should_defer``);
* what began before it is not overtaken: groups go out oldest first, and the trainer waits for a group that the next
  step would make too old, as long as that costs no device its work (``should_wait_for_the_slow``).

Nothing here forbids for ever: a trainer that waits is served, an unknown pace forbids nothing, and a group that cannot
come within the bound whenever it begins is played all the same, and counted as late by whoever delivers it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

QUANTILE = 0.9
"""A group is expected to take as long as nine in ten do. Means say little of times with a heavy tail."""
ENOUGH_SEEN = 8
"""Episodes of an instance, or of a task, below which those of all tasks tell more."""
VERSIONS_LOOKED_AT = 9
"""The pace is the median of the newest: one pause for an evaluation does not change it."""
MAX_REMEMBERED = 4096
"""Instances and tasks; those of which nothing was seen for longest are forgotten first."""
MAX_WAIT_IN_VERSIONS = 2.0
"""A trainer waits for slow groups no longer than so many versions usually take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSeen:
    """One weight version as the trainer's polls told it. Times are seconds on any one clock."""

    version: int
    since: float
    """When the trainer first asked for groups with it."""
    last_taken_at: float
    """When it got the last of them."""
    groups: int
    """How many it got."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast the trainer goes; None is unknown."""

    version_s: float | None = None
    """Seconds from one weight version to the next."""
    step_s: float | None = None
    """Those of them in which it did not wait for groups."""
    groups_per_version: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsAhead:
    """What stands between a group that would begin now and the trainer, in groups."""

    taken: int
    """Handed out since the newest version."""
    ready: int
    running: int
    """Begun and not ready."""
    trainer_waits: bool
    """It has asked for groups and got none."""


def pace_of(seen: Sequence[VersionSeen]) -> Pace:
    """Returns the trainer's pace by the versions it had, oldest first; all is unknown before the second."""
    newest = list(seen)[-VERSIONS_LOOKED_AT:]
    steps = [(one, after, after.version - one.version) for one, after in pairwise(newest)]
    steps = [(one, after, gap) for one, after, gap in steps if gap > 0]
    if not steps:
        return Pace()
    return Pace(
        version_s=statistics.median(max(0.0, after.since - one.since) / gap for one, after, gap in steps),
        step_s=statistics.median(max(0.0, after.since - one.last_taken_at) / gap for one, after, gap in steps),
        groups_per_version=statistics.median(one.groups / gap for one, _, gap in steps),
    )


def version_at(seen: Sequence[VersionSeen], moment: float) -> int | None:
    """Returns the weight version at a moment, the first that is known before that; None when none is."""
    began = [one.version for one in seen if one.since <= moment]
    return began[-1] if began else (seen[0].version if seen else None)


def _groups_per_version(pace: Pace, ahead: GroupsAhead) -> float | None:
    """A trainer that waits for more than it ever took has larger steps now."""
    usual = pace.groups_per_version
    if usual is None or usual <= 0:
        return None
    return max(usual, 2.0 * ahead.taken) if ahead.trainer_waits and ahead.taken >= usual else usual


def room_for_groups(lag: int, pace: Pace, ahead: GroupsAhead) -> int | None:
    """Returns how many groups may begin at once so that each is trained at most ``lag`` versions later.

    None is unlimited: as long as nobody knows how many groups a version takes. Never 0 when the trainer waits and
    nothing is on its way to it.
    """
    per_version = _groups_per_version(pace, ahead)
    if per_version is None:
        return None
    room = math.floor((lag + 1) * per_version + 1e-9) - ahead.taken - ahead.ready - ahead.running
    if ahead.trainer_waits and not ahead.ready and not ahead.running:
        return max(1, room)
    return max(0, room)


def should_defer(lag: int, pace: Pace, ahead: GroupsAhead, expected_s: float | None) -> bool:
    """True if a group should begin later, when the trainer has less to go on with and so gets less far meanwhile.

    False for one that would be too old even with an empty backlog: it is not helped by waiting.
    """
    if expected_s is None or not pace.version_s or not pace.groups_per_version:
        return False
    at_most = expected_s / pace.step_s if pace.step_s else math.inf
    unhurried = min(at_most, expected_s / pace.version_s)
    hurried = min(at_most, expected_s / pace.version_s + (ahead.taken + ahead.ready) / pace.groups_per_version)
    return unhurried <= lag < hurried


def should_wait_for_the_slow(
    lag: int, pace: Pace, ahead: GroupsAhead, *, oldest_is_behind: int | None, waited_s: float
) -> bool:
    """Returns True if the trainer is to wait for a running group that began ``oldest_is_behind`` versions ago.

    Only when the next step would make that group too old, and only while the devices have room for all that they can
    begin in the trainer's next step: whatever is ready by then it takes quicker than they make it.
    """
    if oldest_is_behind is None or oldest_is_behind < lag or lag < 1:
        return False
    if not pace.version_s or pace.step_s is None or waited_s >= MAX_WAIT_IN_VERSIONS * pace.version_s:
        return False
    if ahead.taken >= (pace.groups_per_version or 0.0):
        return False  # it has taken a step's groups and wants more: who knows how many
    room = room_for_groups(lag, pace, ahead)
    per_version = pace.groups_per_version or 0.0
    return room is not None and room > per_version * min(1.0, pace.step_s / pace.version_s)


class GroupTimes:
    """How long episodes took, by instance, by task and all together: what a group is expected to take."""

    def __init__(self, *, group_size: int, of_instance: int = 32, of_task: int = 128, of_all: int = 512) -> None:
        """The numbers are how many of the newest episodes are kept of each."""
        self._share: float = QUANTILE ** (1.0 / group_size)
        self._limits = (of_instance, of_task, of_all)
        self._seen: dict[tuple[str, str], deque[float]] = {}  # newest last

    def add(self, instance_id: str, task: str, seconds: float) -> None:
        """An episode came to its end after so many seconds."""
        for key, limit in zip(self._keys(instance_id, task), self._limits, strict=True):
            times = self._seen.pop(key, None) or deque[float](maxlen=limit)
            times.append(seconds)
            self._seen[key] = times
        while len(self._seen) > MAX_REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def expected_s(self, instance_id: str, task: str) -> float | None:
        """Returns the seconds in which nine of ten such groups are complete; None while too little was seen.

        Of a group all members must end: it is the quantile 0.9 ** (1 / n) of its episodes' times.
        """
        for key in self._keys(instance_id, task):
            times = self._seen.get(key) or ()
            if len(times) >= ENOUGH_SEEN:
                place = math.ceil(self._share * len(times)) - 1
                return sorted(times)[min(len(times) - 1, place)]
        return None

    @staticmethod
    def _keys(instance_id: str, task: str) -> tuple[tuple[str, str], ...]:
        return ("instance", instance_id), ("task", task), ("all", "")
