"""Each test of a trainer begins as its process does, and waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime.rollout.agent_rollout import reset_jobs
from slime_plugins.rollout_buffer.trainer import job_feed
from slime_plugins.rollout_buffer.trainer.image_fetch import process_cache


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job_feed, "FIRST_POLL_PAUSE_S", 0.001)
    monkeypatch.setattr(job_feed, "MIN_POLL_S", 0.01)
    reset_jobs()
    yield
    process_cache(0)
