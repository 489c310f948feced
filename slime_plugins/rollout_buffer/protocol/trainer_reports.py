"""What a trainer may say of the rows of a step, and the query for what came of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_plugins.rollout_buffer.protocol.request_models import Body, Count, Identifier

__all__ = ["MismatchQuery", "ReportedRow", "TrainerReport"]

MAX_ROWS = 1000
MAX_TOKENS = 1_000_000

Finite = Annotated[float, Field(allow_inf_nan=False)]


class ReportedRow(Body):
    """One training row as the trainer saw it."""

    uid: Identifier
    """The trajectory's, from the item."""
    row: Annotated[Count, Field(ge=0, le=1_000_000)] = 0
    """Which of its training rows, from 0."""
    log_probs: Annotated[list[Finite], Field(max_length=MAX_TOKENS)] | None = None
    """The trainer's own, of the trained tokens (mask 1) in order."""
    advantage: Finite | None = None
    """What its tokens were weighted with."""
    entropy: Finite | None = None
    """Mean over its trained tokens, in nats."""
    loss_share: Finite | None = None
    """Its part of the step's loss."""
    clip_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of its trained tokens whose ratio was clipped."""


class TrainerReport(Body):
    """The body of `trainer_rows`: what the trainer computed of the rows of a step."""

    rows: Annotated[list[ReportedRow], Field(min_length=1, max_length=MAX_ROWS)]
    """The rows; of each the last word counts."""
    step: Annotated[Count, Field(ge=0, le=2**53)] | None = None
    """The trainer's count of rollouts or steps."""
    weight_version: Annotated[Count, Field(ge=0, le=2**53)] | None = None
    """The weights that computed the log-probs; the newest that the job knows of when it is left out."""


class MismatchQuery(Body):
    """How much of a job's mismatch is listed."""

    limit: Annotated[Count, Field(ge=1, le=500)] = 20
    """How many of the worst turns at most."""
