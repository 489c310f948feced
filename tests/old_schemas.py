"""Data directories as earlier versions left them, for the tests of the migrations.

``tests/data/old_schemas`` holds the schema of every version but today's, as it was.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from slime_plugins.rollout_buffer.storage.store import SCHEMA_FILE, SCHEMA_VERSION

__all__ = ["create_schema", "rewrite_as", "schema_of"]

FOLDER = Path(__file__).with_name("data") / "old_schemas"


def create_schema(connection: sqlite3.Connection, version: int) -> None:
    """Gives an empty database the schema of a version."""
    path = SCHEMA_FILE if version == SCHEMA_VERSION else FOLDER / f"version_{version}.sql"
    connection.executescript(path.read_text("utf-8"))
    connection.execute(f"PRAGMA user_version={version}")


def schema_of(connection: sqlite3.Connection) -> dict[str, object]:
    """What a schema says: tables with their columns in any order, indices and triggers by their text."""
    found: dict[str, object] = {}
    for kind, name, text in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        if kind == "table":
            rows = connection.execute(f"PRAGMA table_info({name})").fetchall()
            keys = connection.execute(f"PRAGMA foreign_key_list({name})").fetchall()
            found[name] = (sorted(tuple(row)[1:] for row in rows), sorted(tuple(key)[2:] for key in keys))
        elif text is not None:
            found[name] = " ".join(text.split())
    return found


def rewrite_as(data_dir: Path, version: int) -> None:
    """Gives a closed data directory the schema of an earlier version, with what that version knew of its rows."""
    path = data_dir / "buffer.sqlite3"
    with sqlite3.connect(path) as today:
        today.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    today.close()
    newer = path.rename(data_dir / "newer.sqlite3")
    old = sqlite3.connect(path)
    create_schema(old, version)
    triggers = old.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        old.execute(f"DROP TRIGGER {name}")
    old.execute("ATTACH ? AS newer", (str(newer),))
    for (table,) in old.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall():
        names = ", ".join(_columns(old, "main", table) & _columns(old, "newer", table))
        old.execute(f"INSERT OR REPLACE INTO main.{table} ({names}) SELECT {names} FROM newer.{table}")
    if version < 7:
        old.execute(_REPORTED_IN)
    if version == 9:
        old.execute("DELETE FROM main.counters WHERE name = 'job'")
    for _, text in triggers:
        old.execute(text)
    old.commit()
    old.close()
    newer.unlink()


def _columns(connection: sqlite3.Connection, schema: str, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA {schema}.table_info({table})")}


_REPORTED_IN = """
UPDATE main.trajectories SET reported_in = (
    SELECT sums.reported_in FROM newer.portion_sums AS sums JOIN newer.trajectories AS newer_one
    ON sums.job_key = newer_one.job_key AND sums.portion = newer_one.portion
    WHERE newer_one.key = main.trajectories.key LIMIT 1
)
"""
"""Before version 7 each trajectory said itself which delivery reported it."""
