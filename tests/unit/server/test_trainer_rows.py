"""What a trainer says of its rows comes back: kept beside the trajectory, compared with the engine, worst first."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.asgi_client import post

JOB = "run-1"
TURNS = [
    {
        "keep": 0,
        "prompt_ids": [1, 2, 3],
        "output_ids": [10, 4],
        "output_log_probs": [-0.5, -0.25],
        "weight_version": "3",
    },
    {"keep": 5, "prompt_ids": [5, 6], "output_ids": [20], "output_log_probs": [-1.0], "weight_version": "5"},
]


def item(uid: str, generations: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "uid": uid,
        "instance_id": "a",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}],
        "reward": 1.0,
        "extra_info": {},
        "generations": [{**turn, "finish_reason": "stop"} for turn in (TURNS if generations is None else generations)],
    }


@pytest.fixture
def job(client: FlaskClient) -> FlaskClient:
    """A job with two trajectories: one of two turns in one row, one of two rows."""
    start = {"task_type": "external", "num_repeat_per_sample": 2, "job_id": JOB}
    assert post(client, "/start_rollout", start)[0] == 200
    forked = [TURNS[0], {**TURNS[1], "keep": 2}]
    assert post(client, "/buffer/write", {"job_id": JOB, "items": [item("one"), item("two", forked)]})[0] == 200
    return client


def report(client: FlaskClient, *rows: dict[str, Any], **more: Any) -> Any:
    status, reply = post(client, f"/jobs/{JOB}/trainer_rows", {"rows": list(rows), **more})
    assert status == 200, reply
    return reply


def test_the_gap_is_between_what_the_trainer_says_and_what_the_engine_recorded(job: FlaskClient) -> None:
    said = report(job, {"uid": "one", "log_probs": [-0.5, -0.75, -1.25], "advantage": 1.5}, step=7)
    found = job.get(f"/jobs/{JOB}/mismatch").get_json()

    assert said == {"kept": 1, "refused": []}
    assert (found["rows"], found["tokens"], found["mean"], found["max"]) == (1, 3, 0.25, 0.5)
    assert found["by_turn"] == [
        {"turn": 0, "tokens": 2, "mean": 0.25, "max": 0.5},
        {"turn": 1, "tokens": 1, "mean": 0.25, "max": 0.25},
    ]
    assert [(entry["weight_lag"], entry["mean"]) for entry in found["by_weight_lag"]] == [(0, 0.25), (2, 0.25)]
    worst = found["worst"][0]
    assert (worst["uid"], worst["row"], worst["turn"], worst["at"]) == ("one", 0, 0, 1)
    assert (worst["gap"], worst["weight_lag"], worst["advantage"], worst["step"]) == (0.5, 2, 1.5, 7)


def test_a_turn_that_is_not_trained_shifts_no_gap_to_another_turn(job: FlaskClient) -> None:
    untrained_first = item("three", [{**TURNS[0], "trained": False}, TURNS[1]])
    assert post(job, "/buffer/write", {"job_id": JOB, "items": [{**untrained_first, "instance_id": "b"}]})[0] == 200
    report(job, {"uid": "three", "log_probs": [-3.0]})

    (gap,) = job.get(f"/jobs/{JOB}/mismatch").get_json()["by_turn"]
    assert (gap["turn"], gap["max"]) == (1, 2.0)


def test_each_row_is_compared_with_its_own_turns(job: FlaskClient) -> None:
    report(job, {"uid": "two", "row": 0, "log_probs": [-0.5, -0.25]}, {"uid": "two", "row": 1, "log_probs": [-3.0]})
    found = job.get(f"/jobs/{JOB}/mismatch?limit=1").get_json()

    assert [(entry["turn"], entry["max"]) for entry in found["by_turn"]] == [(0, 0.0), (1, 2.0)]
    assert [(entry["row"], entry["turn"], entry["gap"]) for entry in found["worst"]] == [(1, 1, 2.0)]


def test_the_lag_is_from_the_weights_that_the_trainer_names(job: FlaskClient) -> None:
    report(job, {"uid": "one", "log_probs": [-0.5, -0.25, -1.0]}, weight_version=9)

    assert [entry["weight_lag"] for entry in job.get(f"/jobs/{JOB}/mismatch").get_json()["by_weight_lag"]] == [4, 6]


def test_a_version_that_is_none_has_no_lag_and_default_is_version_0(job: FlaskClient) -> None:
    names = {"odd": "9" * 30, "first": "default"}
    for uid, version in names.items():
        turn = {**TURNS[0], "weight_version": version}
        assert post(job, "/buffer/write", {"job_id": JOB, **item(uid, [turn]), "instance_id": uid})[0] == 200
    report(job, *({"uid": uid, "log_probs": [-0.5, -0.5]} for uid in names), weight_version=6)
    by_lag = job.get(f"/jobs/{JOB}/mismatch").get_json()["by_weight_lag"]
    assert [(entry["weight_lag"], entry["tokens"]) for entry in by_lag] == [(6, 2), (None, 2)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"uid": "nobody", "log_probs": [-1.0]}, "no trajectory of that uid"),
        ({"uid": "one", "row": 3, "log_probs": [-1.0]}, "no training row of that number"),
        ({"uid": "one", "log_probs": [-1.0]}, "it trains 3 tokens, and log_probs has 1"),
        ({"uid": "one", "log_probs": [-0.5, 1.7e308, -1.0]}, "log_probs[1] is 1.7e+308"),
        ({"uid": "one", "log_probs": [-0.5, -0.25, float("nan")]}, "log_probs[2] is nan"),
        ({"uid": "one", "log_probs": [float("-inf"), -0.25, -1.0]}, "log_probs[0] is -inf"),
        ({"uid": "one", "advantage": float("nan")}, "advantage is nan"),
        ({"uid": "one", "entropy": 1e39}, "entropy is 1e+39"),
        ({"uid": "one", "clip_share": 2}, "clip_share is 2.0: a number from 0 to 1 is needed"),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_costs_no_other(
    job: FlaskClient, row: dict[str, Any], reason: str
) -> None:
    said = report(job, row, {"uid": "one", "log_probs": [-0.5, -0.25, -1.0]})

    assert said["kept"] == 1
    assert reason in said["refused"][0]["reason"]


@pytest.mark.parametrize(
    "rows", [[], [{"row": 1}], [{"uid": "one", "entropy": "much"}], [{"uid": "one", "log_prob": [1]}]]
)
def test_what_means_nothing_is_refused(job: FlaskClient, rows: list[Any]) -> None:
    assert post(job, f"/jobs/{JOB}/trainer_rows", {"rows": rows})[0] == 400


def test_the_tokens_of_a_row_come_with_what_the_trainer_said(job: FlaskClient) -> None:
    assert job.get("/token_rows/one").get_json()["trainer"] is None

    report(job, {"uid": "one", "log_probs": [-0.5, -0.75, -1.25], "advantage": 1.5, "entropy": 0.5})
    said = job.get("/token_rows/one").get_json()["trainer"]
    assert (said["log_probs"], said["advantage"], said["entropy"]) == ([-0.5, -0.75, -1.25], 1.5, 0.5)


def test_prometheus_and_the_job_tell_the_distribution(job: FlaskClient) -> None:
    report(job, {"uid": "one", "log_probs": [-0.5, -0.75, -1.25]})

    assert job.get(f"/jobs/{JOB}").get_json()["measures"]["log_prob_gap"] == {"mean": 0.25, "max": 0.5}
    page = job.get("/metrics").get_data(as_text=True)
    line = f'rollout_buffer_log_prob_gap{{job_id="{JOB}",statistic="max",task_type="external"}} 0.5'
    assert line in page
