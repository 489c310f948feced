"""What the replies of the HTTP API are, typed once: the OpenAPI schemas are made of these.

Replies are built as dicts: nothing is validated while one is answered. Tests hold real replies to these types. The
sentence below a field is its description at ``/openapi.json``.
"""

from __future__ import annotations

from typing import Any, Literal

from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.types import (
    DeliveryState,
    GroupState,
    JobState,
    Outcome,
    StopReason,
    WriteStatus,
)
from slime_plugins.rollout_buffer.wire.checks import WireRecord
from slime_plugins.rollout_buffer.wire.generations import GenerationEntry
from slime_plugins.rollout_buffer.wire.items import ChatMessage, Item


class Acknowledged(WireRecord):
    """What acknowledged deliveries were, by their ids."""

    acked: list[str]
    """Received, now or earlier."""
    expired: list[str]
    """Too late: their groups went out in another delivery; do not train them."""
    unknown: list[str]
    """Never heard of."""


class ShortGroup(WireRecord):
    """A delivered group with fewer members than it should have."""

    group_index: int
    """One per group."""
    instance_id: str
    """The line of the input that it belongs to."""
    members: int
    """Played members."""
    group_size: int
    """Slots of the group."""
    delivered: bool
    """False: too few are left, and the group has failed."""


class MetaInfo(WireRecord):
    """What a delivery says of itself and of the job."""

    total_samples: int
    """Trajectories written since the last delivery, before any filter."""
    num_groups: int
    """Groups they belong to."""
    avg_group_size: float | None = None
    """Trajectories of a group, on average."""
    avg_reward: float | None = None
    """Mean of their rewards; 0 when there are none."""
    reward_std: float | None = None
    """Standard deviation (n - 1) of their rewards."""
    reward_min: float | None = None
    """The lowest of them."""
    reward_max: float | None = None
    """The highest of them."""
    finished_groups: list[str]
    """instance_id of each group delivered, filtered or failed since the last one."""
    delivery_id: str | None
    """What to acknowledge; null when nothing was delivered."""
    job_id: str | None = None
    """The job's id."""
    job_state: str | None = None
    """Only when nothing was delivered."""
    job_cause: str | None = None
    """Why the job is in that state, when there is a reason; only when nothing was delivered."""
    outcomes: dict[str, int]
    """Trajectories since the last delivery by outcome."""
    exhausted: bool
    """Nothing will ever be ready again, and nothing is leased to anybody else."""
    acknowledged: Acknowledged | None = None
    """What became of the deliveries that the poll acknowledged."""
    reward_version: int | None = None
    """Which rewards its trajectories have: 0 is what was played; left out when nothing was delivered."""
    weight_version: int | None = None
    """The newest that is known in this run of the trainer."""
    stale_groups: list[int] | None = None
    """`group_index` of groups that are too old, where `staleness_policy` is `flag`."""
    note: str | None = None
    """What was done otherwise than asked: a `batch_size` below one group."""
    short_groups: list[ShortGroup] | None = None
    """Groups with fewer members than they should have, for a client that takes no dummies."""


class DeliveredGroups(WireRecord):
    """The groups of a delivery."""

    data: list[Item]
    """Whole groups, one after the other."""
    meta_info: MetaInfo
    """What the delivery says of itself."""


class RolloutData(WireRecord):
    """What a poll gets: whole groups; or `success: false` and no data when nothing is ready."""

    success: bool
    """False when nothing was ready; ask again."""
    message: str
    """A sentence for people."""
    data: DeliveredGroups
    """The groups, and what is said of them."""


class WrittenResult(WireRecord):
    """What became of one written item."""

    uid: str
    """Names the trajectory."""
    status: WriteStatus
    """stored; duplicate: it was there, nothing changed; late: kept, but its group had closed."""


class WriteReply(WireRecord):
    """What became of the items of one write."""

    success: bool
    """True unless something was refused."""
    message: str
    """A sentence for people."""
    job_id: str
    """The job's id."""
    results: list[WrittenResult]
    """One per item, in order."""


class BiasRow(WireRecord):
    """How many members of one kind are over, and what became of them; those that nothing else counts were lost."""

    by: str
    """`duration`, `length` (sampled tokens), `turns`, `reward`, `success` or `task`."""
    name: str
    """Which of that kind."""
    submitted: int
    """Members of groups that are over."""
    trained: int
    """Those that were handed out."""
    filtered: int
    """Those that were filtered for their rewards, or their group's."""
    given_up: int
    """Those that had not come when their group was closed."""
    failed: int
    """Those whose slot used up its attempts."""


class Job(WireRecord):
    """A job, its progress and its accounting."""

    job_id: str
    """The job's id."""
    task_type: str
    """Which generator plays it."""
    state: JobState
    """Where it stands."""
    cause: str
    """Why it is in that state, when there is a reason."""
    cause_code: CauseCode
    """The same for programs: one of a few stable codes, or empty."""
    engine_url: str | None = None
    """The engine that its episodes ask."""
    group_size: int
    """Slots of each group."""
    instances: int
    """Lines of the input."""
    epochs: int
    """How often the input is gone through."""
    created_at: float | None = None
    """Seconds since 1970, as all times."""
    updated_at: float | None = None
    """When it changed last."""
    finished_at: float | None = None
    """When it ended; null while it has not."""
    last_poll_at: float | None = None
    """When a trainer last asked for its data."""
    groups: dict[str, int]
    """Groups by state."""
    slots: dict[str, int]
    """Slots by state; `submitted` is always the sum of the others."""
    attempts: dict[str, int]
    """Attempts by state, and `failed:CODE` by error code."""
    outcomes: dict[str, int]
    """Trajectories by outcome."""
    late: int
    """Trajectories that came after their group had closed."""
    damaged: int
    """Trajectories that could not be read when they were to be delivered."""
    refused_items: int
    """Written items that were refused; of requests without the token, only now and then one is counted."""
    trainer_run: int
    """Weight versions are ordered within one; every start of the trainer opens the next."""
    measures: dict[str, dict[str, float]]
    """Over the whole job: `reward` (mean, min, max), `success` (mean), `staleness` in weight versions, `log_prob_gap`
    and `poll_wait_seconds` (mean, max), `bias` by kind, `prompts` ([fidelity](fidelity.md)); what is unknown is left
    out."""
    prompt_findings: list[str]
    """What its engine was found to do to prompts ([fidelity](fidelity.md)): each follows "the engine"."""
    bias: list[BiasRow]
    """Trained against submitted, of the newest groups that are over; empty while they have fewer than 16 members."""
    causes: dict[str, Any]
    """Why groups were filtered or failed: state, cause, count."""
    settings: dict[str, Any] | None = None
    """Only from `GET /jobs/{job_id}`: what the job keeps of its start payload, with `***` for passwords and keys."""
    devices: dict[str, Any] | None = None
    """Only from there: the last report on its devices, `age_s` seconds old: the farm's name `pool`, who waits, and for
    each of `devices` its state, last error, counters and times.
    """


class ImageReply(WireRecord):
    """A screenshot that is stored."""

    sha256: str
    """Of the bytes, in hex."""
    created: bool
    """False when it was there already."""


class Jobs(WireRecord):
    """All jobs."""

    jobs: list[Job]
    """Newest first."""


class DeliveryEntry(WireRecord):
    """One past delivery."""

    delivery_id: str
    """The delivery it is in."""
    state: DeliveryState
    """popped: handed out for good."""
    consumer_id: str | None = None
    """Who polled, where it said so."""
    poll_id: str | None = None
    """Which poll it was, where it said so."""
    created_at: float
    """Seconds since 1970, as all times."""
    lease_expires_at: float | None = None
    """When its groups come back unless it is acknowledged."""
    groups: int
    """How many groups."""
    samples: int
    """How many samples, dummies included."""


class DeliveryPage(WireRecord):
    """A page of deliveries."""

    job_id: str
    """The job's id."""
    deliveries: list[DeliveryEntry]
    """Newest first."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""


class TrajectoryEntry(WireRecord):
    """A trajectory without its payload."""

    job_id: str
    """The job's id."""
    uid: str
    """Names the trajectory."""
    instance_id: str
    """The line of the input that it belongs to."""
    epoch: int | None = None
    """Which pass over the input, from 0."""
    slot: int | None = None
    """Place in the group, from 0."""
    attempt: int | None = None
    """Which try to fill its slot, from 1."""
    outcome: Outcome
    """How the attempt ended."""
    stop_reason: StopReason
    """Why the episode stopped."""
    reward: float
    """As it was written, before the group functions."""
    raw_reward: float | None = None
    """What the episode earned, when that differs."""
    late: bool
    """It came after its group had closed."""
    group_state: str | None = None
    """State of its group; null when it has none."""
    group_index: int | None = None
    """As in a delivered item."""
    delivery_id: str | None = None
    """The delivery its group is in."""
    body_bytes: int
    """Size of the payload without screenshots."""
    created_at: float
    """Seconds since 1970, as all times."""
    success: float | None = None
    """In [0, 1]: what the environment said, before any shaping; null when unknown."""
    turns: int | None = None
    """How many turns were played; null when unknown."""
    sampled_tokens: int | None = None
    """How many tokens were sampled; null when unknown."""
    generate_s: float | None = None
    """Seconds it waited for the engine."""
    played_s: float | None = None
    """Seconds of all its phases."""
    oldest_version: int | None = None
    """Of the weights that sampled it."""
    versions_behind: int | None = None
    """How far that was behind the job's newest when it was written."""


class ListedTrajectory(TrajectoryEntry):
    """A trajectory as a list has it."""

    goal: str | None = None
    """With `previews`: what was asked, on one line."""
    answer: str | None = None
    """With `previews`: what was answered, on one line."""


class TrajectoryPage(WireRecord):
    """A page of trajectories."""

    trajectories: list[ListedTrajectory]
    """In the order that was asked for."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""


class TrajectorySummary(WireRecord):
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


class SearchHit(TrajectoryEntry):
    """A trajectory with the text that was searched."""

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


class SearchPage(WireRecord):
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


class StoredTrajectory(TrajectoryEntry):
    """A trajectory with its payload."""

    messages: list[ChatMessage]
    """OpenAI messages."""
    extra_info: dict[str, Any]
    """What the generator says of it."""
    turn_rewards: list[float] | None = None
    """What each trained turn earned, in order; left out where nobody said."""
    token_rewards: list[list[float] | None] | None = None
    """What the sampled tokens of each trained turn earned beside; null for a turn without."""
    generations: list[GenerationEntry] | None = None
    """Token ids and log-probabilities as sampled."""
    images: list[str] | None = None
    """sha256 of each screenshot."""
    timings_s: dict[str, Any] | None = None
    """Seconds by phase of the episode."""


class Explanation(WireRecord):
    """Why something moves or stands still."""

    code: str
    """Stable, for programs."""
    severity: Literal["ok", "wait", "ended", "attention", "stopped"]
    """stopped: until somebody acts; wait: it ends by itself; ended: somebody cancelled it."""
    message: str
    """What is."""
    advice: str
    """What to do; empty when there is nothing to do."""


class OverviewJob(WireRecord):
    """A job as the dashboard lists it."""

    job_id: str
    """The job's id."""
    task_type: str
    """Which generator plays it."""
    state: JobState
    """Where it stands."""
    cause: str
    """Why it is in that state, when there is a reason."""
    cause_code: CauseCode
    """The same for programs: one of a few stable codes, or empty."""
    group_size: int
    """Slots of each group."""
    created_at: float
    """Seconds since 1970, as all times."""
    finished_at: float | None
    """When it ended; null while it has not."""
    last_poll_at: float | None
    """When a trainer last asked for its data."""
    groups: dict[str, int]
    """Groups by state."""
    slots: dict[str, int]
    """Slots by state; `submitted` is always the sum of the others."""
    newest: dict[str, Any]
    """The newest 200 trajectories: episodes, mean reward, success."""
    explanation: list[Explanation]
    """Why it moves or stands still, the most pressing first."""


class Extension(WireRecord):
    """One entry point of an installed package."""

    group: str
    """`task_types`, `devices`, `engines`, `scorers` or `commands`."""
    name: str
    """What it is asked for by."""
    target: str
    """`module` or `module:object`."""
    package: str
    """Its distribution and version."""


class Overview(WireRecord):
    """How the buffer is, and a page of jobs."""

    now: float
    """The buffer's time."""
    supervisor_age_s: float | None
    """Seconds since its heartbeat; null when there is none."""
    task_types: list[str]
    """What can be started."""
    extensions: list[Extension]
    """What installed packages add."""
    disk_free_bytes: int | None = None
    """Room on the disk of the data directory."""
    explanation: list[Explanation]
    """Why it moves or stands still, the most pressing first."""
    jobs: list[OverviewJob]
    """Newest first."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""
    needs_token: bool
    """The server asks for a token."""


class JobExplanation(WireRecord):
    """Why a job moves or stands still, with the numbers behind the words."""

    job_id: str
    """The job's id."""
    now: float
    """The buffer's time."""
    explanation: list[Explanation]
    """Why it moves or stands still, the most pressing first."""
    weight_version: int | None = None
    """The newest that any trajectory was sampled with."""
    trainer_run: int
    """Weight versions are ordered within one; every start of the trainer opens the next."""
    running_attempts: int | None = None
    """Episodes that are being played."""
    trajectory_age_s: float | None = None
    """Seconds since one ended."""
    poll_age_s: float | None = None
    """Seconds since a trainer asked."""
    trainer_waits_s: float | None = None
    """Seconds that a trainer has polled in vain; null when none waits."""
    recent_failures: dict[str, int] | None = None
    """Failed attempts of the last ten minutes by error code."""
    last_failure: str | None = None
    """What the last of them said."""
    devices: dict[str, Any] | None = None
    """What the runner says of its devices; empty when it does not."""
    engine: dict[str, Any] | None = None
    """What the runner says of its engine; empty when it does not."""
    concurrency: dict[str, Any] | None = None
    """How many episodes may play at once (`limit`) and whether that is steered (`auto`); then why (`reason`)."""
    newest: dict[str, Any] | None = None
    """The newest 200 trajectories: episodes, mean reward, success."""


class SeriesColumns(WireRecord):
    """What happened to a job, one entry per bucket of time."""

    t: list[float]
    """Where each bucket starts."""
    episodes: list[int] | None = None
    """Trajectories that came."""
    completed: list[int] | None = None
    """Of them, completed."""
    truncated: list[int] | None = None
    """Of them, truncated."""
    aborted: list[int] | None = None
    """Of them, aborted."""
    failed: list[int] | None = None
    """Attempts that failed."""
    groups_valid: list[int] | None = None
    """Groups that became ready."""
    groups_filtered: list[int] | None = None
    """Groups that were filtered."""
    groups_failed: list[int] | None = None
    """Groups that failed."""
    deliveries: list[int] | None = None
    """Deliveries that went out."""
    reward_mean: list[float | None] | None = None
    """Mean reward."""
    reward_min: list[float | None] | None = None
    """The lowest of them."""
    reward_max: list[float | None] | None = None
    """The highest of them."""
    success: list[float | None] | None = None
    """Share of trajectories that solved their task."""
    behind_mean: list[float | None] | None = None
    """Weight versions behind, on average."""
    behind_max: list[float | None] | None = None
    """Weight versions behind, at most."""
    turns: list[float | None] | None = None
    """How many turns were played; null when unknown."""
    sampled_tokens: list[float | None] | None = None
    """How many tokens were sampled; null when unknown."""
    generating: list[float | None] | None = None
    """Episodes that waited for the engine, on average."""
    playing: list[float | None] | None = None
    """Episodes that were played, on average."""
    wait_mean: list[float | None] | None = None
    """Seconds that a poll waited, on average."""
    wait_max: list[float | None] | None = None
    """Seconds that a poll waited, at most."""


class Series(WireRecord):
    """What happened to a job over time."""

    job_id: str
    """The job's id."""
    until: float
    """Now, or when the job ended: the last bucket is as long as from its start to there."""
    width_s: int
    """Seconds of a bucket."""
    columns: SeriesColumns
    """One list per measure, as long as `t`."""


class GroupMember(WireRecord):
    """A trajectory of a group."""

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
    success: float | None = None
    """In [0, 1]: what the environment said, before any shaping; null when unknown."""
    turns: int | None = None
    """How many turns were played; null when unknown."""
    sampled_tokens: int | None = None
    """How many tokens were sampled; null when unknown."""
    generate_s: float | None = None
    """Seconds it waited for the engine."""
    played_s: float | None = None
    """Seconds of all its phases."""
    oldest_version: int | None = None
    """Of the weights that sampled it."""
    versions_behind: int | None = None
    """How far that was behind the job's newest when it was written."""


class GroupEntry(WireRecord):
    """A group and the rewards of its members."""

    group_index: int
    """As in a delivered item."""
    epoch: int
    """Which pass over the input, from 0."""
    position: int | None = None
    """Line of its instance in the input, from 0."""
    instance_id: str
    """The line of the input that it belongs to."""
    state: GroupState
    """Where it stands."""
    cause: str
    """Why it was filtered, failed or skipped."""
    cause_code: CauseCode
    """The same for programs: one of a few stable codes, or empty."""
    message: str
    """The same as a sentence for people."""
    group_size: int
    """Slots of the group."""
    opened_at: float | None = None
    """When its first attempt began or its first item came."""
    last_write_at: float | None = None
    """When a trajectory of it came last."""
    closed_at: float | None = None
    """When it was judged."""
    delivery_id: str | None = None
    """The delivery it is in."""
    members: list[GroupMember]
    """Its trajectories in slot order."""


class GroupPage(WireRecord):
    """A page of groups."""

    job_id: str
    """The job's id."""
    group_size: int
    """Slots of the group."""
    groups: list[GroupEntry]
    """The last touched first."""
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


class FailedAttempt(WireRecord):
    """An attempt that died of its surroundings. It has no reward."""

    uid: str
    """Names what it would have brought, in logs and traces."""
    group_index: int
    """As in a delivered item."""
    epoch: int
    """Which pass over the input, from 0."""
    instance_id: str
    """The line of the input that it belongs to."""
    slot: int
    """Place in the group, from 0."""
    attempt: int
    """Which try to fill its slot, from 1."""
    error_code: str | None
    """The same for programs: a stable code."""
    error_message: str | None
    """Why it failed."""
    started_at: float
    """When it began."""
    ended_at: float
    """When it failed."""
    traceback: str | None
    """Where its generator raised; of the newest, and null where something else failed."""
    has_transcript: bool
    """Whether what was said in it was kept: that of the newest is."""
    messages: list[dict[str, Any]] | None
    """What was said in it, long texts shortened, where `transcripts` asks for it and it was kept."""


class FailedAttemptPage(WireRecord):
    """A page of attempts that failed."""

    job_id: str
    """The job's id."""
    log: str | None
    """The file on the buffer's host in which its runner logs; null where nothing is played here."""
    attempts: list[FailedAttempt]
    """The last ended first."""
    next_cursor: str | None
    """Send it as `cursor` for the next page; null on the last one."""


class GroupAttempt(WireRecord):
    """One try to fill a slot."""

    slot: int
    """Place in the group, from 0."""
    attempt: int
    """Which try to fill its slot, from 1."""
    state: str
    """Where it stands."""


class DeliveredGroupMember(WireRecord):
    """One place of a group as a trainer is given it."""

    source_uid: str | None
    """The trajectory it was made of; null for a dummy."""
    reward: float | None
    """What the trainer is to use; null for a dummy."""
    raw_reward: float | None
    """What the episode earned, when that differs."""
    remove_sample: bool
    """A dummy that stands for a missing member."""
    ordinal: int
    """Place in what is delivered, from 0."""
    uid: str
    """Names the trajectory."""


class Group(GroupEntry):
    """A group with all that is known of it."""

    job_id: str
    """The job's id."""
    task_type: str
    """Which generator plays it."""
    attempts: list[GroupAttempt]
    """Every try to fill a slot, with its error when it failed."""
    delivered: list[DeliveredGroupMember]
    """What a trainer is given."""
    instance: dict[str, Any]
    """Its line of the input."""


class TokenRows(WireRecord):
    """The training rows of a trajectory, token by token."""

    uid: str
    """Names the trajectory."""
    job_id: str
    """The job's id."""
    contexts: list[dict[str, Any]]
    """For each generation: how its prompt continued the one before."""
    rows: list[dict[str, Any]]
    """Each training row: tokens, trained, generations."""
    row: int
    """Which one `pieces` are of."""
    pieces: list[dict[str, Any]]
    """Context in stretches, trained tokens in whole characters with log-probs."""
    why_no_texts: str
    """Empty when there are texts."""
    trainer: dict[str, Any] | None
    """What the trainer said of the row: `log_probs` of its trained tokens, `advantage` …; null when nothing."""


class TurnOfTree(WireRecord):
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


class TurnTree(WireRecord):
    """The turns of a trajectory as a tree."""

    uid: str
    """Names the trajectory."""
    job_id: str
    """The job's id."""
    turns: list[TurnOfTree]
    """Branch after branch, each turn after the one it stands on."""
    why_no_texts: str
    """Empty when there are texts."""


class Neighbours(WireRecord):
    """What was written to a job before and after a trajectory."""

    uid: str
    """Names the trajectory."""
    job_id: str
    """The job's id."""
    older: str | None
    """The uid of the one that was written just before; null for the first."""
    newer: str | None
    """The uid of the one that was written just after; null for the last."""


class RefusedRow(WireRecord):
    """A row that does not fit its trajectory."""

    uid: str
    """The trajectory that was named."""
    row: int
    """The row that was named."""
    reason: str
    """Why it was left out."""


class TrainerRowsKept(WireRecord):
    """What became of the rows that a trainer reported."""

    kept: int
    """How many rows."""
    refused: list[RefusedRow]
    """The others, each with the reason."""


class TurnMismatch(WireRecord):
    """The distance between train and rollout log-prob in one turn of a conversation, over all rows."""

    turn: int
    """The generation, from 0."""
    tokens: int
    """Trained tokens that were compared."""
    mean: float
    """Mean over them."""
    max: float
    """The largest."""


class LagMismatch(WireRecord):
    """The same for tokens that weights of one age sampled."""

    weight_lag: int | None
    """Versions between the weights that sampled them and those that trained them; null when it is unknown."""
    tokens: int
    """Trained tokens that were compared."""
    mean: float
    """Mean over them."""
    max: float
    """The largest."""


class WorstTurn(WireRecord):
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


class Mismatch(WireRecord):
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


class SignedIn(WireRecord):
    """Whether the browser may ask now."""

    signed_in: bool
    """True when the token was right."""


class Health(WireRecord):
    """Whether the service works: it is well, or degraded and serving, and `reason` says why."""

    status: Literal["ok", "degraded"]
    """Degraded: `reason` says by what."""
    reason: str | None
    """What is not well, and since when; null when all is."""
    supervisor: str
    """`alive` or `not seen`."""
    task_types: list[str]
    """What can be started."""
    extensions: list[Extension]
    """What installed packages add."""
