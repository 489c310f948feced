"""Deliveries: a repeated poll gets the same delivery; any other poll gets an expired delivery unchanged or,
without one, ready groups.

``buffer.py`` opens the transaction. The groups of a delivery, in order, and its ``meta_info`` are
stored, so that it can be redelivered unchanged: to the same poll under its id, to any other poll under a new id.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import cast

from slime_plugins.rollout_buffer.state.delivery_leases import (
    all_still_waiting,
    delivered_state,
    expire_leases,
    lease_again,
    lease_columns,
    renew_lease,
)
from slime_plugins.rollout_buffer.state.delivery_meta import meta_info_of
from slime_plugins.rollout_buffer.state.staleness import (
    drop_stale_groups,
    note_trainers_version,
    policy_of,
    stale_groups,
    waits_for_stragglers,
)
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, group_rows, job_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import DeliveryState
from slime_plugins.rollout_buffer.wire.delivery_replies import MetaInfo
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """The groups delivered to a poll; ``Buffer.delivered_pieces`` reads their payloads."""

    key: int
    delivery_id: str
    meta_info: MetaInfo


def take(connection: Connection, now: float, job: JobRecord, poll: PollPayload) -> Delivery | None:
    """Delivers ready groups; see ``Buffer.take``. ``job`` was read in this transaction."""
    limit = _group_limit(poll, job)
    expire_leases(connection, now)
    if poll.weight_version is not None:
        job = note_trainers_version(connection, job, poll.weight_version)
    if policy_of(job) == "drop":
        drop_stale_groups(connection, now, job)
    delivery = (
        _delivery_of_same_poll(connection, now, job, poll)
        or _redelivery(connection, now, job, poll, limit)
        or _new_delivery(connection, now, job, poll, limit)
    )
    if delivery is None or poll.batch_size is None or poll.batch_size >= job.group_size:
        return delivery
    note = f"batch_size {poll.batch_size} was rounded up to one group of {job.group_size} samples: groups are whole"
    return replace(delivery, meta_info={**delivery.meta_info, "note": note})


def _delivery_of_same_poll(connection: Connection, now: float, job: JobRecord, poll: PollPayload) -> Delivery | None:
    if poll.consumer_id is None or poll.poll_id is None:
        return None
    earlier = delivery_rows.delivery_of_poll(connection, job.key, poll.consumer_id, poll.poll_id)
    if earlier is None:
        return None
    if earlier.state is DeliveryState.EXPIRED:
        if not all_still_waiting(connection, earlier):
            # Its groups went to another consumer: the poll gets a new delivery.
            delivery_rows.update_delivery(connection, earlier.key, poll_id=None)
            return None
        lease_again(connection, now, earlier, poll)
    elif earlier.state is DeliveryState.LEASED:
        renew_lease(connection, now, earlier, poll)
    return Delivery(key=earlier.key, delivery_id=earlier.delivery_id, meta_info=earlier.meta_info)


def _redelivery(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, limit: int | None
) -> Delivery | None:
    """Redelivers the oldest expired delivery whole; None if it has more than ``limit`` groups, or there is none."""
    expired = delivery_rows.oldest_expired_delivery(connection, job.key)
    if expired is None or not all_still_waiting(connection, expired):
        return None
    if limit is not None and len(delivery_rows.groups_in_delivery(connection, expired.key)) > limit:
        return None
    # Under a new id, so that an acknowledgement tells which of the two deliveries was received.
    meta_info: MetaInfo = {**expired.meta_info, "delivery_id": uuid.uuid4().hex}
    delivery = _insert_delivery(connection, now, job, poll, meta_info)
    delivery_rows.move_groups_to_delivery(connection, expired.key, delivery.key, delivered_state(poll))
    return delivery


def _new_delivery(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, limit: int | None
) -> Delivery | None:
    ready = delivery_rows.ready_groups(connection, job.key, limit)
    if not ready or waits_for_stragglers(connection, now, job):
        return None
    for expired_key in {group.delivery_key for group in ready if group.delivery_key is not None}:
        # This expired delivery cannot be redelivered whole: the groups that it reported are reported again.
        delivery_rows.dissolve_delivery(connection, expired_key)
    delivery = _insert_delivery(connection, now, job, poll, cast("MetaInfo", {"delivery_id": uuid.uuid4().hex}))
    stale = set(stale_groups(connection, job))
    for group in ready:
        group_rows.update_group(connection, group.key, state=delivered_state(poll).value, delivery_key=delivery.key)
    delivery_rows.insert_delivery_groups(connection, delivery.key, [group.key for group in ready])
    meta_info = meta_info_of(connection, job, delivery.key, delivery.delivery_id, ready, stale)
    delivery_rows.update_delivery(connection, delivery.key, meta_info=json.dumps(meta_info))
    return replace(delivery, meta_info=meta_info)


def _insert_delivery(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, meta_info: MetaInfo
) -> Delivery:
    """Adds a delivery without groups, with the id in ``meta_info``."""
    delivery_id = str(meta_info["delivery_id"])
    key = delivery_rows.insert_delivery(
        connection,
        delivery_id=delivery_id,
        job_key=job.key,
        consumer_id=poll.consumer_id,
        poll_id=poll.poll_id,
        created_at=now,
        waited_s=0.0 if job.waiting_since is None else max(0.0, now - job.waiting_since),
        meta_info=meta_info,
        **lease_columns(now, poll),
    )
    job_rows.update_job(connection, job.key, waiting_since=None)
    return Delivery(key=key, delivery_id=delivery_id, meta_info=meta_info)


def _group_limit(poll: PollPayload, job: JobRecord) -> int | None:
    if poll.batch_size is None:
        return poll.max_groups
    return max(1, poll.batch_size // job.group_size)
