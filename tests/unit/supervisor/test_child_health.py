"""Who starts a server goes on when it answers, and otherwise learns why it does not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.supervisor.child_health import wait_until_healthy
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess

SLEEPER = "import time; time.sleep(60)"
NOBODY = "http://127.0.0.1:9/health"


class Recovering(BaseHTTPRequestHandler):
    """Answers 503 first, and 200 from the second request on."""

    asked = 0

    def do_GET(self) -> None:
        Recovering.asked += 1
        self.send_response(200 if Recovering.asked > 1 else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def recovering_url() -> Iterator[str]:
    Recovering.asked = 0
    with HTTPServer(("127.0.0.1", 0), Recovering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/health"
        server.shutdown()
        thread.join()


def child(tmp_path: Path, program: str) -> ChildProcess:
    return ChildProcess("engine", [sys.executable, "-c", program], log_file=tmp_path / "engine.log")


def test_one_that_is_not_well_yet_is_waited_for(tmp_path: Path, recovering_url: str) -> None:
    running = child(tmp_path, SLEEPER)
    try:
        wait_until_healthy(running, recovering_url, timeout_s=60, error=UnavailableError)
    finally:
        running.kill()
    assert Recovering.asked == 2


def test_one_that_ended_is_not_waited_for_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    ended = child(tmp_path, "raise SystemExit('no such model')")
    with pytest.raises(UnavailableError, match=r"the engine ended while starting:\n.*no such model"):
        wait_until_healthy(ended, NOBODY, timeout_s=60, error=UnavailableError)


def test_one_that_never_answers_is_given_up_with_the_name_of_its_log(tmp_path: Path) -> None:
    silent = child(tmp_path, SLEEPER)
    try:
        with pytest.raises(UnavailableError, match=r"the engine does not answer at .*; its log is .*engine\.log"):
            wait_until_healthy(silent, NOBODY, timeout_s=0.3, error=UnavailableError)
    finally:
        silent.kill()
