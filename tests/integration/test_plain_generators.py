"""Generators in slime's plain form, files of other people, played by ``rollout-buffer serve`` with an engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.integration.conftest import BufferProcess
from tests.processes import is_alive, process_table
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

SLIME = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME", "")
StartBuffer = Callable[..., BufferProcess]

OWN_GENERATOR = """
from slime_plugins.rollout_buffer.generator import BaseGenerator, query_single_turn

TASK_TYPE = "sums"


def reward(item):
    return float("\\\\boxed{" + item["label"] + "}" in item["messages"][-1]["content"])


def run_rollout(data):
    generator = BaseGenerator(
        data["remote_engine_url"],
        data["remote_buffer_url"],
        num_repeat_per_sample=int(data["num_repeat_per_sample"]),
        max_tokens=int(data["sampling_params"]["max_tokens"]),
        num_process=int(data.get("num_process", 100)),
        task_type=data["task_type"],
        skip_instance_ids=data.get("skip_instance_ids"),
    )
    generator.entry(data["input_file"], query_single_turn, reward, int(data.get("num_epoch", 1)))


def is_valid_group(group, min_valid_group_size, task_type):
    return len(group[1]) >= min_valid_group_size
"""


def sums(folder: Path, count: int) -> Path:
    """Problems that the scripted engine solves now and then."""
    lines = [
        {
            "instance_id": f"sum-{i}",
            "prompt": [{"role": "user", "content": f"What is {i} + {i}? Put the result in \\boxed{{}}."}],
            "label": str(2 * i),
        }
        for i in range(10, 10 + count)
    ]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_generator_on_slimes_base_class_fills_its_own_job_beside_another_and_behind_a_token(
    start_buffer: StartBuffer, stand_in_engine: int, tmp_path: Path
) -> None:
    folder = tmp_path / "generators"
    folder.mkdir()
    (folder / "sums.py").write_text(OWN_GENERATOR)
    token = tmp_path / "token"
    token.write_text("open-sesame-open-sesame\n")
    buffer = start_buffer("--generator-dir", str(folder), "--token-file", str(token))
    client = RolloutBufferClient(buffer.url, token="open-sesame-open-sesame", timeout_s=30)
    client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "another"})
    job_id = client.start_rollout(
        {
            "task_type": "sums",
            "input_file": str(sums(tmp_path, 4)),
            "remote_engine_url": f"http://127.0.0.1:{stand_in_engine}",
            "num_repeat_per_sample": "3",
            "num_process": "6",
            "num_epoch": "1",
            "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9},
            "tokenizer_path": str(DEMO_TOKENIZER_PATH),
            "skip_instance_ids": ["sum-11"],
        }
    ).job_id
    got: list[RolloutItem] = []
    while not (data := client.get_rollout_data(job_id=job_id, wait_s=5, lease_s=60)).exhausted:
        got += data.items
        if data.delivery_id is not None:  # a crowded machine may play none within one poll
            client.ack([data.delivery_id])
    got += data.items

    assert sorted(item.instance_id for item in got) == sorted(["sum-10", "sum-12", "sum-13"] * 3)
    assert {item.reward for item in got} <= {0.0, 1.0}
    assert all(item.raw["extra_info"]["finish_reason"] == "stop" for item in got)
    assert client.job(job_id)["slots"]["skipped"] == 3


@pytest.mark.slime
@pytest.mark.skipif(not SLIME, reason="set ROLLOUT_BUFFER_TEST_SLIME to the path of a slime checkout")
def test_slimes_own_base_generator_file_plays_here(
    start_buffer: StartBuffer, stand_in_engine: int, tmp_path: Path
) -> None:
    """With its forks, beside another job. Replaced are its task type, which one of ours has, and a judge with torch."""
    text = (Path(SLIME) / "slime_plugins/rollout_buffer/generator/base_generator.py").read_text()
    text = text.replace('TASK_TYPE = "math"', 'TASK_TYPE = "slimes_math"')
    needs_torch = "from slime.rollout.rm_hub import get_deepscaler_rule_based_reward"
    assert needs_torch in text
    judge = "def get_deepscaler_rule_based_reward(text, label):\n    return float('{' + label + '}' in text)\n"
    folder = tmp_path / "generators"
    folder.mkdir()
    (folder / "slimes_math.py").write_text(text.replace(needs_torch, judge))
    buffer = start_buffer("--generator-dir", str(folder))
    buffer.client.start_rollout({"task_type": "external", "num_repeat_per_sample": 1, "job_id": "another"})
    job_id = buffer.client.start_rollout(
        {
            "task_type": "slimes_math",
            "input_file": str(sums(tmp_path, 6)),
            "remote_engine_url": f"http://127.0.0.1:{stand_in_engine}",
            "num_repeat_per_sample": "4",
            "num_process": "4",
            "num_epoch": "1",
            "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9},
        }
    ).job_id
    wait_until(lambda: buffer.client.job(job_id)["slots"]["open"] == 0, 90, "end of the groups")
    items = buffer.client.get_rollout_data(job_id=job_id).items

    assert items
    assert len(items) % 4 == 0
    assert all(item.raw["extra_info"]["round_number"] == 1 for item in items)
    forked = [pid for pid, _, command in process_table() if "runner.main" in command and f"{tmp_path}/data" in command]
    assert len(forked) > 5
    buffer.client.cancel(job_id)
    wait_until(lambda: not any(map(is_alive, forked)), 30, "end of slime's processes")
