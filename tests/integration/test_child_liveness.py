"""``rollout-buffer serve`` while one of its processes is stopped (SIGSTOP): noticed, replaced, holding up nobody."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.integration.conftest import ROLLOUT_BUFFER, BufferProcess, answers
from tests.support import written
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)

StartBuffer = Callable[..., BufferProcess]


def health(buffer: BufferProcess) -> tuple[int, dict[str, object]]:
    reply = requests.get(f"{buffer.url}/health", timeout=10)
    report: dict[str, object] = reply.json()
    return reply.status_code, report


@pytest.mark.large
@pytest.mark.slow
def test_a_gateway_and_a_gunicorn_that_are_stopped_are_replaced_and_nothing_else_is(start_buffer: StartBuffer) -> None:
    buffer = start_buffer("--service-heartbeat-timeout-s", "4", gateway=True)
    gateway, server = buffer.child("gateway.main"), buffer.child("-m gunicorn")
    os.kill(gateway, signal.SIGSTOP)
    wait_until(lambda: buffer.child("gateway.main") != gateway, 60, "another gateway")
    wait_until(lambda: answers(f"{buffer.gateway_url}/health"), 60, "its first answer")
    assert buffer.child("-m gunicorn") == server
    os.kill(server, signal.SIGSTOP)
    wait_until(lambda: buffer.child("-m gunicorn") != server, 60, "another gunicorn")
    wait_until(lambda: answers(f"{buffer.url}/health"), 60, "its first answer")
    log = (buffer.folder / "serve.log").read_text()
    assert "gateway: it has sent no heartbeat for 4 s" in log
    assert "server: it has sent no heartbeat for 4 s" in log


def age_heartbeats(pid: int, seconds: float) -> None:
    """Makes all heartbeats in a process's shared memory that much older."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:heartbeat" in str(link.readlink()) and (page := link.read_text().rstrip()):
            beat = json.loads(page)
            beat["at"] -= seconds
            with link.open("r+") as memory:
                memory.write(json.dumps(beat).ljust(len(page)))


def test_while_the_supervisor_is_stopped_health_says_so_and_data_goes_on(start_buffer: StartBuffer) -> None:
    buffer = start_buffer()
    buffer.client.start_rollout({"task_type": "external", "job_id": "j", "num_repeat_per_sample": 1})
    assert health(buffer)[1]["reason"] is None
    os.kill(buffer.process.pid, signal.SIGSTOP)
    try:
        age_heartbeats(buffer.process.pid, SUPERVISOR.silent_after_s)
        wait_until(lambda: health(buffer)[0] == 503, what="a health that says so")
        assert "it is frozen or has exited" in str(health(buffer)[1]["reason"])
        buffer.client.write([written("u", "i")], job_id="j")
        assert [item.uid for item in buffer.client.get_rollout_data(job_id="j").items] == ["u"]
    finally:
        os.kill(buffer.process.pid, signal.SIGCONT)
    wait_until(lambda: health(buffer)[0] == 200, 60, "a health that is well again")


def test_a_generator_file_that_hangs_is_named_meanwhile_and_serve_stops_at_once(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    port = free_port()
    command = [
        *ROLLOUT_BUFFER, "serve", "--port", str(port), "--data-dir", str(tmp_path / "data"),
        "--generator-dir", str(tmp_path),
    ]  # fmt: skip
    process = ChildProcess("buffer", command, log_file=tmp_path / "hanging.log")

    def reason() -> str:
        try:
            reply = requests.get(f"http://127.0.0.1:{port}/health", timeout=10)
        except requests.RequestException:
            return ""
        assert reply.status_code == 503
        return str(reply.json()["reason"])

    try:
        wait_until(lambda: "hangs.py has been loading" in reason(), 60, "a health that names it")
    finally:
        process.stop(40)
    assert process.exit_code() == 0
