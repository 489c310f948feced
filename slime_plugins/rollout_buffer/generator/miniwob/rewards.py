"""Rewards of MiniWoB++ episodes: the page's score, and 0 for an episode that its page did not end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRewardBreakdown:
    """The reward, and ``success``, the page's own score: 1 for a solved task, None if no score was read."""

    reward: float
    success: float | None
    steps: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Returns the fields as JSON has them."""
        return asdict(self)


class PageReward:
    """The benchmark's rule: the reward is the page's score, from -1 to 1."""

    score_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def needs_device_score(self, *, ended_by_agent: bool) -> bool:
        """Returns True: a page that has not ended scores 0."""
        del ended_by_agent
        return True

    def earned(
        self, *, score: float | None, ended_by_agent: bool, thinking_tokens: Sequence[int], max_turns: int
    ) -> PageRewardBreakdown:
        del ended_by_agent, max_turns
        return PageRewardBreakdown(reward=score or 0.0, success=score, steps=len(thinking_tokens))
