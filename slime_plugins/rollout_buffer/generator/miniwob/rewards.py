"""What a MiniWoB++ episode earns: what the page gave, and nothing for an episode that its page did not end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRewardBreakdown:
    """The reward, and the page's own score behind it: 1 is success. None where the page was not asked."""

    reward: float
    success: float | None
    steps: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Returns the fields as JSON has them."""
        return asdict(self)


class PageReward:
    """The rule of the benchmark: the page scores from -1 to 1, and its score is the reward."""

    score_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)

    def asks_device(self, *, ended_by_agent: bool) -> bool:
        """Always: a page that has not ended scores 0 by itself."""
        del ended_by_agent
        return True

    def earned(
        self, *, score: float | None, ended_by_agent: bool, thinking_tokens: Sequence[int], max_turns: int
    ) -> PageRewardBreakdown:
        """As ``RewardRule.earned``."""
        del ended_by_agent, max_turns
        return PageRewardBreakdown(reward=score or 0.0, success=score, steps=len(thinking_tokens))
