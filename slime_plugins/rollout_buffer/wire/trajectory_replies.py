"""Replies on trajectories: lists, search, tokens and turns of one, and a trainer's report on its rows."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.types import Outcome, StopReason
from slime_plugins.rollout_buffer.wire.generations import GenerationEntry
from slime_plugins.rollout_buffer.wire.items import ChatMessage


class GroupMember(TypedDict):
    """A trajectory as one of a group's members."""

    uid: str
    """Id of the trajectory."""
    reward: float
    """The stored reward."""
    slot: int
    """Slot in the group, from 0."""
    attempt: int
    """Number of the attempt at the slot, from 1."""
    outcome: Outcome
    """How the attempt ended."""
    stop_reason: StopReason
    """Why the episode stopped."""
    raw_reward: float | None
    """The reward before normalisation, if it differs."""
    late: bool
    """True if its group had closed, or had no free slot, before it was stored."""
    created_at: float
    """Time at which it was stored."""
    success: float | None
    """The environment's score in [0, 1], before reward shaping; null if unknown."""
    turns: int | None
    """Number of turns; null if unknown."""
    sampled_tokens: int | None
    """Number of sampled tokens; null if unknown."""
    generate_s: float | None
    """Seconds for which it waited for the engine."""
    played_s: float | None
    """Seconds of all its phases."""
    oldest_version: int | None
    """The oldest weight version that sampled it."""
    versions_behind: int | None
    """Versions between `oldest_version` and the job's newest at the time of the write."""


class TrajectoryEntry(GroupMember):
    """A trajectory without its payload."""

    job_id: str
    """The job's id."""
    instance_id: str
    """Id of the instance, one line of the input."""
    epoch: int | None
    """Epoch of the input, from 0."""
    group_state: str | None
    """State of its group; null when it has none."""
    group_index: int | None
    """Number of the group, as in a delivered item."""
    delivery_id: str | None
    """Id of the delivery of its group."""
    body_bytes: int
    """Size of the payload without screenshots."""


class ListedTrajectory(TrajectoryEntry):
    """A trajectory in a list."""

    goal: NotRequired[str | None]
    """With `previews`: the question on one line."""
    answer: NotRequired[str | None]
    """With `previews`: the answer on one line."""


class TrajectoryPage(TypedDict):
    """A page of trajectories."""

    trajectories: list[ListedTrajectory]
    """In the requested order."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""


class TrajectorySummary(TypedDict):
    """Statistics of the trajectories that pass the filters."""

    trajectories: int
    """Number of trajectories."""
    reward_mean: float | None
    """Mean reward; this and the following fields are null without trajectories."""
    reward_min: float | None
    """Lowest reward."""
    reward_max: float | None
    """Highest reward."""
    success: float | None
    """Share of trajectories with success 1, among those whose success is known."""
    turns: float | None
    """Mean number of turns."""
    sampled_tokens: int | None
    """Number of sampled tokens of all trajectories."""
    played_s: float | None
    """Mean seconds of an episode."""
    bin_width: float
    """Width of a bin of the histogram."""
    bins: list[int]
    """Trajectories by reward, in bins of equal width from `reward_min` on; the last one holds `reward_max`."""


class FoundText(TypedDict):
    """Where a trajectory has the text that was searched."""

    turn: int
    """The first turn that has the text, from 1."""
    role: str
    """Role of the message with the text."""
    before: str
    """The text before it."""
    found: str
    """The text as it was written."""
    after: str
    """The text after it."""
    places: int
    """Number of texts of the trajectory that contain the searched text."""


class SearchHit(TrajectoryEntry, FoundText):
    """A trajectory with the text that was searched."""


class SearchPage(TypedDict):
    """A page of search results."""

    hits: list[SearchHit]
    """Newest first."""
    searched: int
    """Number of trajectories searched for this page."""
    unreadable: int
    """Number of these whose payload is deleted or damaged."""
    out_of_time: bool
    """True if the time limit ended the search: continue with `next_cursor`."""
    next_cursor: int | None
    """Send it as `cursor` to continue; null at the end."""


class TurnTiming(TypedDict):
    """Seconds of one generation; null where nobody measured them."""

    engine_s: float | None
    """Until its reply, retries included."""
    environment_s: float | None
    """From its reply to the next request, or to the end of the episode."""


class StoredTrajectory(TrajectoryEntry):
    """A trajectory with its payload."""

    messages: list[ChatMessage]
    """OpenAI messages."""
    extra_info: dict[str, Any]
    """Further fields of the generator."""
    turn_rewards: NotRequired[list[float]]
    """Reward of each trained turn, in order; absent if unknown."""
    token_rewards: NotRequired[list[list[float] | None]]
    """Additional rewards of the sampled tokens of each trained turn; null for a turn without them."""
    generations: NotRequired[list[GenerationEntry]]
    """Token ids and log-probabilities as sampled."""
    images: NotRequired[list[str]]
    """sha256 of each screenshot."""
    timings_s: NotRequired[dict[str, Any]]
    """Seconds by phase of the episode."""
    turn_timings: NotRequired[list[TurnTiming]]
    """One for each generation, where `generations=false` leaves them out."""


class DescribedRows(TypedDict):
    """The training rows that generations became, and the tokens of one row."""

    contexts: list[dict[str, Any]]
    """For each generation: how its prompt continued the previous generation."""
    rows: list[dict[str, Any]]
    """Each training row: tokens, trained, generations."""
    row: int
    """The row that `pieces` belong to."""
    pieces: list[dict[str, Any]]
    """The row's text: spans of context, and trained tokens with log-probs."""


class TokenRows(DescribedRows):
    """The training rows of a trajectory, token by token."""

    uid: str
    """Id of the trajectory."""
    job_id: str
    """The job's id."""
    why_no_texts: str
    """Why there are no texts; empty if there are."""
    trainer: dict[str, Any] | None
    """The trainer's report on the row: `log_probs` of its trained tokens, `advantage` …; null without one."""


class TurnOfTree(TypedDict):
    """A turn and its parent."""

    turn: int
    """Index of the generation, from 0."""
    parent: int | None
    """The turn whose tokens its prompt continues exactly; null for a root."""
    sampled_as: int | None
    """Number of the turn in the session by time of sampling, from 1; null if not recorded."""
    new_tokens: int
    """Context tokens that its prompt adds to its parent's."""
    output_tokens: int
    """Number of sampled tokens."""
    mean_log_prob: float | None
    """Mean log-prob of the sampled tokens; null if not recorded."""
    finish_reason: str
    """Why sampling ended."""
    row: int | None
    """The training row it is in; null when it is not trained."""
    context: str | None
    """Text of the context that its prompt adds; null without a tokenizer."""
    output: str | None
    """Sampled text; null without a tokenizer."""


class TurnTree(TypedDict):
    """The turns of a trajectory as a tree."""

    uid: str
    """Id of the trajectory."""
    job_id: str
    """The job's id."""
    turns: list[TurnOfTree]
    """Branch by branch, each turn after its parent."""
    why_no_texts: str
    """Why there are no texts; empty if there are."""


class Neighbours(TypedDict):
    """The trajectories stored before and after one."""

    uid: str
    """Id of the trajectory."""
    job_id: str
    """The job's id."""
    older: str | None
    """Uid of the trajectory stored before it; null for the first."""
    newer: str | None
    """Uid of the trajectory stored after it; null for the last."""


class RefusedRow(TypedDict):
    """A row that does not fit its trajectory."""

    uid: str
    """Uid in the report."""
    row: int
    """Number of the row in the report."""
    reason: str
    """Why the row was refused."""


class TrainerRowsKept(TypedDict):
    """Results of a trainer's report on rows."""

    kept: int
    """Number of stored rows."""
    refused: list[RefusedRow]
    """Refused rows with reasons."""


class MeanGap(TypedDict):
    """Absolute difference between the log-probs of trainer and engine."""

    tokens: int
    """Number of compared trained tokens."""
    mean: float
    """Mean difference."""
    max: float
    """The largest difference."""


class TurnMismatch(MeanGap):
    """The difference in one turn of the conversation, over all rows."""

    turn: int
    """The generation, from 0."""


class LagMismatch(MeanGap):
    """The difference for tokens sampled by weights of one age."""

    weight_lag: int | None
    """Versions between the weights that sampled them and those that trained them; null when it is unknown."""


class WorstTurn(TypedDict):
    """A turn with a large difference."""

    uid: str
    """Id of the trajectory."""
    row: int
    """Its training row, from 0."""
    turn: int
    """The generation, from 0."""
    at: int
    """Index of the worst token among the row's trained tokens."""
    gap: float
    """The difference at that token."""
    mean: float
    """Mean over the turn."""
    weight_lag: int | None
    """Versions between the weights that sampled it and those that trained it."""
    advantage: float | None
    """Advantage of its tokens."""
    step: int | None
    """The trainer's step."""


class Mismatch(TypedDict):
    """Differences between the log-probs of a job's trainer and engine."""

    job_id: str
    """The job's id."""
    rows: int
    """Number of compared rows: at most the 5000 with the largest difference."""
    tokens: int
    """Number of trained tokens of these rows."""
    mean: float | None
    """Mean over all compared tokens of the job; null without any."""
    max: float | None
    """The largest difference of a compared token; null without any."""
    by_turn: list[TurnMismatch]
    """By turn of the conversation."""
    by_weight_lag: list[LagMismatch]
    """By age of the weights."""
    worst: list[WorstTurn]
    """The turns with the largest difference, worst first."""
