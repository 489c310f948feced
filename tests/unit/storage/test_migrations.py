"""A database of any version that is still opened becomes exactly what a new one would be, and keeps its rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.storage.store import MIGRATIONS, OLDEST_VERSION, SCHEMA_VERSION, Store
from slime_plugins.rollout_buffer.storage.tables import job_rows
from tests.old_schemas import create_schema, rewrite_as, schema_of
from tests.support import poll, start_external, uids, write, written

OLD_VERSIONS = range(OLDEST_VERSION, SCHEMA_VERSION)


def today() -> dict[str, object]:
    with closing(sqlite3.connect(":memory:")) as connection:
        create_schema(connection, SCHEMA_VERSION)
        return schema_of(connection)


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_every_step_leads_to_the_schema_of_the_version_after_it(version: int) -> None:
    with closing(sqlite3.connect(":memory:")) as migrated, closing(sqlite3.connect(":memory:")) as expected:
        create_schema(migrated, version)
        migrated.executescript((MIGRATIONS / f"from_{version}_to_{version + 1}.sql").read_text("utf-8"))
        create_schema(expected, version + 1)
        assert schema_of(migrated) == schema_of(expected)


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_an_old_database_becomes_what_a_new_one_would_be(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "buffer.sqlite3") as connection:
        create_schema(connection, version)
    connection.close()
    store = Store(tmp_path)
    with store.read() as opened:
        assert schema_of(opened) == today()
        assert opened.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    store.close()


@pytest.mark.parametrize("version", OLD_VERSIONS)
def test_a_job_of_an_old_version_goes_on_where_it_was(tmp_path: Path, version: int) -> None:
    before = Buffer(Store(tmp_path))
    job = start_external(before, 2)
    write(before, job, written("a1", "a"), written("a2", "a", 0.0), written("b1", "b"))
    before.store.close()
    rewrite_as(tmp_path, version)
    buffer = Buffer(Store(tmp_path))
    job = buffer.job(job.job_id)
    assert write(buffer, job, written("a1", "a"), written("b2", "b", 0.0)) == ["duplicate", "stored"]
    assert uids(buffer, poll(buffer, job)) == ["a1", "a2", "b1", "b2"]
    buffer.store.close()


def test_steps_and_old_schemas_are_there_for_every_version() -> None:
    steps = {path.name for path in MIGRATIONS.glob("*.sql")}
    assert steps == {f"from_{version}_to_{version + 1}.sql" for version in OLD_VERSIONS}


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, SCHEMA_VERSION + 1])
def test_what_no_step_leads_from_is_refused_and_left_as_it_was(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "buffer.sqlite3") as connection:
        connection.execute(f"PRAGMA user_version={version}")
    connection.close()
    with pytest.raises(ConfigError, match=f"schema {version}"):
        Store(tmp_path)
    with sqlite3.connect(tmp_path / "buffer.sqlite3") as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == version
    connection.close()


CAUSES_OF_BEFORE = {
    "is_valid_group refused it": "not_valid",
    "filter_item kept 1 of 4 members": "items_filtered",
    "timed out: 1 of 4 members came": "timed_out",
    "slots failed: 1 of 4 members came": "slots_failed",
    "pad_group_data raised KeyError: 'x'": "group_function",
    "": "",
}


def test_causes_that_were_written_before_they_had_codes_have_them_afterwards(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job = start_external(Buffer(store), ids=tuple(f"i{at}" for at in range(len(CAUSES_OF_BEFORE))))
    with store.write() as connection:
        for at, cause in enumerate(CAUSES_OF_BEFORE):
            values = (cause, f"i{at}")
            connection.execute("UPDATE groups SET cause = ?, state = 'failed' WHERE instance_id = ?", values)
        connection.execute("UPDATE jobs SET cause = '9 of 9 attempts failed: gone', state = 'failed'")
    store.close()
    rewrite_as(tmp_path, 12)
    opened = Store(tmp_path)
    with opened.read() as connection:
        assert dict(connection.execute("SELECT cause, cause_code FROM groups").fetchall()) == CAUSES_OF_BEFORE
        assert job_rows.find_job(connection, job.job_id).cause_code is CauseCode.ATTEMPTS_FAILED  # type: ignore[union-attr]  # it is there
    opened.close()
