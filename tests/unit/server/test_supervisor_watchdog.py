"""A worker kills a supervisor that hangs with the write lock, if that can be done from inside its container."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_plugins.rollout_buffer.observability.process_status import ProcessStatus
from slime_plugins.rollout_buffer.server import supervisor_watchdog
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.write_lock import WriteLockOwner, WriteLockWatch


class EnoughError(Exception):
    """Ends the loop of the watchdog."""


@pytest.mark.parametrize(("pid", "says"), [(4711, "killing it, the supervisor"), (1, "supervisor, in vain: process 1")])
def test_a_supervisor_that_stays_stuck_is_reported_once_and_process_1_as_not_killable(
    pid: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed, rounds = [], iter(range(3))

    def sleep(_seconds: float) -> None:
        if next(rounds, None) is None:
            raise EnoughError

    facts: dict[str, Any] = {"state": "T", "started": 5, "cpu_ticks": 0}
    stuck = WriteLockOwner(pid=pid, held_s=60.0, **facts)
    monkeypatch.setattr(supervisor_watchdog, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    monkeypatch.setattr(
        supervisor_watchdog, "process_status", lambda _pid: ProcessStatus(parent=pid, session=0, **facts)
    )
    store = Store(tmp_path)
    monkeypatch.setattr(store, "write_lock_owner", lambda: stuck)
    with caplog.at_level(logging.ERROR), pytest.raises(EnoughError):
        supervisor_watchdog._watch(store, WriteLockWatch(-1.0))
    store.close()
    assert [says in one for one in caplog.messages] == [True]
    assert set(killed) == {(pid, signal.SIGKILL)}
