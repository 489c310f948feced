"""How a payload becomes a job, or attaches to one. Rules on an open transaction; ``buffer.py`` opens it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.protocol.request_models import (
    CHANGEABLE,
    EXTERNAL_TASK_TYPE,
    MAX_ATTEMPTS,
    StartPayload,
)
from slime_plugins.rollout_buffer.rules import jobs as job_rules
from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, SUPERSEDED
from slime_plugins.rollout_buffer.rules.skip_list import plan_groups
from slime_plugins.rollout_buffer.state.job_end import cancel_job, reopen_finished_job
from slime_plugins.rollout_buffer.state.skip_list import apply_skip_list
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    delivery_rows,
    group_rows,
    job_rows,
    reward_sum_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import DeliveryState, GroupState, Instance, JobState
from slime_plugins.rollout_buffer.wire import MAX_IDENTIFIER

__all__ = ["StartedJob", "creates_job", "start_job"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedJob:
    """The outcome of ``start_job``."""

    job: JobRecord
    attached: bool
    message: str


def start_job(
    connection: Connection,
    now: float,
    payload: StartPayload,
    instances: Sequence[Instance],
    *,
    written_as: int | None = None,
) -> StartedJob:
    """Attaches to the job that the payload names, or creates it; see ``Buffer.start_job``.

    ``written_as`` is the key under which the groups of a large job were written before.
    """
    job = _job_to_attach_to(connection, payload)
    if job is not None and _attaches(job, payload):
        if written_as is not None:
            raise ConflictError(f"job {job.job_id} was started meanwhile: the same call attaches to it")
        return _attach(connection, now, job, payload, repeated=_is_same_start(job, payload))
    if job is not None:
        _supersede(connection, now, job)
    return _create_job(connection, now, payload, instances, written_as)


def creates_job(connection: Connection, payload: StartPayload) -> bool:
    """Tells whether the payload makes a new job; else it attaches to one."""
    job = _job_to_attach_to(connection, payload)
    return job is None or not _attaches(job, payload)


def _attaches(job: JobRecord, payload: StartPayload) -> bool:
    return not payload.fresh or _is_same_start(job, payload)


def _is_same_start(job: JobRecord, payload: StartPayload) -> bool:
    return payload.start_id is not None and payload.start_id == job.start_id


def _job_to_attach_to(connection: Connection, payload: StartPayload) -> JobRecord | None:
    identity = payload.identity()
    if payload.job_id is not None:
        job = job_rows.find_job(connection, payload.job_id)
        if job is not None and job.identity != identity and not payload.fresh:
            raise ConflictError(
                f"job {payload.job_id} exists with other settings ({_difference(job, payload)}): send the same "
                "payload to attach, another job_id, or fresh: true to start anew",
                {"job_id": job.job_id},
            )
        return job
    same = [job for job in job_rows.all_jobs(connection) if job.identity == identity]
    unfinished = [job for job in same if job.state in job_rules.OPEN_STATES]
    if unfinished:
        return unfinished[-1]
    return same[0] if same and same[0].state is JobState.FAILED else None


def _create_job(
    connection: Connection,
    now: float,
    payload: StartPayload,
    instances: Sequence[Instance],
    written_as: int | None,
) -> StartedJob:
    ids = [instance.instance_id for instance in instances]
    key = job_rows.insert_job(
        connection,
        key=written_as,
        job_id=payload.job_id or f"{payload.task_type}-{uuid.uuid4().hex[:12]}",
        task_type=payload.task_type,
        state=JobState.RUNNING.value,
        identity=payload.identity(),
        start_id=payload.start_id,
        engine_url=payload.remote_engine_url,
        settings=payload.settings(),
        has_input=bool(ids),
        has_runner=payload.task_type != EXTERNAL_TASK_TYPE,
        takes_items=payload.task_type == EXTERNAL_TASK_TYPE,
        group_size=payload.num_repeat_per_sample,
        instance_count=len(ids),
        num_epoch=payload.num_epoch,
        created_at=now,
        updated_at=now,
        run_began_at=now,
    )
    if written_as is None:
        lines = ((at, ids[at], orjson.dumps(instance.data)) for at, instance in enumerate(instances))
        group_rows.insert_instances(connection, key, lines)
        planned = plan_groups(ids, payload.num_epoch, map(str, payload.skip_instance_ids or ()))
        group_rows.insert_groups(connection, key, ids, planned)
    return StartedJob(job=job_rows.get_job(connection, key), attached=False, message="Rollout started")


def _supersede(connection: Connection, now: float, job: JobRecord) -> None:
    """Ends a job for good and frees its id; its rows stay, under a name that says what happened."""
    if job.state in job_rules.OPEN_STATES:
        cancel_job(connection, now, job.key, SUPERSEDED)
    for delivery in delivery_rows.leased_deliveries(connection, job.key):
        delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.EXPIRED.value)
    for state in (GroupState.READY, GroupState.LEASED):
        group_rows.move_groups(connection, job.key, state, GroupState.SKIPPED, SUPERSEDED)
    job_rows.update_job(connection, job.key, job_id=_free_name(connection, job), updated_at=now)


def _free_name(connection: Connection, job: JobRecord) -> str:
    """Returns ``ID~KEY``, or with one more ``~`` for each job that somebody called so."""
    ending = f"~{job.key}"
    while True:
        name = job.job_id[: MAX_IDENTIFIER - len(ending)] + ending
        if job_rows.find_job(connection, name) is None:
            return name
        ending += "~"


def _attach(connection: Connection, now: float, job: JobRecord, payload: StartPayload, *, repeated: bool) -> StartedJob:
    brought = {} if repeated else {key: value for key, value in payload.settings().items() if key in CHANGEABLE}
    settings = {**job.settings.kept, **brought}
    changes: dict[str, Any] = {"start_id": payload.start_id, "settings": json.dumps(settings), "updated_at": now}
    if payload.remote_engine_url is not None:
        changes["engine_url"] = payload.remote_engine_url
    if job.state is JobState.FAILED:
        changes |= {"state": job_rules.next_state(job.state, "reopen").value, "finished_at": None, **NO_CAUSE.columns()}
    job_rows.update_job(connection, job.key, **changes)
    if job.state is JobState.FAILED and not repeated:
        _open_failed_groups(connection, now, job, settings)
    if not repeated:
        job_rows.open_trainer_run(connection, job.key, now)
    if payload.skip_instance_ids is not None and not repeated:
        apply_skip_list(connection, job, [str(entry) for entry in payload.skip_instance_ids])
    if payload.retry_given_up and not repeated and job.state is not JobState.CANCELLED:
        _retry_given_up(connection, now, job, settings)
    return StartedJob(job=job_rows.get_job(connection, job.key), attached=True, message="Rollout attached")


def _open_failed_groups(connection: Connection, now: float, job: JobRecord, settings: dict[str, Any]) -> None:
    """Begins anew with what failed; what the skip list names of it is skipped afterwards."""
    failed = group_rows.failed_groups(connection, job.key)
    group_rows.open_again(connection, failed, now)
    reward_sum_rows.report_again(connection, failed)
    _allow_more_attempts(connection, job.key, settings)


def _retry_given_up(connection: Connection, now: float, job: JobRecord, settings: dict[str, Any]) -> None:
    """Opens every closed group that came short."""
    short = group_rows.short_groups(connection, job.key, job.group_size)
    for delivery in {group.delivery_key for group in short if group.state is GroupState.READY}:
        if delivery is not None:
            delivery_rows.dissolve_delivery(connection, delivery)
    group_rows.open_again(connection, [group.key for group in short], now)
    reward_sum_rows.report_again(connection, [group.key for group in short])
    _allow_more_attempts(connection, job.key, settings)
    reopen_finished_job(connection, job.key)


def _allow_more_attempts(connection: Connection, job_key: int, settings: dict[str, Any]) -> None:
    """What failed is still counted, so the limit grows by as much."""
    spent = attempt_rows.most_failures(connection, job_key)
    limit = min(spent + settings["max_attempts"], MAX_ATTEMPTS)
    job_rows.update_job(connection, job_key, settings=json.dumps({**settings, "max_attempts": limit}))


def _difference(job: JobRecord, payload: StartPayload) -> str:
    new, old = payload.settings(), job.settings.kept
    keys = sorted(key for key in {*new, *old} - CHANGEABLE if new.get(key) != old.get(key))
    return "different: " + (", ".join(keys[:8]) or "instances")
