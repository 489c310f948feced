"""Chooses the runner that gets the next free device. No I/O and no clock of its own.

First it chooses a purpose, training or evaluation: while both wait, evaluation gets ``evaluation_share`` of the devices
and training the rest. Within the purpose, the owner that holds the fewest devices is chosen; among equals the one that
was served longest ago. The share of a purpose or owner that does not wait goes to the others.

A runner that returned a device, or got fewer than it wanted, asks again within ``ASKS_AGAIN_WITHIN_S``. Until then it
counts as waiting; otherwise the other purpose, whose request is pending, would get every device that becomes free.

Devices with different capabilities are shared separately. Otherwise a claimant that can use several kinds could get all
devices of one kind, and a task that needs a capability of that kind would never get a device.

This prevents starvation: within a purpose, owners without a device come before owners with one, and each of them is
served once before any is served again.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from slime_plugins.rollout_buffer.devices.capabilities import covers

ASKS_AGAIN_WITHIN_S = 1.0
"""Time within which a runner is expected to ask again: a round trip to the manager on a busy machine."""
_REMEMBERED_S = 600.0


class Purpose(StrEnum):
    """The purpose of an episode."""

    TRAINING = "training"  # its trajectory is trained on
    EVALUATION = "evaluation"  # its reward is reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimant:
    """A runner that waits for or holds devices, for one purpose and for tasks with the same needs."""

    owner: str
    purpose: Purpose
    needs: frozenset[str] = frozenset()

    @property
    def is_reservation(self) -> bool:
        """True if no runner waits, but one is expected to ask soon."""
        return not self.owner

    def reservation(self) -> Claimant:
        """Returns the stand-in for a runner that is expected to ask for the same purpose and needs."""
        return replace(self, owner="")


class FairShare:
    """The queue for devices. ``evaluation_share`` is the share of evaluations, in (0, 1)."""

    def __init__(self, evaluation_share: float = 0.5) -> None:
        self.evaluation_share = evaluation_share
        self._waiting: set[Claimant] = set()
        # When each claimant was last served, or joined. Stored for a while after it leaves: a runner that got nothing
        # and asks again must not go to the end of the queue.
        self._last_served: dict[Claimant, float] = {}
        self._left_at: dict[Claimant, float] = {}
        # A purpose's virtual time (stride scheduling), by kind of device: the purpose that is behind has the next turn.
        self._virtual_time: defaultdict[tuple[Purpose, frozenset[str] | None], float] = defaultdict(float)
        # For each expected request, by its reservation, the time until which it counts as waiting.
        self._expected: defaultdict[Claimant, deque[float]] = defaultdict(deque)

    def join(self, claimant: Claimant, now: float) -> None:
        """Adds a claimant to the queue; one that left recently gets its old place."""
        self._drop_outdated(now)
        self._left_at.pop(claimant, None)
        self._last_served.setdefault(claimant, now)
        self._waiting.add(claimant)

    def leave(self, claimant: Claimant, now: float) -> None:
        """Removes a claimant from the queue."""
        self._waiting.discard(claimant)
        self._left_at[claimant] = now

    def expect(self, claimant: Claimant, devices: int, now: float) -> None:
        """Reserves devices within the purpose's share for a claimant that is expected to ask for them soon."""
        self._expected[claimant.reservation()].extend([now + ASKS_AGAIN_WITHIN_S] * devices)

    def serve(
        self, claimant: Claimant, now: float, *, offered: Collection[frozenset[str] | None] = frozenset({None})
    ) -> None:
        """Records that a claimant got a device; it stays in the queue, behind its equals.

        ``offered`` are the capabilities of all free devices for which the claimant was next: it has had its turn for
        each of these kinds of devices.
        """
        for capabilities in offered:
            if len({each.purpose for each in self._candidates({}, now, capabilities)}) > 1:
                # Counted from the smaller of both virtual times. A purpose's own time may be ahead because of devices
                # that it got while the other purpose held more, or under another share: it owes no turns for these.
                earlier = min(self._virtual_time[purpose, capabilities] for purpose in Purpose)
                self._virtual_time[claimant.purpose, capabilities] = earlier + 1 / self._share_of(claimant.purpose)
        self._last_served[claimant] = now
        self._drop_outdated(now)
        if expected := self._expected.get(claimant.reservation()):
            expected.popleft()

    def next(
        self, held: Mapping[Claimant, int], now: float, capabilities: frozenset[str] | None = None
    ) -> Claimant | None:
        """Returns the claimant that gets the next free device with these capabilities; None if no claimant can use it.

        ``held`` counts the devices with these capabilities that each claimant holds. The claimant may be a reservation.
        """
        candidates = self._candidates(held, now, capabilities)
        if all(claimant.is_reservation for claimant in candidates):
            return None
        purposes = [each for each in Purpose if any(claimant.purpose is each for claimant in candidates)]
        purpose = min(purposes, key=lambda each: self._use_of_share(each, held, capabilities))
        in_line = [claimant for claimant in candidates if claimant.purpose is purpose]
        by_owner: Counter[tuple[str, Purpose]] = Counter()
        for claimant, count in held.items():
            by_owner[claimant.owner, claimant.purpose] += count
        return min(
            # A waiting runner comes before a reservation.
            [claimant for claimant in in_line if not claimant.is_reservation] or in_line[:1],
            key=lambda claimant: (by_owner[claimant.owner, purpose], self.last_served(claimant, now), claimant.owner),
        )

    def last_served(self, claimant: Claimant, now: float) -> float:
        """Returns when a claimant was last served, or joined."""
        return self._last_served.get(claimant, now)

    def waiting(self) -> dict[str, int]:
        """Returns the number of waiting runners by purpose."""
        counted = Counter(claimant.purpose for claimant in self._waiting)
        return {purpose.value: counted[purpose] for purpose in Purpose}

    def _candidates(
        self, held: Mapping[Claimant, int], now: float, capabilities: frozenset[str] | None
    ) -> list[Claimant]:
        """Returns the claimants that can use such a device: waiting ones, and reservations with expected requests for
        which no device is held back yet (``held`` counts the devices held back for each)."""
        unserved = [
            reservation
            for reservation, times in self._expected.items()
            if sum(until > now for until in times) > held.get(reservation, 0)
        ]
        return [claimant for claimant in (*self._waiting, *unserved) if covers(capabilities, claimant.needs)]

    def _use_of_share(
        self, purpose: Purpose, held: Mapping[Claimant, int], capabilities: frozenset[str] | None
    ) -> tuple[float, float]:
        """Returns a purpose's held devices relative to its share, and its virtual time; the smallest is served next.

        The virtual time decides between purposes that hold equally many, as they always do with a single device.
        """
        holds = sum(count for claimant, count in held.items() if claimant.purpose is purpose)
        return holds / self._share_of(purpose), self._virtual_time[purpose, capabilities]

    def _share_of(self, purpose: Purpose) -> float:
        return self.evaluation_share if purpose is Purpose.EVALUATION else 1 - self.evaluation_share

    def _drop_outdated(self, now: float) -> None:
        for times in self._expected.values():
            while times and times[0] <= now:
                times.popleft()
        for claimant in [each for each, left in self._left_at.items() if now - left > _REMEMBERED_S]:
            del self._left_at[claimant]
            self._last_served.pop(claimant, None)
