"""Rewards of episodes. Pure functions of numbers; every constant is in ``RewardSettings``.

=============================================  ==============================================  =====================
how the episode ended                          reward                                          range
=============================================  ==============================================  =====================
success s = 1, with any end of the episode     ``step_scale + thinking_bonus``                 (0.1, 1 + b)
0 < s < 1, with any end                        ``s * step_scale``                              (0, 1)
s = 0, the agent ended it                      ``-premature_penalty``                          [-0.5, 0]
s = 0, out of turns, tokens or context         ``0``                                           0
=============================================  ==============================================  =====================

``steps`` counts well-formed actions, the final ``terminate`` or ``answer`` included; a malformed reply costs a turn but
is no action. With ``success_needs_ending`` an episode that the agent did not end itself gets 0 even if the state is
right: stopping in time is then part of the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from pydantic import Field, model_validator

from slime_plugins.rollout_buffer.devices.settings_section import SettingsSection


class RewardSettings(SettingsSection):
    """The constants of the reward, bounded so that every reward lies within the generator's ``REWARD_RANGE``."""

    step_decay: float = Field(default=0.1, ge=0)
    step_scale_min: float = Field(default=0.1, ge=0, le=1)
    step_scale_max: float = Field(default=1.5, gt=0, le=1.5)
    thinking_bonus: float = Field(default=0.1, ge=0, le=0.5)
    thinking_tokens_middle: float = Field(default=64.0, ge=0)
    thinking_tokens_width: float = Field(default=32.0, gt=0)
    premature_penalty: float = Field(default=0.5, ge=0, le=0.5)
    success_needs_ending: bool = False

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    @model_validator(mode="after")
    def _scale_bounds_are_ordered(self) -> RewardSettings:
        if self.step_scale_min > self.step_scale_max:
            raise ValueError("step_scale_min must not exceed step_scale_max")
        return self

    def needs_device_score(self, *, ended_by_agent: bool) -> bool:
        return ended_by_agent or not self.success_needs_ending

    def earned(
        self, *, score: float | None, ended_by_agent: bool, thinking_tokens: Sequence[int], max_turns: int
    ) -> PhoneRewardBreakdown:
        """Returns the reward of an episode, by the table of this module.

        ``score`` is the device's score, None if it was not scored. ``thinking_tokens`` has one entry per action taken:
        the tokens inside the thinking tags of that reply.
        """
        steps = len(thinking_tokens)
        scale = step_scale(steps, self)
        bonus = penalty = 0.0
        if score is not None and score >= 1:
            bonus = thinking_bonus(sum(thinking_tokens) / max(steps, 1), self)
        elif score is not None and score <= 0 and ended_by_agent:
            penalty = premature_penalty(steps, max_turns, self)
        return PhoneRewardBreakdown(
            reward=(score or 0.0) * scale + bonus - penalty,
            success=score,
            steps=steps,
            step_scale=scale,
            thinking_bonus=bonus,
            premature_penalty=penalty,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PhoneRewardBreakdown:
    """A reward and its parts. ``success`` is None if the device was not scored."""

    reward: float
    success: float | None
    steps: int
    step_scale: float
    thinking_bonus: float
    premature_penalty: float

    def as_dict(self) -> dict[str, float | int | None]:
        """Returns the fields as JSON has them."""
        return asdict(self)


def step_scale(steps: int, settings: RewardSettings) -> float:
    """Returns ``clamp(exp(-0.1 * steps), 0.1, 1.5)`` with the defaults: fewer actions give more. In [0.1, 1]."""
    return min(max(math.exp(-settings.step_decay * steps), settings.step_scale_min), settings.step_scale_max)


def thinking_bonus(mean_thinking_tokens: float, settings: RewardSettings) -> float:
    """Returns ``b * sigmoid((t - t0) / w)`` of the mean tokens inside the thinking tags per action. In (0, b).

    Defaults: b = 0.1, t0 = 64, w = 32.
    """
    distance = (mean_thinking_tokens - settings.thinking_tokens_middle) / settings.thinking_tokens_width
    return settings.thinking_bonus / (1 + math.exp(min(-distance, 700.0)))  # 700: without overflow


def premature_penalty(steps: int, max_turns: int, settings: RewardSettings) -> float:
    """Returns ``0.5 * (1 - steps / max_turns)`` with the defaults: giving up early costs more. In [0, 0.5]."""
    return settings.premature_penalty * (1 - min(steps / max_turns, 1.0))
