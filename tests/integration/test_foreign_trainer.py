"""The trainer of docs/trainer.md that is not slime, run as it stands on a served buffer, to the acknowledgements."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests

from slime_plugins.rollout_buffer import RolloutFeed
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.integration.conftest import BufferProcess

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = 12
SAMPLES = 4


def code_of_the_page() -> str:
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## A trainer of your own\n.*?```python\n(.*?)```", page, re.S)
    return str(code)


def loop_of_the_page() -> ModuleType:
    module = ModuleType("loop_of_the_page")
    exec(compile(code_of_the_page(), "docs/trainer.md", "exec"), vars(module))
    return module


def tell_version(engine_url: str, version: str) -> None:
    body = {"new_version": version}
    requests.post(f"{engine_url}/update_weight_version", json=body, timeout=10).raise_for_status()


class Recorder:
    """A model that learns nothing and keeps what it was trained on; the scripted engine is told its versions."""

    def __init__(self, engine_url: str, *, dies_in_step: int | None = None) -> None:
        self.version = 1
        self.steps: list[list[dict[str, Any]]] = []
        self._engine_url = engine_url
        self._dies_in_step = dies_in_step

    def train(self, sequences: list[dict[str, Any]]) -> None:
        if len(self.steps) == self._dies_in_step:
            raise KeyboardInterrupt
        self.steps.append(sequences)

    def push(self) -> None:
        self.version += 1
        tell_version(self._engine_url, str(self.version))

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


@pytest.fixture
def payload(tmp_path: Path, stand_in_engine: int, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A job of math problems; the engine, which other tests share, has its version back afterwards."""
    engine_url = f"http://127.0.0.1:{stand_in_engine}"
    lines = (ROOT / "data" / "demo_math.jsonl").read_text(encoding="utf-8").splitlines()[:PROBLEMS]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield {
        "job_id": request.node.name,
        "task_type": "math",
        "input_file": str(tmp_path / "problems.jsonl"),
        "num_repeat_per_sample": SAMPLES,
        "num_process": 16,
        "remote_engine_url": engine_url,
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "max_tokens": 256,
    }
    tell_version(engine_url, "default")


def test_a_foreign_trainer_trains_every_group_once_across_a_restart(
    served: BufferProcess, tmp_path: Path, payload: dict[str, Any]
) -> None:
    buffer = served
    loop = loop_of_the_page()
    checkpoint = tmp_path / "checkpoint"
    first = Recorder(payload["remote_engine_url"], dies_in_step=1)

    with pytest.raises(KeyboardInterrupt):
        loop.train(buffer.url, payload, first, checkpoint, groups_per_step=2)
    second = Recorder(payload["remote_engine_url"])
    loop.train(buffer.url, payload, second, checkpoint, groups_per_step=2)

    job = buffer.client.job(payload["job_id"])
    consumed = json.loads((checkpoint / "consumed.json").read_text())
    trained = [sequence for step in (*first.steps, *second.steps) for sequence in step]
    assert job["state"] == "finished"
    assert not {"open", "ready", "leased"} & {state for state, count in job["groups"].items() if count}
    assert sorted(consumed) == sorted(set(consumed)), "an instance of a job of one epoch is consumed once"
    assert len(trained) == SAMPLES * job["groups"]["delivered"] > 0
    for sequence in trained:
        assert len(sequence["ids"]) == len(sequence["mask"]) == len(sequence["rollout_log_probs"])
        assert sum(sequence["mask"]) * sequence["token_weight"] == pytest.approx(1.0)
        at_ones = [value for value, mask in zip(sequence["rollout_log_probs"], sequence["mask"], strict=True) if mask]
        assert all(value < 0 for value in at_ones)


def test_on_policy_batches_are_sampled_by_the_weights_of_their_beginning_alone(
    served: BufferProcess, payload: dict[str, Any]
) -> None:
    """Places for all 48 episodes at once: only what is leased and drained keeps the job from playing ahead."""
    buffer, engine_url = served, payload["remote_engine_url"]
    seen = []
    with RolloutFeed(buffer.url, {**payload, "num_process": 100, "max_groups_ahead": 2}) as feed:
        for version in (1, 2, 3):
            tell_version(engine_url, str(version))
            feed.resume() if version > 1 else feed.start()
            batch = feed.next_batch(2, weight_version=version)
            feed.drain()
            assert not buffer.client.job(payload["job_id"])["attempts"].get("running")
            seen.append({name for row in batch.rows for name in row.weight_versions})
            feed.ack(batch)

    groups = buffer.client.job(payload["job_id"])["groups"]
    assert seen == [{"1"}, {"2"}, {"3"}]
    assert groups["delivered"] == 6
    assert groups["ready"] == groups["leased"] == 0
