"""From samples to a report, and from two reports to their difference: what is left out is counted, nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout import agent_rollout_eval
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.evaluation import evaluate
from slime_plugins.rollout_buffer.evaluation.plan import EngineFacts, EvaluationSettings, ask_engine, tokenizer_for
from slime_plugins.rollout_buffer.evaluation.report import (
    SampleRecord,
    TaskRecord,
    build_report,
    compare_reports,
    default_pass_at_ks,
)


def sample(task: str, slot: int, solved: bool, **changes: Any) -> SampleRecord:
    values = {"reward": float(solved), "outcome": "completed", "stop_reason": "stop", "turns": 3, "played_s": 2.0}
    return SampleRecord(instance_id=task, slot=slot, uid=f"{task}.{slot}", solved=solved, **{**values, **changes})


def report_of(solved: dict[str, list[bool]], planned: int, ks: list[int] | None = None) -> dict[str, Any]:
    tasks = [TaskRecord(instance_id=name, task=name[0], groups={"app": (name[0], "all")}) for name in solved]
    samples = [sample(name, slot, one) for name, outcomes in solved.items() for slot, one in enumerate(outcomes)]
    wanted = default_pass_at_ks(planned) if ks is None else ks
    return build_report(
        tasks, samples, samples_per_task=planned, ks=wanted, failed_attempts={"device": 2}, complete=True
    )


def test_a_report_counts_by_task_and_by_app_and_leaves_out_what_was_not_played() -> None:
    report = report_of({"a1": [True, False], "a2": [True, True], "b1": [False], "b2": []}, planned=2)
    assert report["slots"] == {"planned": 8, "played": 5, "not_played": 3}
    assert (report["solved"], report["tasks"], report["tasks_without_attempt"]) == (3, 4, 1)
    assert report["success"]["value"] == pytest.approx((0.5 + 1 + 0) / 3)
    assert report["success_failures_as_zero"]["value"] == pytest.approx((0.5 + 1 + 0 + 0) / 4)
    assert report["pass_at_k"]["2"] == {**report["pass_at_k"]["2"], "value": 1.0, "tasks": 2, "left_out": 2}
    assert report["by_task"]["b"]["success"]["value"] == 0
    assert report["by_app"]["all"]["slots"] == report["slots"]
    assert report["instances"][3] == {
        "instance_id": "b2", "task": "b", "app": ["b", "all"], "solved": 0, "played": 0, "not_played": 2, "attempts": []
    }  # fmt: skip
    assert (report["outcomes"], report["failed_tries"]) == ({"completed": 5}, {"device": 2})
    json.dumps(report, allow_nan=False)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), st.lists(st.booleans(), max_size=4), min_size=1))
def test_the_accounting_of_a_report_balances(solved: dict[str, list[bool]]) -> None:
    report = report_of(solved, planned=4)
    slots = report["slots"]
    assert slots["planned"] == 4 * len(solved) == slots["played"] + slots["not_played"]
    assert slots["played"] == sum(map(len, solved.values())) == sum(report["outcomes"].values())
    for name in ("planned", "played", "not_played"):
        assert sum(group["slots"][name] for group in report["by_task"].values()) == slots[name]
    told = [report["pass_at_k"][str(k)] for k in (1, 2, 4)]
    assert all(estimate["tasks"] + estimate["left_out"] == len(solved) for estimate in told)
    if all(len(outcomes) == 4 for outcomes in solved.values()):
        assert told[0]["value"] <= told[1]["value"] <= told[2]["value"]
        assert told[0]["value"] == pytest.approx(report["success"]["value"])


def test_two_reports_are_compared_on_the_tasks_that_both_played() -> None:
    new = report_of({"a": [True, True], "b": [True, False], "c": [False, False], "d": [True], "e": []}, planned=2)
    old = report_of({"a": [False, False], "b": [True, False], "c": [True, False], "x": [True]}, planned=2)
    compared = compare_reports(new, old)
    assert (compared["tasks"], compared["only_new"], compared["only_old"]) == (3, 1, 1)
    assert (compared["better"], compared["equal"], compared["worse"]) == (1, 1, 1)
    assert compared["difference"]["value"] == pytest.approx((1 + 0 - 0.5) / 3)
    assert compared["new"] - compared["old"] == pytest.approx(compared["difference"]["value"])
    assert compared == compare_reports(json.loads(json.dumps(new)), json.loads(json.dumps(old)))


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ([(7, 7), (7, 7)], "one weight version: 7"),
        ([(3, 3), (3, 4), (5, 5)], "changed during it: weight versions 3 to 5, 1 of 3 episodes span a change"),
        ([(3, 3), (4, 4)], "changed during it: weight versions 3 to 4, 0 of 2 episodes span a change"),
        ([None, None], "the engine named no weight version"),
        ([None, (0, 0)], "one weight version: 0; 1 episodes have no known version"),
    ],
)
def test_a_report_says_which_weights_it_measured(versions: list[tuple[int, int] | None], message: str) -> None:
    samples = [sample("a", slot, True, versions=span) for slot, span in enumerate(versions)]
    tasks = [TaskRecord(instance_id="a")]
    report = build_report(tasks, samples, samples_per_task=3, ks=[1], failed_attempts={}, complete=True)
    assert report["weight_versions"]["message"] == message
    told = report["weight_versions"]
    assert told["known"] + told["unknown"] == len(versions)


@given(st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda two: (min(two), max(two)))))
def test_weights_that_changed_are_never_called_one_version(versions: list[tuple[int, int] | None]) -> None:
    samples = [sample("a", slot, True, versions=span) for slot, span in enumerate(versions)]
    tasks = [TaskRecord(instance_id="a")]
    report = build_report(tasks, samples, samples_per_task=99, ks=[1], failed_attempts={}, complete=True)
    seen = {version for span in versions if span for version in span}
    assert ("changed during it" in report["weight_versions"]["message"]) is (len(seen) > 1)


# --- the weights that sampled an episode -----------------------------------------------------------------------------


class Stored:
    """A client with one trajectory of two turns, sampled by versions 3 and 4."""

    def __init__(self) -> None:
        self.reads = 0

    def trajectory(self, uid: str, *, job_id: str) -> dict[str, Any]:
        self.reads += 1
        turns = [{"prompt_ids": [1], "output_ids": [2], "weight_version": version} for version in ("3", "4")]
        return {"uid": uid, "generations": turns}


@pytest.mark.parametrize(
    ("oldest", "behind", "versions", "reads"),
    [(None, None, None, 0), (3, 0, (3, 3), 0), (3, 2, (3, 4), 1), (3, None, (3, 4), 1)],
)
def test_turns_are_read_where_the_weights_had_moved(
    oldest: int | None, behind: int | None, versions: tuple[int, int] | None, reads: int
) -> None:
    stored = Stored()
    entry = {"uid": "u", "oldest_version": oldest, "versions_behind": behind}
    assert evaluate._versions(cast("RolloutBufferClient", stored), "j", entry) == versions
    assert stored.reads == reads


def test_in_a_training_the_versions_of_a_set_are_counted() -> None:
    def trajectory(*versions: str) -> list[Any]:
        return [SimpleNamespace(weight_versions=list(versions))]

    counted = agent_rollout_eval._weight_versions("set", [trajectory("3"), trajectory("3", "4"), trajectory()])
    assert counted == {"eval/set-weight_versions": 2, "eval/set-spanning_a_change": 1}
    assert agent_rollout_eval._weight_versions("set", [trajectory()]) == {}


# --- the check of the engine -----------------------------------------------------------------------------------------


def answering(statuses: dict[str, int], asked: list[requests.PreparedRequest]) -> Callable[..., requests.Response]:
    """In place of an adapter's ``send``: an engine with these statuses by route, and 404 for any other."""

    def send(_: object, request: requests.PreparedRequest, **__: Any) -> requests.Response:
        asked.append(request)
        reply = requests.Response()
        reply.status_code = statuses.get(urlsplit(str(request.url)).path, 404)
        return reply

    return send


def settings_for(folder: Path, **changes: Any) -> EvaluationSettings:
    return EvaluationSettings(output=folder, task_type="t", tasks="", **changes)


@pytest.mark.parametrize(
    "statuses", [{"/generate": 405}, {"/generate": 403, "/model_info": 403}, {"/generate": 405, "/health": 502}]
)
def test_an_engine_behind_a_proxy_that_forwards_turns_only_is_evaluated_with_a_given_tokenizer(
    statuses: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answering(statuses, []))
    settings = settings_for(tmp_path, engine_url="http://h")
    engine = ask_engine(settings)
    assert engine == EngineFacts()
    with pytest.raises(ConfigError, match=r"/model_info names none.*give --tokenizer FOLDER"):
        tokenizer_for(settings, engine)
    assert tokenizer_for(replace(settings, tokenizer=tmp_path), engine) == str(tmp_path)


def test_what_is_no_sglang_is_refused_with_the_routes_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answering({"/v1/models": 200, "/health": 200}, []))
    with pytest.raises(ConfigError, match=r"neither /model_info nor /generate.*is --api openai missing"):
        ask_engine(settings_for(tmp_path, engine_url="http://h"))


def test_the_engines_key_of_the_environment_is_sent_to_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[requests.PreparedRequest] = []
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answering({"/model_info": 200}, asked))
    monkeypatch.setenv("ROLLOUT_BUFFER_ENGINE_API_URL", "http://h")
    monkeypatch.setenv("ROLLOUT_BUFFER_ENGINE_API_KEY", "key")
    ask_engine(settings_for(tmp_path, engine_url="http://h"))
    assert [request.headers["Authorization"] for request in asked] == ["Bearer key"]


def test_the_key_is_sent_also_where_netrc_has_a_password_for_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[requests.PreparedRequest] = []
    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answering({}, asked))
    (tmp_path / "netrc").write_text("default login user password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = settings_for(tmp_path, engine_url="http://h/v1", api="openai", model="m", api_key="key")
    assert ask_engine(settings) == EngineFacts(model="m")
    assert [request.headers["Authorization"] for request in asked] == ["Bearer key"]
