"""What slime computed of a row finds its way back to the trajectory, and never into the training's way."""

from __future__ import annotations

import logging
import math
import pickle
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rollout_buffer_lab.mock_trainer import MockTrainer
from slime.rollout.agent_rollout_data_postprocess import (
    RowName,
    drop_unknown_log_probs,
    rows_to_report,
    take_weight_off_dummies,
)
from slime_plugins.rollout_buffer.trainer import training_reports
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport, TrainingReporter
from tests.loopback_buffer import LoopbackBuffer


class Buffer:
    """Takes what a reporter sends, or fails."""

    def __init__(self, *, fails: bool = False, replies: Mapping[str, Any] | None = None) -> None:
        self.fails = fails
        self.replies = {"kept": 1, "refused": []} if replies is None else replies
        self.said: list[tuple[str, Sequence[Mapping[str, Any]], int | None]] = []

    def report_training(self, job_id: str, rows: Sequence[Mapping[str, Any]], *, step: int | None) -> dict[str, Any]:
        if self.fails:
            raise ConnectionError("nobody listens")
        self.said.append((job_id, rows, step))
        return dict(self.replies)


def reporter(monkeypatch: pytest.MonkeyPatch, buffer: Buffer, **changes: Any) -> TrainingReporter:
    monkeypatch.setattr(training_reports, "RolloutBufferClient", lambda *_, **__: buffer)
    return TrainingReporter("http://127.0.0.1:1", **changes)


def row(uid: str, gap: float) -> RowReport:
    return RowReport(uid=uid, row=0, log_probs=[-1.0 - gap], rollout_log_probs=[-1.0], advantage=0.123456789)


def test_the_rows_that_are_furthest_from_the_engine_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Buffer()
    sends = reporter(monkeypatch, buffer, most_rows=2)

    assert sends.report({"job": [row("near", 0.0), row("far", 2.0), row("middle", 1.0)]}, step=4)
    sends.flush()
    ((job_id, rows, step),) = buffer.said
    assert (job_id, step, [said["uid"] for said in rows]) == ("job", 4, ["far", "middle"])
    assert rows[0] == {"uid": "far", "row": 0, "log_probs": [-3.0], "advantage": 0.12346}


def test_rows_that_cannot_be_compared_stop_no_report_and_nan_is_the_largest_gap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = Buffer(replies={"kept": 1})
    sends = reporter(monkeypatch, buffer, most_rows=2)
    other_length = RowReport(uid="other length", row=0, log_probs=[-1.0], rollout_log_probs=[-1.0, -2.0])
    sends.report({"job": [other_length, row("near", 0.0), row("nan", math.nan)]})
    sends.flush()

    ((_, rows, _),) = buffer.said
    assert [said["uid"] for said in rows] == ["nan", "near"]
    assert not caplog.records


def test_a_report_that_fails_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    sends = reporter(monkeypatch, Buffer(fails=True))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sends.report({"job": [row("a", 1.0)]})
            sends.flush()

    assert caplog.text.count("could not be sent") == 1


def test_the_name_of_a_row_is_its_instance_id_and_survives_the_way_to_another_process() -> None:
    name = pickle.loads(pickle.dumps(RowName.of("task-1", job_id="job", uid="task-1.0.2", row=3)))

    assert (name, name.job_id, name.uid, name.row) == ("task-1", "job", "task-1.0.2", 3)


def test_every_sample_of_a_rollout_names_its_row() -> None:
    with LoopbackBuffer(["task-0", "task-1"]) as buffer:
        (record,) = MockTrainer(buffer.trainer_args(rollout_buffer_job_id="named")).train(1)

    names: list[Any] = [sample.index for sample in record.samples]
    said = [(name, name.job_id, name.uid, name.row) for name in names]
    assert said[:2] == [("task-0", "named", "task-0.0.0", 0), ("task-0", "named", "task-0.0.1", 0)]


def data_of_a_rank() -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    names = [RowName.of("a", job_id="job", uid=uid, row=0) for uid in ("a.0", "a.1", "a.dummy")]
    return {
        "sample_indices": names,
        "rollout_ids": [0, 1, 2],
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1]), torch.tensor([0])],
        "rollout_mask_sums": torch.tensor([2.0, 1.0, 0.0]),
        "log_probs": [torch.tensor([-1.0, 9.0, -2.0]), torch.tensor([-0.5]), torch.tensor([0.0])],
        "rollout_log_probs": [torch.tensor([-1.0, 9.0, -1.0]), torch.tensor([-0.5]), torch.tensor([0.0])],
        "advantages": [torch.tensor([0.5, 0.5, 0.5]), torch.tensor([-0.5]), torch.tensor([0.0])],
        "global_batch_sizes": [3],
        "num_microbatches": [2],
        "micro_batch_indices": [[0, 1], [2]],
    }


def test_the_trained_tokens_of_a_rank_are_reported_and_dummies_are_not() -> None:
    found = list(rows_to_report(Namespace(eps_clip=0.2, eps_clip_high=0.2), data_of_a_rank()))

    assert [(job_id, said.uid) for job_id, said in found] == [("job", "a.0"), ("job", "a.1")]
    first = found[0][1]
    assert (first.log_probs, first.rollout_log_probs, first.advantage) == ([-1.0, -2.0], [-1.0, -1.0], 0.5)
    assert first.clip_share == 0.5
    assert first.loss_share == pytest.approx(1 / 3)


def test_where_slime_has_no_log_probs_yet_the_advantage_is_reported() -> None:
    data = data_of_a_rank()
    del data["log_probs"]
    first = next(rows_to_report(Namespace(), data))[1]

    assert (first.log_probs, first.advantage, first.clip_share) == (None, 0.5, None)


def test_the_weight_of_dummies_is_taken_off_where_another_rank_has_played_trajectories() -> None:
    """Three trajectories here, one of them a dummy; two of the step's five are played on the other rank."""
    data = data_of_a_rank() | {"global_batch_sizes": [5]}
    shares = take_weight_off_dummies(data, lambda own: [own, [{3, 4}]])

    assert shares == [0.8]
    assert data["rollout_mask_sums"].tolist() == pytest.approx([1.6, 0.8, 0.0])


@pytest.mark.parametrize("who", ["nobody", "this rank", "another rank"])
def test_log_probs_that_nobody_knows_are_forgotten_on_every_rank(who: str) -> None:
    """Ranks add up what they log key by key: one that kept them would stop the others."""
    data = data_of_a_rank()
    if who == "this rank":
        data["rollout_log_probs"][1][:] = float("nan")
    forgotten = drop_unknown_log_probs(data, lambda known: [known, who != "another rank"])

    assert forgotten is (who != "nobody")
    assert ("rollout_log_probs" in data) is not forgotten
