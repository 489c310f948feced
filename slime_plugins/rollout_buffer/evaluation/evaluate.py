"""A stand-alone evaluation: a task list, several samples of each task, and a report. ``rollout-buffer eval``.

The task list becomes an evaluation job of a rollout buffer (started in the output folder, or given), whose runner
plays the tasks, retries failed attempts, and stores every trajectory. A sample is the trajectory that fills a slot. An
evaluation that was interrupted or killed attaches to its job and continues with the open slots.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.credentials import KEY_URL_VARIABLE, KEY_VARIABLE
from slime_plugins.rollout_buffer.errors import ConfigError, NotFoundError, RolloutBufferError
from slime_plugins.rollout_buffer.evaluation.plan import (
    EvaluationSettings,
    Plan,
    ask_engine,
    job_payload,
    open_plan,
    read_tasks,
    tokenizer_for,
)
from slime_plugins.rollout_buffer.evaluation.report import SampleRecord, TaskRecord, build_report
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES
from slime_plugins.rollout_buffer.rules.weight_versions import versions_of
from slime_plugins.rollout_buffer.serve_settings import token_from_environment
from slime_plugins.rollout_buffer.storage.data_dir import OWNER_LOCK, lock_within, try_lock
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from slime_plugins.rollout_buffer.supervisor.child_startup import wait_until_healthy
from slime_plugins.rollout_buffer.trainer.job_feed import call_with_retries
from slime_plugins.rollout_buffer.trainer.settings import DEFAULT_LEASE_S
from slime_plugins.rollout_buffer.types import Instance, JobState, Outcome

REPORT_FILE = "report.json"
PAUSED_FILE = "paused"
"""Exists from an interrupted call, which pauses the job, to the next call, which resumes it."""
BUFFER_FOLDER = "buffer"
POLL_INTERVAL_S = 0.5
BUFFER_START_TIMEOUT_S = 120.0
BUFFER_STOP_TIMEOUT_S = 40.0
RELEASE_TIMEOUT_S = 60.0
"""How long the buffer of a killed call may take to release the output folder."""
MAX_FAILURES = 20
"""Failures in a row of one call that are retried, which takes about two minutes if the buffer refuses connections."""
TRAJECTORIES_PER_PAGE = 500
MAX_GROUPS_PER_POLL = 64

logger = logging.getLogger(__name__)

Watch = Callable[[Mapping[str, Any]], None]
Report = dict[str, Any]
P = ParamSpec("P")
Reply = TypeVar("Reply")


class EvaluationError(RolloutBufferError):
    """The evaluation cannot continue. Played slots stay stored; ``detail["report"]``, if present, covers them."""

    code = "evaluation"


class EvaluationStoppedError(EvaluationError):
    """Interrupted by the user."""

    code = "evaluation_stopped"


def evaluate(settings: EvaluationSettings, ks: Sequence[int], watch: Watch = lambda job: None) -> Report:
    """Plays the open slots and returns the report, which is also written to ``report.json``.

    ``watch`` is called with the reply of ``GET /jobs/<id>`` about twice a second. A job that an operator pauses stays
    paused, and is waited for.

    Raises:
        ConfigError: a setting is invalid, or the folder belongs to another evaluation or to a running one.
        EngineError: the engine does not answer.
        EvaluationError: the job failed or was cancelled, the buffer does not start, or its retention has purged
            trajectories that the report needs.
        RetriesUsedUpError: the buffer does not answer any more.
        EvaluationStoppedError: Ctrl-C or SIGTERM; the job is paused until the same call continues it.
    """
    settings.output.mkdir(parents=True, exist_ok=True)
    try:
        with _locked_output(settings.output):
            tasks = read_tasks(settings)
            engine = ask_engine(settings)
            plan = open_plan(settings, tasks, engine)
            tokenizer = tokenizer_for(settings, engine)
            payload = job_payload(settings, plan, tasks, tokenizer)
            with _served_buffer(settings, tokenizer) as url:
                client = RolloutBufferClient(url, token=token_from_environment())
                evaluation = _Evaluation(settings, plan, tasks, ks, client, url)
                return evaluation.play(payload, watch)
    except KeyboardInterrupt as error:  # before the job was started, or for the second time
        raise EvaluationStoppedError("stopped; played slots are stored, and the same command continues") from error


# --- the job ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """An evaluation whose buffer answers at ``url``."""

    settings: EvaluationSettings
    plan: Plan
    tasks: Sequence[Instance]
    ks: Sequence[int]
    client: RolloutBufferClient
    url: str

    def play(self, payload: Mapping[str, Any], watch: Watch) -> Report:
        """Plays the job to its end, and writes the report, also if the job fails or is interrupted."""
        try:
            self._start(payload)
            job = self._follow(watch)
        except KeyboardInterrupt as error:
            raise self._stopped() from error
        report = self._write_report(job)
        if self.settings.buffer_url is not None:
            self._take_deliveries()
        if job["state"] != JobState.FINISHED:
            reason = job["cause"] or "no reason was given"
            raise EvaluationError(f"the job is {job['state']}: {reason}", {"report": report})
        return report

    def _start(self, payload: Mapping[str, Any]) -> None:
        """Starts the job or attaches to it, and resumes it if an interrupted call has paused it."""
        try:
            self.client.start_rollout(payload)
        except KeyboardInterrupt:
            # The request may still be under way. After a second one the job certainly exists, and can be paused.
            self.client.start_rollout(payload)
            raise
        paused_file = self.settings.output / PAUSED_FILE
        if paused_file.exists():
            if _answer_of(self.client.job, self.plan.job_id)["state"] == JobState.PAUSED:
                _answer_of(self.client.resume, self.plan.job_id)
            paused_file.unlink()

    def _follow(self, watch: Watch) -> Mapping[str, Any]:
        """Waits for the end of the job, and returns its last description. Logs each pause; does not resume it."""
        job_id, was_paused = self.plan.job_id, False
        while True:
            job = _answer_of(self.client.job, job_id)
            watch(job)
            if job["state"] not in OPEN_STATES:
                return job
            is_paused = job["state"] == JobState.PAUSED
            if is_paused and not was_paused:
                advice = f"rollout-buffer status {job_id} --url {self.url} says what resumes it"
                logger.warning("the job is paused (%s): %s", job["cause"] or "by request", advice)
            was_paused = is_paused
            time.sleep(POLL_INTERVAL_S)

    def _stopped(self) -> EvaluationStoppedError:
        """Pauses the job, and writes the report on the slots that were played until now."""
        job = self._pause()
        report = self._write_report(job)
        slots = report["slots"]
        store = self.settings.output if self.settings.buffer_url is None else f"the buffer at {self.url}"
        return EvaluationStoppedError(
            f"stopped with {slots['played']} of {slots['planned']} slots played; they are stored in {store}, job "
            f"{self.plan.job_id} is {job['state']}, and the same command continues",
            {"report": report},
        )

    def _pause(self) -> Mapping[str, Any]:
        """Pauses the job until the next call, unless it has ended or an operator has paused it; returns it."""
        job = _answer_of(self.client.job, self.plan.job_id)
        # A job whose engine is away would resume by itself.
        if job["state"] != JobState.RUNNING and job["cause_code"] != CauseCode.ENGINE_AWAY:
            return job
        (self.settings.output / PAUSED_FILE).touch()
        return _answer_of(self.client.drain, self.plan.job_id, stop=True)

    def _take_deliveries(self) -> None:
        """Takes and acknowledges the job's groups on a given buffer, where nobody else would take them."""
        while True:
            data = _answer_of(
                self.client.get_rollout_data,
                job_id=self.plan.job_id,
                max_groups=MAX_GROUPS_PER_POLL,
                lease_s=DEFAULT_LEASE_S,
                images="hash",
            )
            if data.delivery_id is None:
                return
            _answer_of(self.client.ack, [data.delivery_id])

    def _write_report(self, job: Mapping[str, Any]) -> Report:
        """Writes and returns the report on the trajectories that are stored now; ``job`` is the job's description."""
        client, job_id = self.client, self.plan.job_id
        samples, aborted_count = _samples(client, job_id, self.settings.success_threshold)
        records = [_task_record(task, self.settings.group_by) for task in self.tasks]
        failed = {name: count for name, count in job["attempts"].items() if name.startswith("failed:")}
        failed_attempts = {name.removeprefix("failed:"): count for name, count in failed.items()}
        if aborted_count:
            failed_attempts[Outcome.ABORTED.value] = aborted_count
        report = {
            "job_id": job_id,
            "work": dict(self.plan.work),
            "began_at": job["created_at"],
            "finished_at": job["finished_at"],
            **build_report(
                _with_apps(client, job_id, records, samples),
                samples,
                samples_per_task=self.settings.samples_per_task,
                ks=self.ks,
                failed_attempts=failed_attempts,
                complete=job["state"] == JobState.FINISHED,
            ),
        }
        partial = self.settings.output / f"{REPORT_FILE}.partial"
        partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(self.settings.output / REPORT_FILE)
        return report


def _answer_of(call: Callable[P, Reply], *args: P.args, **kwargs: P.kwargs) -> Reply:
    """Calls the buffer with retries: the supervisor restarts a server that crashed.

    Raises:
        RetriesUsedUpError: the call failed more than ``MAX_FAILURES`` times.
    """
    return call_with_retries(getattr(call, "__name__", "a call"), MAX_FAILURES, lambda: call(*args, **kwargs))


# --- the buffer ------------------------------------------------------------------------------------------------------


@contextmanager
def _locked_output(output: Path) -> Iterator[None]:
    """Locks the folder against a second call."""
    with (output / "evaluation.lock").open("w", encoding="utf-8") as lock:
        if not try_lock(lock.fileno()):
            raise ConfigError(f"another rollout-buffer eval uses {output}: wait for it, or give another --output")
        yield


@contextmanager
def _served_buffer(settings: EvaluationSettings, tokenizer: str | None) -> Iterator[str]:
    """Yields the URL of the given buffer, or of a buffer that is started for the time of the context."""
    if settings.buffer_url is not None:
        yield settings.buffer_url
        return
    port = free_port()
    _wait_until_released(settings.output / BUFFER_FOLDER)
    arguments = _serve_arguments(settings, tokenizer, port)
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", *arguments]
    child = ChildProcess("buffer", command, log_file=settings.output / "buffer.log", environment=_environment(settings))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(child, f"{url}/health", timeout_s=BUFFER_START_TIMEOUT_S, error=EvaluationError)
        yield url
    finally:
        child.stop(BUFFER_STOP_TIMEOUT_S)


def _serve_arguments(settings: EvaluationSettings, tokenizer: str | None, port: int) -> list[str]:
    folders = ["--data-dir", str(settings.output / BUFFER_FOLDER), "--data-root", str(settings.tasks_file.parent)]
    folders += [] if tokenizer is None else ["--allow-tokenizer", tokenizer]
    return ["--port", str(port), *folders, *settings.serve_arguments]


def _environment(settings: EvaluationSettings) -> dict[str, str]:
    key = {} if settings.api_key is None else {KEY_VARIABLE: settings.api_key, KEY_URL_VARIABLE: settings.engine_url}
    return {**settings.environment, **key}


def _wait_until_released(data_dir: Path) -> None:
    """Waits for the end of the supervisor of a killed call; the kernel has sent it SIGTERM."""
    if not (data_dir / OWNER_LOCK).exists():
        return
    with (data_dir / OWNER_LOCK).open("a", encoding="utf-8") as lock:
        if not lock_within(lock.fileno(), RELEASE_TIMEOUT_S):
            raise EvaluationError(f"a process still serves {data_dir}: stop it, or wait, and call again")


# --- the records of the report ---------------------------------------------------------------------------------------


def _samples(client: RolloutBufferClient, job_id: str, success_threshold: float) -> tuple[list[SampleRecord], int]:
    """Returns the samples and the number of aborted trajectories; aborted and late trajectories fill no slot."""
    samples: dict[tuple[str, int], SampleRecord] = {}
    aborted_count, cursor = 0, None
    while True:
        page = _answer_of(client.trajectories, job_id=job_id, limit=TRAJECTORIES_PER_PAGE, cursor=cursor)
        for entry in page["trajectories"]:
            if entry["late"]:
                continue
            if entry["outcome"] == Outcome.ABORTED:
                aborted_count += 1
                continue
            versions = _versions(client, job_id, entry)
            samples[entry["instance_id"], int(entry["slot"])] = _sample_record(entry, success_threshold, versions)
        cursor = page["next_cursor"]
        if cursor is None:
            return list(samples.values()), aborted_count


def _versions(client: RolloutBufferClient, job_id: str, entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the oldest and newest weight version of an episode; reads its turns only if the weights have changed."""
    oldest = entry["oldest_version"]
    if oldest is None:
        return None
    if entry["versions_behind"] == 0:  # no turn of the episode has a newer version
        return oldest, oldest
    trajectory = _trajectory(client, job_id, entry["uid"])
    return versions_of(wire.decode_generations(trajectory.get("generations"))) or (oldest, oldest)


def _trajectory(client: RolloutBufferClient, job_id: str, uid: str) -> Mapping[str, Any]:
    """Returns a stored trajectory with its payload.

    Raises:
        EvaluationError: retention has purged the payload.
    """
    try:
        return _answer_of(client.trajectory, uid, job_id=job_id)
    except NotFoundError as error:
        raise EvaluationError(f"no report: {error.message}; to play the tasks again, give another --output") from error


def _sample_record(
    entry: Mapping[str, Any], success_threshold: float, versions: tuple[int, int] | None
) -> SampleRecord:
    success = entry["success"]
    reward = float(entry["reward"])
    return SampleRecord(
        instance_id=entry["instance_id"],
        slot=int(entry["slot"]),
        uid=entry["uid"],
        solved=(reward if success is None else float(success)) >= success_threshold,
        reward=reward,
        outcome=entry["outcome"],
        stop_reason=entry["stop_reason"],
        turns=entry["turns"],
        played_s=entry["played_s"],
        versions=versions,
    )


def _task_record(task: Instance, group_by: Sequence[str]) -> TaskRecord:
    """Returns the task's values of the categories; a key of its ``metadata`` overrides the same key of the line."""
    metadata = task.data.get("metadata")
    fields = {**task.data, **metadata} if isinstance(metadata, Mapping) else dict(task.data)
    categories = {name: _values(fields.get(name)) for name in dict.fromkeys(("app", "difficulty", *group_by))}
    task_name = fields.get("task_name")
    return TaskRecord(
        instance_id=task.instance_id,
        task=None if task_name is None else str(task_name),
        groups={name: values for name, values in categories.items() if values},
    )


def _values(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def _with_apps(
    client: RolloutBufferClient, job_id: str, tasks: Sequence[TaskRecord], samples: Sequence[SampleRecord]
) -> list[TaskRecord]:
    """Adds the app that the device reported to tasks whose line has none; reads one trajectory for each task name."""
    uids = {sample.instance_id: sample.uid for sample in samples}
    without_app = [task for task in tasks if "app" not in task.groups and task.instance_id in uids]
    uid_of_name = {task.task: uids[task.instance_id] for task in without_app if task.task is not None}
    apps = {name: _apps(_trajectory(client, job_id, uid)) for name, uid in uid_of_name.items()}
    return [_with_app(task, apps.get(task.task or "", ())) for task in tasks]


def _with_app(task: TaskRecord, apps: tuple[str, ...]) -> TaskRecord:
    return task if not apps or "app" in task.groups else replace(task, groups={**task.groups, "app": apps})


def _apps(trajectory: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the apps of a trajectory's task; ``extra_info`` has their names, separated by commas."""
    extra_info = trajectory.get("extra_info")
    names = extra_info.get("app") if isinstance(extra_info, Mapping) else None
    return tuple(name for name in str(names).split(",") if name) if names else ()
