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
    """How much it matters."""

    OK = "ok"  # it moves, or it is done
    WAIT = "wait"  # it stands still for a reason that ends by itself
    ENDED = "ended"  # it was ended before all was played, because somebody wanted that
    ATTENTION = "attention"  # it moves, but somebody should look
    STOPPED = "stopped"  # it stands still, or all that it does is in vain, until somebody does something


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Why something moves or stands still."""

    code: str
    """Stable, for programs."""
    severity: Severity
    """stopped: until somebody acts; wait: it ends by itself; ended: somebody cancelled it."""
    message: str
    """What is."""
    advice: str = ""
    """What to do; empty when there is nothing to do."""


class JobProgress(TypedDict):
    """A job and how far it is."""

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


class Job(JobProgress):
    """A job, its progress and its accounting."""

    engine_url: str | None
    """The engine that its episodes ask."""
    instances: int
    """Lines of the input."""
    epochs: int
    """How often the input is gone through."""
    updated_at: float
    """When it changed last."""
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


class JobDetails(Job):
    """A job with its settings and devices."""

    settings: dict[str, Any]
    """What the job keeps of its start payload, with `***` for passwords and keys."""
    devices: dict[str, Any] | None
    """The last report on its devices, `age_s` seconds old: the farm's name `pool`, who waits, and for
    each of `devices` its state, last error, counters and times.
    """


class Jobs(TypedDict):
    """All jobs."""

    jobs: list[Job]
    """Newest first."""


class OverviewJob(JobProgress):
    """A job as the dashboard lists it."""

    newest: dict[str, Any]
    """The newest 200 trajectories: episodes, mean reward, success."""
    explanation: list[Explanation]
    """Why it moves or stands still, the most pressing first."""


class Overview(TypedDict):
    """How the buffer is, and a page of jobs."""

    now: float
    """The buffer's time."""
    supervisor_age_s: float | None
    """Seconds since its heartbeat; null when there is none."""
    task_types: list[str]
    """What can be started."""
    extensions: list[InstalledExtension]
    """What installed packages add."""
    disk_free_bytes: int
    """Room on the disk of the data directory."""
    explanation: list[Explanation]
    """Why it moves or stands still, the most pressing first."""
    jobs: list[OverviewJob]
    """Newest first."""
    next_cursor: int | None
    """Send it as `cursor` for the next page; null on the last one."""
    needs_token: bool
    """The server asks for a token."""


class JobExplanation(TypedDict):
    """Why a job moves or stands still, with the numbers behind the words."""

    job_id: str
    """The job's id."""
    now: float
    """The buffer's time."""
    explanation: list[Explanation]
    """Why it moves or stands still, the most pressing first."""
    weight_version: int | None
    """The newest that any trajectory was sampled with."""
    trainer_run: int
    """Weight versions are ordered within one; every start of the trainer opens the next."""
    running_attempts: int
    """Episodes that are being played."""
    trajectory_age_s: float | None
    """Seconds since one ended."""
    poll_age_s: float | None
    """Seconds since a trainer asked."""
    trainer_waits_s: float | None
    """Seconds that a trainer has polled in vain; null when none waits."""
    recent_failures: dict[str, int]
    """Failed attempts of the last ten minutes by error code."""
    last_failure: str
    """What the last of them said."""
    devices: dict[str, Any]
    """What the runner says of its devices; empty when it does not."""
    engine: dict[str, Any]
    """What the runner says of its engine; empty when it does not."""
    concurrency: dict[str, Any]
    """How many episodes may play at once (`limit`) and whether that is steered (`auto`); then why (`reason`)."""
    newest: dict[str, Any]
    """The newest 200 trajectories: episodes, mean reward, success."""


class CountedColumns(TypedDict):
    """What is counted in each bucket of time: 0 where nothing happened."""

    episodes: list[int]
    """Trajectories that came."""
    completed: list[int]
    """Of them, completed."""
    truncated: list[int]
    """Of them, truncated."""
    aborted: list[int]
    """Of them, aborted."""
    failed: list[int]
    """Attempts that failed."""
    groups_valid: list[int]
    """Groups that became ready."""
    groups_filtered: list[int]
    """Groups that were filtered."""
    groups_failed: list[int]
    """Groups that failed."""
    deliveries: list[int]
    """Deliveries that went out."""


class MeasuredColumns(TypedDict):
    """What is measured in each bucket of time: null where nothing happened."""

    reward_mean: list[float | None]
    """Mean reward."""
    reward_min: list[float | None]
    """The lowest of them."""
    reward_max: list[float | None]
    """The highest of them."""
    success: list[float | None]
    """Share of trajectories that solved their task."""
    behind_mean: list[float | None]
    """Weight versions behind, on average."""
    behind_max: list[float | None]
    """Weight versions behind, at most."""
    turns: list[float | None]
    """How many turns were played; null when unknown."""
    sampled_tokens: list[float | None]
    """How many tokens were sampled; null when unknown."""
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
    """Where each bucket starts."""


class Series(TypedDict):
    """What happened to a job over time."""

    job_id: str
    """The job's id."""
    until: float
    """Now, or when the job ended: the last bucket is as long as from its start to there."""
    width_s: int
    """Seconds of a bucket."""
    columns: SeriesColumns
    """One list per measure, as long as `t`."""


class SignedIn(TypedDict):
    """Whether the browser may ask now."""

    signed_in: bool
    """True when the token was right."""


class Health(TypedDict):
    """Whether the service works: it is well, or degraded and serving, and `reason` says why."""

    status: Literal["ok", "degraded"]
    """Degraded: `reason` says by what."""
    reason: str | None
    """What is not well, and since when; null when all is."""
    supervisor: str
    """`alive` or `not seen`."""
    task_types: list[str]
    """What can be started."""
    extensions: list[InstalledExtension]
    """What installed packages add."""
