"""The data directory is its user's alone, and one supervisor's at a time."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.storage import data_dir
from slime_plugins.rollout_buffer.storage.migrations import SCHEMA_VERSION
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.supervisor.supervisor import Supervisor
from tests.support import start_external, use_next_schema, write, written

BIG = [{"role": "user", "content": "x" * 100_000}]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def version(folder: Path) -> int:
    connection = sqlite3.connect(folder / "buffer.sqlite3")
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.close()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory with a written item, which no process has open."""
    buffer = Buffer(Store(tmp_path / "data"))
    write(buffer, start_external(buffer), written("a", messages=BIG))
    buffer.store.close()
    return tmp_path / "data"


def test_everything_in_it_is_for_its_user_alone(folder: Path) -> None:
    store = Store(folder)
    assert mode(folder) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"buffer.sqlite3", "buffer.sqlite3-wal", "writer.active", "00000001.pack"}
    assert [path for path in files if mode(path) & 0o077] == []
    store.close()


def test_what_a_restored_backup_left_open_is_closed_at_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = [folder / "buffer.sqlite3", folder / "packs" / "00000001.pack", folder / "writer.active"]
    folder.chmod(0o755)
    for path in opened:
        path.chmod(0o644)
    data_dir.acquire_ownership(folder).close()
    data_dir.restrict_permissions(folder)
    assert mode(folder) == 0o700
    assert [mode(path) for path in opened] == [0o600] * 3
    assert str(folder) in caplog.text


def test_what_is_not_the_buffers_is_left_as_it_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "tasks.jsonl").touch(mode=0o644)
    folder.chmod(0o755)
    data_dir.acquire_ownership(folder).close()
    data_dir.restrict_permissions(folder)
    assert (mode(folder / "tasks.jsonl"), mode(folder)) == (0o644, 0o755)
    assert "use a folder of its own" in caplog.text


def test_a_folder_that_all_users_share_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="shared by all users"):
        Store(tmp_path)
    assert mode(tmp_path) == 0o777, "and not closed to the others"


STRANGER = """
import fcntl, os, sys
os.setgid(65534); os.setuid(65534)
for name in ("", "/buffer.sqlite3", "/writer.active", "/supervisor.lock", "/packs/00000001.pack"):
    try:
        descriptor = os.open(sys.argv[1] + name, os.O_RDONLY)
    except PermissionError:
        continue
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("opened", name or "the folder")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and become another user")
def test_another_user_reads_nothing_and_takes_no_lock(tmp_path: Path, folder: Path) -> None:
    for above in (folder, *folder.parents):
        if above != Path("/") and above.is_relative_to(Path("/tmp")) and above != Path("/tmp"):
            above.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = subprocess.run([sys.executable, "-c", STRANGER, str(folder)], capture_output=True, text=True, check=True)
    assert "opened /buffer.sqlite3" in before.stdout, "the test can see what it looks for"
    data_dir.acquire_ownership(folder).close()
    data_dir.restrict_permissions(folder)
    after = subprocess.run([sys.executable, "-c", STRANGER, str(folder)], capture_output=True, text=True, check=True)
    assert after.stdout == ""


# --- one owner -------------------------------------------------------------------------------------------------------


def test_a_second_serve_is_refused_before_it_opens_or_migrates_anything(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = data_dir.acquire_ownership(folder)
    use_next_schema(monkeypatch, tmp_path)
    monkeypatch.setattr(data_dir, "OWNERSHIP_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="another rollout-buffer serve"):
        Supervisor(ServeSettings(data_dir=folder, port=1)).run()
    assert version(folder) == SCHEMA_VERSION
    owner.close()


def test_nobody_migrates_what_a_living_supervisor_of_another_version_has(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = data_dir.acquire_ownership(folder)
    use_next_schema(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="another version"):
        Store(folder)
    assert version(folder) == SCHEMA_VERSION
    Store(folder, owned=True).close()
    assert version(folder) == SCHEMA_VERSION + 1
    owner.close()


def test_beside_a_living_supervisor_of_the_same_version_it_is_opened(folder: Path) -> None:
    owner = data_dir.acquire_ownership(folder)
    assert data_dir.is_owned(folder)
    Store(folder).close()
    owner.close()
    assert not data_dir.is_owned(folder)
