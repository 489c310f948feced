"""What a trainer may say of the rows of a step, and the query for what came of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_plugins.rollout_buffer.wire.request_fields import Body, Count, Identifier

MAX_ROWS = 1000
MAX_TOKENS = 1_000_000
MAX_FLOAT32 = 3.4e38


class ReportedRow(Body):
    """One training row as the trainer saw it. A number that is not finite costs this row alone."""

    uid: Identifier
    """The trajectory's, from the item."""
    row: Annotated[Count, Field(ge=0, le=1_000_000)] = 0
    """Which of its training rows, from 0."""
    log_probs: Annotated[list[float], Field(max_length=MAX_TOKENS)] | None = None
    """The trainer's own, of the trained tokens (mask 1) in order."""
    advantage: float | None = None
    """Advantage of its tokens."""
    entropy: float | None = None
    """Mean over its trained tokens, in nats."""
    loss_share: float | None = None
    """Its part of the step's loss."""
    clip_share: float | None = None
    """Share of its trained tokens whose ratio was clipped, 0 to 1."""

    def check_numbers(self) -> None:
        """Raises ``ValueError`` for a number that is not finite, or that a float32 does not hold."""
        _check("clip_share", self.clip_share, 0.0, 1.0)
        for name in ("advantage", "entropy", "loss_share"):
            _check(name, getattr(self, name))
        for at, value in enumerate(self.log_probs or ()):
            if not abs(value) <= MAX_FLOAT32:
                _check(f"log_probs[{at}]", value)


def _check(name: str, value: float | None, low: float = -MAX_FLOAT32, high: float = MAX_FLOAT32) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} is {value}: a number from {low:g} to {high:g} is needed")


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
