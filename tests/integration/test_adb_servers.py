"""One adb server for each emulator, with the real ``adb``: it knows its own emulator and none of the neighbours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import NO_ADB_SEARCH, is_free
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.processes import process_table
from tests.waiting import wait_until
from tests.watchdog_device import make_sdk

ADB = shutil.which("adb")
ROOT = Path(__file__).resolve().parents[2]
NEIGHBOURS = 3
pytestmark = [pytest.mark.skipif(ADB is None, reason="Debian's adb is not installed"), pytest.mark.timeout(180)]


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmulatorProcess]]:
    monkeypatch.setenv("ROLLOUT_BUFFER_DEVICE_RECORDS", str(tmp_path / "records"))
    monkeypatch.setenv("ROLLOUT_BUFFER_PORT_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("HOME", str(tmp_path))  # adb's key, and nobody else's
    values = make_sdk(tmp_path / "sdk") | {"adb_path": str(ADB), "base_adb_server_port": free_port()}
    program = f'#!/bin/sh\ncd {ROOT}\nexec {sys.executable} -m tests.adb_emulator "$@"\n'
    Path(str(values["emulator_path"])).write_text(program)
    settings = AndroidWorldSettings.model_validate(values | {"boot_timeout_s": 120})
    with ExitStack() as running:
        found = []
        for index in range(NEIGHBOURS):
            host = EmulatorProcess(settings, index)
            running.callback(host.close)
            host.start()
            found.append(host)
        yield found


def test_no_server_adopts_its_neighbours_emulators(hosts: list[EmulatorProcess]) -> None:
    searching = free_port()
    try:
        adb(searching, "start-server")
        all_serials = [serial(host) for host in hosts]
        wait_until(lambda: set(all_serials) <= set(devices(searching)))  # what a server does that may look around
    finally:
        adb(searching, "kill-server")
    assert [devices(server(host)) for host in hosts] == [[one] for one in all_serials]


def test_a_server_that_somebody_restarts_finds_its_emulator_again_and_only_that(hosts: list[EmulatorProcess]) -> None:
    first, *others = hosts
    adb(server(first), "kill-server")
    adb(server(first), "start-server", **NO_ADB_SEARCH)
    wait_until(lambda: devices(server(first)) == [serial(first)])
    for host in hosts:
        host.check_alive()
    assert [devices(server(host)) for host in others] == [[serial(host)] for host in others]


def test_a_command_to_an_emulator_that_has_died_leaves_no_server_behind(hosts: list[EmulatorProcess]) -> None:
    """Any command of adb starts a server where there is none, also after the watchdog has ended with its emulator."""
    host = hosts[0]
    port = server(host)
    started = f"-port {serial(host).rpartition('-')[2]}"
    emulator = next(pid for pid, _, words in process_table() if started in words and "watchdog.py" not in words)
    os.kill(emulator, signal.SIGKILL)
    wait_until(lambda: host.lost() != "")
    adb(port, "devices")  # as whoever looks at the device in this moment does
    host.close()
    wait_until(lambda: is_free(port))


def server(host: EmulatorProcess) -> int:
    assert host.ports is not None
    return host.ports.adb_server


def serial(host: EmulatorProcess) -> str:
    assert host.ports is not None
    return host.ports.serial


def devices(port: int) -> list[str]:
    lines = adb(port, "devices").splitlines()[1:]
    return sorted(line.partition("\t")[0] for line in lines if line.endswith("\tdevice"))


def adb(port: int, *words: str, **variables: str) -> str:
    """What adb says; ``variables`` are for the server, should this start one."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [str(ADB), "-P", str(port), *words], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return done.stdout
