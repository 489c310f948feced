"""A database of an earlier version becomes what a new one is; what no step leads from is refused and left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConfigError, RolloutBufferError
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.storage import migrations
from slime_plugins.rollout_buffer.storage.data_dir import DATABASE
from slime_plugins.rollout_buffer.storage.migrations import SCHEMA_FILE, SCHEMA_VERSION, create_database
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.supervisor.supervisor import Supervisor
from tests.support import poll, start_external, uids, use_next_schema, write, written


def schema_of(opened: Store) -> dict[str, str]:
    with opened.read() as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
        return {"version": str(connection.execute("PRAGMA user_version").fetchone()[0]), **dict(map(tuple, rows))}


def test_the_next_version_migrates_a_database_once_keeps_its_rows_and_makes_new_ones_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Buffer(Store(tmp_path / "data"))
    job = start_external(before, 2)
    write(before, job, written("a1", "a"), written("a2", "a", 0.0), written("b1", "b"))
    before.store.close()
    use_next_schema(monkeypatch, tmp_path)
    for _ in range(2):
        buffer = Buffer(Store(tmp_path / "data"))
        again = write(buffer, buffer.job(job.job_id), written("a1", "a"), written("b2", "b", 0.0))
        buffer.store.close()
    assert again == ["duplicate", "duplicate"]
    buffer, new = Buffer(Store(tmp_path / "data")), Store(tmp_path / "new")
    assert uids(buffer, poll(buffer, buffer.job(job.job_id))) == ["a1", "a2", "b1", "b2"]
    with buffer.store.read() as connection:
        writers = connection.execute("SELECT uid, writer FROM trajectories ORDER BY uid").fetchall()
    assert [tuple(row) for row in writers] == [*((uid, "before") for uid in ("a1", "a2", "b1")), ("b2", "after")]
    assert schema_of(buffer.store) == schema_of(new)
    buffer.store.close()
    new.close()


@pytest.mark.parametrize("schema", [1, 2])
def test_sessions_that_a_gateway_of_an_earlier_schema_had_open_are_given_up_with_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: int
) -> None:
    create_database(tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as connection:
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "SCHEMA_VERSION", schema)
            migrations.migrate(connection)
        for key, has_runner in ((1, 0), (2, 1)):
            connection.execute(
                "INSERT INTO jobs (key, job_id, task_type, state, identity, settings, has_runner, has_input, "
                "group_size, instance_count, num_epoch, created_at, updated_at) "
                "VALUES (?, ?, 'x', 'running', '', '{}', ?, 1, 1, 1, 1, 0, 0)",
                (key, f"job {key}", has_runner),
            )
            connection.execute(
                "INSERT INTO groups (key, job_key, epoch, position, instance_id, task, state) "
                "VALUES (?, ?, 0, 0, 'a', 'a', 'open')",
                (key, key),
            )
            connection.execute(
                "INSERT INTO attempts (group_key, slot, attempt, fence, state, started_at) "
                "VALUES (?, 0, 1, 1, 'running', 5.0)",
                (key,),
            )
        if schema == 2:
            connection.execute(
                "INSERT INTO turns (group_key, slot, attempt, number, created_at, request, context_ids, output_ids, "
                "log_probs, detail) VALUES (1, 0, 1, 1, 5.0, x'', x'', x'', x'', '{}')"
            )
    opened = Store(tmp_path)
    with opened.read() as connection:
        found = connection.execute("SELECT state, error_code, ended_at > 5 FROM attempts ORDER BY group_key").fetchall()
        assert connection.execute("SELECT count(*) FROM turns").fetchone()[0] == 0
    assert [tuple(row) for row in found] == [("given_up", "gateway_restarted", 1), ("running", None, None)]
    opened.close()


def test_a_step_that_fails_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "data").close()
    with monkeypatch.context() as patch:
        use_next_schema(patch, tmp_path, "CREATE TABLE more (key INTEGER); CREATE TABLE jobs (key INTEGER);")
        sentence = rf"schema {SCHEMA_VERSION}\) cannot be migrated.*jobs already exists\): no released version wrote it"
        with pytest.raises(ConfigError, match=sentence):
            Store(tmp_path / "data")
    opened = Store(tmp_path / "data")
    assert schema_of(opened)["version"] == str(SCHEMA_VERSION)
    assert "more" not in schema_of(opened)
    opened.close()


def test_what_a_newer_version_wrote_is_refused_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        use_next_schema(patch, tmp_path)
        Store(tmp_path / "data").close()
    with pytest.raises(ConfigError, match=rf"schema {SCHEMA_VERSION + 1}, this version knows {SCHEMA_VERSION}\): use"):
        Store(tmp_path / "data")
    with closing(sqlite3.connect(tmp_path / "data" / DATABASE)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)


def everything_in(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    found = {}
    for path in [folder, *folder.rglob("*")]:
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (content, path.stat().st_mode, path.stat().st_mtime_ns)
    return found


@pytest.mark.parametrize("version", [1, 4, 19])
def test_a_directory_of_before_0_1_0_is_refused_by_all_who_open_it_and_nothing_in_it_changes(
    tmp_path: Path, version: int
) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    crashed = sqlite3.connect(folder / "buffer.sqlite3")  # its rows are in the log alone
    crashed.execute("PRAGMA journal_mode=WAL")
    crashed.executescript(SCHEMA_FILE.read_text("utf-8"))
    crashed.execute(f"PRAGMA user_version={version}")
    before = everything_in(folder)
    for open_it in (lambda: Store(folder), lambda: Supervisor(ServeSettings(data_dir=folder, port=1)).run()):
        with pytest.raises(ConfigError, match=r"version before 0\.1\.0.*does not change it: give another --data-dir"):
            open_it()
    assert everything_in(folder) == before
    crashed.close()


def test_of_many_who_make_a_database_at_once_all_get_the_same(tmp_path: Path) -> None:
    database = tmp_path / DATABASE
    Store(tmp_path).close()
    made = database.stat().st_ino
    create_database(tmp_path)
    assert database.stat().st_ino == made
    assert [path.name for path in tmp_path.glob(f"{DATABASE}*")] == [DATABASE]


def test_an_empty_file_in_its_place_is_damage(tmp_path: Path) -> None:
    (tmp_path / DATABASE).touch()
    with pytest.raises(RolloutBufferError, match=r"is damaged .it has no tables.*go on with a backup"):
        Store(tmp_path)
