"""No emulator outlives whatever owned it, whichever process of the chain is killed without a word.

serve ─ local Ray ─ raylet ─ device worker ─ (device process) ─ watchdog ─ emulator
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import DEVICE_MARK
from tests.integration.conftest import BufferProcess
from tests.processes import descendants, is_alive, process_table, processes_with
from tests.waiting import wait_until
from tests.watchdog_device import make_sdk, recorded

DEVICE = "tests.watchdog_device:create_device"
TIMEOUT_S = 60.0
OWNER = """
import sys
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.devices.device_process import DeviceProcess
from slime_plugins.rollout_buffer.generator.android_world.config import DEVICE_KIND, AndroidWorldSettings
options = AndroidWorldSettings.model_validate_json(sys.argv[1]).for_devices().device_options
device = DeviceProcess(sys.executable, DEVICE_KIND, options, 0, setting="android_world_python")
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLOUT_BUFFER_DEVICE_RECORDS", str(tmp_path / "records"))
    monkeypatch.setenv("ROLLOUT_BUFFER_PORT_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "records"


def all_gone(pids: list[int]) -> Callable[[], bool]:
    return lambda: not any(map(is_alive, pids))


def parent_of(pid: int) -> int:
    return next(parent for child, parent, _ in process_table() if child == pid)


def marked() -> dict[int, str]:
    """Every process that was started for an emulator of these tests."""
    return processes_with(f"{DEVICE_MARK}=orphan_test_")


# ---- below one owner -------------------------------------------------------------------------------------------------


@pytest.fixture
def owner(records: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns a device in a process of its own."""
    settings = AndroidWorldSettings.model_validate({"device": DEVICE, **make_sdk(tmp_path / "sdk")})
    command = [sys.executable, "-c", OWNER, settings.model_dump_json()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.mark.parametrize("killed", ["owner", "device process", "watchdog"])
def test_an_emulator_ends_with_whoever_is_killed_above_it(
    owner: subprocess.Popen[bytes], records: Path, killed: str
) -> None:
    wait_until(lambda: recorded(records), what="the record of an emulator")
    (emulator,), (watchdog,) = recorded(records), recorded(records, "watchdog")
    above = {"owner": owner.pid, "device process": parent_of(watchdog), "watchdog": watchdog}
    os.kill(above[killed], signal.SIGKILL)
    wait_until(all_gone([emulator]), TIMEOUT_S, "the end of the emulator")
    if killed != "watchdog":
        wait_until(lambda: not list(records.glob("[0-9]*-[0-9]*")), TIMEOUT_S, "an empty record")


def test_a_device_that_is_closed_leaves_nothing(owner: subprocess.Popen[bytes], records: Path) -> None:
    wait_until(lambda: recorded(records), what="the record of an emulator")
    assert owner.stdin is not None
    owner.stdin.close()
    assert owner.wait(timeout=TIMEOUT_S) == 0
    wait_until(lambda: not marked() and not list(records.glob("[0-9]*-[0-9]*")), TIMEOUT_S, "the end of everything")


# ---- the whole farm --------------------------------------------------------------------------------------------------


@pytest.fixture
def farm(records: Path, tmp_path: Path) -> Iterator[BufferProcess]:
    """A buffer with a job that holds two devices on Ray."""
    names = "".join(f"{key}: {value}\n" for key, value in make_sdk(tmp_path / "sdk").items())
    config = tmp_path / "android_world.yaml"
    config.write_text(f"device: {DEVICE}\nnum_workers: 2\nboot_timeout_s: 60\n{names}")
    environment = {"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(config)}
    buffer = BufferProcess(tmp_path, "--ray-num-cpus", "1", environment=environment)
    payload = {
        "task_type": "android_world",
        "instances": [{"instance_id": str(n), "metadata": {"task_name": "Slow", "params_idx": n}} for n in range(4)],
        "remote_engine_url": "http://127.0.0.1:9",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "job_id": "farm",
    }
    try:
        buffer.client.start_rollout(payload)
        wait_until(lambda: len(recorded(records)) == 2, 240, "two emulators")
        yield buffer
    finally:
        buffer.stop()
    wait_until(lambda: not marked(), TIMEOUT_S, "the end of everything")


@pytest.mark.large
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed", ["raylet", "local Ray", "supervisor"])
def test_no_emulator_outlives_the_killed_farm(farm: BufferProcess, records: Path, killed: str) -> None:
    emulators = recorded(records)
    names = {"raylet": "raylet/raylet", "local Ray": "supervisor.local_ray"}
    below = descendants(farm.process.pid)
    named = (pid for pid, command in below.items() if names[killed] in command)
    victim = farm.process.pid if killed == "supervisor" else next(named)
    os.kill(victim, signal.SIGKILL)
    wait_until(all_gone(emulators), TIMEOUT_S, "the end of the emulators")
