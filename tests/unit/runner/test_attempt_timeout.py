"""An attempt ends within its limit, whatever its generator does; its wait for a device is no part of it."""

from __future__ import annotations

import asyncio

import pytest

from slime_plugins.rollout_buffer.errors import AttemptTimeoutError
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.observability.tracing import NoTracer
from slime_plugins.rollout_buffer.runner.attempt_timeout import AttemptTimeout
from tests.virtual_time import in_virtual_time


async def play(*, wait_s: float, play_s: float) -> str:
    with PhaseTimer().phase("acquire"):
        await asyncio.sleep(wait_s)
    await asyncio.sleep(play_s)
    return "played"


async def ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize(("seconds", "wait_s", "play_s"), [(100, 5000, 99), (None, 0, 1e7)])
@in_virtual_time
async def test_an_attempt_within_its_limit_or_without_one_is_not_ended_however_long_it_waits_for_its_device(
    seconds: float | None, wait_s: float, play_s: float
) -> None:
    limit = AttemptTimeout(seconds, NoTracer())
    task = limit.begin(play(wait_s=wait_s, play_s=play_s))
    await limit.wait(task)
    assert task.result() == "played"


@in_virtual_time
async def test_an_attempt_that_plays_for_longer_is_cancelled_once_its_seconds_are_used_up() -> None:
    limit = AttemptTimeout(100, NoTracer())
    task = limit.begin(play(wait_s=5000, play_s=1000))
    with pytest.raises(AttemptTimeoutError, match=r"attempt_timeout_seconds \(100 s\)"):
        await limit.wait(task)
    assert task.cancelled()
    assert 5100 <= asyncio.get_running_loop().time() <= 5101


@in_virtual_time
async def test_an_attempt_that_ignores_its_cancellation_is_left_behind() -> None:
    limit = AttemptTimeout(100, NoTracer())
    task = limit.begin(ignore_cancellation())
    with pytest.raises(AttemptTimeoutError, match="it ignores the cancellation"):
        await limit.wait(task)
    assert asyncio.get_running_loop().time() < 200
    task.get_coro().close()  # it would keep the loop of this test as well


@in_virtual_time
async def test_an_attempt_that_is_stopped_and_ignores_its_cancellation_is_left_behind() -> None:
    limit = AttemptTimeout(None, NoTracer())
    task = limit.begin(ignore_cancellation())
    asyncio.get_running_loop().call_later(100, limit.stop)
    await limit.wait(task)
    assert not task.done()
    assert asyncio.get_running_loop().time() < 200
    task.get_coro().close()
