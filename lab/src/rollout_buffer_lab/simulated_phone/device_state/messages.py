"""Text messages, received and sent, in the database of the telephony provider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout_buffer_lab.simulated_phone.device_state.contacts import same_number
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState

_INBOX, _SENT = 1, 2  # Telephony.Sms.MESSAGE_TYPE_*


@dataclass(frozen=True, kw_only=True, slots=True)
class Sms:
    """One message; ``address`` is the other side's number."""

    sms_id: int
    address: str
    body: str
    date_ms: int
    sent: bool


def insert_sms(state: DeviceState, address: str, body: str, *, sent: bool, date_ms: int | None = None) -> int:
    """Stores a message and returns its id; its date defaults to now."""
    date_ms = state.clock.now_ms if date_ms is None else date_ms
    thread = _thread_of(state, address)
    state.sms_db.execute("UPDATE threads SET date = max(date, ?), snippet = ? WHERE _id = ?", date_ms, body, thread)
    return state.sms_db.execute(
        "INSERT INTO sms (thread_id, address, date, date_sent, read, type, body, seen) VALUES (?, ?, ?, ?, 1, ?, ?, 1)",
        thread,
        address,
        date_ms,
        date_ms,
        _SENT if sent else _INBOX,
        body,
    )


def delete_sms(state: DeviceState, sms_id: int) -> None:
    """Removes a message."""
    state.sms_db.execute("DELETE FROM sms WHERE _id = ?", sms_id)


def messages_with(state: DeviceState, address: str) -> list[Sms]:
    """Returns all messages from and to a number, oldest first."""
    return [sms for sms in _all(state) if same_number(sms.address, address)]


def sent_messages(state: DeviceState) -> list[Sms]:
    """Returns all messages sent, oldest first."""
    return [sms for sms in _all(state) if sms.sent]


def conversations(state: DeviceState) -> list[Sms]:
    """Returns the last message with each number, newest first."""
    latest = {row["thread_id"]: _sms(row) for row in _rows(state)}  # of equal keys a dict keeps the last value
    return sorted(latest.values(), key=lambda sms: (sms.date_ms, sms.sms_id), reverse=True)


def _all(state: DeviceState) -> list[Sms]:
    return [_sms(row) for row in _rows(state)]


def _rows(state: DeviceState) -> list[dict[str, Any]]:
    return state.sms_db.query("SELECT * FROM sms ORDER BY date, _id")


def _sms(row: dict[str, Any]) -> Sms:
    return Sms(
        sms_id=row["_id"],
        address=row["address"] or "",
        body=row["body"] or "",
        date_ms=row["date"] or 0,
        sent=row["type"] == _SENT,
    )


def _thread_of(state: DeviceState, address: str) -> int:
    for row in state.sms_db.query("SELECT thread_id, address FROM sms GROUP BY thread_id"):
        if same_number(row["address"] or "", address):
            return int(row["thread_id"])
    recipient = state.sms_db.execute("INSERT INTO canonical_addresses (address) VALUES (?)", address)
    return state.sms_db.execute("INSERT INTO threads (recipient_ids) VALUES (?)", str(recipient))
