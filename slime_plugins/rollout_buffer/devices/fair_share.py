"""Who gets the next free device when several wait. Pure: the clock is a parameter, nothing waits here.

Two steps. First the purpose: while training and evaluation both wait, each is brought to its share of the devices,
``evaluation_share`` and the rest. Then, within the purpose, the owner: whoever holds fewest, and among equals whoever
was served longest ago. A purpose or owner that does not wait takes nothing, and leaves its share to the others.

So nobody waits for ever. Within a purpose, who holds nothing comes before all who hold something, and each of them
is served once before any is served again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Claimant", "FairShare", "Purpose"]

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

    def serve(self, claimant: Claimant, now: float) -> None:
        """Notes that somebody in line got a device; it stays in line, behind its equals."""
        if len(self._waiting_purposes()) > 1:
            self._turns[claimant.purpose] += 1
        self._place[claimant] = now

    def next(self, held: Mapping[Claimant, int]) -> Claimant | None:
        """Returns who gets the next free device, None when nobody waits. ``held`` is what everybody holds now."""
        purposes = self._waiting_purposes()
        if not purposes:
            return None
        purpose = min(purposes, key=lambda each: self._claim_of(each, held))
        in_line = (claimant for claimant in self._waiting if claimant.purpose is purpose)
        return min(in_line, key=lambda claimant: (held.get(claimant, 0), self._place[claimant], claimant.owner))

    def waiting(self) -> dict[str, int]:
        """Returns how many runners wait, by purpose."""
        counted = Counter(claimant.purpose for claimant in self._waiting)
        return {purpose.value: counted[purpose] for purpose in Purpose}

    def _waiting_purposes(self) -> list[Purpose]:
        found = {claimant.purpose for claimant in self._waiting}
        return [purpose for purpose in Purpose if purpose in found]

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
