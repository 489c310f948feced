"""How groups go out under a lease, come back when it lapses, and end by an acknowledgement.

Rules on an open transaction; ``buffer.py`` opens it. A delivery keeps its groups, in order, and what it said of itself,
so that it can be delivered again exactly as it was: to the same poll under the same id, to any other under a new one.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_plugins.rollout_buffer.protocol.request_models import PollPayload
from slime_plugins.rollout_buffer.rules import groups as group_rules
from slime_plugins.rollout_buffer.rules import jobs as job_rules
from slime_plugins.rollout_buffer.rules.causes import STALE
from slime_plugins.rollout_buffer.rules.weight_versions import Standing, standing_of
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, group_rows, job_rows, portion_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.delivery_rows import DeliveryRecord
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import AckResult, DeliveryState, GroupState

__all__ = ["Delivery", "acknowledge", "expire_leases", "is_exhausted", "take"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Groups that a poll was given; read the bytes with ``Buffer.delivered_items``."""

    key: int
    delivery_id: str
    meta_info: dict[str, Any]


def take(connection: Connection, now: float, job: JobRecord, poll: PollPayload) -> Delivery | None:
    """Hands out ready groups; see ``Buffer.take``. ``job`` is as it is in this transaction."""
    limit = _group_limit(poll, job)
    expire_leases(connection, now)
    if poll.weight_version is not None:
        job = _note_trainers_version(connection, job, poll.weight_version)
    if job.settings.stale_groups == "drop":
        _drop_stale_groups(connection, now, job)
    repeated = _repeated(connection, now, job, poll) or _returned(connection, now, job, poll, limit)
    delivery = repeated or _new_delivery(connection, now, job, poll, limit)
    if delivery is None or poll.batch_size is None or poll.batch_size >= job.group_size:
        return delivery
    note = f"batch_size {poll.batch_size} was rounded up to one group of {job.group_size} samples: groups are whole"
    return replace(delivery, meta_info={**delivery.meta_info, "note": note})


def _note_trainers_version(connection: Connection, job: JobRecord, version: int) -> JobRecord:
    """Notes what the trainer says of its weights and returns the job with it; most polls say nothing new."""
    if version == job.weight_version:
        return job
    if standing_of(version, job.known_versions()) is not Standing.ALONE:
        job_rows.note_weight_versions(connection, job.key, version, version)
    elif job.lone_version == version:
        return job
    else:
        job_rows.note_lone_version(connection, job.key, version)
    return job_rows.get_job(connection, job.key)


def _stale_groups(connection: Connection, job: JobRecord) -> list[int]:
    """Groups sampled by weights that are too old; those of an earlier run are as old as the present one's first."""
    lag = job.settings.max_weight_version_lag
    if lag is None or job.weight_version is None or job.first_weight_version is None:
        return []
    oldest_allowed = job.weight_version - lag
    return delivery_rows.stale_ready_groups(
        connection, job.key, job.trainer_run, oldest_allowed, version_of_earlier_runs=job.first_weight_version
    )


def _drop_stale_groups(connection: Connection, now: float, job: JobRecord) -> None:
    """Filters groups that waited for so long that training on them would be too far off policy."""
    for key in _stale_groups(connection, job):
        delivery_key = group_rows.get_group(connection, key).delivery_key
        if delivery_key is not None:
            # The delivery it had come back from will not go out whole: what that reported is reported anew.
            delivery_rows.dissolve_delivery(connection, delivery_key)
        group_rows.update_group(connection, key, state=GroupState.FILTERED.value, closed_at=now, **STALE.columns())


def _repeated(connection: Connection, now: float, job: JobRecord, poll: PollPayload) -> Delivery | None:
    if poll.consumer_id is None or poll.poll_id is None:
        return None
    earlier = delivery_rows.delivery_of_poll(connection, job.key, poll.consumer_id, poll.poll_id)
    if earlier is None:
        return None
    if earlier.state is DeliveryState.EXPIRED:
        if not _all_still_waiting(connection, earlier):
            # Its groups went to somebody else: this poll starts over.
            delivery_rows.update_delivery(connection, earlier.key, poll_id=None)
            return None
        _lease_again(connection, now, earlier, poll)
    elif earlier.state is DeliveryState.LEASED:
        _renew(connection, now, earlier, poll)
    return _as_delivery(earlier)


def _returned(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, limit: int | None
) -> Delivery | None:
    expired = delivery_rows.oldest_expired_delivery(connection, job.key)
    if expired is None or not _all_still_waiting(connection, expired):
        return None
    if limit is not None and len(delivery_rows.groups_in_delivery(connection, expired.key)) > limit:
        return None
    return _redelivery(connection, now, job, poll, expired)


def _redelivery(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, expired: DeliveryRecord
) -> Delivery:
    """Hands an expired delivery out again, under an id of its own: an acknowledgement tells which of them arrived."""
    meta_info = {**expired.meta_info, "delivery_id": uuid.uuid4().hex}
    delivery = _insert(connection, now, job, poll, meta_info)
    delivery_rows.hand_over(connection, expired.key, delivery.key, _handed_out(poll))
    return delivery


def _all_still_waiting(connection: Connection, delivery: DeliveryRecord) -> bool:
    return all(
        group.state is GroupState.READY and group.delivery_key == delivery.key
        for group in delivery_rows.groups_in_delivery(connection, delivery.key)
    )


def _lease_again(connection: Connection, now: float, delivery: DeliveryRecord, poll: PollPayload) -> None:
    delivery_rows.set_groups_of_delivery(connection, delivery.key, GroupState.READY, _handed_out(poll))
    delivery_rows.update_delivery(connection, delivery.key, **_lease_columns(now, poll))


def _handed_out(poll: PollPayload) -> GroupState:
    return GroupState.DELIVERED if poll.lease_s is None else GroupState.LEASED


def _renew(connection: Connection, now: float, delivery: DeliveryRecord, poll: PollPayload) -> None:
    lease_s = poll.lease_s or delivery.lease_s or 0.0
    delivery_rows.update_delivery(connection, delivery.key, lease_s=lease_s, lease_expires_at=now + lease_s)


def _lease_columns(now: float, poll: PollPayload) -> dict[str, Any]:
    if poll.lease_s is None:
        return {"state": DeliveryState.POPPED.value, "lease_s": None, "lease_expires_at": None}
    return {"state": DeliveryState.LEASED.value, "lease_s": poll.lease_s, "lease_expires_at": now + poll.lease_s}


def _new_delivery(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, limit: int | None
) -> Delivery | None:
    ready = delivery_rows.ready_groups(connection, job.key, limit)
    if not ready:
        return None
    for broken_up in {group.delivery_key for group in ready if group.delivery_key is not None}:
        # Part of a delivery that had come back goes out in another one: what it reported is reported anew.
        delivery_rows.dissolve_delivery(connection, broken_up)
    delivery = _insert(connection, now, job, poll, {"delivery_id": uuid.uuid4().hex})
    stale = set(_stale_groups(connection, job))
    for group in ready:
        group_rows.update_group(connection, group.key, state=_handed_out(poll).value, delivery_key=delivery.key)
    delivery_rows.insert_delivery_groups(connection, delivery.key, [group.key for group in ready])
    meta_info = {
        **_meta_info(connection, job, delivery.key, delivery.delivery_id, ready),
        "stale_groups": [group.key for group in ready if group.key in stale],
    }
    delivery_rows.set_meta_info(connection, delivery.key, meta_info)
    return replace(delivery, meta_info=meta_info)


def _insert(
    connection: Connection, now: float, job: JobRecord, poll: PollPayload, meta_info: dict[str, Any]
) -> Delivery:
    """Adds a delivery without groups; its id is what ``meta_info`` says."""
    key = delivery_rows.insert_delivery(
        connection,
        delivery_id=meta_info["delivery_id"],
        job_key=job.key,
        consumer_id=poll.consumer_id,
        poll_id=poll.poll_id,
        created_at=now,
        waited_s=_waited_s(now, job),
        meta_info=meta_info,
        **_lease_columns(now, poll),
    )
    job_rows.update_job(connection, job.key, waiting_since=None)
    return Delivery(key=key, delivery_id=meta_info["delivery_id"], meta_info=meta_info)


def _waited_s(now: float, job: JobRecord) -> float:
    """How long the trainer has polled in vain until now."""
    return 0.0 if job.waiting_since is None else max(0.0, now - job.waiting_since)


def _meta_info(
    connection: Connection, job: JobRecord, key: int, delivery_id: str, ready: Sequence[GroupRecord]
) -> dict[str, Any]:
    ended = portion_rows.report_in(connection, job.key, key)
    sums, outcomes = portion_rows.sum_unreported(connection, job.key, key)
    statistics = group_rules.summarize_rewards(
        samples=sums.samples,
        groups=sums.groups,
        total=sums.total,
        square_total=sums.square_total,
        low=sums.low,
        high=sums.high,
    )
    return {
        **statistics,
        **job.meta_info,
        "finished_groups": [*ended, *(group.instance_id for group in ready)],
        "delivery_id": delivery_id,
        "job_id": job.job_id,
        "outcomes": outcomes,
        "weight_version": job.weight_version,
        "exhausted": is_exhausted(connection, job, but_for=key),
    }


def is_exhausted(connection: Connection, job: JobRecord, *, but_for: int | None = None) -> bool:
    """Nothing will ever be ready again, but for what a delivery that is just made holds itself.

    What is leased to somebody may come back. A job without input may still get items until somebody ends it.
    """
    if not job.has_input and job.state in job_rules.OPEN_STATES:
        return False
    if delivery_rows.has_groups(connection, job.key, GroupState.OPEN, GroupState.READY):
        return False
    return all(delivery.key == but_for for delivery in delivery_rows.leased_deliveries(connection, job.key))


def acknowledge(connection: Connection, delivery_id: str) -> AckResult:
    """Counts one delivery as received; see ``Buffer.acknowledge``."""
    delivery = delivery_rows.find_delivery(connection, delivery_id)
    if delivery is None:
        return AckResult.UNKNOWN
    if delivery.state in (DeliveryState.ACKED, DeliveryState.POPPED):
        return AckResult.ACKED
    if delivery.state is DeliveryState.EXPIRED and not _all_still_waiting(connection, delivery):
        return AckResult.EXPIRED
    for state in (GroupState.LEASED, GroupState.READY):
        delivery_rows.set_groups_of_delivery(connection, delivery.key, state, GroupState.DELIVERED)
    delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.ACKED.value)
    return AckResult.ACKED


def expire_leases(connection: Connection, now: float) -> None:
    """Makes what was not acknowledged in time ready again, each delivery as a whole."""
    for delivery in delivery_rows.lapsed_deliveries(connection, now):
        delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.EXPIRED.value)
        delivery_rows.set_groups_of_delivery(connection, delivery.key, GroupState.LEASED, GroupState.READY)


def _group_limit(poll: PollPayload, job: JobRecord) -> int | None:
    if poll.batch_size is None:
        return poll.max_groups
    return max(1, poll.batch_size // job.group_size)


def _as_delivery(record: DeliveryRecord) -> Delivery:
    return Delivery(key=record.key, delivery_id=record.delivery_id, meta_info=record.meta_info)
