"""The databases of the device's providers and apps: SQLite in memory, under the paths of Android's files.

Each can be pulled and pushed as the bytes of a database file. Tables have the columns that Android and AndroidWorld
read; unused columns are left out.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

CONTACTS_DB = "/data/data/com.android.providers.contacts/databases/contacts2.db"
SMS_DB = "/data/data/com.android.providers.telephony/databases/mmssms.db"
CALENDAR_DB = "/data/data/com.simplemobiletools.calendar.pro/databases/events.db"

_CONTACTS_SCHEMA = """
CREATE TABLE mimetypes (_id INTEGER PRIMARY KEY AUTOINCREMENT, mimetype TEXT NOT NULL UNIQUE);
INSERT INTO mimetypes (_id, mimetype) VALUES
  (1, 'vnd.android.cursor.item/email_v2'),
  (5, 'vnd.android.cursor.item/phone_v2'),
  (7, 'vnd.android.cursor.item/name');
CREATE TABLE contacts (_id INTEGER PRIMARY KEY AUTOINCREMENT, name_raw_contact_id INTEGER);
CREATE TABLE raw_contacts (
  _id INTEGER PRIMARY KEY AUTOINCREMENT,
  contact_id INTEGER REFERENCES contacts (_id),
  display_name TEXT,
  deleted INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE data (
  _id INTEGER PRIMARY KEY AUTOINCREMENT,
  mimetype_id INTEGER NOT NULL REFERENCES mimetypes (_id),
  raw_contact_id INTEGER NOT NULL REFERENCES raw_contacts (_id),
  data1 TEXT, data2 TEXT, data3 TEXT, data4 TEXT
);
"""

_SMS_SCHEMA = """
CREATE TABLE threads (_id INTEGER PRIMARY KEY AUTOINCREMENT, date INTEGER DEFAULT 0, recipient_ids TEXT, snippet TEXT);
CREATE TABLE canonical_addresses (_id INTEGER PRIMARY KEY AUTOINCREMENT, address TEXT);
CREATE TABLE sms (
  _id INTEGER PRIMARY KEY AUTOINCREMENT,
  thread_id INTEGER,
  address TEXT,
  person INTEGER,
  date INTEGER,
  date_sent INTEGER DEFAULT 0,
  protocol INTEGER,
  read INTEGER DEFAULT 0,
  status INTEGER DEFAULT -1,
  type INTEGER,
  subject TEXT,
  body TEXT,
  seen INTEGER DEFAULT 0
);
"""

_CALENDAR_SCHEMA = """
CREATE TABLE events (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  start_ts INTEGER NOT NULL,
  end_ts INTEGER NOT NULL,
  title TEXT NOT NULL,
  location TEXT NOT NULL DEFAULT '',
  description TEXT NOT NULL DEFAULT '',
  repeat_interval INTEGER NOT NULL DEFAULT 0,
  repeat_rule INTEGER NOT NULL DEFAULT 0,
  repeat_limit INTEGER NOT NULL DEFAULT 0,
  repetition_exceptions TEXT NOT NULL DEFAULT '[]',
  reminder_1_minutes INTEGER NOT NULL DEFAULT -1,
  reminder_2_minutes INTEGER NOT NULL DEFAULT -1,
  reminder_3_minutes INTEGER NOT NULL DEFAULT -1,
  reminder_1_type INTEGER NOT NULL DEFAULT 0,
  reminder_2_type INTEGER NOT NULL DEFAULT 0,
  reminder_3_type INTEGER NOT NULL DEFAULT 0,
  attendees TEXT NOT NULL DEFAULT '',
  import_id TEXT NOT NULL DEFAULT '',
  time_zone TEXT NOT NULL DEFAULT 'UTC',
  flags INTEGER NOT NULL DEFAULT 0,
  event_type INTEGER NOT NULL DEFAULT 1,
  parent_id INTEGER NOT NULL DEFAULT 0,
  last_updated INTEGER NOT NULL DEFAULT 0,
  source TEXT NOT NULL DEFAULT 'simple-calendar',
  availability INTEGER NOT NULL DEFAULT 0,
  color INTEGER NOT NULL DEFAULT 0,
  type INTEGER NOT NULL DEFAULT 0
);
"""

SCHEMAS: Mapping[str, str] = {CONTACTS_DB: _CONTACTS_SCHEMA, SMS_DB: _SMS_SCHEMA, CALENDAR_DB: _CALENDAR_SCHEMA}


class Database:
    """One database file of the device, at first empty; ``schema`` is needed for a path that is not in ``SCHEMAS``."""

    def __init__(self, path: str, schema: str | None = None) -> None:
        self.path = path
        self._empty = _empty_file(SCHEMAS[path] if schema is None else schema)
        self._connection = _opened(self._empty)
        # A phone may be dropped without close(), and from Python 3.13 on sqlite warns about unclosed connections.
        self._closer = weakref.finalize(self, self._connection.close)

    def wipe(self) -> None:
        """Empties the database."""
        self.write(self._empty)

    def read(self) -> bytes:
        """Returns the bytes of the database file."""
        return self._connection.serialize()

    def write(self, data: bytes) -> None:
        """Replaces the whole database.

        Raises:
            sqlite3.Error: the bytes are no database.
        """
        replacement = _opened(data)
        try:
            replacement.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            replacement.close()
            raise
        self._closer()
        self._connection, self._closer = replacement, weakref.finalize(self, replacement.close)

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Returns rows as dicts by column name."""
        return [dict(row) for row in self._connection.execute(sql, values)]

    def execute(self, sql: str, *values: Any) -> int:
        """Runs a statement that changes the database; returns the id of an inserted row."""
        cursor = self._connection.execute(sql, values)
        self._connection.commit()
        return cursor.lastrowid or 0

    def run_script(self, sql: str) -> list[tuple[Any, ...]]:
        """Runs statements one after the other and returns all their rows.

        Raises:
            sqlite3.Error: a statement cannot be run; those before it were run.
        """
        rows: list[tuple[Any, ...]] = []
        statement = ""
        for piece in sql.split(";"):
            statement += piece + ";"
            if sqlite3.complete_statement(statement):
                rows += [tuple(row) for row in self._connection.execute(statement)]
                statement = ""
        if statement.strip("; \n"):
            rows += [tuple(row) for row in self._connection.execute(statement)]
        self._connection.commit()
        return rows

    def close(self) -> None:
        """Closes the database."""
        self._closer()


def _opened(data: bytes) -> sqlite3.Connection:
    # Calls come one at a time, but not always from the thread that made the device.
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    if data:  # an empty file is an empty database, which deserialize refuses
        connection.deserialize(data)
    connection.row_factory = sqlite3.Row
    return connection


@cache
def _empty_file(schema: str) -> bytes:
    if not schema:
        return b""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(schema)
        return connection.serialize()
    finally:
        connection.close()
