"""What a trainer gets, as frozen records: a batch of groups of trajectories of rows.

Every trajectory of a job has as many siblings as the job plays of an instance. One that cannot be trained keeps its
place in the group, without rows and with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.utils.mask_token_records import TokenRecords
from slime_plugins.rollout_buffer.rules.weight_versions import version_number
from slime_plugins.rollout_buffer.types import Outcome, StopReason, WeightVersionSpan

__all__ = ["RolloutBatch", "RolloutGroup", "RolloutRow", "RolloutTrajectory", "RowSource", "TokenSource"]


class TokenSource(StrEnum):
    """Where the tokens of a trajectory came from."""

    GENERATIONS = "generations"  # sampled by the engine, id by id
    MESSAGES = "messages"  # rebuilt with the tokenizer
    DUMMY = "dummy"  # nothing of it is trained


class RowSource(StrEnum):
    """How the rows of a trajectory were made."""

    GENERATIONS = "generations"  # of what was sampled
    TURNS = "turns"  # rebuilt from messages turn by turn
    CONVERSATION = "conversation"  # rebuilt from messages, one mask over the whole
    DUMMY = "dummy"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """One sequence with a loss.

    ``token_ids`` and ``loss_mask`` have one length: 1 stands on tokens that the policy sampled and that are trained.
    ``log_probs`` is as long, with what the engine recorded at the ones and 0.0 elsewhere; None where it recorded
    nothing. ``response_start`` is the place of the first trained token, never 0. ``reward`` is the trajectory's, which
    its rows share: a loss counts each trajectory once, by ``uid``.

    ``images`` names the screenshot (sha256) of each placeholder run in order. ``train_inputs`` holds what the model's
    own processor made of them (``pixel_values``, ``image_grid_thw``, joined along dimension 0), None without images or
    without a processor. ``weight_versions`` are those that sampled the row's turns, in order. ``prompt_tokens`` and
    ``cached_tokens`` count what the engine was shown in those turns, and what of it was in its cache; 0 where it did
    not tell.

    ``version_spans`` say which weights sampled which trained tokens, as places in ``token_ids``, and
    ``trainer_version`` which weights the trainer had when the row was made. ``returns``, as long as ``token_ids``, has
    what is earned from each trained token on (``turn_rewards``) and 0.0 elsewhere; None where nobody asked, or its
    turns earned nothing of their own. ``records`` has what was asked for of the engine beside: under ``routed_experts``
    a record for every token but the first, under ``top_p_tokens`` one for every token from ``response_start`` on.
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
        """How many versions older than the trainer's the weights were that sampled each token; at least 0.

        As long as ``token_ids``, None at tokens that are not trained or of weights that nobody named. None altogether
        where the trainer's version is not known.
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
    """One member of a group. ``rows`` is empty where it cannot be trained, and ``dummy_reason`` says why.

    ``reward`` is what the loss sees, ``raw_reward`` what the episode earned; those of a member that cannot be trained
    are the means of its group's others, so that it moves no mean. ``weight_version`` is the oldest that sampled some
    token of it. ``extra_info`` is what its generator says beside, ``replies`` the text that the
    policy wrote, as far as its messages hold it.

    ``turn_returns`` has, where returns were asked for and its turns earned rewards, what is earned from the beginning
    of each trained turn on; None otherwise.
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
        """Whether nothing of it is trained."""
        return not self.rows

    @property
    def truncated(self) -> bool:
        """Whether a limit cut it: its outcome says so, or, of slime's own generators, ``extra_info.finish_reason``."""
        return self.outcome == Outcome.TRUNCATED.value or self.extra_info.get("finish_reason") == "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All members of one (job, epoch, instance), in the order of their slots as they were delivered."""

    group_index: int
    instance_id: str
    trajectories: tuple[RolloutTrajectory, ...]

    @property
    def rows(self) -> list[RolloutRow]:
        """The rows of all members."""
        return [row for trajectory in self.trajectories for row in trajectory.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """Groups for one step of a trainer, and what the buffer said beside them.

    ``group_numbers`` name what came for it, and are acknowledged with it. ``finished_elsewhere`` names the instances of
    groups that ended without a row of theirs in a batch: they are consumed as well.
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
        """Instance ids to put on the skip list of a resumed run, one for each group that this batch used up."""
        return [*self.finished_elsewhere, *(group.instance_id for group in self.groups)]
