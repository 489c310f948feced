"""A frozen process is noticed without the wall clock, the disk and the store."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from slime_plugins.rollout_buffer.observability import liveness
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat, HeartbeatMonitor, send_heartbeats
from slime_plugins.rollout_buffer.testing.clock import SettableClock


class Kernel:
    """Says whether the process is stopped."""

    stopped = False

    def __call__(self) -> bool:
        return self.stopped


def test_a_process_is_frozen_once_its_last_heartbeat_is_older_than_the_timeout() -> None:
    clock = SettableClock()
    heartbeat = Heartbeat(clock=clock)
    monitor = HeartbeatMonitor(heartbeat, Kernel(), clock=clock)
    for _ in range(3):
        clock.now += 9
        heartbeat.beat()
        assert not monitor.is_frozen(10)
    clock.now += 10
    assert not monitor.is_frozen(10)
    clock.now += 1
    assert monitor.is_frozen(10)


def test_a_process_without_heartbeats_is_frozen_once_it_was_stopped_for_long_without_a_break() -> None:
    clock, kernel = SettableClock(), Kernel()
    monitor = HeartbeatMonitor(None, kernel, clock=clock)
    clock.now += 10_000
    kernel.stopped = True
    assert not monitor.is_frozen(10)
    clock.now += 9
    assert not monitor.is_frozen(10)
    kernel.stopped = False
    assert not monitor.is_frozen(10)
    kernel.stopped = True
    clock.now += 9
    assert not monitor.is_frozen(10)
    clock.now += 11
    assert monitor.is_frozen(10)


def test_another_process_reads_the_detail_of_the_last_beat() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.last() is None
    heartbeat.beat(reason="the disk is full", nothing=None)
    program = (
        "import sys; from slime_plugins.rollout_buffer.observability.liveness import Heartbeat\n"
        "print(dict(Heartbeat(int(sys.argv[1])).last().detail))"
    )
    command = [sys.executable, "-c", program, str(heartbeat.descriptor)]
    said = subprocess.run(command, pass_fds=[heartbeat.descriptor], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "{'reason': 'the disk is full'}"


def test_a_reader_during_a_write_gets_the_beat_before_or_the_new_one() -> None:
    heartbeat, ended = Heartbeat(), threading.Event()

    def write() -> None:
        for number in range(4000):
            heartbeat.beat(reason=str(number % 10) * (number % 900))
        ended.set()

    heartbeat.beat(reason="")
    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        beat = heartbeat.last()
        assert beat is not None
        assert len(set(beat.detail["reason"])) <= 1
    writer.join()


async def test_a_turning_event_loop_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "INTERVAL_S", 0.01)
    heartbeat = Heartbeat()
    task = asyncio.create_task(send_heartbeats(heartbeat))
    seen: set[bytes] = set()
    while len(seen) < 3:
        await asyncio.sleep(0.01)
        seen.add(os.pread(heartbeat.descriptor, 100, 0))
    task.cancel()
