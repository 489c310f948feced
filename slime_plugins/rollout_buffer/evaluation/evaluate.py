"""A stand-alone evaluation: a task list, several attempts for each task, and a report. ``rollout-buffer eval``.

The task list becomes an evaluation job of a rollout buffer (one in the output folder, or a given one), whose runner
plays it, retries failed attempts, and stores every trajectory. An evaluation that was killed attaches to its job and
continues with the open slots.
"""

from __future__ import annotations

import fcntl
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import requests

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.credentials import KEY_URL_VARIABLE, KEY_VARIABLE
from slime_plugins.rollout_buffer.errors import BusyError, ConfigError, RolloutBufferError, UnavailableError
from slime_plugins.rollout_buffer.evaluation.plan import (
    EvaluationSettings,
    Plan,
    ask_engine,
    job_payload,
    open_plan,
    read_tasks,
    tokenizer_for,
)
from slime_plugins.rollout_buffer.evaluation.report import AttemptRecord, TaskRecord, build_report
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.rules.weight_versions import versions_of
from slime_plugins.rollout_buffer.serve_settings import token_from_environment
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from slime_plugins.rollout_buffer.supervisor.child_startup import wait_until_healthy
from slime_plugins.rollout_buffer.trainer.settings import DEFAULT_LEASE_S
from slime_plugins.rollout_buffer.types import Instance, Outcome

REPORT_FILE = "report.json"
BUFFER_FOLDER = "buffer"
POLL_INTERVAL_S = 0.5
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
LET_GO_TIMEOUT_S = 60.0
"""How long the processes of a killed call may take to release the folder."""
SILENCE_TIMEOUT_S = 120.0
PAGE = 500
MAX_GROUPS_PER_POLL = 64
OPEN = ("running", "paused")

logger = logging.getLogger(__name__)

Watch = Callable[[Mapping[str, Any]], None]
Report = dict[str, Any]


class EvaluationError(RolloutBufferError):
    """The evaluation cannot continue. Played slots stay stored."""

    code = "evaluation"


class EvaluationStoppedError(RolloutBufferError):
    """Interrupted by the user. ``detail["report"]`` covers the slots played until then."""

    code = "evaluation_stopped"


def evaluate(settings: EvaluationSettings, ks: Sequence[int], watch: Watch = lambda job: None) -> Report:
    """Plays the open slots and returns the report, which is also written to ``report.json``.

    ``watch`` is called with the reply of ``GET /jobs/<id>`` about twice a second.

    Raises:
        ConfigError: a setting is invalid, or the folder belongs to another evaluation or to a running one.
        EngineError: the engine does not answer.
        EvaluationError: the job failed or was cancelled, or the buffer does not start.
        EvaluationStoppedError: Ctrl-C or SIGTERM; the same call continues.
    """
    settings.output.mkdir(parents=True, exist_ok=True)
    with _locked_output(settings.output):
        tasks = read_tasks(settings)
        engine = ask_engine(settings)
        plan = open_plan(settings, tasks, engine)
        tokenizer = tokenizer_for(settings, engine)
        payload = job_payload(settings, plan, tasks, tokenizer)
        with _buffer(settings, tokenizer) as client:
            client.start_rollout({key: value for key, value in payload.items() if value is not None or key in NULLABLE})
            job = _play(settings, client, plan, tasks, ks, watch)
            report = _report(settings, client, plan, tasks, job, ks)
            _write(settings.output / REPORT_FILE, report)
            if settings.buffer_url is not None:
                _take_delivery(client, plan.job_id)
    return report


NULLABLE = frozenset({"max_groups_ahead", "pause_when_idle_s"})
"""Settings for which null means no limit."""


# --- playing ---------------------------------------------------------------------------------------------------------


def _play(
    settings: EvaluationSettings,
    client: RolloutBufferClient,
    plan: Plan,
    tasks: Sequence[Instance],
    ks: Sequence[int],
    watch: Watch,
) -> Mapping[str, Any]:
    """Waits for the end of the job; an interrupt writes the report of the played slots."""
    try:
        return _follow(client, plan.job_id, watch)
    except KeyboardInterrupt as error:
        report = _report(settings, client, plan, tasks, client.job(plan.job_id), ks)
        _write(settings.output / REPORT_FILE, report)
        slots = report["slots"]
        raise EvaluationStoppedError(
            f"stopped with {slots['played']} of {slots['planned']} slots played; they are stored in "
            f"{settings.output}, and the same command continues",
            {"report": report},
        ) from error


def _follow(client: RolloutBufferClient, job_id: str, watch: Watch) -> Mapping[str, Any]:
    answered = time.monotonic()
    while True:
        try:
            job = client.job(job_id)
            watch(job)
            if job["state"] == "paused" and job["cause_code"] != CauseCode.ENGINE_AWAY:
                client.resume(job_id)
            answered = time.monotonic()
        except (requests.RequestException, UnavailableError, BusyError) as error:
            # The supervisor restarts a server that crashed.
            if time.monotonic() - answered > SILENCE_TIMEOUT_S:
                raise EvaluationError(f"the buffer does not answer any more: {error}") from error
        else:
            if job["state"] not in OPEN:
                break
        time.sleep(POLL_INTERVAL_S)
    if job["state"] != "finished":
        raise EvaluationError(f"the job is {job['state']}: {job['cause'] or 'no reason was given'}")
    return job


@contextmanager
def _locked_output(output: Path) -> Iterator[None]:
    """Locks the folder against a second call."""
    with (output / "evaluation.lock").open("w", encoding="utf-8") as lock:
        if not _lock(lock, 0.0):
            raise ConfigError(f"another rollout-buffer eval uses {output}: wait for it, or give another --output")
        yield


@contextmanager
def _buffer(settings: EvaluationSettings, tokenizer: str | None) -> Iterator[RolloutBufferClient]:
    """Yields a client of the given buffer, or of a buffer that is started for the time of the context."""
    if settings.buffer_url is not None:
        yield RolloutBufferClient(settings.buffer_url, token=token_from_environment())
        return
    port = free_port()
    _wait_for_the_last_one(settings.output / BUFFER_FOLDER / "supervisor.lock")
    arguments = _serve_arguments(settings, tokenizer, port)
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", *arguments]
    child = ChildProcess("buffer", command, log_file=settings.output / "buffer.log", environment=_environment(settings))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(child, f"{url}/health", timeout_s=START_TIMEOUT_S, error=EvaluationError)
        yield RolloutBufferClient(url)
    finally:
        child.stop(STOP_TIMEOUT_S)


def _serve_arguments(settings: EvaluationSettings, tokenizer: str | None, port: int) -> list[str]:
    roots = Path(settings.tasks.partition("@[")[0]).resolve().parent
    places = ["--data-dir", str(settings.output / BUFFER_FOLDER), "--data-root", str(roots)]
    places += [] if tokenizer is None else ["--allow-tokenizer", tokenizer]
    return ["--port", str(port), *places, *settings.serve_arguments]


def _environment(settings: EvaluationSettings) -> dict[str, str]:
    key = {} if settings.api_key is None else {KEY_VARIABLE: settings.api_key, KEY_URL_VARIABLE: settings.engine_url}
    return {**settings.environment, **key}


def _wait_for_the_last_one(lock_file: Path) -> None:
    """Waits for the supervisor of a killed call, which the kernel has sent SIGTERM."""
    if not lock_file.exists():
        return
    with lock_file.open("a", encoding="utf-8") as lock:
        if not _lock(lock, LET_GO_TIMEOUT_S):
            raise EvaluationError(f"a process still serves {lock_file.parent}: stop it, or wait, and call again")


def _lock(file: IO[str], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        else:
            return True


def _take_delivery(client: RolloutBufferClient, job_id: str) -> None:
    """Takes and acknowledges the job's groups on a shared buffer, where nobody else would take them."""
    while True:
        data = client.get_rollout_data(
            job_id=job_id, max_groups=MAX_GROUPS_PER_POLL, lease_s=DEFAULT_LEASE_S, images="hash"
        )
        if data.delivery_id is None:
            return
        client.ack([data.delivery_id])


# --- the report ------------------------------------------------------------------------------------------------------


def _report(
    settings: EvaluationSettings,
    client: RolloutBufferClient,
    plan: Plan,
    tasks: Sequence[Instance],
    job: Mapping[str, Any],
    ks: Sequence[int],
) -> Report:
    attempts, broken = _attempts(settings, client, plan.job_id)
    records = _with_apps(client, plan.job_id, [_task_record(task, settings.group_by) for task in tasks], attempts)
    failed = {name.removeprefix("failed:"): count for name, count in job["attempts"].items() if "failed:" in name}
    report = build_report(
        records,
        attempts,
        samples_per_task=settings.samples_per_task,
        ks=ks,
        failed_tries={**failed, **({Outcome.ABORTED.value: broken} if broken else {})},
        complete=job["state"] == "finished",
    )
    began, ended = job["created_at"], job["finished_at"]
    return {"job_id": plan.job_id, "work": dict(plan.work), "began_at": began, "finished_at": ended, **report}


def _attempts(
    settings: EvaluationSettings, client: RolloutBufferClient, job_id: str
) -> tuple[list[AttemptRecord], int]:
    """Returns the complete attempts, one for each slot, and the number of aborted attempts."""
    found: dict[tuple[str, int], AttemptRecord] = {}
    aborted, cursor = 0, None
    while True:
        page = client.trajectories(job_id=job_id, limit=PAGE, cursor=cursor)
        for entry in page["trajectories"]:
            if entry["late"]:
                continue
            if entry["outcome"] == Outcome.ABORTED:
                aborted += 1
                continue
            versions = _versions(client, job_id, entry)
            found[entry["instance_id"], int(entry["slot"])] = _attempt(entry, settings.success_threshold, versions)
        cursor = page["next_cursor"]
        if cursor is None:
            return list(found.values()), aborted


def _versions(client: RolloutBufferClient, job_id: str, entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the oldest and newest weight version of an episode; reads its turns only if the weights have changed."""
    oldest = entry["oldest_version"]
    if oldest is None:
        return None
    if entry["versions_behind"] == 0:  # no turn of the episode has a newer version
        return oldest, oldest
    trajectory = client.trajectory(entry["uid"], job_id=job_id)
    return versions_of(wire.decode_generations(trajectory.get("generations"))) or (oldest, oldest)


def _attempt(entry: Mapping[str, Any], threshold: float, versions: tuple[int, int] | None) -> AttemptRecord:
    success = entry["success"]
    reward = float(entry["reward"])
    return AttemptRecord(
        instance_id=entry["instance_id"],
        slot=int(entry["slot"]),
        uid=entry["uid"],
        solved=(reward if success is None else float(success)) >= threshold,
        reward=reward,
        outcome=entry["outcome"],
        stop_reason=entry["stop_reason"],
        turns=entry["turns"],
        played_s=entry["played_s"],
        versions=versions,
    )


def _task_record(task: Instance, group_by: Sequence[str]) -> TaskRecord:
    metadata = task.data.get("metadata")
    facts = {**task.data, **metadata} if isinstance(metadata, Mapping) else dict(task.data)
    groups = {name: _values(facts.get(name)) for name in dict.fromkeys(("app", "difficulty", *group_by))}
    name = facts.get("task_name")
    return TaskRecord(
        instance_id=task.instance_id,
        task=None if name is None else str(name),
        groups={group: values for group, values in groups.items() if values},
    )


def _values(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def _with_apps(
    client: RolloutBufferClient, job_id: str, tasks: Sequence[TaskRecord], attempts: Sequence[AttemptRecord]
) -> list[TaskRecord]:
    """Adds the app from a trajectory of each task name, if the task list has none."""
    uids = {attempt.instance_id: attempt.uid for attempt in attempts}
    nameless = [task for task in tasks if "app" not in task.groups and task.instance_id in uids]
    by_name = {task.task: uids[task.instance_id] for task in nameless if task.task is not None}
    apps = {name: _apps(client.trajectory(uid, job_id=job_id)) for name, uid in by_name.items()}
    return [_with_app(task, apps.get(task.task or "", ())) for task in tasks]


def _with_app(task: TaskRecord, app: tuple[str, ...]) -> TaskRecord:
    return task if not app or "app" in task.groups else replace(task, groups={**task.groups, "app": app})


def _apps(trajectory: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the apps of a trajectory's task, which ``extra_info`` names separated by commas."""
    extra_info = trajectory.get("extra_info")
    app = extra_info.get("app") if isinstance(extra_info, Mapping) else None
    return tuple(name for name in str(app).split(",") if name) if app else ()


def _write(path: Path, report: Report) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
