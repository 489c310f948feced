"""``rollout-buffer serve`` while one of its processes is stopped (SIGSTOP): noticed, replaced, holding up nobody."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest
import requests

from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.integration.conftest import BufferProcess, answers, wait_until
from tests.support import written

pytestmark = pytest.mark.timeout(240)

StartBuffer = Callable[..., BufferProcess]


def child(buffer: BufferProcess, word: str) -> int:
    def find() -> int | None:
        return next((pid for pid, command in buffer.children().items() if word in command), None)

    found: int = wait_until(find, 60, f"a process of {word}")
    return found


def health(buffer: BufferProcess) -> tuple[int, dict[str, object]]:
    reply = requests.get(f"{buffer.url}/health", timeout=10)
    report: dict[str, object] = reply.json()
    return reply.status_code, report


def reason_of(buffer: BufferProcess) -> str:
    """What health says is not well; nothing while nobody answers."""
    try:
        return str(health(buffer)[1]["reason"])
    except requests.RequestException:
        return ""


@pytest.mark.large
@pytest.mark.slow
def test_a_gateway_and_a_gunicorn_that_are_stopped_are_replaced_and_nothing_else_is(start_buffer: StartBuffer) -> None:
    port = free_port()
    buffer = start_buffer("--gateway-port", str(port), "--service-heartbeat-timeout-s", "4")
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60, "start of the gateway")
    gateway, server = child(buffer, "gateway.main"), child(buffer, "gunicorn")
    os.kill(gateway, signal.SIGSTOP)
    wait_until(lambda: child(buffer, "gateway.main") != gateway, 60, "another gateway")
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60, "its first answer")
    assert child(buffer, "gunicorn") == server
    os.kill(server, signal.SIGSTOP)
    wait_until(lambda: child(buffer, "gunicorn") != server, 60, "another gunicorn")
    wait_until(lambda: answers(f"{buffer.url}/health"), 60, "its first answer")
    log = (buffer.folder / "serve.log").read_text()
    assert "gateway: it has sent no heartbeat for 4 s" in log
    assert "server: it has sent no heartbeat for 4 s" in log


@pytest.mark.slow
def test_while_the_supervisor_is_stopped_health_says_so_and_data_goes_on(start_buffer: StartBuffer) -> None:
    buffer = start_buffer()
    buffer.client.start_rollout({"task_type": "external", "job_id": "j", "num_repeat_per_sample": 1})
    assert health(buffer)[1]["reason"] is None
    os.kill(buffer.process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: health(buffer)[0] == 503, 60, "a health that says so")
        assert "it is frozen or has exited" in str(health(buffer)[1]["reason"])
        buffer.client.write([written("u", "i")], job_id="j")
        assert [item.uid for item in buffer.client.get_rollout_data(job_id="j").items] == ["u"]
    finally:
        os.kill(buffer.process.pid, signal.SIGCONT)
    wait_until(lambda: health(buffer)[0] == 200, 60, "a health that is well again")


@pytest.mark.slow
def test_a_generator_file_that_hangs_is_named_meanwhile_and_serve_stops_at_once(start_buffer: StartBuffer) -> None:
    buffer = start_buffer()
    folder = buffer.folder / "generators"
    folder.mkdir()
    (folder / "hangs.py").write_text("import time\ntime.sleep(1000)\n")
    buffer.stop()
    command = [
        sys.executable, "-m", "slime_plugins.rollout_buffer", "serve", "--port", str(buffer.port),
        "--data-dir", str(buffer.folder / "data"), "--generator-dir", str(folder),
    ]  # fmt: skip
    process = ChildProcess("buffer", command, log_file=buffer.folder / "hanging.log")
    try:
        wait_until(lambda: "hangs.py has been loading" in reason_of(buffer), 60, "a health that names it")
        assert health(buffer)[0] == 503
    finally:
        process.stop(40)
    assert process.exit_code() == 0
