"""The gateway as its users run it: a child of serve, or alone; an agent's client; a scripted engine; crashes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from tests.integration.conftest import ROLLOUT_BUFFER, BufferProcess, running
from tests.processes import children_of
from tests.waiting import wait_until

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
    """An agent with the official client, whose replies are streamed."""
    import openai

    with openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        messages: list[Any] = [{"role": "user", "content": opened["instance"]["question"]}]
        for _ in range(turns):
            with client.chat.completions.stream(model="policy", messages=messages) as stream:
                said = stream.get_final_completion().choices[0].message.content
            assert said
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]


class CountingEngine(ThreadingHTTPServer):
    """Never samples the same ids twice, and remembers what it sampled last after each prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _GenerateHandler)
        self.sampled = 0
        self.times_after = Counter[tuple[int, ...]]()
        self.last_after: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed gateway cuts its connections."""

    def generate(self, prompt: Sequence[int]) -> bytes:
        with self.lock:
            self.sampled += 1
            ids = [1000 + self.sampled // 100, 1000 + self.sampled % 100]
            self.times_after[tuple(prompt)] += 1
            self.last_after[tuple(prompt)] = tuple(ids)
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
        }
        return json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()


class _GenerateHandler(BaseHTTPRequestHandler):
    server: CountingEngine
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.05)
        self.answer(200, self.server.generate(body["input_ids"]) if self.path == "/generate" else b"{}")

    def do_GET(self) -> None:
        self.answer(404, b"{}")

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def counting_engine() -> Iterator[CountingEngine]:
    engine = CountingEngine()
    thread = threading.Thread(target=engine.serve_forever)
    thread.start()
    yield engine
    engine.shutdown()
    thread.join()
    engine.server_close()


def play_until(opened: dict[str, Any], is_over: threading.Event) -> list[str]:
    """An agent that knows of nothing but its client's two retries; returns what it was told."""
    import openai

    messages: list[Any] = []
    with openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        while not is_over.is_set():
            messages.append({"role": "user", "content": f"{opened['slot']}: {len(messages)}"})
            said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            messages.append({"role": "assistant", "content": said})
    return [message["content"] for message in messages[1::2]]


def wait_for_turns(engine: CountingEngine) -> None:
    before = engine.sampled
    wait_until(lambda: engine.sampled >= before + 12, what="turns")


def test_sessions_live_through_kills_and_no_turn_that_was_answered_is_lost_or_sampled_again(
    start_buffer: Callable[..., BufferProcess], counting_engine: CountingEngine
) -> None:
    buffer = start_buffer("--gateway-workers", "2", gateway=True, held=True)
    gateway = buffer.gateway_url
    job_id = start_job(buffer, counting_engine.server_port, n=4)
    sessions = [open_session(gateway, job_id) for _ in range(4)]
    is_over = threading.Event()
    with ThreadPoolExecutor(len(sessions)) as pool:
        playing = [pool.submit(play_until, opened, is_over) for opened in sessions]
        try:
            wait_for_turns(counting_engine)
            for _ in range(2):
                os.kill(buffer.child("gateway.main"), signal.SIGKILL)
                wait_for_turns(counting_engine)
            buffer.kill_supervisor()
            with ThreadPoolExecutor(1) as waiting:
                asked = waiting.submit(requests.get, f"{buffer.url}/jobs", timeout=60)
                time.sleep(0.5)
                buffer.start()
                assert asked.result().ok, "the connection waits for the next server"
            wait_for_turns(counting_engine)
        finally:
            is_over.set()
        told = [one.result(60) for one in playing]
    for at, opened in enumerate(sessions):
        closed = requests.post(f"{gateway}/sessions/{opened['session_id']}/close", json={"reward": at % 2}, timeout=30)
        assert closed.json()["status"] == "stored"
    items = {item.uid: item for item in buffer.client.get_rollout_data(job_id=job_id).items}
    assert [items[opened["session_id"]].reward for opened in sessions] == [0.0, 1.0, 0.0, 1.0]
    assert {item.weight_version for item in items.values()} == {1}
    wait_until(lambda: buffer.client.job(job_id)["state"] == "finished", what="the end of the job")
    tokenizer = load_tokenizer(str(DEMO_TOKENIZER_PATH))
    repeats = 0
    for opened, heard in zip(sessions, told, strict=True):
        generations = items[opened["session_id"]].generations
        assert [tokenizer.decode(one.output_ids) for one in generations] == heard
        assert len(pack_training_rows(generations)) == 1
        last = [counting_engine.last_after[tuple(one.prompt_ids)] for one in generations]
        assert [tuple(one.output_ids) for one in generations] == last, "a stored turn was sampled again"
        repeats += sum(counting_engine.times_after[tuple(one.prompt_ids)] - 1 for one in generations)
    assert repeats <= 3 * len(sessions), "more turns were repeated than the three kills interrupted"


@pytest.fixture
def alone(served: BufferProcess, tmp_path: Path) -> Iterator[tuple[BufferProcess, str, ChildProcess]]:
    port = free_port()
    command = [*ROLLOUT_BUFFER, "gateway", "--data-dir", str(served.folder / "data")]
    command += ["--idle-timeout-s", "3", "--workers", "2"]
    with running("gateway", port, command, tmp_path) as process:
        yield served, f"http://127.0.0.1:{port}", process


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
    assert [path for path in (buffer.folder / "data").rglob("*") if path.stat().st_mode & 0o077] == []
    second = ChildProcess(
        "second",
        [*ROLLOUT_BUFFER, "gateway", "--port", str(free_port()), "--data-dir", str(buffer.folder / "data")],
        log_file=tmp_path / "second.log",
    )
    assert wait_until(lambda: second.exit_code() is not None and second.exit_code(), what="its end") == 2
    assert "another gateway" in second.log_tail()
    for pid in children_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    assert requests.get(f"{gateway}/health", timeout=60).ok, "the connection waits for the next process"
    process.stop(20)
    assert process.exit_code() == 0
