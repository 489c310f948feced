"""Clients that keep a real server waiting: others are answered meanwhile, and no worker ends.

``python -m tests.slow_clients`` measures how promptly, on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.conftest import BufferProcess
from tests.integration.test_worker_shares import workers
from tests.slow_clients import ATTACKS, attacked, watch

StartBuffer = Callable[..., BufferProcess]
pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]
FEW_FILES = ("prlimit", "--nofile=1024:1024")


def stands(buffer: BufferProcess, attack: str) -> None:
    """Health is answered and writes are kept while the attack lasts, by the workers that were there before."""
    buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "honest"})
    before = workers(buffer)
    with attacked(attack, buffer.port):
        seen = watch(buffer.port, "honest", 6.0)
    assert seen.failed_health_checks == 0
    assert seen.slowest_health_s < 8  # it would be for ever
    assert seen.failed_writes == 0
    assert seen.writes_per_s > 1
    assert workers(buffer) == before
    log = (buffer.folder / "data" / "logs" / "server.log").read_text()
    assert "Traceback" not in log, log[-3000:]


@pytest.mark.parametrize("attack", ["slow readers", "large slow bodies", "pipelined health"])
def test_a_few_clients_hold_no_threads_and_no_event_loop(start_buffer: StartBuffer, attack: str) -> None:
    stands(start_buffer("--threads", "4"), attack)


@pytest.mark.parametrize("attack", ["idle", "many half heads", "reconnecting slow bodies"])
def test_thousands_of_slow_clients_with_few_file_descriptors_do_not_keep_others_out(
    start_buffer: StartBuffer, attack: str
) -> None:
    stands(start_buffer(launcher=FEW_FILES), attack)


@pytest.mark.large
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("launcher", [(), FEW_FILES], ids=["many files", "few files"])
def test_every_attack_is_stood(start_buffer: StartBuffer, attack: str, launcher: tuple[str, ...]) -> None:
    stands(start_buffer(launcher=launcher), attack)
