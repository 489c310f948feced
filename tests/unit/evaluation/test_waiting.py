"""The wait for an evaluation's job goes on while the buffer, or a proxy before it, does not answer for a while."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import BusyError, RolloutBufferError, UnavailableError
from slime_plugins.rollout_buffer.evaluation import evaluate


class Flaky:
    """A client whose job is paused until a resume that does not fail, and finished then."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.state = "paused"

    def job(self, job_id: str) -> dict[str, Any]:
        self.fail()
        return {"state": self.state, "cause_code": "", "cause": ""}

    def resume(self, job_id: str) -> None:
        self.fail()
        self.state = "finished"

    def fail(self) -> None:
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure


@pytest.mark.parametrize("failure", [requests.ConnectionError("gone"), UnavailableError("not now"), BusyError("429")])
@pytest.mark.parametrize("at_resume", [False, True])
def test_a_call_that_fails_for_a_while_is_repeated(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, at_resume: bool
) -> None:
    monkeypatch.setattr(evaluate, "POLL_INTERVAL_S", 0.0)
    failures: list[Any] = [None, failure] if at_resume else [failure]
    client = cast("RolloutBufferClient", Flaky(*failures))
    assert evaluate._follow(client, "job", lambda job: None)["state"] == "finished"


@pytest.mark.parametrize("answers", [[], [None]], ids=["to nothing", "not to resume"])
def test_a_buffer_that_stays_silent_ends_it(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0.0, evaluate.SILENCE_TIMEOUT_S / 4).__next__, sleep=abs)
    monkeypatch.setattr(evaluate, "time", clock)
    client = cast("RolloutBufferClient", Flaky(*[*answers, requests.ConnectionError("gone")] * 9))
    with pytest.raises(RolloutBufferError, match="does not answer any more: gone"):
        evaluate._follow(client, "job", lambda job: None)
