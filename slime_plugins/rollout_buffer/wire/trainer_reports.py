"""A trainer's report on the rows of a step, and the query of the mismatch between trainer and engine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slime_plugins.rollout_buffer.wire.request_fields import Body, Count, Identifier

MAX_ROWS = 1000
"""Limit of the rows of one report."""
MAX_TOKENS = 1_000_000
"""Limit of the trained tokens of one row."""
MAX_FLOAT32 = 3.4e38


class ReportedRow(Body):
    """The trainer's values for one training row. A row with an invalid number is refused; the other rows of the report
    are stored."""

    uid: Identifier
    """Id of the trajectory."""
    row: Annotated[Count, Field(ge=0, le=1_000_000)] = 0
    """Number of the training row, from 0."""
    log_probs: Annotated[list[float], Field(max_length=MAX_TOKENS)] | None = None
    """The trainer's log-probs of the trained tokens (mask 1), in order."""
    advantage: float | None = None
    """Advantage of its tokens."""
    entropy: float | None = None
    """Mean entropy of its trained tokens, in nats."""
    loss_share: float | None = None
    """Its share of the step's loss."""
    clip_share: float | None = None
    """Share of its trained tokens whose ratio was clipped, 0 to 1."""

    def check_numbers(self) -> None:
        """Raises ``ValueError`` for a number that no float32 holds, NaN, or a ``clip_share`` outside 0 to 1."""
        _check("clip_share", self.clip_share, 0.0, 1.0)
        for name in ("advantage", "entropy", "loss_share"):
            _check(name, getattr(self, name))
        for index, value in enumerate(self.log_probs or ()):
            if not abs(value) <= MAX_FLOAT32:  # also for NaN; names are built for wrong values only, which saves time
                _check(f"log_probs[{index}]", value)


def _check(name: str, value: float | None, low: float = -MAX_FLOAT32, high: float = MAX_FLOAT32) -> None:
    if value is not None and not low <= value <= high:
        raise ValueError(f"{name} is {value}: a number from {low:g} to {high:g} is needed")


class TrainerReport(Body):
    """The body of `trainer_rows`: the trainer's values for the rows of a step."""

    rows: Annotated[list[ReportedRow], Field(min_length=1, max_length=MAX_ROWS)]
    """The rows; a repeated row replaces the earlier report."""
    step: Annotated[Count, Field(ge=0)] | None = None
    """The trainer's number of the rollout or step."""
    weight_version: Annotated[Count, Field(ge=0)] | None = None
    """Version of the weights that computed the log-probs. Default: the job's newest version."""


class MismatchQuery(Body):
    """The query of the turns whose log-probs differ most between trainer and engine."""

    limit: Annotated[Count, Field(ge=1, le=500)] = 20
    """Maximum number of listed turns."""
