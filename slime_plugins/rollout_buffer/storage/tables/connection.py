"""The connection type, the limit of parameters in one statement, and rows as records."""

from __future__ import annotations

import sqlite3
from typing import Any, TypeVar

MAX_MARKS = 500
Connection = sqlite3.Connection
Record = TypeVar("Record")


def as_record(kind: type[Record], row: sqlite3.Row, **converted: Any) -> Record:
    """Returns a row as a dataclass with slots named as columns; ``converted`` are the fields of other types."""
    slots: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]  # of a dataclass with slots
    return kind(**{name: row[name] for name in slots if name not in converted}, **converted)
