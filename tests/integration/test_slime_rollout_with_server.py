"""The trainer side against the real server and store: groups written over HTTP come out as samples, once each."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_buffer_lab.mock_trainer import MockTrainer, RolloutRecord, trainer_args
from slime.rollout.agent_rollout import get_rollout_data, reset_jobs, start_rollout
from slime.rollout.agent_rollout_samples import SampleConverter
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.trainer import job_feed
from slime_plugins.rollout_buffer.wire import decode_item
from tests.asgi_client import create_app, serving_wsgi

ROOT = Path(__file__).resolve().parents[2]
INSTANCES = [f"task-{number}" for number in range(12)]
SAMPLES = 4


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_feed, "MIN_POLL_S", 0.05)
    monkeypatch.setattr(job_feed, "JOB_END_TIMEOUT_S", 0.5)  # no supervisor ends the job
    reset_jobs()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A served buffer, and the heartbeat of a supervisor for as long as the test takes."""
    settings = ServeSettings(data_dir=tmp_path / "data", data_roots=(tmp_path,))
    app = create_app(settings)
    store = Store(settings.data_dir)
    buffer, over = Buffer(store), threading.Event()

    def beat() -> None:
        buffer.beat("supervisor", os.getpid(), {"task_types": {"external": {}}})

    def beat_until_over() -> None:
        while not over.wait(1.0):
            beat()

    beat()
    supervisor = threading.Thread(target=beat_until_over, daemon=True)
    supervisor.start()
    with serving_wsgi(app) as found:
        yield found
    over.set()
    supervisor.join()
    app.extensions["rollout_buffer"].buffer.store.close()
    store.close()


def trainer_of(url: str, save: Path, *, start: int = 0, **changes: Any) -> MockTrainer:
    args = trainer_args(
        **{
            "rollout_buffer_url": url,
            "rollout_task_type": "external",
            "rollout_buffer_job_id": "the-job",
            "rollout_buffer_options": {"instances": [{"instance_id": name} for name in INSTANCES]},
            "rollout_buffer_wait_s": 0.5,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": SAMPLES,
            "save": str(save),
            "load": str(save),
            **changes,
        }
    )
    return MockTrainer(args, start_rollout_id=start)


def play(url: str, names: list[str], *, epoch: int = 0) -> None:
    """Writes whole groups, as a generator somewhere would."""
    client = RolloutBufferClient(url)
    client.write([written(name, slot, epoch) for name in names for slot in range(SAMPLES)], job_id="the-job")


def written(name: str, slot: int, epoch: int) -> dict[str, Any]:
    turns = [
        {"keep": 0, "prompt_ids": [1, 2, 3], "output_ids": [10 + slot, 4], "output_log_probs": [-0.5, -0.25]},
        {"keep": 5, "prompt_ids": [5, 6], "output_ids": [20 + slot], "output_log_probs": [-1.0]},
    ]
    return {
        "uid": f"{name}.{epoch}.{slot}",
        "instance_id": name,
        "messages": [{"role": "user", "content": name}, {"role": "assistant", "content": str(slot)}],
        "reward": slot / SAMPLES,
        "extra_info": {"slot_was": slot},
        "generations": [{**turn, "finish_reason": "stop", "weight_version": "1"} for turn in turns],
    }


def instances(records: list[RolloutRecord]) -> list[str]:
    return [group[0].metadata["instance_id"] for record in records for group in record.groups]


def train_with_writer(url: str, trainer: MockTrainer, rollouts: int, names: list[str]) -> list[RolloutRecord]:
    """Trains while somebody writes: there is a job to write into only once the trainer has started it."""
    client = RolloutBufferClient(url)
    jobs_before = len(client.jobs())
    over = threading.Event()

    def write_after_start() -> None:
        while len(client.jobs()) == jobs_before and not over.wait(0.01):
            pass
        for name in names:
            play(url, [name])

    writer = threading.Thread(target=write_after_start)
    writer.start()
    try:
        return trainer.train(rollouts)
    finally:
        over.set()
        writer.join()


def test_rollout_0_trains_what_was_written_before_any_trainer_came(url: str, tmp_path: Path) -> None:
    start = {"task_type": "external", "num_repeat_per_sample": SAMPLES, "job_id": "the-job"}
    assert RolloutBufferClient(url).start_rollout(start).state == "running"
    play(url, INSTANCES[:4])
    trainer = trainer_of(url, tmp_path / "save", rollout_buffer_options={})
    assert sorted(instances(trainer.train(1))) == INSTANCES[:4]
    reset_jobs()
    play(url, INSTANCES[4:8])
    resumed = trainer_of(url, tmp_path / "save", rollout_buffer_options={}, start=1)
    assert sorted(instances(resumed.train(1))) == INSTANCES[4:8]


@pytest.mark.parametrize("place", ["beside the messages", "extra_info"])
def test_the_tools_of_a_written_item_are_in_the_prompt_that_is_trained_after(
    url: str, tmp_path: Path, place: str
) -> None:
    tools = [{"type": "function", "function": {"name": "tap_the_screen", "parameters": {}}}]
    extra: dict[str, Any] = {"tools": tools} if place != "extra_info" else {"extra_info": {"tools": tools}}
    client = RolloutBufferClient(url)
    trainer = trainer_of(
        url, tmp_path, rollout_batch_size=1, n_samples_per_prompt=1, hf_checkpoint=str(DEMO_TOKENIZER_PATH)
    )
    start_rollout(url, trainer.args, {})
    client.write([{**written("task-0", 0, 0), "generations": [], **extra}], job_id="the-job")
    groups, _ = asyncio.run(get_rollout_data(url, timeout=20))
    ((sample,),) = SampleConverter(trainer.args, samples_per_group=1).groups([decode_item(groups[0])])

    assert "tap_the_screen" in AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH).decode(sample.tokens)


def test_three_rollouts_of_four_groups_of_four_are_48_samples(url: str, tmp_path: Path) -> None:
    records = train_with_writer(url, trainer_of(url, tmp_path), 3, INSTANCES)
    samples = [sample for record in records for sample in record.samples]

    assert sorted(instances(records)) == sorted(INSTANCES)
    assert [len(record.samples) for record in records] == [16, 16, 16]
    assert len({sample.prompt for sample in samples}) == 48
    assert all(sample.loss_mask == [1, 1, 0, 0, 1] for sample in samples)
    assert {sample.reward for sample in samples} == {0.0, 0.25, 0.5, 0.75}
    # A reply counts what was written since the one before: nothing, where the writer was far ahead of the trainer.
    assert sum(record.metrics.get("rollout/no_filter/total_samples", 0) for record in records) == 48
    accounting = RolloutBufferClient(url).job("the-job")["slots"]
    assert accounting["submitted"] == accounting["delivered"] == 48


TRAINER_PROGRAM = """
import json, sys, time
from rollout_buffer_lab.mock_trainer import MockTrainer, trainer_args

options = json.loads(sys.argv[1])
trainer = MockTrainer(trainer_args(**options["args"]), start_rollout_id=options["start"])

def say(record):
    print(json.dumps([group[0].metadata["instance_id"] for group in record.groups]), flush=True)

for save_interval in options["saves"]:
    trainer.train(1, save_interval=save_interval, on_rollout=say)
time.sleep(60)
"""


def killed_trainer(args: Any, *, start: int, saves: list[int | None]) -> list[str]:
    """Runs a trainer in a process of its own, kills it after its last rollout, and returns what it had received."""
    options = json.dumps({"args": vars(args), "start": start, "saves": saves})
    command = [sys.executable, "-c", TRAINER_PROGRAM, options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            return [name for _ in saves for name in json.loads(process.stdout.readline())]
        finally:
            process.kill()


def test_nothing_is_lost_or_trained_twice_when_trainers_are_killed(url: str, tmp_path: Path) -> None:
    args = trainer_of(url, tmp_path).args
    start_rollout(url, args, {})
    play(url, INSTANCES)
    args.rollout_batch_size = 3

    # The first trainer starts again at rollout 0, so it is told to go on from the job that was filled beforehand.
    first = killed_trainer(args, start=1, saves=[1, None])
    second = killed_trainer(args, start=2, saves=[1, 1])
    third = killed_trainer(args, start=4, saves=[1])

    trained = [*first[:3], *second, *third]
    assert second[:3] == first[3:]
    assert sorted(trained) == sorted(INSTANCES)
