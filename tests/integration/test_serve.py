"""``rollout-buffer serve`` as its users run it: processes, crashes, restarts, and a trainer on the other side."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.integration.conftest import BufferProcess
from tests.support import written
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

StartBuffer = Callable[..., BufferProcess]


def math_file(folder: Path, count: int) -> Path:
    path = folder / "math.jsonl"
    lines = [
        {
            "instance_id": f"sum-{i}",
            "prompt": [{"role": "user", "content": f"What is {i} + {i * 3}? Put the result in \\boxed{{}}."}],
            "label": str(i * 4),
        }
        for i in range(10, 10 + count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- crashes ---------------------------------------------------------------------------------------------------------


def poll_all(client: RolloutBufferClient, job_id: str, timeout_s: float = 90.0) -> list[str]:
    """Polls until the input is exhausted; returns every uid that came."""
    got: list[str] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        data = client.get_rollout_data(job_id=job_id, wait_s=2, lease_s=60)
        got += [item.uid for item in data.items]
        if data.delivery_id is not None:
            client.ack([data.delivery_id])
        if data.exhausted:
            return got
    raise AssertionError(f"not exhausted after {timeout_s} s: {client.job(job_id)}")


def start_math(buffer: BufferProcess, engine_port: int, count: int, **changes: Any) -> str:
    payload = {
        "task_type": "math",
        "input_file": str(math_file(buffer.folder, count)),
        "remote_engine_url": f"http://127.0.0.1:{engine_port}",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "num_repeat_per_sample": "2",
        "num_process": "4",
        "max_tokens": "256",
        "evaluation": True,  # groups with one reward are delivered as well: every slot can be counted
        **changes,
    }
    return buffer.client.start_rollout(payload).job_id


@pytest.mark.slow
def test_a_killed_runner_or_supervisor_is_replaced_and_nothing_is_lost_or_played_twice(
    start_buffer: StartBuffer, stand_in_engine: int
) -> None:
    buffer = start_buffer()
    job_id = start_math(buffer, stand_in_engine, 60)

    def kill_runner() -> None:
        os.kill(buffer.runner_pid(), signal.SIGKILL)

    for kill in (kill_runner, buffer.kill_supervisor):  # the latter sees that the children end
        seen = buffer.client.job(job_id)["outcomes"].get("completed", 0)
        wait_until(lambda seen=seen: buffer.client.job(job_id)["outcomes"].get("completed", 0) > seen + 10, 60)  # type: ignore[misc]  # mypy cannot type a lambda with a default
        kill()
    buffer.start()
    got = poll_all(buffer.client, job_id)
    assert len(got) == len(set(got)) == 120
    job = buffer.client.job(job_id)
    assert job["slots"]["delivered"] == 120
    assert job["attempts"]["finished"] == 120


def test_cancelling_ends_the_runner(served: BufferProcess, stand_in_engine: int) -> None:
    buffer = served
    job_id = start_math(buffer, stand_in_engine, 500)
    pid = buffer.runner_pid()
    assert buffer.client.cancel(job_id)["state"] == "cancelled"
    wait_until(lambda: pid not in buffer.children(), 30, "end of the runner")
    assert buffer.client.job(job_id)["slots"]["open"] == 0


# --- polling and serving ---------------------------------------------------------------------------------------------


def test_a_waiting_poll_gets_a_group_soon_after_it_is_complete(served: BufferProcess) -> None:
    buffer = served
    job_id = buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1}).job_id
    latencies = []
    for number in range(5):
        arrived: list[float] = []

        def wait_for_it(arrived: list[float] = arrived) -> None:
            assert buffer.client.get_rollout_data(job_id=job_id, wait_s=20).items
            arrived.append(time.monotonic())

        poller = threading.Thread(target=wait_for_it)
        poller.start()
        time.sleep(0.3)
        buffer.client.write([written(f"u{number}", f"i{number}")], job_id=job_id)
        complete = time.monotonic()
        poller.join(20)
        latencies.append(arrived[0] - complete)
    # Far above what is aimed for (tens of milliseconds), far below the wait: polls must be woken, not run out.
    assert sorted(latencies)[2] < 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--token-file", "/no/such/file"], "cannot be read"),
        (["--data-root", "/no/such/folder"], "is not an existing folder"),
        (["--workers", "0"], "workers"),
    ],
)
def test_a_server_that_may_not_start_says_why(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments, "--data-dir", str(tmp_path / "data")])
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
