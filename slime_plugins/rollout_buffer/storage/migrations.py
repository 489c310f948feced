"""Creates the database and migrates it: ``schema.sql`` is version 1, ``migration_to_2.sql`` and so on follow it."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
from pathlib import Path

from slime_plugins.rollout_buffer.storage.data_dir import APPLICATION_ID, DATABASE

SCHEMA_VERSION = 3
SCHEMA_FILE = Path(__file__).with_name("schema.sql")
MIGRATIONS_FOLDER = SCHEMA_FILE.parent
"""Holds one SQL file for each version after the first. Released files never change."""


def version_of(connection: sqlite3.Connection) -> int:
    """Returns the schema version of a database; 0 if it has no tables."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def create_database(data_dir: Path) -> None:
    """Creates a database of version 1 under a temporary name, then gives it its name.

    If another process has created a database meanwhile, that database stays.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"{DATABASE}.", dir=data_dir)  # mode 0600, as SQLite's other files
    os.close(descriptor)
    try:
        with contextlib.closing(sqlite3.connect(name, isolation_level=None)) as connection:
            marks = f"PRAGMA user_version=1; PRAGMA application_id={APPLICATION_ID};"
            connection.execute("PRAGMA journal_mode=OFF")  # the file is discarded if it is not completed
            connection.executescript(f"BEGIN; {SCHEMA_FILE.read_text('utf-8')}; {marks} COMMIT")
        with contextlib.suppress(FileExistsError):
            os.link(name, data_dir / DATABASE)
    finally:
        os.unlink(name)


def migrate(connection: sqlite3.Connection) -> None:
    """Migrates the database to ``SCHEMA_VERSION`` in the open transaction; does nothing if that was done before."""
    for step in range(version_of(connection) + 1, SCHEMA_VERSION + 1):
        _run_script(connection, (MIGRATIONS_FOLDER / f"migration_to_{step}.sql").read_text("utf-8"))
        connection.execute(f"PRAGMA user_version={step}")


def _run_script(connection: sqlite3.Connection, script: str) -> None:
    """Runs statements in the open transaction, which ``executescript`` would commit."""
    without_comments = re.sub(r"--[^\n]*", "", script)
    statement = ""
    for piece in without_comments.split(";"):
        statement += f"{piece};"
        if sqlite3.complete_statement(statement):  # a trigger contains semicolons
            if statement.strip() != ";":
                connection.execute(statement)
            statement = ""
