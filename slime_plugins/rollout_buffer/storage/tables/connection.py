"""What all tables use: the connection type, the limit of parameters in one statement, and helpers for rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any, TypeVar

MAX_PARAMETERS = 500
"""Limit of the parameters (``?``) of one statement."""
Connection = sqlite3.Connection
Record = TypeVar("Record")


def as_record(kind: type[Record], row: sqlite3.Row, **converted: Any) -> Record:
    """Returns a row as a dataclass whose slots are named as columns.

    ``converted`` has the fields whose values differ from the columns.
    """
    slots: tuple[str, ...] = kind.__slots__  # type: ignore[attr-defined]  # of a dataclass with slots
    return kind(**{name: row[name] for name in slots if name not in converted}, **converted)


def insert_row(connection: Connection, table: str, columns: Mapping[str, Any]) -> int:
    """Adds a row and returns its key."""
    query = f"INSERT INTO {table} ({', '.join(columns)}) VALUES (:{', :'.join(columns)}) RETURNING key"
    return int(connection.execute(query, columns).fetchone()[0])


def update_row(connection: Connection, table: str, value: int, columns: Mapping[str, Any], *, by: str = "key") -> None:
    """Changes columns of the row whose column ``by`` has that value."""
    assignments = ", ".join(f"{name} = :{name}" for name in columns)
    connection.execute(f"UPDATE {table} SET {assignments} WHERE {by} = :{by}", {**columns, by: value})
