"""The device pool on a Ray cluster of several nodes: where workers land, and what the death of a node costs.

The nodes are processes on this machine, each with a resource called ``phone``; the head has none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import RayDevicePool
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.state.runner_reports import devices_of_job
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.types import EpisodeRequest, Trajectory
from tests.integration.ray_processes import ON_RAY, RayProcess, local_ray, phones, pool_at
from tests.support import plugin_of, slot_counts, start_played, trajectory

pytestmark = [*ON_RAY, pytest.mark.large, pytest.mark.timeout(600)]

CLICK = Action(kind=ActionKind.CLICK, point=(1, 1))
A_PHONE = {"num_cpus": 0.1, "custom": {"phone": 1}}
FOUR: dict[str, Any] = {"num_workers": 4, "lease_timeout_s": 30, "boot_timeout_s": 120, "resources_per_worker": A_PHONE}


def start_node(address: str, log: Path) -> RayProcess:
    """One more node of the cluster, with two phones."""
    return RayProcess(log, f"--address={address}", "--num-cpus=2", "--node-ip-address=127.0.0.1", *phones(2))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster whose head offers no phone."""
    with local_ray(tmp_path_factory.mktemp("nodes")) as address:
        yield address


@pytest.fixture(scope="module")
def first_node(head: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayProcess]:
    node = start_node(head, tmp_path_factory.mktemp("first") / "log")
    yield node
    node.kill()


async def until_ready(pool: RayDevicePool, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + 240
    while True:
        ready = [device for device in await pool.counters() if device["state"] == "ready"]
        if len(ready) == count:
            return ready
        assert time.monotonic() < deadline, await pool.counters()
        await asyncio.sleep(0.2)


def nodes_of(devices: list[dict[str, Any]]) -> Counter[str]:
    return Counter(device["place"].split(" on ")[0] for device in devices)


# ---- where workers land ----------------------------------------------------------------------------------------------


async def test_workers_land_only_where_their_resource_is_and_the_rest_wait_and_say_why(
    head: str, first_node: RayProcess
) -> None:
    async with pool_at(head, **FOUR | {"boot_timeout_s": 60}) as pool:
        ready = await until_ready(pool, 2)
        assert list(nodes_of(ready).values()) == [2]
        deadline = time.monotonic() + 120
        while not any("is full" in device["last_error"] for device in await pool.counters()):
            assert time.monotonic() < deadline, await pool.counters()
            await asyncio.sleep(0.2)


# ---- the death of a node ---------------------------------------------------------------------------------------------


class PlaysOnPhones:
    """A generator without a policy: three slow actions on a phone, then its score."""

    def __init__(self, pool: RayDevicePool, playing: asyncio.Event) -> None:
        self._pool = pool
        self._playing = playing

    async def start(self, context: GeneratorContext) -> None:
        """The pool is up already."""

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        async with await self._pool.acquire() as device:
            await device.reset("Slow", 0)
            self._playing.set()
            for _ in range(3):
                await device.step(CLICK)
            reward = await device.score()
        return trajectory(episode.uid, episode.instance.instance_id, reward)

    async def devices(self) -> Mapping[str, Any]:
        return await self._pool.snapshot()

    async def close(self) -> None:
        """The pool stays up for the test to look at."""


async def test_a_nodes_death_costs_its_attempts_and_a_new_node_takes_over(
    head: str, first_node: RayProcess, tmp_path: Path
) -> None:
    second = await asyncio.to_thread(start_node, head, tmp_path / "second.log")
    third: RayProcess | None = None
    buffer = Buffer(Store(tmp_path / "data"))
    try:
        async with pool_at(head, **FOUR) as pool:
            assert sorted(nodes_of(await until_ready(pool, 4)).values()) == [2, 2]
            playing = asyncio.Event()
            generator = PlaysOnPhones(pool, playing)
            plugin = plugin_of("phones", lambda: generator, needs_ray=True)
            names = [str(number) for number in range(12)]
            # As an evaluation every group is kept, also those with equal rewards: every slot can be counted.
            job = start_played(
                buffer, names, task_type="phones", job_id="job", num_process=8, max_attempts=8, evaluation=True
            )
            running = asyncio.create_task(
                JobRunner(buffer, job.key, plugin, buffer_url="http://127.0.0.1:9", ray_address=head).run()
            )
            await playing.wait()
            second.kill()
            await asyncio.sleep(5)
            third = await asyncio.to_thread(start_node, head, tmp_path / "third.log")
            await asyncio.wait_for(running, 400)
            described = describe_job(buffer.store, buffer.job("job"))
            assert described["state"] == "finished"
            counts = slot_counts(buffer, buffer.job("job"))
            assert (counts["submitted"], counts["ready"]) == (24, 24)
            assert 1 <= described["attempts"]["failed:device"] <= 4
            report = devices_of_job(buffer.store, job.key)
            assert report is not None
            assert sum(device["failures"].get("died", 0) for device in report["devices"]) >= 1
            assert sorted(nodes_of(await until_ready(pool, 4)).values()) == [2, 2]
    finally:
        second.kill()
        if third is not None:
            third.kill()
        buffer.store.close()
