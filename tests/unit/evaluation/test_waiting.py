"""An evaluation waits through pauses and restarts, and what an interrupt leaves behind can be continued."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer.errors import BusyError, NotFoundError, UnavailableError
from slime_plugins.rollout_buffer.evaluation import evaluate
from slime_plugins.rollout_buffer.evaluation.plan import EngineFacts, EvaluationSettings
from slime_plugins.rollout_buffer.trainer.job_feed import RetriesUsedUpError

Action = Callable[[], object]


class ScriptedBuffer:
    """A client of a buffer that plays nothing: before it answers a call, it takes the call's next scripted action."""

    def __init__(self) -> None:
        self.state: str | None = None
        self.cause_code = ""
        self.calls: Counter[str] = Counter()
        self.actions: dict[str, list[Action | None]] = {}

    def script(self, name: str, *actions: Action | None) -> None:
        self.actions[name] = list(actions)

    def to(self, state: str) -> Action:
        return lambda: setattr(self, "state", state)

    def start_rollout(self, payload: dict[str, Any]) -> None:
        self._take_action("start_rollout")
        self.state = self.state or "running"

    def job(self, job_id: str) -> dict[str, Any]:
        self._take_action("job")
        if self.state is None:
            raise NotFoundError("no such job")
        numbers = {"attempts": {"failed:device": 2, "finished": 1}, "created_at": 1.0, "finished_at": None}
        return {"state": self.state, "cause_code": self.cause_code, "cause": "", **numbers}

    def drain(self, job_id: str, *, stop: bool) -> dict[str, Any]:
        self._take_action("drain")
        assert stop
        self.state, self.cause_code = "paused", "stopped"
        return self.job(job_id)

    def resume(self, job_id: str) -> None:
        self._take_action("resume")
        self.state, self.cause_code = "running", ""

    def trajectories(self, **_query: Any) -> dict[str, Any]:
        self._take_action("trajectories")
        ended = {"outcome": "completed", "stop_reason": "stop", "reward": 1.0, "success": None, "late": False}
        numbers = {"slot": 0, "turns": 1, "played_s": 1.0, "oldest_version": 3, "versions_behind": 0}
        return {"trajectories": [{"instance_id": "a", "uid": "u", **ended, **numbers}], "next_cursor": None}

    def trajectory(self, uid: str, *, job_id: str) -> dict[str, Any]:
        self._take_action("trajectory")
        return {"extra_info": {"app": "clock"}}

    def get_rollout_data(self, **_query: Any) -> Any:
        self._take_action("get_rollout_data")
        return SimpleNamespace(delivery_id="d" if self.calls["get_rollout_data"] == 1 else None)

    def ack(self, delivery_ids: list[str]) -> None:
        self._take_action("ack")

    def _take_action(self, name: str) -> None:
        self.calls[name] += 1
        actions = self.actions.get(name)
        if actions and (action := actions.pop(0)) is not None:
            action()


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> ScriptedBuffer:
    buffer = ScriptedBuffer()
    monkeypatch.setattr(evaluate, "RolloutBufferClient", lambda url, token: buffer)
    monkeypatch.setattr(evaluate, "ask_engine", lambda settings: EngineFacts(model="m"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return buffer


def evaluated(folder: Path) -> dict[str, Any]:
    """Evaluates one task with two samples on a given buffer."""
    (folder / "tasks.jsonl").write_text('{"instance_id": "a", "task_name": "t"}\n')
    settings = EvaluationSettings(
        output=folder / "out",
        task_type="t",
        tasks=str(folder / "tasks.jsonl"),
        engine_url="http://engine/v1",
        api="openai",
        samples_per_task=2,
        buffer_url="http://buffer",
    )
    return evaluate.evaluate(settings, [1])


def raising(error: BaseException) -> Action:
    def action() -> None:
        raise error

    return action


INTERRUPT = raising(KeyboardInterrupt())


def test_an_operators_pause_stays_and_is_logged_once(
    buffer: ScriptedBuffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer.script("job", None, buffer.to("paused"), None, None, buffer.to("running"), buffer.to("finished"))
    with caplog.at_level(logging.WARNING, evaluate.__name__):
        assert evaluated(tmp_path)["complete"]
    assert buffer.calls["resume"] == 0
    (line,) = caplog.messages
    assert line.startswith("the job is paused (by request): rollout-buffer status eval-")


@pytest.mark.parametrize(("state", "cause_code"), [("running", ""), ("paused", "engine_away")])
def test_an_interrupted_call_pauses_its_job_and_the_next_call_resumes_it(
    buffer: ScriptedBuffer, tmp_path: Path, state: str, cause_code: str
) -> None:
    buffer.state, buffer.cause_code = state, cause_code
    buffer.script("job", None, INTERRUPT)
    with pytest.raises(evaluate.EvaluationStoppedError, match=r"1 of 2 slots .* buffer at http://buffer.* is paused"):
        evaluated(tmp_path)
    assert (buffer.state, buffer.calls["drain"]) == ("paused", 1)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["slots"]["played"] == 1
    buffer.script("job", None, buffer.to("finished"))
    assert evaluated(tmp_path)["complete"]
    assert buffer.calls["resume"] == 1
    assert not (tmp_path / "out" / evaluate.PAUSED_FILE).exists()


def test_an_operators_pause_stays_through_an_interrupted_call_and_the_next(
    buffer: ScriptedBuffer, tmp_path: Path
) -> None:
    buffer.script("job", buffer.to("paused"), INTERRUPT)
    with pytest.raises(evaluate.EvaluationStoppedError):
        evaluated(tmp_path)
    buffer.script("job", None, None, buffer.to("finished"))
    assert evaluated(tmp_path)["complete"]
    assert buffer.calls["drain"] == buffer.calls["resume"] == 0


def test_a_job_whose_start_was_interrupted_under_way_is_paused(buffer: ScriptedBuffer, tmp_path: Path) -> None:
    buffer.script("start_rollout", INTERRUPT)
    with pytest.raises(evaluate.EvaluationStoppedError, match="is paused"):
        evaluated(tmp_path)
    assert buffer.state == "paused"


def test_an_interrupt_before_the_start_is_reported_as_one(
    buffer: ScriptedBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "ask_engine", lambda settings: INTERRUPT())
    with pytest.raises(evaluate.EvaluationStoppedError, match="the same command continues"):
        evaluated(tmp_path)
    assert not buffer.calls


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_that_does_not_finish_is_reported_with_what_was_played(
    buffer: ScriptedBuffer, tmp_path: Path, state: str
) -> None:
    buffer.script("job", buffer.to(state))
    with pytest.raises(evaluate.EvaluationError, match=f"the job is {state}") as caught:
        evaluated(tmp_path)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["complete"], report["slots"]["played"], report["failed_tries"]) == (False, 1, {"device": 2})
    assert caught.value.detail == {"report": report}
    assert buffer.calls["ack"] == 1


@pytest.mark.parametrize("failure", [requests.ConnectionError("gone"), UnavailableError("not now"), BusyError("429")])
@pytest.mark.parametrize("call", ["job", "trajectories", "trajectory", "get_rollout_data", "ack"])
def test_a_call_that_fails_for_a_while_is_repeated(
    buffer: ScriptedBuffer, tmp_path: Path, call: str, failure: Exception
) -> None:
    buffer.state = "finished"
    buffer.script(call, raising(failure), raising(failure))
    assert set(evaluated(tmp_path)["by_app"]) == {"clock"}


def test_a_buffer_that_stays_silent_ends_the_evaluation(buffer: ScriptedBuffer, tmp_path: Path) -> None:
    buffer.script("job", *[raising(requests.ConnectionError("gone"))] * (evaluate.MAX_FAILURES + 1))
    with pytest.raises(RetriesUsedUpError, match="job failed 21 times"):
        evaluated(tmp_path)


def test_a_finished_evaluation_whose_payloads_were_purged_says_that_it_must_be_played_again(
    buffer: ScriptedBuffer, tmp_path: Path
) -> None:
    buffer.state = "finished"
    buffer.script("trajectory", raising(NotFoundError("the payload of trajectory 'u' was purged by retention")))
    with pytest.raises(evaluate.EvaluationError, match=r"'u' was purged by retention.*give another --output"):
        evaluated(tmp_path)
