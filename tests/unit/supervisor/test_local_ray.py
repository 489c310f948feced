"""The program that keeps a local Ray, with a fake ``ray`` command: what it does when Ray does not start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.supervisor import local_ray
from slime_plugins.rollout_buffer.supervisor.restart_policies import ray_policy
from tests.waiting import wait_until

LOCAL_RAY = "slime_plugins.rollout_buffer.supervisor.local_ray"
ROOT = Path(__file__).resolve().parents[4]
FAKE_RAY = """
import os, signal, sys, time
from pathlib import Path
tries = Path(os.environ["TRIES"])
count = len(tries.read_text()) + 1 if tries.exists() else 1
tries.write_text("x" * count)
if count <= int(os.environ["FAILURES"]):
    sys.exit("The current node timed out during startup.")
if "ORPHAN" in os.environ and os.fork() == 0:
    orphan = os.fork()
    if orphan:
        Path(os.environ["ORPHAN"]).write_text(str(orphan))
    os._exit(0)
if "GUARD" in os.environ and os.fork() == 0:
    def end_in_order(*_):
        time.sleep(4)
        Path(os.environ["GUARD"]).unlink()
        os._exit(0)
    signal.signal(signal.SIGTERM, end_in_order)
    Path(os.environ["GUARD"]).touch()
    while True:
        time.sleep(600)
print("Ray runtime started", flush=True)
time.sleep(600)
"""


def start(tmp_path: Path, failures: int, **variables: str) -> subprocess.Popen[str]:
    package = tmp_path / "ray" / "scripts"
    package.mkdir(parents=True, exist_ok=True)
    (tmp_path / "ray" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "scripts.py").write_text(FAKE_RAY, encoding="utf-8")
    (tmp_path / "token").write_text("a secret of this test", encoding="utf-8")
    more = {"TRIES": str(tmp_path / "tries"), "FAILURES": str(failures), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    command = [sys.executable, "-m", LOCAL_RAY, "--address-file", str(tmp_path / "address"), "--num-cpus", "1"]
    command += ["--temp-root", variables.pop("TEMP_ROOT", "/tmp")]
    environment = {**os.environ, **more, **variables, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_ray_that_did_not_start_is_started_again(tmp_path: Path) -> None:
    process = start(tmp_path, failures=2)
    try:
        wait_until((tmp_path / "address").exists, 60)
    finally:
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert said.count("timed out during startup") == 2
    assert process.returncode == 0
    assert (tmp_path / "tries").read_text(encoding="utf-8") == "xxx"


@pytest.mark.timeout(60)
def test_a_ray_that_never_starts_ends_the_program_with_its_words(tmp_path: Path) -> None:
    process = start(tmp_path, failures=99)
    _, said = process.communicate(timeout=50)
    assert process.returncode == 1
    assert said.count("timed out during startup") == 3
    assert not (tmp_path / "address").exists()


def test_the_supervisor_waits_until_ray_has_given_up_and_ended_what_it_had_started() -> None:
    """It kills a child that is not ready with its session, and Ray's processes have sessions of their own."""
    attempts_s = local_ray._START_ATTEMPTS * (local_ray._START_TIMEOUT_S + local_ray._GRACE_S)
    assert ray_policy(ServeSettings()).start_timeout_s > attempts_s + 30


def test_orphaned_processes_that_end_are_reaped_while_it_serves(tmp_path: Path) -> None:
    """A killed worker leaves its device's process to the cluster's keeper, and a farm replaces workers for weeks."""
    note = tmp_path / "orphan"
    process = start(tmp_path, failures=0, ORPHAN=str(note))
    try:
        orphan = wait_until(lambda: note.exists() and note.read_text())
        wait_until(lambda: not Path(f"/proc/{orphan}").exists(), what="the end of the zombie")
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_watchdog_has_the_time_to_end_its_emulator_and_to_remove_the_records(tmp_path: Path) -> None:
    record = tmp_path / "record"
    process = start(tmp_path, failures=0, GUARD=str(record))
    try:
        wait_until(record.exists, 60)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert not record.exists()


def test_the_files_of_a_ray_whose_keeper_was_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lr_", dir="/tmp") as root:  # short enough for Ray's sockets
        with start(tmp_path, failures=0, TEMP_ROOT=root) as killed:
            wait_until((tmp_path / "address").exists, 60)
            killed.kill()
        assert list(Path(root).glob("rb_ray_*"))
        (tmp_path / "address").unlink()
        with start(tmp_path, failures=0, TEMP_ROOT=root) as following:
            wait_until((tmp_path / "address").exists, 60)
            following.terminate()
        assert not list(Path(root).glob("rb_ray_*"))
