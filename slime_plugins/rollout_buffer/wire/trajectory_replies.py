"""Replies on trajectories: lists, search, tokens and turns of one, and what a trainer said of its rows."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.types import Outcome, StopReason
from slime_plugins.rollout_buffer.wire.generations import GenerationEntry
from slime_plugins.rollout_buffer.wire.items import ChatMessage


class GroupMember(TypedDict):
    """A trajectory as one of a group's members."""

    uid: str
    """Names the trajectory."""
    reward: float
    """As it was written."""
    slot: int
    """Place in the group, from 0."""
    attempt: int
    """Which try to fill its slot, from 1."""
    outcome: Outcome
    """How the attempt ended."""
    stop_reason: StopReason
    """Why the episode stopped."""
    raw_reward: float | None
    """What the episode earned, when that differs."""
    late: bool
    """It came after its group had closed."""
    created_at: float
    """When it came."""
    success: float | None
    """In [0, 1]: what the environment said, before any shaping; null when unknown."""
    turns: int | None
    """How many turns were played; null when unknown."""
    sampled_tokens: int | None
    """How many tokens were sampled; null when unknown."""
    generate_s: float | None
    """Seconds it waited for the engine."""
    played_s: float | None
    """Seconds of all its phases."""
    oldest_version: int | None
    """Of the weights that sampled it."""
    versions_behind: int | None
    """How far that was behind the job's newest when it was written."""


class TrajectoryEntry(GroupMember):
    """A trajectory without its payload."""

    job_id: str
    """The job's id."""
    instance_id: str
    """The line of the input that it belongs to."""
    epoch: int | None
    """Which pass over the input, from 0."""
    group_state: str | None
    """State of its group; null when it has none."""
    group_index: int | None
    """As in a delivered item."""
    delivery_id: str | None
    """The delivery its group is in."""
    body_bytes: int
    """Size of the payload without screenshots."""


class ListedTrajectory(TrajectoryEntry):
    """A trajectory as a list has it."""

    goal: NotRequired[str | None]
    """With `previews`: what was asked, on one line."""
    answer: NotRequired[str | None]
    """With `previews`: what was answered, on one line."""


class TrajectoryPage(TypedDict):
    """A page of trajectories."""

    trajectories: list[ListedTrajectory]
    """In the order that was asked for."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""


class TrajectorySummary(TypedDict):
    """What all trajectories that filters let through have in common."""

    trajectories: int
    """How many there are."""
    reward_mean: float | None
    """Mean reward; null when there are none, as all that follows."""
    reward_min: float | None
    """Lowest reward."""
    reward_max: float | None
    """Highest reward."""
    success: float | None
    """Share with success 1, of those that reported one."""
    turns: float | None
    """Mean turns."""
    sampled_tokens: int | None
    """All sampled tokens."""
    played_s: float | None
    """Mean seconds of an episode."""
    bin_width: float
    """Width of a bin of the histogram."""
    bins: list[int]
    """Trajectories by reward, in bins of equal width from `reward_min` on; the last one holds `reward_max`."""


class FoundText(TypedDict):
    """Where a trajectory has the text that was searched."""

    turn: int
    """The first turn that has it, from 1."""
    role: str
    """Of the message that has it."""
    before: str
    """What stands before it."""
    found: str
    """The text as it was written."""
    after: str
    """What stands after it."""
    places: int
    """How many texts of the trajectory have it."""


class SearchHit(TrajectoryEntry, FoundText):
    """A trajectory with the text that was searched."""


class SearchPage(TypedDict):
    """A page of what a search found."""

    hits: list[SearchHit]
    """Newest first."""
    searched: int
    """Trajectories that were looked through for this page."""
    unreadable: int
    """Those among them whose payload is gone or damaged."""
    out_of_time: bool
    """The time was up before the page was full: go on with `next_cursor`."""
    next_cursor: int | None
    """Send it as `cursor` to search on; null when all were searched."""


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
    """What the generator says of it."""
    turn_rewards: NotRequired[list[float]]
    """What each trained turn earned, in order; left out where nobody said."""
    token_rewards: NotRequired[list[list[float] | None]]
    """What the sampled tokens of each trained turn earned beside; null for a turn without."""
    generations: NotRequired[list[GenerationEntry]]
    """Token ids and log-probabilities as sampled."""
    images: NotRequired[list[str]]
    """sha256 of each screenshot."""
    timings_s: NotRequired[dict[str, Any]]
    """Seconds by phase of the episode."""
    turn_timings: NotRequired[list[TurnTiming]]
    """One for each generation, where `generations=false` leaves them out."""


class DescribedRows(TypedDict):
    """How generations became training rows, and the tokens of one row."""

    contexts: list[dict[str, Any]]
    """For each generation: how its prompt continued the one before."""
    rows: list[dict[str, Any]]
    """Each training row: tokens, trained, generations."""
    row: int
    """Which one `pieces` are of."""
    pieces: list[dict[str, Any]]
    """Context in stretches, trained tokens in whole characters with log-probs."""


class TokenRows(DescribedRows):
    """The training rows of a trajectory, token by token."""

    uid: str
    """Names the trajectory."""
    job_id: str
    """The job's id."""
    why_no_texts: str
    """Empty when there are texts."""
    trainer: dict[str, Any] | None
    """What the trainer said of the row: `log_probs` of its trained tokens, `advantage` …; null when nothing."""


class TurnOfTree(TypedDict):
    """A turn, and what it stands on."""

    turn: int
    """Its place among the generations, from 0."""
    parent: int | None
    """The turn whose tokens its prompt continues exactly; null where it begins a tree."""
    sampled_as: int | None
    """Which turn of the session it was, from 1, in the order of being sampled; null when nobody noted it."""
    new_tokens: int
    """Context tokens that its prompt adds to its parent's."""
    output_tokens: int
    """Tokens that were sampled."""
    mean_log_prob: float | None
    """Of the sampled tokens; null when none were recorded."""
    finish_reason: str
    """Why sampling ended."""
    row: int | None
    """The training row it is in; null when it is not trained."""
    context: str | None
    """What its prompt adds, as text; null without a tokenizer."""
    output: str | None
    """What was sampled, as text; null without a tokenizer."""


class TurnTree(TypedDict):
    """The turns of a trajectory as a tree."""

    uid: str
    """Names the trajectory."""
    job_id: str
    """The job's id."""
    turns: list[TurnOfTree]
    """Branch after branch, each turn after the one it stands on."""
    why_no_texts: str
    """Empty when there are texts."""


class Neighbours(TypedDict):
    """What was written to a job before and after a trajectory."""

    uid: str
    """Names the trajectory."""
    job_id: str
    """The job's id."""
    older: str | None
    """The uid of the one that was written just before; null for the first."""
    newer: str | None
    """The uid of the one that was written just after; null for the last."""


class RefusedRow(TypedDict):
    """A row that does not fit its trajectory."""

    uid: str
    """The trajectory that was named."""
    row: int
    """The row that was named."""
    reason: str
    """Why it was left out."""


class TrainerRowsKept(TypedDict):
    """What became of the rows that a trainer reported."""

    kept: int
    """How many rows."""
    refused: list[RefusedRow]
    """The others, each with the reason."""


class MeanGap(TypedDict):
    """A distance between train and rollout log-prob."""

    tokens: int
    """Trained tokens that were compared."""
    mean: float
    """Mean over them."""
    max: float
    """The largest."""


class TurnMismatch(MeanGap):
    """The distance in one turn of a conversation, over all rows."""

    turn: int
    """The generation, from 0."""


class LagMismatch(MeanGap):
    """The distance of tokens that weights of one age sampled."""

    weight_lag: int | None
    """Versions between the weights that sampled them and those that trained them; null when it is unknown."""


class WorstTurn(TypedDict):
    """A turn in which trainer and engine are far apart."""

    uid: str
    """Names the trajectory."""
    row: int
    """Its training row, from 0."""
    turn: int
    """The generation, from 0."""
    at: int
    """The worst token's place among the row's trained ones."""
    gap: float
    """The distance there."""
    mean: float
    """Mean over the turn."""
    weight_lag: int | None
    """Versions between the weights that sampled it and those that trained it."""
    advantage: float | None
    """What its tokens were weighted with."""
    step: int | None
    """The trainer's count."""


class Mismatch(TypedDict):
    """How far the log-probs of a job's trainer and engine are apart."""

    job_id: str
    """The job's id."""
    rows: int
    """Rows that were compared: the 5000 with the largest distance at most."""
    tokens: int
    """Their trained tokens."""
    mean: float | None
    """Mean over all tokens of the job that were compared; null when none were."""
    max: float | None
    """The largest of them."""
    by_turn: list[TurnMismatch]
    """By turn of the conversation."""
    by_weight_lag: list[LagMismatch]
    """By age of the weights."""
    worst: list[WorstTurn]
    """The turns with the largest distance, worst first."""
