"""A run takes nothing away that it is told to read, and proves nothing once its trainer has refused."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("torch", reason="the policy needs torch")

from typer.testing import CliRunner

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
    monkeypatch.setattr(service, "LOOK_INTERVAL_S", 0.01)
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
