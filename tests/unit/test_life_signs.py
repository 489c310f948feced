"""Who shows no life is noticed by the watcher's own clock, whatever the system's clock says."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer import life_signs
from slime_plugins.rollout_buffer.life_signs import FIRST_SIGN_PATIENCE_S, Silence, show_life


class Watch:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def sign(tmp_path: Path) -> Path:
    return tmp_path / "sign"


def renew(sign: Path, number: int) -> None:
    sign.touch()
    os.utime(sign, ns=(number, number))


def renewed_at(sign: Path) -> int:
    return sign.stat().st_mtime_ns


def test_silence_counts_from_the_last_sign_also_when_signs_go_back_in_time(sign: Path) -> None:
    watch = Watch()
    silence = Silence(sign, clock=watch)
    for number in (50, 49, 7, 8):
        watch.now += 9
        renew(sign, number)
        assert not silence.is_too_long(10)
    watch.now += 10
    assert not silence.is_too_long(10)
    watch.now += 1
    assert silence.is_too_long(10)


def test_who_has_not_begun_has_longer_and_a_predecessors_sign_is_no_beginning(sign: Path) -> None:
    renew(sign, 1)
    watch = Watch()
    silence = Silence(sign, clock=watch)
    watch.now = FIRST_SIGN_PATIENCE_S
    assert not silence.is_too_long(10)
    watch.now += 1
    assert silence.is_too_long(10)
    assert not silence.is_too_long(2 * FIRST_SIGN_PATIENCE_S)


async def test_a_turning_loop_renews_its_sign_and_a_folder_that_is_gone_does_not_end_it(
    sign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_signs, "INTERVAL_S", 0.01)
    for path in (sign, sign / "not" / "there"):
        task = asyncio.create_task(show_life(path))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    first = renewed_at(sign)
    task = asyncio.create_task(show_life(sign))
    while renewed_at(sign) <= first:  # noqa: ASYNC110 - a file wakes nobody
        await asyncio.sleep(0.01)
    task.cancel()
