"""The device pool on a real Ray cluster of its own: leases, deaths, several runners, and a clean end."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.cli.doctor import Examination, examine
from slime_plugins.rollout_buffer.cli.node_checks import examine_nodes
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import MANAGER_NAME, NAMESPACE, RayDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, WorkerResources
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, read_settings
from slime_plugins.rollout_buffer.generator.android_world_generator import AndroidWorldGenerator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.android_world_expert import expert_replies, turn_of
from tests.bad_adb import make_adb, set_devices
from tests.demo_tokens import tokenizer
from tests.episode_requests import phone_episode
from tests.integration.ray_processes import LOCAL_RAY, ON_RAY, pool_at, token_in
from tests.memory_eater import BY_FILE
from tests.processes import descendants, is_alive, write_program
from tests.waiting import until, wait_until

pytestmark = [*ON_RAY, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
TASK = "SystemWifiTurnOn"
QUICK: dict[str, Any] = {"num_workers": 2, "lease_timeout_s": 2}
CLICK = Action(kind=ActionKind.CLICK, point=(1, 1))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a local Ray, which must end when its parent is killed."""
    folder = tmp_path_factory.mktemp("ray")
    address_file = folder / "address"
    command = [*LOCAL_RAY, "--num-cpus", "2", "--address-file", str(address_file)]
    starts = [sys.executable, "-c", f"import subprocess; subprocess.run({command})"]
    with token_in(folder):
        parent = ChildProcess("parent of Ray", starts, log_file=folder / "ray.log")
        try:
            wait_until(address_file.exists, 120, "the start of Ray")
            yield address_file.read_text(encoding="utf-8")
        finally:
            below = descendants(parent.pid)
            assert below
            os.kill(parent.pid, signal.SIGKILL)
            wait_until(lambda: not any(map(is_alive, below)), 60, "the end of Ray")
            assert parent.exit_code() == -signal.SIGKILL
            assert not address_file.exists()


def kill_manager() -> None:
    ray = importlib.import_module("ray")
    ray.kill(ray.get_actor(MANAGER_NAME, namespace=NAMESPACE), no_restart=False)


async def test_episodes_play_at_once_on_devices_in_other_processes(cluster: str) -> None:
    pids: set[str] = set()

    async with pool_at(cluster, **QUICK) as pool:

        async def episode(number: int) -> float:
            async with await pool.acquire() as device:
                observation = await device.reset("Solved", number)
                assert observation.goal == f"Play Solved number {number}."
                pids.add(observation.details["pid"])
                await device.step(CLICK)
                return await device.score()

        assert await asyncio.gather(*(episode(number) for number in range(100))) == [1.0] * 100
        counters = await pool.counters()
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert sum(device["episodes"] for device in counters) >= 98


async def test_the_next_runner_finds_the_same_devices(cluster: str) -> None:
    seen = []
    for owner in ("first", "second"):
        async with pool_at(cluster, owner, **QUICK) as pool, await pool.acquire() as one, await pool.acquire() as other:
            seen.append({(await device.reset("Solved", 0)).details["pid"] for device in (one, other)})
    assert seen[0] == seen[1]


async def test_a_worker_that_dies_costs_one_attempt_and_is_replaced(cluster: str) -> None:
    async with pool_at(cluster, **QUICK) as pool:
        async with await pool.acquire() as device:
            await device.reset("Exit", 0)
            with pytest.raises(DeviceError, match="a device worker or the device manager is gone"):
                await device.step(CLICK)
            lost = device.device_id
        async with await pool.acquire() as one, await pool.acquire() as other:
            assert {one.device_id, other.device_id} == {"device-0", "device-1"}
            for device in (one, other):
                await device.reset("Solved", 0)
            counters = {entry["device_id"]: entry for entry in await pool.counters()}
    assert counters[lost]["failures"]["died"] == 1
    assert counters[lost]["replacements"] == 1


async def test_a_hung_worker_is_killed_and_replaced(cluster: str) -> None:
    async with pool_at(cluster, num_workers=1, lease_timeout_s=2, step_timeout_s=1) as pool:
        async with await pool.acquire() as device:
            hung = (await device.reset("Hang", 0)).details["pid"]
            with pytest.raises(DeviceError, match="did not finish"):
                await device.step(CLICK)
        async with await pool.acquire() as device:
            assert (await device.reset("Solved", 0)).details["pid"] != hung
        assert not is_alive(int(hung))


VICTIM = (
    "import asyncio, sys\n"
    "from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings\n"
    "from slime_plugins.rollout_buffer.devices.ray_cluster.pool import RayDevicePool\n"
    "async def main():\n"
    "    settings = DevicePoolSettings.model_validate_json(sys.argv[2])\n"
    "    pool = RayDevicePool(settings, ray_address=sys.argv[1], owner='victim')\n"
    "    await pool.start()\n"
    "    held = [await pool.acquire() for _ in range(settings.num_workers)]\n"
    "    sys.stdout.write('holding\\n')\n"
    "    sys.stdout.flush()\n"
    "    await asyncio.sleep(600)\n"
    "asyncio.run(main())\n"
)


def start_victim(address: str) -> subprocess.Popen[bytes]:
    """Starts a runner in a process of its own that holds every device and does nothing."""
    settings = DevicePoolSettings.model_validate({"kind": ADDRESS} | QUICK)
    command = [sys.executable, "-c", VICTIM, address, settings.model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def test_what_a_killed_runner_held_comes_back_when_its_lease_ends(cluster: str) -> None:
    with start_victim(cluster) as victim:
        try:
            assert victim.stdout is not None
            assert await asyncio.to_thread(victim.stdout.readline) == b"holding\n"
            async with pool_at(cluster, **QUICK, acquire_timeout_s=30) as pool:
                waiting = asyncio.create_task(pool.acquire())
                await asyncio.sleep(2.5)
                assert not waiting.done(), "a living runner lost its lease"
                victim.send_signal(signal.SIGKILL)
                async with await waiting as device:
                    await device.reset("Solved", 0)
        finally:
            victim.kill()  # else the devices would be missing in the tests after this one


async def test_a_manager_that_dies_is_started_anew_with_fresh_devices(cluster: str) -> None:
    began = asyncio.get_running_loop().create_future()

    async def episode() -> None:
        async with await pool.acquire() as device:
            began.set_result((await device.reset("Solved", 0)).details["pid"])
            await asyncio.sleep(60)

    async with pool_at(cluster, **QUICK) as pool:
        playing = asyncio.create_task(episode())
        before = await began
        kill_manager()
        async with await pool.acquire() as other:
            assert (await other.reset("Solved", 0)).details["pid"] != before
        with pytest.raises(DeviceError):
            await playing
        await until(lambda: not is_alive(int(before)))


def test_doctor_examines_every_node_of_a_cluster_and_names_one_that_does_not_answer(
    cluster: str, tmp_path: Path
) -> None:
    emulators = AndroidWorldSettings(
        device="android_world", num_workers=3, resources_per_worker=WorkerResources(num_cpus=1), adb_path="/no/adb"
    )
    examination = Examination(settings=emulators, data_dir=tmp_path, ray_address=cluster)
    findings = {finding.name.rpartition(": ")[2]: finding.detail for finding in examine(examination)}
    assert (findings["devices"], findings["platform-tools"]) == ("room for 2", "no program at /no/adb")
    assert findings["room for the devices"] == "2 of 3 devices fit on the nodes at once"
    silent, _ = examine_nodes(cluster, emulators, 0.0)
    assert (silent.name.startswith("node "), silent.detail) == (True, "did not answer within 0 s")


async def test_a_node_short_of_memory_loses_one_device_with_that_reason_and_the_others_play_on(
    cluster: str, tmp_path: Path
) -> None:
    reading = tmp_path / "used_share"
    reading.write_text("0.5")
    reserved = {"num_cpus": 0.1, "memory": 1_000_000}
    options = {"reading": str(reading)}
    began, played = asyncio.Semaphore(0), asyncio.Event()

    async def episode(pool: RayDevicePool) -> None:
        async with await pool.acquire() as device:
            await device.reset("Solved", 0)
            began.release()
            await played.wait()
            await device.score()

    own: dict[str, Any] = {
        "kind": BY_FILE,
        "device_options": options,
        "resources_per_worker": reserved,
        "farm": "memory",
    }
    async with pool_at(cluster, **QUICK, **own, boot_pause_s=1) as pool:
        episodes = [asyncio.create_task(episode(pool)) for _ in range(2)]
        for _ in episodes:
            await began.acquire()
        reading.write_text("0.97")
        (lost,), (other,) = await asyncio.wait(episodes, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(DeviceError, match="the node's memory is 97% in use, and Ray kills workers above 95%"):
            await lost
        async with await pool.acquire():  # the lost one has booted again
            assert not other.done()
            played.set()
            await other
            assert sorted(device["replacements"] for device in await pool.counters()) == [0, 1]


async def test_nobody_without_the_token_gets_in(cluster: str) -> None:
    program = "import ray, sys; ray.init(address=sys.argv[1]); sys.stderr.write('I am in')"
    intruder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cluster, env=without_token(), stdout=DEVNULL, stderr=PIPE
    )
    assert intruder.stderr is not None
    said = b""
    while b"uthentica" not in said:  # it would go on trying for a while
        said = await intruder.stderr.readline()
        assert b"I am in" not in said
        assert said, "the process ended without an authentication error"
    intruder.kill()
    await intruder.communicate()


def without_token() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}


def test_no_cluster_is_started_without_a_token(tmp_path: Path) -> None:
    command = [*LOCAL_RAY, "--address-file", str(tmp_path / "address")]
    done = subprocess.run(command, env=without_token(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "RAY_AUTH_TOKEN_PATH must name a file" in done.stderr


async def test_simulated_phones_play_whole_episodes_in_their_workers(cluster: str) -> None:
    phones = AndroidWorldSettings(screenshot_max_pixels=100_000, lease_timeout_s=2).for_devices()
    async with pool_at(cluster, **phones.model_dump()) as pool:
        generator = AndroidWorldGenerator(pool)
        engine = FakeEngine(expert, tokenizer=tokenizer)
        await generator.start(GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=4))
        played = await asyncio.gather(*(generator.play(phone_episode(TASK, 0, uid=TASK)) for _ in range(4)))
        assert all(trajectory.extra_info["success"] for trajectory in played)
        assert {trajectory.extra_info["device_id"] for trajectory in played} <= {"device-0", "device-1"}
        assert all(trajectory.images[0].data.startswith(b"\x89PNG") for trajectory in played)


def expert(request: GenerateRequest) -> str:
    return expert_replies(request.session_id, 0)[turn_of(request)]


async def test_attached_devices_play_in_workers_and_one_that_drops_is_connected_again(
    cluster: str, tmp_path: Path
) -> None:
    python = write_program(tmp_path / "python", f'cd {ROOT}\nexec {sys.executable} -m tests.adb_phone "$@"')
    addresses = ("10.0.0.7:5555", "10.0.0.8:5555")
    set_devices(tmp_path, **{address: {"state": "device"} for address in addresses})
    inventory = tmp_path / "phones.yaml"
    inventory.write_text(
        "devices:\n" + "".join(f"  phone{n}: {{connect: '{at}', restore: apps}}\n" for n, at in enumerate(addresses))
    )
    config = tmp_path / "farm.yaml"
    config.write_text(
        f"device: attached\ndevice_options: {{inventory: {inventory}}}\nadb_path: {make_adb(tmp_path, ROOT)}\n"
        f"android_world_python: {python}\nresources_per_worker: {{num_cpus: 0.1, memory: 0}}\n"
    )
    settings = read_settings(config).for_devices().model_copy(update={"farm": "attached"})
    inventory.unlink()  # other nodes do not have it
    async with pool_at(cluster, **settings.model_dump()) as pool:
        for state in ("device", ""):
            async with await pool.acquire() as one, await pool.acquire() as other:  # both have booted, or are checked
                set_devices(tmp_path, **{address: {"state": state, "comes_back": True} for address in addresses})
                for device in (one, other):
                    assert (await device.reset("Tap", 0)).goal == "Tap for Tap."
                    await device.step(CLICK)
                    assert await device.score() == 1.0
        assert [entry["failures"] for entry in await pool.counters()] == [{}, {}]
