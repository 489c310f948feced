"""Request bodies of ``/sessions``: open, close, abandon."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from slime_plugins.rollout_buffer.types import Outcome, StopReason
from slime_plugins.rollout_buffer.wire.checks import Reward
from slime_plugins.rollout_buffer.wire.request_fields import Body, HttpUrl, Identifier, Number


class OpenBody(Body):
    """The body of ``POST /sessions``."""

    job_id: Identifier
    """An open job of task type ``external`` with an engine and a tokenizer."""
    instance_id: Identifier | None = None
    """The instance. Default: the next one of the input."""
    idle_timeout_s: Annotated[Number, Field(gt=0, le=7 * 86400)] | None = None
    """Seconds without a turn after which the session expires. Default: that of the gateway."""


class CloseBody(Body):
    """The body of ``POST /sessions/ID/close``."""

    reward: Reward | None = None
    """The reward for the trainer."""
    raw_reward: Reward | None = None
    """The reward before shaping, if it differs."""
    turn_rewards: list[Any] | None = None
    """Reward of each turn in order of sampling; replaces ``reward`` for trainers that use rewards of turns."""
    token_rewards: list[Any] | None = None
    """Additional rewards of tokens: for each turn null, or one number for each of its tokens."""
    scoring_url: HttpUrl | None = None
    """Address that computes the rewards instead. Its host must be allowed with ``--scoring-host``."""
    outcome: Outcome | None = None
    """``completed`` or ``truncated``. Default: by the finish reason of the last turn."""
    stop_reason: StopReason | None = None
    """Why the episode stopped."""
    extra_info: dict[str, Any] = Field(default={})
    """Stored with the trajectory."""

    @model_validator(mode="after")
    def _has_one_reward(self) -> CloseBody:
        if (self.reward is None) == (self.scoring_url is None):
            raise ValueError("give reward or scoring_url, one of the two")
        if self.scoring_url is not None and (self.turn_rewards, self.token_rewards) != (None, None):
            raise ValueError("with scoring_url the callback returns turn_rewards and token_rewards: leave them out")
        if self.outcome in (Outcome.FAILED, Outcome.ABORTED):
            raise ValueError("outcome: a session that failed or was aborted is abandoned, and has no reward")
        return self


class AbandonBody(Body):
    """The body of ``POST /sessions/ID/abandon``."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=2000)] = "no reason given"
    """Stored as the error of the attempt."""
