"""Request bodies of ``/sessions``: open, close, abandon."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, model_validator

from slime_plugins.rollout_buffer.types import Outcome, StopReason
from slime_plugins.rollout_buffer.wire.request_fields import (
    MAX_NESTING,
    Body,
    HttpUrl,
    Identifier,
    Number,
    is_deeper_than,
)


class OpenBody(Body):
    """The body of ``POST /sessions``."""

    job_id: Identifier
    """An open job of task type ``external`` with an engine and a tokenizer."""
    instance_id: Identifier | None = None
    """Which instance is worked on; the next one of the input when it is left out."""
    idle_timeout_s: Annotated[Number, Field(gt=0, le=7 * 86400)] | None = None
    """After how many seconds without a request the session expires; the gateway's own time when it is left out."""


class CloseBody(Body):
    """The body of ``POST /sessions/ID/close``."""

    reward: Number | None = None
    """What the trainer gets."""
    raw_reward: Number | None = None
    """What was earned, when the reward was shaped from it."""
    turn_rewards: list[Any] | None = None
    """What each turn earned, in the order in which they were sampled: the whole signal, where a trainer asks for it."""
    token_rewards: list[Any] | None = None
    """As many entries, each null or one number for each token of the turn: additional rewards."""
    scoring_url: HttpUrl | None = None
    """In place of rewards: who is asked for them. Its host must be allowed with ``--scoring-host``."""
    outcome: Outcome | None = None
    """``completed`` or ``truncated``; told by the last turn's finish reason when it is left out."""
    stop_reason: StopReason | None = None
    """Why the episode stopped."""
    extra_info: dict[str, Any] = Field(default={})
    """Stored with the trajectory."""

    @model_validator(mode="after")
    def _has_one_reward(self) -> CloseBody:
        if (self.reward is None) == (self.scoring_url is None):
            raise ValueError("give reward or scoring_url, one of the two")
        if self.scoring_url is not None and (self.turn_rewards, self.token_rewards) != (None, None):
            raise ValueError("with scoring_url the service answers turn_rewards and token_rewards: leave them out")
        if self.outcome in (Outcome.FAILED, Outcome.ABORTED):
            raise ValueError("outcome: a session that failed or was aborted is abandoned, and has no reward")
        if is_deeper_than(self.extra_info, MAX_NESTING):
            raise ValueError(f"extra_info is nested more than {MAX_NESTING} levels deep")
        return self


class AbandonBody(Body):
    """The body of ``POST /sessions/ID/abandon``."""

    reason: Annotated[str, StringConstraints(min_length=1, max_length=2000)] = "no reason given"
    """Kept as the attempt's error."""
