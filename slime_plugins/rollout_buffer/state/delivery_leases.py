"""Leases of deliveries: grant, renewal, acknowledgement and expiry. ``buffer.py`` opens the transaction.

A delivery whose lease has run out is ``expired``: its groups are ready again, and are redelivered together.
The length of a lease is ``lease_s`` of the poll; a trainer's default is in ``trainer/settings.py``.
"""

from __future__ import annotations

from typing import Any

from slime_plugins.rollout_buffer.storage.tables import delivery_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.delivery_rows import DeliveryRecord
from slime_plugins.rollout_buffer.types import AckResult, DeliveryState, GroupState
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload


def lease_columns(now: float, poll: PollPayload) -> dict[str, Any]:
    """Returns the lease columns of a delivery. A poll without ``lease_s`` does not acknowledge, and gets no lease."""
    if poll.lease_s is None:
        return {"state": DeliveryState.POPPED.value, "lease_s": None, "lease_expires_at": None}
    return {"state": DeliveryState.LEASED.value, "lease_s": poll.lease_s, "lease_expires_at": now + poll.lease_s}


def delivered_state(poll: PollPayload) -> GroupState:
    """Returns the state that groups have once they are delivered to a poll."""
    return GroupState.DELIVERED if poll.lease_s is None else GroupState.LEASED


def renew_lease(connection: Connection, now: float, delivery: DeliveryRecord, poll: PollPayload) -> None:
    """Restarts the lease of a delivery whose poll was repeated."""
    lease_s = poll.lease_s or delivery.lease_s or 0.0
    delivery_rows.update_delivery(connection, delivery.key, lease_s=lease_s, lease_expires_at=now + lease_s)


def lease_again(connection: Connection, now: float, delivery: DeliveryRecord, poll: PollPayload) -> None:
    """Leases an expired delivery again to the same poll, or delivers it without a lease if the poll wants none."""
    delivery_rows.set_groups_of_delivery(connection, delivery.key, GroupState.READY, delivered_state(poll))
    delivery_rows.update_delivery(connection, delivery.key, **lease_columns(now, poll))


def all_still_waiting(connection: Connection, delivery: DeliveryRecord) -> bool:
    """Returns True if an expired delivery can be redelivered whole: no group of it was delivered since."""
    return all(
        group.state is GroupState.READY and group.delivery_key == delivery.key
        for group in delivery_rows.groups_in_delivery(connection, delivery.key)
    )


def expire_leases(connection: Connection, now: float) -> None:
    """Makes the groups of deliveries whose lease has run out ready again."""
    for delivery in delivery_rows.expired_leases(connection, now):
        delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.EXPIRED.value)
        delivery_rows.set_groups_of_delivery(connection, delivery.key, GroupState.LEASED, GroupState.READY)


def acknowledge(connection: Connection, delivery_id: str) -> AckResult:
    """Acknowledges one delivery; see ``Buffer.acknowledge``."""
    delivery = delivery_rows.find_delivery(connection, delivery_id)
    if delivery is None:
        return AckResult.UNKNOWN
    if delivery.state in (DeliveryState.ACKED, DeliveryState.POPPED):
        return AckResult.ACKED
    if delivery.state is DeliveryState.EXPIRED and not all_still_waiting(connection, delivery):
        return AckResult.EXPIRED
    for state in (GroupState.LEASED, GroupState.READY):
        delivery_rows.set_groups_of_delivery(connection, delivery.key, state, GroupState.DELIVERED)
    delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.ACKED.value)
    return AckResult.ACKED
