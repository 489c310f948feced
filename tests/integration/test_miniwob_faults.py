"""Pages that are killed while they are played on: every episode is accounted for, and no fault is a reward."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.miniwob_browsers import needs_a_browser
from tests.miniwob_faults import Account, Fault, play_under_faults

pytestmark = [pytest.mark.large, needs_a_browser, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_no_fault_is_rewarded_and_no_episode_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_WORKERS", "PAGES_PER_BROWSER", "QUARANTINE_S"):  # put back after the test, which sets them
        monkeypatch.setenv(f"ROLLOUT_BUFFER_MINIWOB__{name}", "3")
    account = await play_under_faults(episodes=12, pages=3, share=0.5)
    assert sum(account.killed.values()) > 0
    assert sum(account.failures.values()) > 0
    assert account.devices_left == 3
    assert account.complaints(12) == []


@pytest.mark.parametrize("fault", Fault)
async def test_each_fault_alone_is_no_reward_and_leaves_nothing(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_WORKERS", "PAGES_PER_BROWSER", "QUARANTINE_S"):
        monkeypatch.setenv(f"ROLLOUT_BUFFER_MINIWOB__{name}", "2")
    monkeypatch.setattr("tests.miniwob_faults.WEIGHTS", {fault: 1})
    account = await play_under_faults(episodes=3, pages=2, share=0.6)
    assert set(account.killed) == {fault.value}
    assert account.complaints(3) == []


def test_an_account_that_does_not_balance_complains() -> None:
    account = Account(rewards=Counter({1.0: 8, 0.0: 1}), given_up=1, memory=[100, 200], left_over=["chromium"])
    assert len(account.complaints(12)) == 5
