"""Pages that are killed while they are played on: every episode is accounted for, and no fault is a reward."""

from __future__ import annotations

import pytest

from tests.miniwob_browsers import needs_a_browser
from tests.miniwob_faults import play_under_faults

pytestmark = [needs_a_browser, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_no_fault_is_rewarded_and_no_episode_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_BUFFER_MINIWOB__NUM_WORKERS", "3")  # put back after the test, which sets it
    account = await play_under_faults(episodes=12, pages=3, share=0.5)
    assert account.killed > 0
    assert sum(account.failures.values()) > 0
    assert set(account.rewards) == {1.0}
    assert account.rewards[1.0] + account.given_up == 12
    assert account.given_up == 0
    assert account.devices_left == 3
