"""Where metrics go: what each sink holds afterwards, and that none stops a training."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout_settings import read_tracking_settings
from slime_plugins.rollout_buffer.trainer import tracking
from slime_plugins.rollout_buffer.trainer.tracking import (
    Example,
    JsonLinesSink,
    TensorBoardSink,
    Tracker,
    WandbSink,
    chosen_examples,
    example_of,
    tracker_for,
)
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.pictures import png
from tests.wandb_runs import artifact_files_in, logged_in, metrics_defined_in, offline_run


def item(uid: str, reward: float, **changes: Any) -> RolloutItem:
    values: dict[str, Any] = {
        "uid": uid,
        "instance_id": "task-0",
        "reward": reward,
        "messages": ({"role": "user", "content": "Do it"}, {"role": "assistant", "content": f"words of {uid}"}),
        "extra_info": {"task_name": "ClockTimerEntry", "success": reward > 0, "turns": 3},
        "images": ("first", "middle", "last"),
    }
    return RolloutItem(**{**values, **changes})


EXAMPLE = example_of(item("a", 0.5), {"first": png((8, 16), "red"), "last": png((8, 16), "blue")})


class HangingSink:
    """Takes the first metrics when it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.steps: list[int] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.go_on.wait(20)
        self.steps.append(step)

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        self.log({}, step)


class BrokenSink:
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise OSError("no network")

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        raise OSError("no network")


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    tracker_for.cache_clear()
    tracking._warn_once.cache_clear()


def test_wandb_holds_numbers_and_pictures_under_the_rollouts_step(tmp_path: Path) -> None:
    with offline_run(tmp_path):
        sink = WandbSink()
        sink.log({"rollout/no_filter/total_samples": 8}, 3)
        sink.log_examples([EXAMPLE], 3)

    numbers, table = logged_in(tmp_path)
    assert (numbers["rollout/no_filter/total_samples"], numbers["rollout/step"]) == (8, 3)
    assert (table["rollout/examples/_type"], table["rollout/step"]) == ("table-file", 3)
    assert table["rollout/examples/nrows"] == 1
    assert sum(path.endswith(".png") for path in artifact_files_in(tmp_path)) == 2
    assert metrics_defined_in(tmp_path)["rollout/*"] == "rollout/step"


def test_a_line_of_the_file_is_a_rollout(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "run" / "metrics.jsonl")
    sink.log({"rollout/reward/mean": 0.5}, 0)
    sink.log_examples([EXAMPLE], 0)

    metrics, examples = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert metrics == {"rollout/step": 0, "rollout/reward/mean": 0.5}
    assert examples["rollout/examples"][0]["last_words"] == "words of a"
    assert examples["rollout/examples"][0]["screenshots"] == ["first", "last"]


def test_tensorboard_reads_the_numbers(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log({"rollout/reward/mean": 0.5}, 7)
    sink.log_examples([EXAMPLE], 7)
    sink.close()

    (path,) = tmp_path.glob("events.*")
    values = {value.tag: (event.step, value) for event in events(path.read_bytes()) for value in event.summary.value}
    assert values["rollout/reward/mean"][0] == 7
    assert values["rollout/reward/mean"][1].simple_value == 0.5
    assert any("rollout/examples" in tag for tag in values)


def events(data: bytes) -> list[Any]:
    """The records of an event file: length, checksum, content, checksum."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        content = data[at + 12 : at + 12 + size]
        assert masked_crc32c(content) == int.from_bytes(data[at + 12 + size : at + 16 + size], "little")
        event = event_pb2.Event()
        event.ParseFromString(content)
        found.append(event)
        at += size + 16
    return found


def test_a_sink_that_fails_is_said_once_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = JsonLinesSink(tmp_path / "metrics.jsonl")
    tracker = Tracker([BrokenSink()], [BrokenSink(), good])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log_before_filter({"rollout/x": 1}, step)
            tracker.log_rollout({"rollout/x": 1}, step)
            tracker.log_examples([EXAMPLE], step)

    assert caplog.text.count("no network") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_sink_that_hangs_holds_up_one_rollout_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "TIMEOUT_S", 0.5)
    sink = HangingSink()
    tracker = Tracker([sink], [])
    began = time.monotonic()
    for step in range(50):
        tracker.log_before_filter({"rollout/x": 1}, step)
    assert time.monotonic() - began < 15  # held up each time it would be 25 s
    assert caplog.text.count("did not finish within") == 1
    sink.go_on.set()
    while len(sink.steps) < 2:
        tracker.log_before_filter({"rollout/x": 1}, 99)
    assert sink.steps[0] == 0
    assert set(sink.steps[1:]) == {99}


def test_the_worst_the_middle_and_the_best_are_shown() -> None:
    items = [item(f"{reward}", reward) for reward in (0.5, -0.5, 1.0, 0.0, 0.25)]
    dummies = [item("dummy", 9.0, remove_sample=True), item("broken", 9.0, error="not an item")]

    assert [chosen.uid for chosen in chosen_examples([*dummies, *items])] == ["-0.5", "0.25", "1.0"]
    assert [chosen.uid for chosen in chosen_examples(items[:1])] == ["0.5"]
    assert chosen_examples(dummies) == []


def test_examples_come_every_so_many_rollouts_and_only_where_somebody_looks() -> None:
    every_third = read_tracking_settings(trainer_args(use_wandb=True, rollout_buffer_example_interval=3))
    never = read_tracking_settings(trainer_args(use_wandb=True, rollout_buffer_example_interval=0))
    unheard = read_tracking_settings(trainer_args(rollout_buffer_example_interval=1))

    assert [number for number in range(7) if every_third.logs_examples(number)] == [0, 3, 6]
    assert not any(never.logs_examples(number) or unheard.logs_examples(number) for number in range(7))
