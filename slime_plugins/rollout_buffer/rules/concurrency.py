"""Pure: how many episodes play at once, when nobody has set a number (``num_process: auto``).

Additive increase, multiplicative decrease (Chiu and Jain 1989), after a first search by doubling. The number grows
while an episode more would be played and brings something, and shrinks when the engine queues, when there are fewer
devices, or when more episodes brought no more tokens in a second: the same measure whatever the limit is made of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

QUEUE_SHARE = 0.1
"""An engine queues when more requests wait than this share of those that run: a few always wait for the next batch."""
DECREASE = 0.8
LEAST_GAIN = 0.25
"""With a tenth more episodes, this share of a tenth more tokens must come, or they only make each other slower."""
BEFORE = 0.8
"""What is compared is an observation with at most this share of the episodes: nearer ones differ by chance."""
OBSERVATIONS_APART = 1.1
"""Of numbers of episodes that differ by less, the newest observation is kept."""
REMEMBERED_STEPS = 64
"""Older observations are of other weights, other tasks, another engine; one of them must not hold the number down."""
FIRST = 16
SPARE_EPISODES = 1 / 16
"""Episodes beyond the devices, as a share of them: one waits for each device that comes back."""


class Reason(StrEnum):
    """Why the number is what it is."""

    GROWS = "grows"
    AT_MOST = "at its upper bound"
    ENGINE_QUEUES = "the engine queues"
    NO_GAIN = "more bring no more tokens"
    DEVICES = "as many as devices"
    NOT_USED = "nothing else may begin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What the number stays within, and by how much it grows: 1 <= ``least`` <= ``most``, 1 <= ``step``."""

    least: int
    most: int
    step: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most or self.step < 1:
            raise ValueError(
                f"bounds of {self.least} to {self.most} by {self.step}: the least is 1, and not the larger"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What was seen since the number last changed, on average. None is unknown."""

    playing: float
    """Episodes that were played, those that waited for a device among them."""
    wanted: bool
    """An episode waited for its place: with a larger number more would have been played."""
    rate: float | None = None
    """What came of them: tokens a second, or episodes."""
    engine_running: float | None = None
    engine_waiting: float | None = None
    """Requests in the engine's queues."""
    devices_free: int | None = None
    """Devices that nobody has."""
    devices_waited_for: float = 0.0
    """Episodes of this job that waited for a device."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What came of so many episodes, in that step."""

    step: int
    playing: float
    rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Steering:
    """How many episodes may play, why, and what was seen last with about so many, newest last."""

    limit: int
    reason: Reason = Reason.GROWS
    searching: bool = True
    """Nothing has spoken against more yet: the number doubles."""
    steps: int = 0
    seen: tuple[Observation, ...] = ()


def first_steering(bounds: Bounds) -> Steering:
    """Returns where a job begins: low, because the first search is quick."""
    return Steering(limit=max(bounds.least, min(FIRST, bounds.most)))


def steer(now: Steering, load: Load, bounds: Bounds) -> Steering:
    """Returns the next number, always within the bounds.

    Nothing that plays is ever given up for it: while more play than may, it is not judged by what they bring.
    """
    after = _remember(now, load)
    ceiling = _ceiling(load, bounds)
    if _queues(load):
        if load.playing > now.limit + 0.5:
            return replace(after, reason=Reason.ENGINE_QUEUES, searching=False)
        return _decreased(after, bounds, min(now.limit, max(1.0, load.playing)), Reason.ENGINE_QUEUES)
    if now.limit > ceiling:
        return replace(after, limit=ceiling, reason=Reason.DEVICES, searching=False)
    if not load.wanted:
        return replace(after, reason=Reason.NOT_USED)
    if load.playing > now.limit + 0.5:
        return after
    if _brings_nothing(after, load):
        return _decreased(after, bounds, now.limit, Reason.NO_GAIN)
    grown = min(2 * now.limit if now.searching else now.limit + bounds.step, ceiling)
    if grown > now.limit:
        return replace(after, limit=grown, reason=Reason.GROWS)
    return replace(after, reason=Reason.AT_MOST if now.limit >= bounds.most else Reason.DEVICES)


def _remember(now: Steering, load: Load) -> Steering:
    if load.rate is None or load.playing < 1:
        return now
    step, place = now.steps + 1, _class_of(load.playing)
    kept = [one for one in now.seen if step - one.step <= REMEMBERED_STEPS and _class_of(one.playing) != place]
    return replace(now, steps=step, seen=(*kept, Observation(step, load.playing, load.rate)))


def _class_of(playing: float) -> int:
    return math.floor(math.log(playing) / math.log(OBSERVATIONS_APART))


def _ceiling(load: Load, bounds: Bounds) -> int:
    """No more episodes than there are devices for, and a few that wait for the next."""
    if load.devices_free is None:
        return bounds.most
    devices = max(0.0, load.playing - load.devices_waited_for) + load.devices_free
    spare = max(1, math.floor(devices * SPARE_EPISODES))
    return max(bounds.least, min(bounds.most, math.floor(devices + 1e-9) + spare))


def _queues(load: Load) -> bool:
    if load.engine_waiting is None:
        return False
    return load.engine_waiting > max(1.0, QUEUE_SHARE * (load.engine_running or 0.0))


def _brings_nothing(after: Steering, load: Load) -> bool:
    """Whether as much came of fewer episodes, when there last were clearly fewer."""
    if load.rate is None:
        return False
    for one in reversed(after.seen):
        if one.playing <= BEFORE * load.playing:
            return load.rate - one.rate < LEAST_GAIN * one.rate * (load.playing / one.playing - 1)
    return False


def _decreased(after: Steering, bounds: Bounds, count: float, reason: Reason) -> Steering:
    limit = max(bounds.least, math.floor(DECREASE * count))
    return replace(after, limit=min(limit, bounds.most), reason=reason, searching=False)
