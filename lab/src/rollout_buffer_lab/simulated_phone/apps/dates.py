"""Dates and times as the phone writes them, the same on every host."""

from __future__ import annotations

from datetime import UTC, datetime

_MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def from_ms(milliseconds: int) -> datetime:
    """The instant, in the device's zone (UTC)."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def time_of_day(instant: datetime) -> str:
    """``15:34``."""
    return f"{instant.hour:02}:{instant.minute:02}"


def long_date(instant: datetime) -> str:
    """``October 15 2023``."""
    return f"{_MONTHS[instant.month - 1]} {instant.day} {instant.year}"


def day_line(instant: datetime) -> str:
    """``Sunday, October 15 2023``."""
    return f"{_DAYS[instant.weekday()]}, {long_date(instant)}"


def date_and_time(milliseconds: int) -> str:
    """``Oct 15, 2023 15:34``."""
    instant = from_ms(milliseconds)
    return f"{_MONTHS[instant.month - 1][:3]} {instant.day}, {instant.year} {time_of_day(instant)}"
