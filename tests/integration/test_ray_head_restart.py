"""A Ray head that is killed and started again at its address: the runner joins the new cluster and plays on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.integration.ray_processes import ON_RAY, RayProcess, phones, pool_at, token_in

pytestmark = [*ON_RAY, pytest.mark.large, pytest.mark.timeout(300)]


async def test_a_runner_joins_a_restarted_head_again_and_waits_for_its_nodes(tmp_path: Path) -> None:
    with contextlib.ExitStack() as started:
        started.enter_context(token_in(tmp_path))

        async def start(name: str, *arguments: str) -> RayProcess:
            process = await asyncio.to_thread(RayProcess, tmp_path / name, *arguments)
            started.callback(process.kill)
            return process

        address = f"{importlib.import_module('ray.util').get_node_ip_address()}:{free_port()}"
        head_arguments = ["--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=1", "--include-dashboard=false"]
        head_arguments.append(f"--ray-client-server-port={free_port()}")
        head = await start("head", *head_arguments, *phones(1))
        resources = {"num_cpus": 0.1, "custom": {"phone": 1}}
        async with pool_at(address, num_workers=1, boot_timeout_s=120, resources_per_worker=resources) as pool:
            head.kill()
            await start("head", *head_arguments)
            waiting = asyncio.create_task(pool.acquire())
            await asyncio.sleep(10)  # the new head has no node with a phone yet
            await start("node", f"--address={address}", "--num-cpus=1", *phones(1))
            async with asyncio.timeout(120):
                async with await waiting as device:
                    assert (await device.reset("Solved", 0)).goal == "Play Solved number 0."
