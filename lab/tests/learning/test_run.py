"""A run takes nothing away that it is told to read, and proves nothing once its trainer has refused."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("torch", reason="the policy needs torch")

from typer.testing import CliRunner

from lab.tests.tiny_policy import policy
from rollout_buffer_lab.learning import run, service
from rollout_buffer_lab.learning.grpo import StepReport
from rollout_buffer_lab.learning.run import LearnSettings, Outcome, Step, learn, outcome_of
from slime_plugins.rollout_buffer.cli.app import app
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.job_feed import JobEndedError


def test_a_model_or_an_input_in_the_folder_of_the_run_is_refused_and_stays(tmp_path: Path) -> None:
    earlier = tmp_path / "run" / "model" / "config.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")

    for settings in (
        LearnSettings(folder=tmp_path, model=earlier.parent),
        LearnSettings(folder=tmp_path, input_file=earlier),
    ):
        with pytest.raises(ConfigError, match="give another --folder"):
            learn(settings, print, print)

    assert earlier.read_text() == "{}"


@pytest.mark.parametrize("line", ["5", "[0.5]", '"reward"', '{"reward": null}', '{"step": 1}', "{"])
def test_a_file_beside_that_is_no_metrics_file_is_refused_in_a_sentence(tmp_path: Path, line: str) -> None:
    beside = tmp_path / "metrics.jsonl"
    beside.write_text(f"{line}\n")

    with pytest.raises(ConfigError, match=r"is no metrics\.jsonl of an earlier run"):
        learn(LearnSettings(folder=tmp_path / "folder", beside=(beside,)), print, print)


def test_a_run_ends_with_the_reason_when_nothing_of_a_step_can_be_trained(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    dummy = Mock(is_dummy=True, dummy_reason="its tokens are too old")
    feed, client, weights = Mock(), Mock(), Mock()
    feed.next_batch.return_value = Mock(trajectories=[dummy], groups=[Mock(trajectories=[dummy])])
    groups = {"open": 0, "ready": 1, "leased": 0, "delivered": 0, "filtered": 0}
    client.job.return_value = {"state": "finished", "groups": groups, "attempts": {}}
    client.groups.return_value = {"groups": [], "next_cursor": None}
    training = run._Training(LearnSettings(folder=tmp_path), tmp_path, policy(), feed, client, [], print)

    outcome = training.play(weights)

    assert outcome.stopped == "no trajectory of step 0 can be trained: its tokens are too old"


def rising(steps: int) -> list[Step]:
    """Steps whose groups earn more and more."""
    seen = StepReport(
        loss=0.0,
        entropy=0.5,
        clipped=0.0,
        gradient_norm=1.0,
        importance=1.0,
        importance_cut=0.0,
        log_prob_gap=1e-7,
        checked=1.0,
        lag=0.0,
        largest_lag=0,
        trajectories=96,
        tokens=500,
    )
    return [
        Step(
            step=number,
            reward=number / steps,
            group_rewards=(number / steps,) * 12,
            groups_trained=12,
            report=seen,
            reward_by_turn=(),
            waited_s=1.0,
            trained_s=1.0,
        )
        for number in range(steps)
    ]


@pytest.mark.parametrize(("refused", "code"), [(None, 0), ("before step 12 trained anything: a gap of .094", 1)])
def test_a_run_that_was_refused_late_did_not_rise_whatever_its_reward_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str | None, code: int
) -> None:
    def ended(*_: object) -> Outcome:
        return outcome_of(rising(12), 0, stopped=None, refused=refused)

    monkeypatch.setattr(run, "learn", ended)
    done = CliRunner().invoke(app, ["learn", "--folder", str(tmp_path)])

    assert done.exit_code == code, done.output
    assert ("The reward rose" in done.output) is (refused is None)
    assert (refused or "The reward") in done.output


def test_a_step_takes_what_is_ready_when_the_bound_on_the_lag_lets_nothing_more_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "QUIET_S", 0.05)
    monkeypatch.setattr(service, "POLL_INTERVAL_S", 0.01)
    client, feed = Mock(), Mock()
    groups = {"open": 100, "ready": 3, "leased": 0, "delivered": 10, "filtered": 9}
    running = iter([2, 1])
    client.job.side_effect = lambda _: {
        "state": "running",
        "groups": groups,
        "attempts": {"running": next(running, 0)},
    }

    service.LearningJob(feed, client, groups_per_step=12).next_batch(7)

    feed.next_batch.assert_called_once_with(3, weight_version=7)
    assert client.job.call_count > 3


@pytest.mark.timeout(30)
def test_a_job_that_failed_is_not_waited_for() -> None:
    client, feed = Mock(), Mock()
    groups = {"open": 100, "ready": 0, "leased": 0, "delivered": 0, "filtered": 0}
    client.job.return_value = {"state": "failed", "groups": groups, "attempts": {}}
    feed.next_batch.side_effect = JobEndedError("its runner ended 8 times in a row")

    with pytest.raises(JobEndedError):
        service.LearningJob(feed, client, groups_per_step=12).next_batch(0)
