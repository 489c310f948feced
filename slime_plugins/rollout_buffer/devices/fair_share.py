"""Who gets the next free device when several wait. Pure: the clock is a parameter, nothing waits here.

Two steps. First the purpose: while training and evaluation both wait, each is brought to its share of the devices,
``evaluation_share`` and the rest. Then, within the purpose, the owner: whoever holds fewest, and among equals whoever
was served longest ago. A purpose or owner that does not wait takes nothing, and leaves its share to the others.

A runner that gave a device back, or was answered with less than it wanted, asks again a moment later. For that moment
it counts as in line: what comes free just then would otherwise go to the other purpose, whose request waits.

So nobody waits for ever. Within a purpose, who holds nothing comes before all who hold something, and each of them
is served once before any is served again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

ASKS_AGAIN_WITHIN_S = 1.0
"""How long a runner is expected to ask again: its way to the manager and back, on a busy machine."""
_REMEMBERED_S = 600.0


class Purpose(StrEnum):
    """What an episode is played for."""

    TRAINING = "training"  # its trajectory is trained on
    EVALUATION = "evaluation"  # its reward is reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Claimant:
    """Somebody who waits for devices or holds some: one runner, for one purpose."""

    owner: str
    purpose: Purpose


class FairShare:
    """The line in front of the devices. ``evaluation_share`` is the part of them that evaluations get, in (0, 1)."""

    def __init__(self, evaluation_share: float = 0.5) -> None:
        self.evaluation_share = evaluation_share
        self._waiting: set[Claimant] = set()
        # When each was served last, or came first. Kept for a while after it left: an empty-handed poll that comes
        # again must not go to the end of the line.
        self._place: dict[Claimant, float] = {}
        self._left_at: dict[Claimant, float] = {}
        self._turns: Counter[Purpose] = Counter()
        # Until when each request that is expected soon counts as in line, soonest first.
        self._expected: dict[Purpose, deque[float]] = {purpose: deque() for purpose in Purpose}

    def join(self, claimant: Claimant, now: float) -> None:
        """Puts somebody in line; who was there a short while ago takes up the old place."""
        self._drop_absent(now)
        self._left_at.pop(claimant, None)
        self._place.setdefault(claimant, now)
        self._waiting.add(claimant)

    def leave(self, claimant: Claimant, now: float) -> None:
        """Takes somebody out of the line."""
        self._waiting.discard(claimant)
        self._left_at[claimant] = now

    def expect(self, purpose: Purpose, devices: int, now: float) -> None:
        """A runner will ask for so many devices in a moment: they are kept for it, within its purpose's share."""
        self._expected[purpose].extend([now + ASKS_AGAIN_WITHIN_S] * devices)

    def serve(self, claimant: Claimant, now: float) -> None:
        """Notes that somebody in line got a device; it stays in line, behind its equals."""
        if len(self._waiting_purposes({}, now)) > 1:
            self._turns[claimant.purpose] += 1
        self._place[claimant] = now
        if self._expected[claimant.purpose]:
            self._expected[claimant.purpose].popleft()

    def next(self, held: Mapping[Claimant, int], now: float) -> Claimant | None:
        """Returns who gets the next free device, None when nobody waits. ``held`` is what everybody holds now.

        It may be nobody in line, with the owner "": the device is kept then for who is expected to ask.
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
        """Returns how many runners wait, by purpose."""
        counted = Counter(claimant.purpose for claimant in self._waiting)
        return {purpose.value: counted[purpose] for purpose in Purpose}

    def _waiting_purposes(self, held: Mapping[Claimant, int], now: float) -> list[Purpose]:
        """Purposes in line, or expected there for more devices than ``held`` keeps for them."""
        for expected in self._expected.values():
            while expected and expected[0] <= now:
                expected.popleft()
        found = {claimant.purpose for claimant in self._waiting}
        kept = {purpose: held.get(_expected_one(purpose), 0) for purpose in Purpose}
        return [purpose for purpose in Purpose if purpose in found or len(self._expected[purpose]) > kept[purpose]]

    def _claim_of(self, purpose: Purpose, held: Mapping[Claimant, int]) -> tuple[float, float]:
        """Devices held and turns had, measured by the share: the smaller, the sooner the next turn.

        Turns count only while both wait: who was alone did not take them from anybody. They decide between equals,
        which on a single device is always.
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
