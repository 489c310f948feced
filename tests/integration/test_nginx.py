"""``deploy/nginx.conf`` with a real nginx: honest clients are served while other addresses attack."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter

from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from tests.integration.conftest import BufferProcess, answers, server_workers
from tests.slow_clients import ATTACKS, under_attack
from tests.support import written
from tests.waiting import wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
]
ATTACK_S = 2.0
IN_CI = ("slow bodies", "half heads")
"""The others reach nginx alone, or the buffer as they do without it (``test_slow_clients.py``)."""
PAUSE_S = 0.05
"""Between the rounds of the honest client: the configuration allows an address 50 requests a second for ``/health``."""


class Front:
    """nginx before a buffer, with the shipped configuration except for TLS, ports and the time limit of bodies."""

    def __init__(self, folder: Path, buffer: BufferProcess) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        text = CONFIGURATION.read_text()
        for shipped, here in (
            ("listen 8443 ssl;", f"listen 127.0.0.1:{self.port};"),
            ("127.0.0.1:8889", f"127.0.0.1:{buffer.port}"),
            ("client_body_timeout 15s", "client_body_timeout 1s"),
        ):
            assert shipped in text
            text = text.replace(shipped, here)
        lines = [line for line in text.splitlines() if "ssl_certificate" not in line]
        (folder / "nginx.conf").write_text("\n".join(lines))
        command = [str(NGINX), "-p", str(folder), "-c", "nginx.conf", "-e", "error.log"]
        self.process = subprocess.Popen([*command, "-g", f"daemon off; pid {folder}/nginx.pid;"])
        wait_until(lambda: answers(f"{self.url}/health"), what="an answer through nginx")

    def stop(self) -> None:
        """Ends it with its workers."""
        self.process.terminate()
        self.process.wait(20)


class OtherAddress(HTTPAdapter):
    """Connects from another address of this machine than the attackers do."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, source_address=("127.0.0.2", 0), **options)


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """A buffer with an external job."""
    found = BufferProcess(tmp_path_factory.mktemp("behind"), "--max-body-bytes", "1000000")
    found.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "honest"})
    wait_until(lambda: len(server_workers(found)) == 2, what="two workers")
    yield found
    found.stop()


@pytest.fixture(scope="module")
def front(buffer: BufferProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(tmp_path_factory.mktemp("nginx"), buffer)
    yield found
    found.stop()


@pytest.fixture
def honest() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.mount("http://", OtherAddress())
        yield session


def test_a_poll_waits_and_a_delivery_the_dashboard_and_refusals_come_through(
    buffer: BufferProcess, front: Front, honest: requests.Session
) -> None:
    items = [written(f"through-{at}", f"through-{at}", extra_info={"x": "y" * 30_000}) for at in range(10)]
    writer = threading.Timer(1.0, lambda: buffer.client.write(items, job_id="honest"))
    began = time.monotonic()
    writer.start()
    reply = honest.post(f"{front.url}/get_rollout_data", json={"job_id": "honest", "wait_s": 30, "max_groups": 10})
    assert len(reply.json()["data"]["data"]) > 0
    assert 0.9 < time.monotonic() - began < 29
    writer.join()
    assert "<html" in honest.get(f"{front.url}/").text.lower()
    assert honest.get(f"{front.url}/dashboard/app.js").status_code == 200
    refused = honest.post(f"{front.url}/buffer/write", data=b" " * 1_000_001)
    assert refused.json()["error"]["code"] == "payload_too_large"
    assert honest.post(f"{front.url}/sign_in", data=b" " * 70_000).status_code == 413


@pytest.mark.parametrize(
    "attack", [one if one in IN_CI else pytest.param(one, marks=pytest.mark.large) for one in ATTACKS]
)
def test_honest_clients_are_served_through_an_attack(
    buffer: BufferProcess, front: Front, honest: requests.Session, attack: str
) -> None:
    before = server_workers(buffer)
    with under_attack(attack, front.port):
        until, writes = time.monotonic() + ATTACK_S, 0
        while time.monotonic() < until or not writes:
            writes += 1
            uid = f"{attack}-{writes}"
            assert honest.get(f"{front.url}/health", timeout=10).status_code == 200
            assert honest.get(f"{front.url}/jobs", timeout=10).status_code == 200
            reply = honest.post(f"{front.url}/jobs/honest/buffer/write", json=written(uid, uid), timeout=10)
            assert reply.json()["results"] == [{"uid": uid, "status": "stored"}]
            time.sleep(PAUSE_S)
    assert server_workers(buffer) == before
