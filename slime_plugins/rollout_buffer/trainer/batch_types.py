"""Frozen records of a batch: ``RolloutBatch`` → ``RolloutGroup`` → ``RolloutTrajectory`` → ``RolloutRow``.

Every group has as many trajectories as the job has slots per group. A trajectory that cannot be trained stays in its
group, without rows and with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.utils.mask_rows import TokenRecords
from slime_plugins.rollout_buffer.types import Outcome, StopReason, WeightVersionSpan, version_number

__all__ = ["RolloutBatch", "RolloutGroup", "RolloutRow", "RolloutTrajectory", "RowSource", "TokenSource"]


class TokenSource(StrEnum):
    """Where the tokens of a trajectory come from."""

    GENERATIONS = "generations"  # sampled by the engine, id by id
    MESSAGES = "messages"  # rebuilt with the tokenizer
    DUMMY = "dummy"  # not trained


class RowSource(StrEnum):
    """How the rows of a trajectory were made."""

    GENERATIONS = "generations"  # from the sampled tokens
    TURNS = "turns"  # rebuilt from messages turn by turn
    CONVERSATION = "conversation"  # rebuilt from messages as one row with one mask
    DUMMY = "dummy"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """One sequence with a loss.

    ``number`` is the row's number in its trajectory, from 0. ``loss_mask`` is 1 at the trained tokens of ``token_ids``.
    ``log_probs`` are the engine's at these tokens, 0.0 elsewhere; None if the engine returned none. ``response_start``
    is the index of the first trained token, never 0. ``reward`` is the trajectory's and equal in all its rows: a loss
    counts each trajectory once, by ``uid``.

    ``images`` are the hashes (sha256) of the screenshots, one for each run of placeholders. ``train_inputs`` are the
    outputs of the model's image processor (``pixel_values``, ``image_grid_thw``, joined along dimension 0), None
    without images or processor. ``pictures`` are the decoded images (PIL), if ``RowSettings.keep_pictures`` is set.
    ``weight_versions`` are those that sampled the row's turns, in order. ``prompt_tokens`` and ``cached_tokens`` count
    the prompt tokens of these turns, and those that were in the engine's prefix cache; 0 if unknown.

    ``version_spans`` are the weight versions of trained tokens, by indices of ``token_ids``; ``trainer_version`` is the
    trainer's version when the row was made. ``returns`` has the return of each trained token (``turn_rewards``), 0.0
    elsewhere; None if they are not computed, or the turns have no rewards. ``records`` are the token records:
    ``routed_experts`` for every token but the first, ``top_p_tokens`` for every token from ``response_start`` on.
    """

    uid: str
    group_index: int
    number: int
    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    log_probs: Sequence[float] | None
    response_start: int
    reward: float
    weight_versions: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: tuple[str, ...] = ()
    train_inputs: Mapping[str, Any] | None = None
    pictures: tuple[Any, ...] = ()
    version_spans: tuple[WeightVersionSpan, ...] = ()
    trainer_version: int | None = None
    returns: Sequence[float] | None = None
    records: Mapping[str, TokenRecords] = field(default_factory=dict)

    @property
    def version_lag(self) -> list[int | None] | None:
        """Lag of each token: the trainer's version minus the version that sampled it, at least 0.

        None at tokens that are not trained or have no known version. None instead of a list if the trainer's version is
        unknown.
        """
        if self.trainer_version is None:
            return None
        lag: list[int | None] = [None] * len(self.token_ids)
        for span in self.version_spans:
            number = version_number(span.weight_version)
            if number is not None:
                lag[span.start : span.end] = [max(0, self.trainer_version - number)] * (span.end - span.start)
        return lag

    @property
    def response_length(self) -> int:
        """Tokens from the first trained one to the end."""
        return len(self.token_ids) - self.response_start

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1."""
        return sum(self.loss_mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTrajectory:
    """One member of a group. ``rows`` is empty if it cannot be trained; ``dummy_reason`` is the reason.

    ``reward`` is used in the loss, ``raw_reward`` is the reward of the episode; both of a dummy are the means of its
    group's other members, so that group means do not change. ``weight_version`` is the oldest that sampled a token.
    ``extra_info`` comes from its generator, ``replies`` is the text of the assistant messages. ``turn_returns`` has the
    return of each trained turn; None if they are not computed, or the turns have no rewards.
    """

    uid: str
    instance_id: str
    group_index: int
    epoch: int
    slot: int
    reward: float
    raw_reward: float
    outcome: str = Outcome.COMPLETED.value
    stop_reason: str = StopReason.STOP.value
    rows: tuple[RolloutRow, ...] = ()
    token_source: TokenSource = TokenSource.DUMMY
    row_source: RowSource = RowSource.DUMMY
    dummy_reason: str | None = None
    has_images: bool = False
    weight_version: int | None = None
    replies: str = ""
    turn_returns: tuple[float, ...] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    timings_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_dummy(self) -> bool:
        """True if it is not trained."""
        return not self.rows

    @property
    def truncated(self) -> bool:
        """True if a limit ended it: by its outcome, or by the ``finish_reason`` that slime's own generators set."""
        return self.outcome == Outcome.TRUNCATED.value or self.extra_info.get("finish_reason") == "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All members of one (job, epoch, instance), in delivery order."""

    group_index: int
    instance_id: str
    trajectories: tuple[RolloutTrajectory, ...]

    @property
    def rows(self) -> list[RolloutRow]:
        """The rows of all members."""
        return [row for trajectory in self.trajectories for row in trajectory.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Groups for one training step, with metrics.

    ``group_numbers`` are the delivered groups that are acknowledged with it. ``finished_elsewhere`` has
    the instance id of each group that finished without rows in a batch: filtered, failed, or without a trainable row.
    These are consumed as well.
    """

    groups: tuple[RolloutGroup, ...]
    group_numbers: frozenset[int] = frozenset()
    finished_elsewhere: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RolloutGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def trajectories(self) -> list[RolloutTrajectory]:
        """All members of all groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def rows(self) -> list[RolloutRow]:
        """All rows of all groups."""
        return [row for group in self.groups for row in group.rows]

    @property
    def consumed(self) -> list[str]:
        """Instance ids for the skip list of a resumed run, one for each group that this batch consumed."""
        return [*self.finished_elsewhere, *(group.instance_id for group in self.groups)]
