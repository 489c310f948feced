"""Questions over documents through ``rollout-buffer serve``, a scripted engine and the trainer's side, to Samples."""

from __future__ import annotations

import json
import sqlite3
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.documents import generate
from rollout_buffer_lab.mock_trainer import MockTrainer, flat_samples, trainer_args
from slime.rollout.agent_rollout import post_process_rewards, reset_jobs
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.demo_tokens import trained_text
from tests.integration.conftest import BufferProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

StartBuffer = Callable[..., BufferProcess]
END_OF_TURN = "<|im_end|>"


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    reset_jobs()
    yield
    reset_jobs()


def documents(folder: Path, lines: int, tokens: tuple[int, int] = (4_000, 8_000)) -> Path:
    path = folder / "documents.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in generate(lines, tokens)), encoding="utf-8")
    return path


def args_for(buffer: BufferProcess, engine_port: int, lines: int, **options: Any) -> Namespace:
    return trainer_args(
        rollout_buffer_url=buffer.url,
        rollout_task_type="statelm",
        rollout_buffer_job_id="documents",
        prompt_data=str(documents(buffer.folder, lines)),
        sglang_router_port=engine_port,
        hf_checkpoint=str(DEMO_TOKENIZER_PATH),
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        save=str(buffer.folder / "checkpoints"),
        rollout_num_process=8,
        rollout_buffer_options={"train_before_deletion": True, **options},
    )


def delivered(client: RolloutBufferClient, engine_port: int, folder: Path, **payload: Any) -> list[RolloutItem]:
    """Plays a job whose every slot is delivered, and takes all of it."""
    job_id = client.start_rollout(
        {
            "task_type": "statelm",
            "input_file": "documents.jsonl",
            "remote_engine_url": f"http://127.0.0.1:{engine_port}",
            "tokenizer_path": str(DEMO_TOKENIZER_PATH),
            "num_repeat_per_sample": 2,
            "max_tokens": 512,
            "evaluation": True,
            "train_before_deletion": True,
            **payload,
        }
    ).job_id
    items: list[RolloutItem] = []
    while True:
        data = client.get_rollout_data(job_id=job_id, wait_s=5, lease_s=60)
        items += data.items
        if data.delivery_id is not None:
            client.ack([data.delivery_id])
        if data.exhausted:
            assert not client.job(job_id)["attempts"].get("failed")
            return items


def test_a_trainer_gets_groups_whose_rows_train_each_turn_once(served: BufferProcess, stand_in_engine: int) -> None:
    buffer = served
    args = args_for(buffer, stand_in_engine, 12)
    (record,) = MockTrainer(args).train(1)
    members = [flat_samples(member) for group in record.groups for member in group]
    assert len(members) == 8
    assert max(map(len, members)) > 1
    said = {
        item["uid"]: "".join(one["content"] + END_OF_TURN for one in item["messages"] if one["role"] == "assistant")
        for item in (buffer.client.trajectory(str(rows[0].prompt)) for rows in members)
    }
    for rows in members:
        trained = [trained_text(row.tokens[-row.response_length :], row.loss_mask) for row in rows]
        assert "".join(trained) == said[str(rows[0].prompt)]
        assert len({row.rollout_id for row in rows}) == 1
        assert {row.metadata["had_delete_operation"] for row in rows} == {len(rows) > 1}
    samples = [row for rows in members for row in rows]
    _, normalized = post_process_rewards(args, samples)
    by_trajectory: dict[Any, set[float]] = {}
    for row, value in zip(samples, normalized, strict=True):
        by_trajectory.setdefault(row.rollout_id, set()).add(value)
    assert all(len(values) == 1 for values in by_trajectory.values())
    for group in record.groups:
        advantages = [by_trajectory[flat_samples(member)[0].rollout_id] for member in group]
        assert abs(sum(value for values in advantages for value in values)) < 1e-6


def test_a_long_document_is_stored_once_and_sent_to_nobody(start_buffer: StartBuffer, stand_in_engine: int) -> None:
    buffer = start_buffer()
    size = documents(buffer.folder, 2, (200_000, 200_000)).stat().st_size
    items = delivered(buffer.client, stand_in_engine, buffer.folder, num_repeat_per_sample=4)
    assert len(items) == 8
    assert all(len(json.dumps(item.raw)) < 300_000 for item in items)
    with closing(sqlite3.connect(buffer.folder / "data" / "buffer.sqlite3")) as connection:
        ((lines,),) = connection.execute("SELECT sum(length(lines)) FROM input_chunks").fetchall()
    assert lines <= size
    stored = sum(path.stat().st_size for path in (buffer.folder / "data" / "packs").rglob("*") if path.is_file())
    assert stored < size / 2
