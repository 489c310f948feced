"""Replies on jobs and on the service: state and accounting, why nothing moves, charts, health."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.extensions import InstalledExtension
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.rules.selection_bias import BiasRow
from slime_plugins.rollout_buffer.types import JobState


class Severity(StrEnum):
    """Severity of an explanation."""

    OK = "ok"  # in progress, or done
    WAIT = "wait"  # waits for something that ends without intervention
    ENDED = "ended"  # ended on request before all was played
    ATTENTION = "attention"  # in progress, but needs attention
    STOPPED = "stopped"  # no progress without intervention


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """An explanation of progress or standstill."""

    code: str
    """Stable code for programs."""
    severity: Severity
    """`stopped`: needs intervention; `wait`: ends without intervention; `ended`: cancelled by request."""
    message: str
    """A sentence that states the fact."""
    advice: str = ""
    """What to do; empty if nothing can be done."""


class JobProgress(TypedDict):
    """A job and its progress."""

    job_id: str
    """The job's id."""
    task_type: str
    """The job's task type."""
    state: JobState
    """Its state."""
    cause: str
    """The reason for the state, if there is one."""
    cause_code: CauseCode
    """Stable code of the cause; empty without one."""
    group_size: int
    """Slots of each group."""
    created_at: float
    """Seconds since 1970, as all times."""
    finished_at: float | None
    """Time of its end; null before."""
    last_poll_at: float | None
    """Time of the last poll."""
    groups: dict[str, int]
    """Groups by state."""
    slots: dict[str, int]
    """Slots by state; `submitted` is always the sum of the others."""


class Job(JobProgress):
    """A job, its progress and its accounting."""

    engine_url: str | None
    """Address of the engine that samples its episodes."""
    has_input: bool
    """False: its items bring its instances, and it runs until it is cancelled or fails."""
    instances: int
    """Number of instances, of the input and of items."""
    epochs: int
    """Number of epochs of the input."""
    updated_at: float
    """Time of the last change."""
    attempts: dict[str, int]
    """Attempts by state, and by `STATE:CODE` with the error code."""
    outcomes: dict[str, int]
    """Trajectories by outcome, without late ones."""
    late: int
    """Trajectories that were stored after their group had closed."""
    damaged: int
    """Trajectories that could not be read for a delivery."""
    refused_items: int
    """Refused items; requests without the token are counted only sometimes."""
    trainer_run: int
    """Number of the trainer's run; weight versions are ordered within a run."""
    measures: dict[str, dict[str, float]]
    """Over the whole job: `reward` (mean, min, max), `success` (mean), `staleness` in weight versions, `log_prob_gap`
    and `poll_wait_seconds` (mean, max), `bias` by kind, `prompts` ([fidelity](fidelity.md)), `forks` of sessions
    (sum); what is unknown is left out."""
    prompt_findings: list[str]
    """Findings on how the engine changes prompts ([fidelity](fidelity.md)); each completes "the engine …"."""
    bias: list[BiasRow]
    """Trained against submitted members of the newest closed groups; empty while these have fewer than 16 members."""
    causes: dict[str, Any]
    """Why groups were filtered or failed: state, cause, count."""


class JobDetails(Job):
    """A job with its settings and devices."""

    settings: dict[str, Any]
    """What the job keeps of its start payload, with `***` for passwords and keys."""
    devices: dict[str, Any] | None
    """The last report on its devices, `age_s` seconds old: the name of the device `pool`, the waiting runners, and
    state, last error, counters and times of each of `devices`; `unreachable` says why there are none."""


class Jobs(TypedDict):
    """All jobs."""

    jobs: list[Job]
    """Newest first."""


class OverviewJob(JobProgress):
    """A job as the dashboard lists it."""

    newest: dict[str, Any]
    """The newest 200 trajectories: episodes, mean reward, success."""
    explanation: list[Explanation]
    """Explanations of its progress or standstill, most severe first."""


class Overview(TypedDict):
    """State of the buffer, and a page of jobs."""

    now: float
    """The buffer's time."""
    supervisor_age_s: float | None
    """Seconds since its heartbeat; null when there is none."""
    task_types: list[str]
    """Task types that can be started."""
    extensions: list[InstalledExtension]
    """Extensions by installed packages."""
    disk_free_bytes: int
    """Free bytes on the disk of the data directory."""
    explanation: list[Explanation]
    """Explanations of its progress or standstill, most severe first."""
    jobs: list[OverviewJob]
    """Newest first."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""
    needs_token: bool
    """True if the server requires a token."""


class JobExplanation(TypedDict):
    """Explanations of a job's progress or standstill, with the figures behind them."""

    job_id: str
    """The job's id."""
    now: float
    """The buffer's time."""
    explanation: list[Explanation]
    """Explanations of its progress or standstill, most severe first."""
    weight_version: int | None
    """The newest weight version of the trainer's present run."""
    trainer_run: int
    """Number of the trainer's run; weight versions are ordered within a run."""
    running_attempts: int
    """Number of running attempts."""
    trajectory_age_s: float | None
    """Seconds since the last trajectory was stored."""
    poll_age_s: float | None
    """Seconds since the last poll."""
    trainer_waits_s: float | None
    """Seconds since a trainer's first poll without groups; null if none waits."""
    recent_failures: dict[str, int]
    """Failed attempts of the last ten minutes by error code."""
    last_failure: str
    """Message of the last failure."""
    devices: dict[str, Any]
    """The runner's report on its devices; empty without one."""
    engine: dict[str, Any]
    """The runner's report on its engine; empty without one."""
    concurrency: dict[str, Any]
    """Number of concurrent episodes (`limit`), whether it adapts (`auto`), and then its `reason`."""
    newest: dict[str, Any]
    """The newest 200 trajectories: episodes, mean reward, success."""


class CountedColumns(TypedDict):
    """Counts for each bucket of time: 0 where nothing happened."""

    episodes: list[int]
    """Trajectories that were stored, without late ones."""
    completed: list[int]
    """Completed trajectories."""
    truncated: list[int]
    """Truncated trajectories."""
    aborted: list[int]
    """Aborted trajectories."""
    failed: list[int]
    """Attempts that failed."""
    groups_valid: list[int]
    """Groups that became ready."""
    groups_filtered: list[int]
    """Groups that were filtered."""
    groups_failed: list[int]
    """Groups that failed."""
    deliveries: list[int]
    """Number of deliveries."""


class MeasuredColumns(TypedDict):
    """Measures for each bucket of time: null where nothing happened."""

    reward_mean: list[float | None]
    """Mean reward."""
    reward_min: list[float | None]
    """Lowest reward."""
    reward_max: list[float | None]
    """Highest reward."""
    success: list[float | None]
    """Share of trajectories that solved their task."""
    behind_mean: list[float | None]
    """Weight versions behind, on average."""
    behind_max: list[float | None]
    """Weight versions behind, at most."""
    turns: list[float | None]
    """Mean number of turns of an episode; null if unknown."""
    sampled_tokens: list[float | None]
    """Mean number of sampled tokens of an episode; null if unknown."""
    generating: list[float | None]
    """Episodes that waited for the engine, on average."""
    playing: list[float | None]
    """Episodes that were played, on average."""
    wait_mean: list[float | None]
    """Seconds that a poll waited, on average."""
    wait_max: list[float | None]
    """Seconds that a poll waited, at most."""


class SeriesColumns(CountedColumns, MeasuredColumns):
    """What happened to a job, one entry per bucket of time."""

    t: list[float]
    """Start of each bucket."""


class Series(TypedDict):
    """What happened to a job over time."""

    job_id: str
    """The job's id."""
    until: float
    """Now, or the last change or delivery of a job that has ended; it is in the last bucket."""
    width_s: int
    """Seconds of a bucket."""
    columns: SeriesColumns
    """One list per measure, as long as `t`."""


class SignedIn(TypedDict):
    """Result of signing in or out."""

    signed_in: bool
    """True after signing in, false after signing out."""


class Health(TypedDict):
    """State of the service; a degraded service still answers."""

    status: Literal["ok", "degraded"]
    """`degraded` has a `reason`."""
    reason: str | None
    """What is wrong, and since when; null if nothing is."""
    supervisor: str
    """`alive` or `not seen`."""
    task_types: list[str]
    """Task types that can be started."""
    extensions: list[InstalledExtension]
    """Extensions by installed packages."""
