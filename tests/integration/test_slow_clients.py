"""A bare port under clients that keep it waiting: it survives, loses nothing, and is well again when they are gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import requests

from tests.integration.conftest import BufferProcess, answers, server_workers
from tests.slow_clients import ATTACKS, under_attack
from tests.support import written
from tests.waiting import wait_until

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
ATTACK_S = 2.0
WELL_AGAIN_S = 5.0


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """A buffer with few file descriptors and an external job, the target of all attacks, one after the other."""
    found = BufferProcess(tmp_path_factory.mktemp("slow"), "--threads", "4", launcher=("prlimit", "--nofile=512:512"))
    found.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "honest"})
    wait_until(lambda: len(server_workers(found)) == 2, what="two workers")
    yield found
    found.stop()


class Writer:
    """Writes one item after the other, and counts what was acknowledged."""

    def __init__(self, buffer: BufferProcess, name: str) -> None:
        self._url = f"{buffer.url}/jobs/honest/buffer/write"
        self._name = name
        self._stopping = threading.Event()
        self.acknowledged: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            uid = f"{self._name}-{number}"
            try:
                reply = requests.post(self._url, json=written(uid, uid), timeout=2)
            except requests.RequestException:
                continue
            if reply.status_code == 200:
                self.acknowledged.append(uid)
            self._stopping.wait(0.05)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bare_port_survives_each_attack_without_losing_what_was_acknowledged(
    buffer: BufferProcess, attack: str
) -> None:
    before = server_workers(buffer)
    with Writer(buffer, attack) as writer, under_attack(attack, buffer.port):
        time.sleep(ATTACK_S)
    ended = time.monotonic()
    for path in ("/health", "/jobs"):  # the second is one of Flask's
        wait_until(partial(answers, f"{buffer.url}{path}"), 20, f"{path} again")
    again = f"{attack}-again"
    wait_until(lambda: buffer.client.write([written(again, again)], job_id="honest")["success"], 20, "a write again")
    assert time.monotonic() - ended < WELL_AGAIN_S
    assert server_workers(buffer) == before
    repeated = [written(uid, uid) for uid in [again, *writer.acknowledged]]
    results = buffer.client.write(repeated, job_id="honest")["results"]
    assert {result["status"] for result in results} == {"duplicate"}, "what was acknowledged is there"
    log = (buffer.folder / "data" / "logs" / "server.log").read_text()
    assert "Traceback" not in log, log[-3000:]
