"""The parts of the device for the real package that need neither the package nor an emulator."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from slime_plugins.rollout_buffer.devices import worker_folders
from slime_plugins.rollout_buffer.devices.device_process import DeviceProcess
from slime_plugins.rollout_buffer.devices.file_locks import try_lock
from slime_plugins.rollout_buffer.devices.worker_folders import WorkerFolder
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_factory import create_device
from slime_plugins.rollout_buffer.generator.android_world.emulator import watchdog as emulator_watchdog
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import check_sdk
from slime_plugins.rollout_buffer.generator.android_world.emulator.gestures import typeable
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import check_package
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import hold_ports
from slime_plugins.rollout_buffer.generator.android_world.emulator.screen_stability import (
    ScreenSample,
    Stability,
    StabilityTimeouts,
    wait_until_stable,
)
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port, free_ports
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS
from tests.processes import write_program
from tests.waiting import wait_until

# ---- settling --------------------------------------------------------------------------------------------------------


class Film:
    """A screen that shows one frame after the other; time passes only by sleeping."""

    def __init__(self, *frames: tuple[float, int], look_s: float = 0.0) -> None:
        self._frames = frames
        self._look_s = look_s
        self.time = 0.0

    def look(self) -> ScreenSample:
        seen = look_at([number for since, number in self._frames if since <= self.time][-1])
        self.time += self._look_s if self.time else 0.0
        return seen

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def settle(self, reference: ScreenSample | None) -> tuple[int, Stability]:
        times = StabilityTimeouts(change_s=2.0, still_s=6.0, between_s=0.3)
        seen, stability = wait_until_stable(reference, self.look, times, now=lambda: self.time, sleep=self.sleep)
        return int(seen.elements[0]), stability


def look_at(number: int) -> ScreenSample:
    return ScreenSample(pixels=np.full((40, 20, 3), number, np.uint8), elements=[number])


def test_a_screen_that_reacts_late_is_not_taken_for_a_settled_one() -> None:
    for late_s in (0.0, 0.2, 0.6, 1.0, 1.9):
        assert Film((0.0, 1), (late_s, 90)).settle(look_at(1)) == (90, Stability.SETTLED)


def test_a_screen_that_goes_on_moving_is_cut_off() -> None:
    film = Film(*((0.1 * frame, frame % 200) for frame in range(200)))
    assert film.settle(look_at(255))[1] is Stability.TIMED_OUT


# ---- text and pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "possible", "refused"),
    [("Hello, world!\n2nd", "Hello, world!\n2nd", []), ("café ☕", "cafe ", ["é", "☕"]), ("日本", "", ["日", "本"])],
)
def test_what_cannot_be_typed_is_named(text: str, possible: str, refused: list[str]) -> None:
    assert typeable(text) == (possible, refused)


# ---- ports and folders -----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_port_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_BUFFER_PORT_LOCKS", str(tmp_path / "ports"))


def test_two_workers_never_get_the_same_ports() -> None:
    first, second = hold_ports(5620, 42100, 42300), hold_ports(5620, 42100, 42300)
    assert first.console % 2 == second.console % 2 == 0
    assert not {first.console, first.grpc, first.adb_server} & {second.console, second.grpc, second.adb_server}
    wanted = first.grpc
    first.release()
    third = hold_ports(5620, 42100, 42300)
    assert third.grpc == wanted
    for ports in (second, third):
        ports.release()


def test_folders_of_dead_workers_are_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closing = tmp_path / "rollout_buffer_test_4_closing"

    def locked_late(path: Path) -> IO[str] | None:
        if path.parent == closing:
            path.parent.rmdir()
        return try_lock(path)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_folders, "try_lock", locked_late)
    dead, mine = tmp_path / "rollout_buffer_test_3_dead", WorkerFolder("rollout_buffer_test_1")
    (dead / "deep").mkdir(parents=True)
    closing.mkdir()
    (tmp_path / "rollout_buffer_test_notes").mkdir()
    other = WorkerFolder("rollout_buffer_test_12")
    assert not dead.exists()
    assert mine.path.is_dir()
    assert other.path.is_dir()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
    other.remove()
    assert (tmp_path / "rollout_buffer_test_notes").is_dir()


def test_a_folder_without_an_index_is_removed_by_the_next_one_too(tmp_path: Path) -> None:
    dead, notes = tmp_path / "base_setup_q1w2e3r4", tmp_path / "base_setup_notes"
    dead.mkdir()
    notes.mkdir()
    folder = WorkerFolder("base_setup", tmp_path)
    assert (dead.exists(), notes.exists(), folder.path.exists()) == (False, True, True)
    folder.remove()


# ---- what is missing is named ----------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("android_world") is not None, reason="the package is installed here")
def test_a_missing_package_is_named_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"needs the packages? .*android_world"):
        check_package()
    with pytest.raises(ConfigError, match="needs the package"):
        create_device(AndroidWorldSettings(device="android_world"), 0)


def test_missing_parts_of_the_sdk_are_named(tmp_path: Path) -> None:
    program = write_program(tmp_path / "program", "")
    nothing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match="emulator_path names no program"):
        check_sdk(AndroidWorldSettings(emulator_path=nothing))
    with pytest.raises(ConfigError, match="adb_path names no program"):
        check_sdk(AndroidWorldSettings(emulator_path=str(program), adb_path=nothing))
    with pytest.raises(ConfigError, match="virtual device AndroidWorldAvd"):
        check_sdk(
            AndroidWorldSettings(emulator_path=str(program), adb_path=str(program), android_avd_home=str(tmp_path))
        )


# ---- processes -------------------------------------------------------------------------------------------------------


def in_a_process(python: str) -> DeviceProcess:
    return DeviceProcess(python, ADDRESS, {}, 0, setting="android_world_python")


def test_a_device_in_another_process_answers_like_one_in_this() -> None:
    device = in_a_process(sys.executable)
    assert device.reset("Solved", 3).goal == "Play Solved number 3."
    assert device.step(Action(kind=ActionKind.WAIT, duration_s=0.0)).screen_width == 1080
    assert device.score() == 1.0
    assert device.health()["pid"] != str(os.getpid())
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="is closed"):
        device.score()


def test_errors_of_a_device_in_another_process_keep_their_kind() -> None:
    device = in_a_process(sys.executable)
    device.reset("Bug", 0)
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        device.step(Action(kind=ActionKind.WAIT))
    device.reset("Exit", 0)
    with pytest.raises(DeviceError, match="process is gone") as caught:
        device.step(Action(kind=ActionKind.WAIT))
    assert caught.value.detail["fault"] == "died"
    with pytest.raises(DeviceError, match="process is gone"):
        device.score()
    device.close()


WATCHDOG = [sys.executable, "-S", emulator_watchdog.__file__]


@pytest.mark.parametrize("ends_by", ["closing", pytest.param("kill", marks=pytest.mark.slow)])
def test_the_guard_ends_the_emulator_when_its_owner_is_gone(tmp_path: Path, ends_by: str) -> None:
    pid_file = tmp_path / "pid"
    records = tmp_path / "records"
    watchdog = [*WATCHDOG, str(records), "clone_0", "/bin/true", str(free_port()), "emulator-5554", "0.5", "--"]
    deaf = "trap '' TERM; " if ends_by == "kill" else ""
    emulator = ["/bin/sh", "-c", f"{deaf}echo $$ > {pid_file}; sleep 100 & wait; sleep 100"]
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, *watchdog, *emulator], stdin=subprocess.PIPE, start_new_session=True
    )
    wait_until(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
    pid = int(pid_file.read_text())
    wait_until(lambda: len(list(records.glob("[0-9]*-[0-9]*"))) == 2)
    assert any(path.name.startswith(f"{pid}-") for path in records.iterdir())
    assert owner.stdin is not None
    if ends_by == "kill":
        owner.kill()
    owner.stdin.close()
    owner.wait()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    wait_until(lambda: not list(records.iterdir()))


ADB_SERVER = "import socket, sys, time; server = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"


@contextmanager
def watchdog_at(port: int, records: Path, avd_home: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """The watchdog of an emulator that only sleeps, once both are on record; it is told to end afterwards."""
    command = [*WATCHDOG, str(records), "clone_0", "/bin/true", str(port), "emulator-5554", "0.5", "--"]
    environment = os.environ | {"ANDROID_AVD_HOME": avd_home}
    with subprocess.Popen([*command, "/bin/sleep", "100"], stdin=subprocess.PIPE, env=environment) as watchdog:
        wait_until(lambda: f"adb_port={port}\n" in recorded(records, "emulator"))
        yield watchdog
        assert watchdog.stdin is not None
        watchdog.stdin.close()


@contextmanager
def adb_server_at(port: int, records: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An adb server, which a watchdog has on record."""
    with subprocess.Popen([sys.executable, "-c", ADB_SERVER, str(port)]) as server:
        try:
            wait_until(lambda: any(records.glob(f"{server.pid}-*")))
            yield server
        finally:
            server.kill()


def recorded(records: Path, kind: str) -> str:
    texts = [path.read_text() for path in records.glob("[0-9]*-[0-9]*")]
    return "".join(text for text in texts if text.startswith(f"kind={kind}\n"))


def test_an_adb_server_that_was_started_again_is_recorded(tmp_path: Path) -> None:
    port = free_port()
    with watchdog_at(port, tmp_path):
        for _ in range(2):
            with adb_server_at(port, tmp_path):
                pass


def test_the_next_watchdog_of_a_device_ends_and_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Another farm's device may have the same name. Process ids are used again: a record's start time decides."""
    (tmp_path / f"{os.getpid()}-1").write_text("kind=adb_server\navd=clone_0\navd_home=\n")
    port, other_port = free_ports(2)
    with watchdog_at(other_port, tmp_path, "another farm's"), adb_server_at(other_port, tmp_path) as in_use:
        with watchdog_at(port, tmp_path) as killed, adb_server_at(port, tmp_path) as left:
            killed.kill()
            killed.wait()
            with watchdog_at(free_port(), tmp_path):
                assert left.wait(20) == -signal.SIGTERM
        assert in_use.poll() is None
    assert [int(path.name.partition("-")[0]) for path in tmp_path.iterdir()] == [left.pid]


_OWNER = """
import subprocess, sys
watchdog = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
sys.stdin.read()
"""
