"""The calendar app's events in its database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState


@dataclass(frozen=True, kw_only=True, slots=True)
class CalendarEvent:
    """One event; its times are in the device's zone, UTC. ``event_id`` is 0 until it is stored."""

    title: str
    start: datetime
    end: datetime
    location: str = ""
    description: str = ""
    event_id: int = 0


def events(state: DeviceState) -> list[CalendarEvent]:
    """Returns all events, earliest first."""
    rows = state.calendar_db.query("SELECT * FROM events ORDER BY start_ts, id")
    return [
        CalendarEvent(
            event_id=row["id"],
            title=row["title"],
            start=datetime.fromtimestamp(row["start_ts"], UTC),
            end=datetime.fromtimestamp(row["end_ts"], UTC),
            location=row["location"],
            description=row["description"],
        )
        for row in rows
    ]


def add_event(state: DeviceState, event: CalendarEvent) -> int:
    """Stores an event and returns its id."""
    return state.calendar_db.execute(
        "INSERT INTO events (start_ts, end_ts, title, location, description) VALUES (?, ?, ?, ?, ?)",
        int(event.start.timestamp()),
        int(event.end.timestamp()),
        event.title,
        event.location,
        event.description,
    )


def delete_event(state: DeviceState, event_id: int) -> None:
    """Removes an event."""
    state.calendar_db.execute("DELETE FROM events WHERE id = ?", event_id)
