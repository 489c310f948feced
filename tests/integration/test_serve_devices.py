"""``serve`` with devices: trainings and evaluations on the same phones, a killed runner, and what is seen of it."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.integration.conftest import BufferProcess
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.large,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(600),
]

StartBuffer = Callable[..., BufferProcess]
TASKS = ("SystemWifiTurnOn", "SystemBluetoothTurnOn")


def instances(lines: int) -> list[dict[str, Any]]:
    return [
        {"instance_id": f"{TASKS[n % 2]}-{n}", "metadata": {"task_name": TASKS[n % 2], "params_idx": n % 20}}
        for n in range(lines)
    ]


def start_job(buffer: BufferProcess, engine_port: int, job_id: str, lines: int, *, evaluation: bool = False) -> None:
    payload = {
        "task_type": "android_world",
        "job_id": job_id,
        "instances": instances(lines),
        "remote_engine_url": f"http://127.0.0.1:{engine_port}",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "num_repeat_per_sample": 2,
        "num_process": 16,
        "max_tokens": 512,
        "evaluation": evaluation,
        "android_world": {"max_turns": 4},
    }
    buffer.client.start_rollout(payload)


def devices_of(buffer: BufferProcess, job_id: str) -> dict[str, Any]:
    return buffer.client.job(job_id).get("devices") or {}


def holders(buffer: BufferProcess, job_id: str) -> set[str]:
    """The jobs that hold devices, as the job's runner sees it."""
    found = (device["leased_by"] for device in devices_of(buffer, job_id).get("devices", []))
    return {holder.rpartition("-")[0] for holder in found if holder}


def test_jobs_share_phones_outlive_a_killed_runner_and_show_their_devices(
    start_buffer: StartBuffer, stand_in_engine: int, tmp_path: Path
) -> None:
    config = tmp_path / "farm.yaml"
    config.write_text("lease_timeout_s: 10\nscreenshot_max_pixels: 100000\nspare_devices: 5\n", encoding="utf-8")
    buffer = start_buffer(
        "--ray-num-cpus", "2",
        "--android-config", str(config),
        "--android", "device=simulated",
        "--android", "num_workers=2",
        "--android", "spare_devices=1",
        environment={"ROLLOUT_BUFFER_ANDROID_WORLD__SIMULATED_LATENCY_S": "0.2", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    start_job(buffer, stand_in_engine, "first", 8)
    wait_until(lambda: holders(buffer, "first") == {"first"}, 240, "the first job's episodes")
    assert len(devices_of(buffer, "first")["devices"]) == 3
    start_job(buffer, stand_in_engine, "second", 2)
    start_job(buffer, stand_in_engine, "evaluation", 2, evaluation=True)

    os.kill(buffer.child("--job-key 1 "), signal.SIGKILL)
    wait_until(lambda: buffer.client.job("evaluation")["state"] == "finished", 240, "the evaluation's end")
    for job_id, slots in (("first", 16), ("second", 4), ("evaluation", 4)):
        wait_until(lambda job_id=job_id: buffer.client.job(job_id)["state"] == "finished", 400, f"end of {job_id}")  # type: ignore[misc]  # mypy cannot type a lambda with a default
        accounting = buffer.client.job(job_id)["slots"]
        assert (
            accounting["submitted"]
            == slots
            == sum(count for state, count in accounting.items() if state != "submitted")
        )
        assert accounting["open"] == accounting["failed"] == 0
    shown = devices_of(buffer, "first")
    failures: dict[str, int] = {}
    for device in shown["devices"]:
        for kind, count in device["failures"].items():
            failures[kind] = failures.get(kind, 0) + count
    assert failures.get("lease_expired", 0) >= 1, failures
    assert sum(device["episodes"] for device in shown["devices"]) >= 22
    assert all(device["step_s_p50"] >= 0.2 for device in shown["devices"])
    page = requests.get(f"{buffer.url}/metrics", timeout=30).text
    assert 'rollout_buffer_device_episodes{device_id="device-2",pool="ray"}' in page
