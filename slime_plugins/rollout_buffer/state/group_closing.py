"""Judges and closes a group, once, by the members that it has at that moment."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.rules.causes import Shortfall
from slime_plugins.rollout_buffer.rules.groups import GroupFunctions, GroupPolicy, Member, Members, Verdict, judge_group
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import group_rows, job_rows, payload_rows, trajectory_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState

logger = logging.getLogger(__name__)


def judge_and_close(
    connection: Connection,
    now: float,
    group_key: int,
    policy: GroupPolicy,
    *,
    shortfall: Shortfall = Shortfall.SLOTS_FAILED,
) -> Verdict | None:
    """Judges an open group with the default functions and closes it, in the caller's transaction.

    Returns the verdict; None if the group is closed already.
    """
    if group_rows.get_group(connection, group_key).state is not GroupState.OPEN:
        return None
    verdict = judge_group(trajectory_rows.members_of(connection, group_key), policy, shortfall=shortfall)
    _close(connection, now, group_key, verdict)
    return verdict


def close_full_groups(connection: Connection, now: float, job: JobRecord, *, only: int | None = None) -> None:
    """Closes the groups of an external job, or only one of them, if each slot is filled or has failed too often.

    Does nothing to a job with a runner, which closes its groups itself.
    """
    if not job.has_runner:
        size, limit = job.group_size, job.settings.max_attempts
        for key in group_rows.full_groups(connection, job.key, group_size=size, max_attempts=limit, only=only):
            judge_and_close(connection, now, key, group_policy(job))


def judge_and_close_outside(
    store: Store,
    clock: Callable[[], float],
    group: GroupRecord,
    policy: GroupPolicy,
    functions: GroupFunctions,
    *,
    shortfall: Shortfall = Shortfall.SLOTS_FAILED,
    check: Callable[[Connection], object] = lambda _: None,
) -> Verdict | None:
    """Judges and closes a group as ``judge_and_close`` does, but runs the generator's slow functions outside the
    transaction.

    If a member is added meanwhile, the group is judged again, so that no stored member is lost. ``check`` runs in the
    closing transaction and raises an error to prevent it.
    """
    while True:
        members, stored_count = _members(store, group, with_items=functions.needs_items)
        verdict = judge_group(members, policy, functions, shortfall=shortfall)
        meta_info = _meta_info(functions, members)
        with store.write() as connection:
            check(connection)
            if group_rows.get_group(connection, group.key).state is not GroupState.OPEN:
                return None
            if trajectory_rows.count_members(connection, group.key) != stored_count:
                continue
            if meta_info is not None:
                job_rows.update_job(connection, group.job_key, meta_info=meta_info)
            _close(connection, clock(), group.key, verdict)
            return verdict


def _close(connection: Connection, now: float, group_key: int, verdict: Verdict) -> None:
    ready = verdict.state is GroupState.READY
    group_rows.update_group(
        connection,
        group_key,
        state=verdict.state.value,
        **verdict.cause.columns(),
        closed_at=now,
        sequence=group_rows.next_sequence(connection) if ready else None,
    )
    if ready:
        trajectory_rows.insert_members(connection, group_key, verdict.members)


def _members(store: Store, group: GroupRecord, *, with_items: bool) -> tuple[list[Member], int]:
    """Returns the members of a group, and the number of its trajectories. With ``with_items`` each member has its item,
    and trajectories whose payload is damaged are no members."""
    with store.read() as connection:
        stored = trajectory_rows.members_of(connection, group.key)
        if not with_items:
            return stored, len(stored)
        payloads = [payload_rows.payload_of(connection, group.job_key, member.uid) for member in stored]
    members = []
    for member, payload in zip(stored, payloads, strict=True):
        try:
            members.append(replace(member, item=_item(member, store.get_payload(*payload))))
        except DamagedError as error:
            logger.error("trajectory %s is left out of its group: %s", member.uid, error.message)
            if any(payload):  # it was not purged
                with store.write() as connection:
                    payload_rows.mark_damaged(connection, group.job_key, member.uid, error.message[:500])
    return members, len(stored)


def _item(member: Member, body: bytes) -> dict[str, Any]:
    """Returns a member for group functions: its payload, with columns of its row."""
    columns = {"uid": member.uid, "instance_id": member.instance_id, "reward": member.reward}
    return {**columns, "raw_reward": member.raw_reward, **orjson.loads(body)}


def _meta_info(functions: GroupFunctions, members: Members) -> str | None:
    """Returns the generator's statistics of a group as JSON; None if it has no function for them, or this raises."""
    if functions.get_group_data_meta_info is None:
        return None
    try:
        return orjson.dumps(dict(functions.get_group_data_meta_info([members]))).decode()
    except Exception:
        logger.exception("get_group_data_meta_info raised")
        return None
