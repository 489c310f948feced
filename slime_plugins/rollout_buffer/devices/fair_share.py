"""Chooses the runner that gets the next free device. Pure: the clock is a parameter, nothing waits here.

First the purpose: while training and evaluation both wait, each gets its share of the devices, ``evaluation_share`` and
the rest. Then, within the purpose, the owner that holds the fewest devices; among equals the one that was served
longest ago. A purpose or owner that does not wait leaves its share to the others.

A runner that returned a device, or got fewer than it wanted, asks again a moment later. During that moment it counts as
waiting; otherwise the other purpose, whose request is pending, would get every device that becomes free.

This prevents starvation: within a purpose, owners without a device come before owners with one, and each of them is
served once before any is served again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

ASKS_AGAIN_WITHIN_S = 1.0
"""Time within which a runner is expected to ask again: a round trip to the manager on a busy machine."""
_REMEMBERED_S = 600.0


class Purpose(StrEnum):
    """The purpose of an episode."""

    TRAINING = "training"  # its trajectory is trained on
    EVALUATION = "evaluation"  # its reward is reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimant:
    """A runner that waits for or holds devices, for one purpose."""

    owner: str
    purpose: Purpose


class FairShare:
    """The queue for devices. ``evaluation_share`` is the share of evaluations, in (0, 1)."""

    def __init__(self, evaluation_share: float = 0.5) -> None:
        self.evaluation_share = evaluation_share
        self._waiting: set[Claimant] = set()
        # When each claimant was last served, or joined. Stored for a while after it leaves: a poll that got nothing and
        # comes again must not go to the end of the queue.
        self._place: dict[Claimant, float] = {}
        self._left_at: dict[Claimant, float] = {}
        self._turns: Counter[Purpose] = Counter()
        # For each expected request, the time until which it counts as waiting, earliest first.
        self._expected: dict[Purpose, deque[float]] = {purpose: deque() for purpose in Purpose}

    def join(self, claimant: Claimant, now: float) -> None:
        """Adds a claimant to the queue; one that left recently gets its old place."""
        self._drop_absent(now)
        self._left_at.pop(claimant, None)
        self._place.setdefault(claimant, now)
        self._waiting.add(claimant)

    def leave(self, claimant: Claimant, now: float) -> None:
        """Removes a claimant from the queue."""
        self._waiting.discard(claimant)
        self._left_at[claimant] = now

    def expect(self, purpose: Purpose, devices: int, now: float) -> None:
        """Reserves devices for a runner that will ask for them in a moment, within its purpose's share."""
        self._expected[purpose].extend([now + ASKS_AGAIN_WITHIN_S] * devices)

    def serve(self, claimant: Claimant, now: float) -> None:
        """Records that a claimant got a device; it stays in the queue, behind its equals."""
        if len(self._waiting_purposes({}, now)) > 1:
            self._turns[claimant.purpose] += 1
        self._place[claimant] = now
        if self._expected[claimant.purpose]:
            self._expected[claimant.purpose].popleft()

    def next(self, held: Mapping[Claimant, int], now: float) -> Claimant | None:
        """Returns the claimant that gets the next free device, None if none waits. ``held`` counts the devices of each.

        A claimant with the owner "" means: the device is reserved for an expected request.
        """
        if not self._waiting:
            return None
        purpose = min(self._waiting_purposes(held, now), key=lambda each: self._claim_of(each, held))
        in_line = (claimant for claimant in self._waiting if claimant.purpose is purpose)
        return min(
            in_line,
            key=lambda claimant: (held.get(claimant, 0), self._place[claimant], claimant.owner),
            default=_expected_one(purpose),
        )

    def waiting(self) -> dict[str, int]:
        """Returns the number of waiting runners by purpose."""
        counted = Counter(claimant.purpose for claimant in self._waiting)
        return {purpose.value: counted[purpose] for purpose in Purpose}

    def _waiting_purposes(self, held: Mapping[Claimant, int], now: float) -> list[Purpose]:
        """Returns purposes that wait, or that are expected to ask for more devices than are reserved for them."""
        for expected in self._expected.values():
            while expected and expected[0] <= now:
                expected.popleft()
        found = {claimant.purpose for claimant in self._waiting}
        kept = {purpose: held.get(_expected_one(purpose), 0) for purpose in Purpose}
        return [purpose for purpose in Purpose if purpose in found or len(self._expected[purpose]) > kept[purpose]]

    def _claim_of(self, purpose: Purpose, held: Mapping[Claimant, int]) -> tuple[float, float]:
        """Returns devices held and turns taken, relative to the share: the smaller, the sooner the next turn.

        Turns count only while both purposes wait. They decide between equals, which on a single device is always the
        case.
        """
        share = self.evaluation_share if purpose is Purpose.EVALUATION else 1 - self.evaluation_share
        holds = sum(count for claimant, count in held.items() if claimant.purpose is purpose)
        return holds / share, self._turns[purpose] / share

    def _drop_absent(self, now: float) -> None:
        for claimant in [each for each, left in self._left_at.items() if now - left > _REMEMBERED_S]:
            del self._left_at[claimant]
            self._place.pop(claimant, None)


def _expected_one(purpose: Purpose) -> Claimant:
    return Claimant(owner="", purpose=purpose)
