"""Pure: the concurrency limit of a job with ``num_process: auto``, the number of episodes at once.

Additive increase, multiplicative decrease (Chiu and Jain 1989), after an initial search by doubling. The limit grows
while episodes wait for it and throughput grows with it. It shrinks when requests queue in the engine, when there are
fewer devices, or when more episodes gave no more tokens per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

QUEUE_SHARE = 0.1
"""The engine counts as saturated above this ratio of waiting to running requests: a few always await the next batch."""
DECREASE_FACTOR = 0.8
MIN_GAIN = 0.25
"""Required relative gain in throughput, as a share of the relative growth in episodes."""
MAX_COMPARED_RATIO = 0.8
"""Throughput is compared with an observation of at most this share of the episodes: closer numbers differ by chance."""
OBSERVATION_SPACING = 1.1
"""Numbers of episodes are grouped into classes; the upper bound of a class is the lower bound times this factor. Only
the newest observation of each class is stored."""
MAX_OBSERVATION_AGE = 64
"""In steps: older observations are of other weights, tasks or engines, and must not lower the limit."""
INITIAL_LIMIT = 16
SPARE_EPISODES = 1 / 16
"""Episodes beyond the number of devices, as a share of it: they wait for the next free device."""


class Reason(StrEnum):
    """Why the limit has its value."""

    GROWS = "grows"
    UPPER_BOUND = "at its upper bound"
    ENGINE_QUEUES = "the engine queues"
    NO_GAIN = "more bring no more tokens"
    DEVICES = "as many as devices"
    NOT_USED = "no episode waits for it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The range of the limit, and its additive increase: 1 <= ``min_limit`` <= ``max_limit``, 1 <= ``step``."""

    min_limit: int
    max_limit: int
    step: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_limit <= self.max_limit or self.step < 1:
            raise ValueError(f"must be 1 <= min_limit <= max_limit and 1 <= step: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Averages over one measuring window. None is unknown."""

    playing: float
    """Episodes that ran, including those that waited for a device."""
    is_limiting: bool
    """True if an episode waited for the limit: a larger limit would have admitted it."""
    rate: float | None = None
    """Throughput: tokens per second, or episodes per second."""
    engine_running: float | None = None
    engine_waiting: float | None = None
    """Requests in the engine's queues."""
    devices_free: int | None = None
    """Devices that no job leases."""
    devices_waited_for: float = 0.0
    """Episodes of this job that waited for a device."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The throughput of a number of episodes in one step."""

    step: int
    playing: float
    rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencyState:
    """The limit, its reason, and the observations it is based on, newest last."""

    limit: int
    reason: Reason = Reason.GROWS
    searching: bool = True
    """True until the first decrease: the limit doubles."""
    steps: int = 0
    seen: tuple[Observation, ...] = ()


def initial_state(bounds: Bounds) -> ConcurrencyState:
    """Returns the state of a job that begins: a low limit, because the search by doubling is quick."""
    return ConcurrencyState(limit=max(bounds.min_limit, min(INITIAL_LIMIT, bounds.max_limit)))


def adjust(now: ConcurrencyState, load: Load, bounds: Bounds) -> ConcurrencyState:
    """Returns the state after a step; its limit is within the bounds.

    Running episodes are never cancelled. While more run than the limit allows, only the number of devices changes it.
    """
    after = _remember(now, load)
    ceiling = _ceiling(load, bounds)
    if _engine_queues(load):
        if load.playing > now.limit + 0.5:
            return replace(after, reason=Reason.ENGINE_QUEUES, searching=False)
        return _decreased(after, bounds, min(now.limit, max(1.0, load.playing)), Reason.ENGINE_QUEUES)
    if now.limit > ceiling:
        return replace(after, limit=ceiling, reason=Reason.DEVICES, searching=False)
    if not load.is_limiting:
        return replace(after, reason=Reason.NOT_USED)
    if load.playing > now.limit + 0.5:
        return after
    if _has_no_gain(after, load):
        return _decreased(after, bounds, now.limit, Reason.NO_GAIN)
    grown = min(2 * now.limit if now.searching else now.limit + bounds.step, ceiling)
    if grown > now.limit:
        return replace(after, limit=grown, reason=Reason.GROWS)
    return replace(after, reason=Reason.UPPER_BOUND if now.limit >= bounds.max_limit else Reason.DEVICES)


def _remember(now: ConcurrencyState, load: Load) -> ConcurrencyState:
    if load.rate is None or load.playing < 1:
        return now
    step, of_class = now.steps + 1, _class_of(load.playing)
    others = [one for one in now.seen if step - one.step <= MAX_OBSERVATION_AGE and _class_of(one.playing) != of_class]
    return replace(now, steps=step, seen=(*others, Observation(step, load.playing, load.rate)))


def _class_of(playing: float) -> int:
    return math.floor(math.log(playing) / math.log(OBSERVATION_SPACING))


def _ceiling(load: Load, bounds: Bounds) -> int:
    """Returns the number of devices plus spare episodes, within the bounds."""
    if load.devices_free is None:
        return bounds.max_limit
    devices = max(0.0, load.playing - load.devices_waited_for) + load.devices_free
    spare = max(1, math.floor(devices * SPARE_EPISODES))
    return max(bounds.min_limit, min(bounds.max_limit, math.floor(devices + 1e-9) + spare))


def _engine_queues(load: Load) -> bool:
    if load.engine_waiting is None:
        return False
    return load.engine_waiting > max(1.0, QUEUE_SHARE * (load.engine_running or 0.0))


def _has_no_gain(after: ConcurrencyState, load: Load) -> bool:
    """Returns True if throughput has hardly grown since the newest observation of clearly fewer episodes."""
    if load.rate is None:
        return False
    for one in reversed(after.seen):
        if one.playing <= MAX_COMPARED_RATIO * load.playing:
            return load.rate - one.rate < MIN_GAIN * one.rate * (load.playing / one.playing - 1)
    return False


def _decreased(after: ConcurrencyState, bounds: Bounds, count: float, reason: Reason) -> ConcurrencyState:
    limit = max(bounds.min_limit, math.floor(DECREASE_FACTOR * count))
    return replace(after, limit=min(limit, bounds.max_limit), reason=reason, searching=False)
