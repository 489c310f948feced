"""The gateway as its users run it: a child of serve, or alone; an agent's client; a scripted engine; crashes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.integration.conftest import BufferProcess, answers, wait_until

pytestmark = pytest.mark.timeout(180)


def start_job(buffer: BufferProcess, engine_port: int, n: int = 1, count: int = 1) -> str:
    """Starts a job that takes sessions and returns its id."""
    payload = {
        "task_type": "external",
        "num_repeat_per_sample": n,
        "remote_engine_url": f"http://127.0.0.1:{engine_port}",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "max_tokens": 200,
        "instances": [{"instance_id": f"sum-{i}", "question": f"What is {i} + {i}?"} for i in range(count)],
    }
    return buffer.client.start_rollout(payload).job_id


def open_session(gateway: str, job_id: str) -> dict[str, Any]:
    reply = requests.post(f"{gateway}/sessions", json={"job_id": job_id}, timeout=30)
    assert reply.status_code == 200, reply.text
    opened: dict[str, Any] = reply.json()
    return opened


def play(opened: dict[str, Any], turns: int = 2) -> None:
    """An agent of two turns, with the official client, streamed and not."""
    with openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        messages: list[Any] = [{"role": "user", "content": opened["instance"]["question"]}]
        for _ in range(turns):
            with client.chat.completions.stream(model="policy", messages=messages) as stream:
                said = stream.get_final_completion().choices[0].message.content
            assert said
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BufferProcess, str]]:
    port = free_port()
    buffer = BufferProcess(tmp_path_factory.mktemp("gateway"), "--gateway-port", str(port))
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: answers(f"{url}/health"), what="start of the gateway")
    yield buffer, url
    buffer.stop()


def gateway_pid(buffer: BufferProcess) -> int:
    found: int = wait_until(
        lambda: next((pid for pid, command in buffer.children().items() if "gateway.main" in command), None),
        what="a gateway",
    )
    return found


def test_sessions_become_groups_that_a_trainer_polls(serving: tuple[BufferProcess, str], stand_in_engine: int) -> None:
    buffer, gateway = serving
    job_id = start_job(buffer, stand_in_engine, n=2, count=2)
    for at in range(4):
        opened = open_session(gateway, job_id)
        play(opened)
        closed = requests.post(f"{gateway}/sessions/{opened['session_id']}/close", json={"reward": at % 2}, timeout=30)
        assert closed.json()["status"] == "stored"
    data = buffer.client.get_rollout_data(job_id=job_id)
    assert [item.reward for item in data.items] == [0.0, 1.0, 0.0, 1.0]
    for item in data.items:
        (row,) = pack_training_rows(item.generations)
        assert sum(row.loss_mask) == sum(len(generation.output_ids) for generation in item.generations)
        assert item.weight_version is not None
    wait_until(lambda: buffer.client.job(job_id)["state"] == "finished", what="the end of the job")


def test_a_killed_gateway_comes_back_and_its_open_sessions_are_played_again(
    serving: tuple[BufferProcess, str], stand_in_engine: int
) -> None:
    buffer, gateway = serving
    job_id = start_job(buffer, stand_in_engine)
    opened = open_session(gateway, job_id)
    play(opened)
    pid = gateway_pid(buffer)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: answers(f"{gateway}/health") and gateway_pid(buffer) != pid, what="a new gateway")
    with openai.OpenAI(base_url=opened["base_url"], api_key="x", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="gateway_restarted") as caught:
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello?"}])
        assert caught.value.status_code == 410
    assert buffer.client.job(job_id)["attempts"]["given_up:gateway_restarted"] == 1
    again = open_session(gateway, job_id)
    assert again["attempt"] == 2
    play(again)
    requests.post(f"{gateway}/sessions/{again['session_id']}/close", json={"reward": 1}, timeout=30)
    (item,) = buffer.client.get_rollout_data(job_id=job_id).items
    assert item.uid == again["session_id"]


def test_a_taken_gateway_port_is_said_at_once(stand_in_engine: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(free_port())]
    command += ["--data-dir", str(tmp_path / "other"), "--gateway-port", str(stand_in_engine)]
    process = ChildProcess("serve", command, log_file=tmp_path / "taken.log")
    assert wait_until(lambda: process.exit_code() is not None and process.exit_code(), what="its end") == 2
    assert "--gateway-port" in process.log_tail()


@pytest.fixture
def alone(served: BufferProcess, tmp_path: Path) -> Iterator[tuple[BufferProcess, str, ChildProcess]]:
    buffer = served
    port = free_port()
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "gateway", "--port", str(port)]
    command += ["--data-dir", str(buffer.folder / "data"), "--idle-timeout-s", "1"]
    process = ChildProcess("gateway", command, log_file=tmp_path / "gateway.log")
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: answers(f"{url}/health"), what=f"start of the gateway\n{process.log_tail(20)}")
    yield buffer, url, process
    process.stop(20)


def test_a_gateway_alone_serves_the_same_data_and_expires_what_is_forgotten(
    alone: tuple[BufferProcess, str, ChildProcess], stand_in_engine: int, tmp_path: Path
) -> None:
    buffer, gateway, process = alone
    job_id = start_job(buffer, stand_in_engine)
    open_session(gateway, job_id)
    wait_until(
        lambda: buffer.client.job(job_id)["attempts"].get("failed:session_expired") == 1, what="the session's expiry"
    )
    opened = open_session(gateway, job_id)
    play(opened)
    requests.post(f"{gateway}/sessions/{opened['session_id']}/close", json={"reward": 1}, timeout=30)
    assert [item.uid for item in buffer.client.get_rollout_data(job_id=job_id).items] == [opened["session_id"]]
    second = ChildProcess(
        "second",
        [sys.executable, "-m", "slime_plugins.rollout_buffer", "gateway", "--port", str(free_port()),
         "--data-dir", str(buffer.folder / "data")],
        log_file=tmp_path / "second.log",
    )  # fmt: skip
    assert wait_until(lambda: second.exit_code() is not None and second.exit_code(), what="its end") == 2
    assert "another gateway" in second.log_tail()
    process.stop(20)
    assert process.exit_code() == 0
