"""Formats dates and times as the phone shows them, independent of the host's locale."""

from __future__ import annotations

from datetime import UTC, datetime

_MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def from_ms(milliseconds: int) -> datetime:
    """Returns the time for milliseconds since 1970, in the device's zone (UTC)."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def time_of_day(instant: datetime) -> str:
    """Returns a text like ``15:34``."""
    return f"{instant.hour:02}:{instant.minute:02}"


def long_date(instant: datetime) -> str:
    """Returns a text like ``October 15 2023``."""
    return f"{_MONTHS[instant.month - 1]} {instant.day} {instant.year}"


def day_line(instant: datetime) -> str:
    """Returns a text like ``Sunday, October 15 2023``."""
    return f"{_DAYS[instant.weekday()]}, {long_date(instant)}"


def date_and_time(milliseconds: int) -> str:
    """Returns a text like ``Oct 15, 2023 15:34``."""
    instant = from_ms(milliseconds)
    return f"{_MONTHS[instant.month - 1][:3]} {instant.day}, {instant.year} {time_of_day(instant)}"
