"""A farm comes up from nothing and plays, with the real adb: slow copies, stale locks, faults, a killed manager.

The emulators are small (``tests/adb_emulator.py``): real processes with real virtual devices, each behind an adb server
of its own; ``tests/adb_phone.py`` says what else is not Android. Disks are copied by a ``cp`` that takes its time.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.adb_phone import HELD_TASKS
from tests.android_world_expert import say
from tests.android_world_script import engine_with
from tests.integration.conftest import BufferProcess
from tests.processes import processes_with, write_program
from tests.unit.generator.android_world.test_avd_clones import write_overlay
from tests.waiting import wait_until

ADB = shutil.which("adb")
ROOT = Path(__file__).resolve().parents[2]
TASKS = (ROOT / "data" / "task_list.txt").read_text().split()
DISKS = ("userdata-qemu.img", "cache.img", "encryptionkey.img")
DISK_BYTES = 2_000_000
UP = {"ready", "leased", "checking"}
pytestmark = [pytest.mark.skipif(ADB is None, reason="Debian's adb is not installed"), pytest.mark.timeout(2400)]

HELD = "held_copies"
FINISHED = "slime_aw_*.avd/*.img"
SLOW_CP = """#!/bin/bash
# Half of the file at once, the rest after a while: whoever is killed meanwhile leaves half a file behind.
# While "held" is there, all but the first files wait.
from="${@: -2:1}"; to="${@: -1}"
size=$(stat -c %s "$from")
head -c $((size / 2)) "$from" > "$to"
sleep $((size / 1000000))
while [ -e "HELD" ] && compgen -G "CLONES" > /dev/null; do sleep 0.1; done
exec /bin/cp "$@"
"""


def make_farm(folder: Path, devices: int) -> dict[str, str]:
    """Writes SDK, base device and settings; returns the environment of the buffer."""
    home, programs = folder / "avd", folder / "bin"
    base = home / "Base.avd"
    for made in (base, programs):
        made.mkdir(parents=True)
    (base / "config.ini").write_text("AvdId=Base\nhw.lcd.width=540\nhw.lcd.height=1200\n")
    (base / "disk.size").write_text(str(DISK_BYTES))
    (home / "Base.ini").write_text(f"path={base}\ntarget=android-33\n")
    backing = (f"{base}/userdata-qemu.img", "cache.img", "../Base.avd/encryptionkey.img")
    for disk, name in zip(DISKS, backing, strict=True):
        (base / disk).write_bytes(os.urandom(DISK_BYTES))
        write_overlay(base / f"{disk}.qcow2", name)
    # What earlier runs leave: locks that nobody holds, and half a clone.
    (base / "multiinstance.lock").touch()
    (base / "hardware-qemu.ini.lock").write_text("999999999")
    (home / ".rollout_buffer_copy_0.lock").touch()
    (home / ".slime_aw_1.lock").touch()
    half = home / "slime_aw_1.avd"
    half.mkdir()
    (half / "rollout_buffer_clone_of").touch()
    (half / "cache.img.rollout_buffer_part").write_bytes(b"half")
    (folder / HELD).touch()
    (folder / HELD_TASKS).touch()
    write_program(programs / "cp", SLOW_CP.replace("HELD", str(folder / HELD)).replace("CLONES", f"{home}/{FINISHED}"))
    write_program(folder / "emulator", f'cd {ROOT}\nexec {sys.executable} -S -m tests.adb_emulator "$@"')
    write_program(folder / "python", f'cd {ROOT}\nexec {sys.executable} -m tests.adb_phone "$@"')
    config = folder / "farm.yaml"
    config.write_text(
        f"device: android_world\nandroid_world_python: {folder / 'python'}\ndevice_pool: local\n"
        f"num_workers: {devices}\nboot_stagger_s: 0.1\nboot_pause_s: 2\nboot_timeout_s: 300\n"
        "reset_timeout_s: 1200\nstep_timeout_s: 15\n"
        f"avd_name: Base\nandroid_avd_home: {home}\nandroid_sdk_root: {folder}\n"
        f"emulator_path: {folder / 'emulator'}\nadb_path: {ADB}\n"
        "base_console_port: 5554\nbase_grpc_port: 45100\nbase_adb_server_port: 45400\n"
    )
    return {
        "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(config),
        "ROLLOUT_BUFFER_DEVICE_RECORDS": str(folder / "records"),
        "HOME": str(folder),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }


def tap_once(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """A policy that taps, and then is done."""
    del skill, rng
    looks = sum(len(turn.images) for turn in conversation.turns)
    return say(action="click", coordinate=[500, 500]) if looks == 1 else say(action="terminate", status="success")


def of_this_farm(folder: Path) -> dict[int, str]:
    """Processes that were started for it and still live."""
    return {pid: command for pid, command in processes_with(str(folder)).items() if pid != os.getpid()}


def copies(folder: Path) -> set[int]:
    return {pid for pid, command in of_this_farm(folder).items() if "rollout_buffer_part" in command}


def job_of(buffer: BufferProcess) -> dict[str, Any]:
    time.sleep(0.5)  # each look is a request to a server that has a farm to serve
    job: dict[str, Any] = buffer.client.job("farm")
    assert job["state"] != "failed", job
    return job


def are_up(job: dict[str, Any], devices: int) -> bool:
    """Whether all devices can be used, or are, at this moment."""
    return sum(one["state"] in UP for one in (job["devices"] or {}).get("devices", [])) == devices


def play(folder: Path, devices: int, tasks: list[str], faults: tuple[str, ...]) -> dict[str, Any]:
    """Brings the farm up, kills what holds its manager in the middle of copying, plays each task once."""
    environment = make_farm(folder, devices)
    with engine_with(tap_once) as port:
        buffer = BufferProcess(folder, environment=environment)
        try:
            buffer.client.start_rollout(
                {
                    "task_type": "android_world",
                    "job_id": "farm",
                    "instances": [
                        {"instance_id": name, "metadata": {"task_name": name, "params_idx": 0}} for name in tasks
                    ],
                    "num_repeat_per_sample": 1,
                    "num_process": devices,
                    "remote_engine_url": f"http://127.0.0.1:{port}",
                    "tokenizer_path": str(DEMO_TOKENIZER_PATH),
                    "sampling_params": {"max_tokens": 512},
                    "max_attempts": 8,
                    "max_groups_ahead": len(tasks),
                    "android_world": {"max_turns": 5, "max_context_len": 65536},
                }
            )
            wait_until(lambda: list((folder / "avd").glob(FINISHED)), 300, "a first file")
            wait_until(lambda: copies(folder), 300, "a copy")
            runner, under_way = buffer.runner_pid(), copies(folder)
            os.kill(runner, signal.SIGKILL)
            # Whatever the first runner has booted by now ends with it: faults and their count begin with the next one.
            (folder / "avd" / "starts").write_text("")
            (folder / "avd" / "next_boots").write_text("\n".join(faults))
            wait_until(lambda: not under_way & copies(folder), 60, "the end of the orphaned copies")
            (folder / HELD).unlink()
            wait_until(lambda: buffer.runner_pid() != runner, 60, "another runner")
            wait_until(lambda: are_up(job_of(buffer), devices), 1200, "every device at once")
            (folder / HELD_TASKS).unlink()
            wait_until(lambda: job_of(buffer)["slots"]["open"] == 0, 1200, "the end of the job")
            job = job_of(buffer) | {"failures": failures(folder / "data")}
        finally:
            buffer.stop()
    wait_until(lambda: not of_this_farm(folder), 120, "the end of everything that was started")
    assert not list((folder / "records").glob("[0-9]*"))
    return job


def failures(data: Path) -> Counter[str]:
    (database,) = data.glob("*.sqlite3")
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT error_code, error_message FROM attempts WHERE state = 'failed'").fetchall()
    return Counter(f"{code}: {message}" for code, message in rows)


def check(folder: Path, job: dict[str, Any], tasks: list[str], min_failures: int) -> None:
    """Every group is there once, every failure is a device's, and no clone reads another's disk."""
    slots = job["slots"]
    assert slots["submitted"] == len(tasks) == slots["ready"] + slots["delivered"]
    assert slots["failed"] == slots["skipped"] == slots["filtered"] == slots["leased"] == 0
    assert [one for one in job["failures"] if "crossed" in one or not one.startswith("device")] == []
    assert sum(job["failures"].values()) >= min_failures
    assert not list((folder / "avd").rglob("*.rollout_buffer_part"))


@pytest.mark.slow
def test_four_devices_come_up_over_a_restart_and_a_wedged_one_costs_its_neighbours_nothing(folder: Path) -> None:
    faults = ("exit", "well", "wedge", "crash")
    tasks = TASKS[:12]
    check(folder, play(folder, 4, tasks, faults), tasks, min_failures=2)
    starts = [line.split() for line in (folder / "avd" / "starts").read_text().splitlines()]
    last_fault = {avd: word for avd, word in starts if word != "well"}
    well = Counter(avd for avd, word in starts if word == "well")
    assert sorted(word for _, word in starts if word != "well") == ["crash", "exit", "wedge"]
    # No device was started again for another's fault. One that failed in an episode may not be up again at the end.
    assert set(well.values()) == {1}
    failed_in_an_episode = {avd for avd, word in last_fault.items() if word != "exit"}
    assert {f"slime_aw_{index}" for index in range(4)} - well.keys() <= failed_in_an_episode
