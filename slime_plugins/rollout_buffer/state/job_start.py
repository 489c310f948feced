"""Starts a job, or attaches to one. ``buffer.py`` opens the transaction.

A start with the ``start_id`` of an earlier start **repeats** it: nothing changes. Writers who send their payload again
after a trainer has taken over their job change nothing, either. Otherwise a start **attaches** to the job that it names
if the payload's identity is equal: engine, changeable settings and skip list become those of the payload.

The first trainer of a job that writers have filled, and of which nothing was consumed, attaches with its own settings
and input, which are added to the job's. Any other start **creates** a job; if another job has the id, the start must be
``fresh``, and the other job is cancelled and renamed.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from slime_plugins.rollout_buffer.errors import ConflictError
from slime_plugins.rollout_buffer.rules import job_states
from slime_plugins.rollout_buffer.rules.causes import IN_SKIP_LIST, NO_CAUSE, SUPERSEDED
from slime_plugins.rollout_buffer.rules.skip_list import compare_with_skip_list
from slime_plugins.rollout_buffer.state.group_closing import close_full_groups
from slime_plugins.rollout_buffer.state.group_opening import add_input, plan_groups, skip_planned
from slime_plugins.rollout_buffer.state.job_transitions import cancel_job, reopen_finished_job
from slime_plugins.rollout_buffer.storage.tables import (
    attempt_rows,
    delivery_rows,
    group_rows,
    job_rows,
    payload_rows,
    reward_sum_rows,
    start_id_rows,
    trajectory_rows,
)
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.input_rows import PackedInput
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import CHANGEABLE, DeliveryState, GroupState, JobState
from slime_plugins.rollout_buffer.wire.checks import MAX_IDENTIFIER
from slime_plugins.rollout_buffer.wire.job_settings import EXTERNAL_TASK_TYPE, MAX_ATTEMPTS
from slime_plugins.rollout_buffer.wire.start_request import StartPayload


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedJob:
    """The outcome of ``start_job``."""

    job: JobRecord
    attached: bool
    reopened: bool = False
    """True if the job had failed: its failed groups are played again."""

    @property
    def message(self) -> str:
        """The reply's message, as slime's buffer has it."""
        return "Rollout attached" if self.attached else "Rollout started"


class StartAction(Enum):
    """Effect of a start. A repeated start changes nothing."""

    REPEAT = auto()
    ATTACH = auto()
    CREATE = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The action of a payload, and its job: the job that it repeats or attaches to, or that a new job replaces.

    ``takes_over`` is True if the first trainer attaches to a job that writers have filled.
    """

    action: StartAction
    job: JobRecord | None = None
    takes_over: bool = False

    @property
    def keeps_input(self) -> bool:
        """True if the payload's input is added to the job."""
        return self.action is StartAction.CREATE or self.takes_over


def start_job(
    connection: Connection, now: float, payload: StartPayload, pack: Callable[[], PackedInput | None]
) -> StartedJob:
    """Attaches to the job that the payload names, or creates it. ``pack`` returns the payload's input, if it has one.

    Raises:
        ConflictError: as ``decide_start``.
    """
    start = decide_start(connection, payload)
    if start.action is StartAction.REPEAT and start.job is not None:
        return StartedJob(job=start.job, attached=True)
    packed = pack() if start.keeps_input else None
    if start.action is StartAction.ATTACH and start.job is not None:
        key = start.job.key
        if start.takes_over:
            _take_over(connection, start.job, payload, packed)
        _attach(connection, now, job_rows.get_job(connection, key), payload)
    else:
        if start.job is not None:
            _supersede(connection, now, start.job)
        key = _create_job(connection, now, payload, packed)
    job = job_rows.get_job(connection, key)
    if payload.start_id is not None:
        start_id_rows.insert_start_id(connection, key, job.job_id, payload.start_id, payload.identity)
    attached = start.action is StartAction.ATTACH
    reopened = attached and start.job is not None and start.job.state is JobState.FAILED
    return StartedJob(job=job, attached=attached, reopened=reopened)


def decide_start(connection: Connection, payload: StartPayload) -> Start:
    """Returns the action of a payload, and its job.

    Raises:
        ConflictError: the job has other settings, a trainer's task type or group size differs from that of the job that
            writers have filled, or the start is a repetition and its job was superseded.
    """
    repeated = _job_of_same_start(connection, payload)
    if repeated is not None:
        return Start(action=StartAction.REPEAT, job=repeated)
    job = _named_job(connection, payload)
    if job is None:
        return Start(action=StartAction.CREATE)
    if payload.is_trainers and _waits_for_trainer(connection, job):
        if (payload.task_type, payload.num_repeat_per_sample) == (job.task_type, job.group_size):
            return Start(action=StartAction.ATTACH, job=job, takes_over=True)
        if written := trajectory_rows.count_trajectories(connection, job.key):
            raise ConflictError(
                f"job {job.job_id} has {written} items that no trainer has consumed, and was started for "
                f"{job.task_type} with num_repeat_per_sample {job.group_size}, not for {payload.task_type} with "
                f"{payload.num_repeat_per_sample}: send equal values, another job_id, or cancel that job first",
                {"job_id": job.job_id},
            )
    if payload.fresh:
        return Start(action=StartAction.CREATE, job=job)
    identity = payload.identity
    # A trainer must send the payload of the trainer before it, if there was one. Writers may send either payload.
    allowed = (job.trainer_identity or job.identity,) if payload.is_trainers else (job.identity, job.trainer_identity)
    if identity not in allowed:
        raise ConflictError(
            f"job {job.job_id} exists with other settings ({_difference(connection, job, payload)}): send the same "
            "payload to attach, another job_id, or fresh: true to start again",
            {"job_id": job.job_id},
        )
    if job.trainer_identity not in (None, identity) and not payload.is_trainers:
        return Start(action=StartAction.REPEAT, job=job)  # the writers' payload does not change the trainer's settings
    return Start(action=StartAction.ATTACH, job=job)


def _job_of_same_start(connection: Connection, payload: StartPayload) -> JobRecord | None:
    if payload.start_id is None:
        return None
    start = start_id_rows.find_start_id(connection, payload.start_id, payload.identity, payload.job_id)
    if start is None:
        return None
    job = job_rows.get_job(connection, start.job_key)
    if job.job_id != start.job_id:
        raise ConflictError(
            f"this start (start_id {payload.start_id}) is a repetition, and job {start.job_id} was started again "
            f"since: the job of this start is now {job.job_id}",
            {"job_id": job.job_id},
        )
    return job


def _waits_for_trainer(connection: Connection, job: JobRecord) -> bool:
    """Returns True for a job that writers fill and that no trainer has started or consumed groups of."""
    return (
        not job.has_runner
        and job.trainer_identity is None
        and job.state is not JobState.CANCELLED
        and not delivery_rows.has_groups(connection, job.key, GroupState.DELIVERED)
    )


def _named_job(connection: Connection, payload: StartPayload) -> JobRecord | None:
    """Returns the job of the payload's id; without an id, the oldest open job of equal identity.

    If none is open, it is the newest job of equal identity, provided that it has failed.
    """
    if payload.job_id is not None:
        return job_rows.find_job(connection, payload.job_id)
    identity = payload.identity
    newest_first = [job for job in job_rows.all_jobs(connection) if identity in (job.identity, job.trainer_identity)]
    open_jobs = [job for job in newest_first if job.state in job_states.OPEN_STATES]
    if open_jobs:
        return open_jobs[-1]
    return newest_first[0] if newest_first and newest_first[0].state is JobState.FAILED else None


def _create_job(connection: Connection, now: float, payload: StartPayload, packed: PackedInput | None) -> int:
    key = job_rows.insert_job(
        connection,
        job_id=payload.job_id or f"{payload.task_type}-{uuid.uuid4().hex[:12]}",
        task_type=payload.task_type,
        state=JobState.RUNNING.value,
        identity=payload.identity,
        trainer_identity=payload.identity if payload.is_trainers else None,
        engine_url=payload.remote_engine_url,
        settings=payload.settings(),
        options=payload.options,
        has_input=packed is not None,
        has_runner=payload.task_type != EXTERNAL_TASK_TYPE,
        takes_items=payload.task_type == EXTERNAL_TASK_TYPE,
        group_size=payload.num_repeat_per_sample,
        instance_count=0 if packed is None else len(packed.instance_ids),
        num_epoch=payload.num_epoch,
        created_at=now,
        updated_at=now,
        run_began_at=now,
    )
    if packed is not None:
        plan_groups(connection, key, packed, payload.num_epoch)
        skip_planned(connection, key, Counter(map(str, payload.skip_instance_ids or ())))
    return key


def _supersede(connection: Connection, now: float, job: JobRecord) -> None:
    """Cancels a job and frees its id by renaming it; its rows stay."""
    if job.state in job_states.OPEN_STATES:
        cancel_job(connection, now, job.key, SUPERSEDED)
    for delivery in delivery_rows.leased_deliveries(connection, job.key):
        delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.EXPIRED.value)
    for state in (GroupState.READY, GroupState.LEASED):
        group_rows.move_groups(connection, job.key, state, GroupState.SKIPPED, SUPERSEDED)
    job_rows.update_job(connection, job.key, job_id=_free_name(connection, job), updated_at=now)


def _free_name(connection: Connection, job: JobRecord) -> str:
    """Returns ``ID~KEY``, with further ``~`` if that id is taken."""
    ending = f"~{job.key}"
    while True:
        name = job.job_id[: MAX_IDENTIFIER - len(ending)] + ending
        if job_rows.find_job(connection, name) is None:
            return name
        ending += "~"


def _take_over(connection: Connection, job: JobRecord, payload: StartPayload, packed: PackedInput | None) -> None:
    """Adds the first trainer's settings, options and input to a job that writers have filled."""
    settings = {**job.settings.all_values, **payload.named_settings()}
    changes: dict[str, Any] = {"settings": json.dumps(settings)}
    if packed is not None:
        instance_count = add_input(connection, job, packed, payload.num_epoch)
        num_epoch = max(job.num_epoch, payload.num_epoch)
        changes |= {"has_input": True, "num_epoch": num_epoch, "instance_count": instance_count}
    job_rows.update_job(connection, job.key, **changes)
    if payload.options:
        job_rows.update_options(connection, job.key, {**job_rows.options_of(connection, job.key), **payload.options})


def _attach(connection: Connection, now: float, job: JobRecord, payload: StartPayload) -> None:
    """Applies the payload's changeable settings, engine and skip list; opens what is to be played again, and closes
    what is full under the new settings."""
    changed = {key: value for key, value in payload.settings().items() if key in CHANGEABLE}
    settings = {**job.settings.all_values, **changed}
    changes: dict[str, Any] = {"settings": json.dumps(settings), "updated_at": now}
    if payload.is_trainers:
        changes["trainer_identity"] = payload.identity
    if payload.remote_engine_url is not None:
        changes["engine_url"] = payload.remote_engine_url
    if job.state is JobState.FAILED:
        changes |= {
            "state": job_states.next_state(job.state, "reopen").value,
            "finished_at": None,
            "refused_items": 0,
            "last_refusal": "",
            **NO_CAUSE.columns(),
        }
    job_rows.update_job(connection, job.key, **changes)
    if job.state is JobState.FAILED:
        _reopen_groups(connection, now, job.key, settings, group_rows.failed_groups(connection, job.key))
    job_rows.begin_trainer_run(connection, job.key, now)
    if payload.skip_instance_ids is not None:
        _apply_skip_list(connection, now, job, [str(entry) for entry in payload.skip_instance_ids])
    if payload.retry_given_up and job.state is not JobState.CANCELLED:
        _retry_given_up(connection, now, job, settings)
    close_full_groups(connection, now, job_rows.get_job(connection, job.key))


def _apply_skip_list(connection: Connection, now: float, job: JobRecord, skip_instance_ids: list[str]) -> None:
    """Marks the groups in a resuming trainer's skip list as consumed, and makes other delivered groups ready again."""
    known = group_rows.known_groups(connection, job.key)
    resumption = compare_with_skip_list(known, skip_instance_ids)
    for delivery in delivery_rows.leased_deliveries(connection, job.key):
        delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.EXPIRED.value)
    # Groups with purged payloads cannot be delivered again: they stay delivered or skipped.
    delivery_rows.make_ready_again(connection, payload_rows.groups_with_payloads(connection, resumption.ready_again))
    delivery_rows.make_unreported(connection, resumption.reported_again)
    delivery_rows.set_groups(connection, resumption.skipped, GroupState.SKIPPED, IN_SKIP_LIST)
    skip_planned(connection, job.key, resumption.not_used)
    delivery_rows.unskip_groups(connection, payload_rows.groups_with_payloads(connection, resumption.not_skipped))
    reopen_finished_job(connection, now, job.key)
    # What is still leased is in the skip list, too: it was consumed, and its acknowledgement was lost.
    delivery_rows.set_groups(connection, resumption.consumed, GroupState.DELIVERED, IN_SKIP_LIST)
    group_rows.move_groups(connection, job.key, GroupState.LEASED, GroupState.DELIVERED, IN_SKIP_LIST)


def _retry_given_up(connection: Connection, now: float, job: JobRecord, settings: dict[str, Any]) -> None:
    """Reopens closed groups with fewer trajectories than slots, except leased and skipped ones."""
    short = group_rows.short_groups(connection, job.key, job.group_size)
    for delivery in {group.delivery_key for group in short if group.state is GroupState.READY}:
        if delivery is not None:
            delivery_rows.dissolve_delivery(connection, delivery)
    _reopen_groups(connection, now, job.key, settings, [group.key for group in short])
    reopen_finished_job(connection, now, job.key)


def _reopen_groups(
    connection: Connection, now: float, job_key: int, settings: dict[str, Any], group_keys: list[int]
) -> None:
    """Reopens groups, and raises ``max_attempts`` by the largest number of failed attempts of an open slot."""
    group_rows.reopen_groups(connection, group_keys, now)
    reward_sum_rows.report_again(connection, group_keys)
    spent = attempt_rows.max_failures_of_a_slot(connection, job_key)
    limit = min(spent + settings["max_attempts"], MAX_ATTEMPTS)
    job_rows.update_job(connection, job_key, settings=json.dumps({**settings, "max_attempts": limit}))


def _difference(connection: Connection, job: JobRecord, payload: StartPayload) -> str:
    new = {**payload.settings(), **payload.options}
    old = {**job.settings.all_values, **job_rows.options_of(connection, job.key)}
    keys = sorted(key for key in {*new, *old} - CHANGEABLE if new.get(key) != old.get(key))
    return "different: " + (", ".join(keys[:8]) or "instances")
