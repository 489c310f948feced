"""What a guide to agent rollouts tells people to write: its functions, bodies and loops, against a real buffer.

Its commands are tried in ``tests/unit/tools/test_install_into_slime.py`` (scripts, instance ids), its mask classes in
``tests/unit/trainer/test_agent_rollout_masks.py``, its flag for the buffer in
``tests/integration/test_buffer_url_flag.py``, generators of its form in ``test_plain_generators.py``. What is refused
on purpose stands at the end, with the reason.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from transformers import AutoTokenizer

from rollout_buffer_lab.mock_trainer import CheckpointDataSource, flat_samples, trainer_args
from slime.rollout import agent_rollout
from slime.rollout.agent_rollout import generate_agent_rollout, get_rollout_data, log_raw_info, start_rollout
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.integration.conftest import BufferProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def shared_buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    """The buffer of this file alone: the guide's polls name no job, so that no other may be open."""
    found = BufferProcess(tmp_path_factory.mktemp("guide"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _no_job_of_before() -> None:
    agent_rollout.reset_jobs()


@pytest.fixture
def buffer(served: BufferProcess) -> BufferProcess:
    return served


def problems(folder: Path, count: int = 12) -> Path:
    """An input of the guide's form, with the label that the math reward needs."""
    lines = [
        {
            "instance_id": f"math_{number:03}",
            "prompt": [{"role": "user", "content": f"Solve {number} + {number}. Put the result in \\boxed{{}}."}],
            "label": str(2 * number),
        }
        for number in range(10, 10 + count)
    ]
    path = folder / "problems_instance_id.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(buffer: BufferProcess, engine_port: int, **changes: Any) -> Namespace:
    """slime's arguments as the guide sets them, small."""
    return trainer_args(
        **{
            "rollout_buffer_url": buffer.url,
            "prompt_data": str(problems(buffer.folder)),
            "loss_mask_type": "qwen",
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 256,
            "rollout_temperature": 0.8,
            "sglang_router_port": engine_port,
            "hf_checkpoint": str(DEMO_TOKENIZER_PATH),
            "rollout_num_process": 8,
            **changes,
        }
    )


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("generate_agent_rollout", ["args", "rollout_id", "data_buffer", "evaluation=False"]),
        ("get_rollout_data", ["api_base_url", "num=None", "timeout=100.0"]),
        ("start_rollout", ["api_base_url", "args", "metadata"]),
        ("log_raw_info", ["args", "all_meta_info", "rollout_id"]),
    ],
)
def test_the_four_functions_take_the_guides_arguments_by_place_and_by_name(name: str, parameters: list[str]) -> None:
    found = [
        parameter.name + ("" if parameter.default is parameter.empty else f"={parameter.default}")
        for parameter in inspect.signature(getattr(agent_rollout, name)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    assert found == parameters


def test_two_of_the_four_functions_are_awaited_and_two_are_not() -> None:
    assert inspect.iscoroutinefunction(generate_agent_rollout)
    assert inspect.iscoroutinefunction(get_rollout_data)
    assert not inspect.iscoroutinefunction(start_rollout)
    assert not inspect.iscoroutinefunction(log_raw_info)


# --- a loop of one's own ---------------------------------------------------------------------------------------------


async def test_start_poll_convert_and_log_as_the_guide_does_it(
    buffer: BufferProcess, stand_in_engine: int, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(buffer, stand_in_engine, rollout_buffer_url=None)
    wanted = args.rollout_batch_size * args.n_samples_per_prompt

    consumed = {"0": ["math_010"], "finished_groups": ["math_011"]}
    told = await asyncio.to_thread(start_rollout, buffer.url, args, consumed)
    assert told["message"]

    results: list[dict[str, Any]] = []
    all_meta_info: list[dict[str, Any]] = []
    while len(results) < wanted:
        data, meta_info = await get_rollout_data(buffer.url, 1, timeout=100.0)
        assert len(data) <= args.n_samples_per_prompt, "one group at a time"
        results.extend(data)
        if meta_info:
            all_meta_info.append(meta_info)
    assert not {"math_010", "math_011"} & {record["instance_id"] for record in results}

    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint)
    samples = [converted(record, tokenizer, args) for record in results]
    assert {len(sample.loss_mask or ()) - sample.response_length for sample in samples} == {0}
    assert all(sum(sample.loss_mask or ()) > 0 for sample in samples)
    assert {sample.metadata["raw_reward"] for sample in samples} <= {0.0, 1.0}

    caplog.set_level("INFO")
    log_raw_info(args, all_meta_info, 0)
    assert "rollout/no_filter/total_samples" in caplog.text
    assert "rollout/no_filter/avg_reward" in caplog.text


def converted(record: dict[str, Any], tokenizer: Any, args: Namespace) -> Sample:
    """The guide's conversion of an item; how it ended is slime's ``status``."""
    generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=args.loss_mask_type)
    token_ids, loss_mask = generator.get_loss_mask(record["messages"])
    response_length = generator.get_response_lengths([loss_mask])[0]
    return Sample(
        index=record["instance_id"],
        prompt=record["uid"],
        tokens=token_ids,
        response_length=response_length,
        reward=record["reward"],
        status=Sample.Status.COMPLETED,
        loss_mask=loss_mask[-response_length:],
        metadata={**record["extra_info"], "raw_reward": record["raw_reward"]},
    )


async def test_the_main_function_takes_its_arguments_by_place(buffer: BufferProcess, stand_in_engine: int) -> None:
    args = arguments(buffer, stand_in_engine)
    source = CheckpointDataSource(args)

    batch = await generate_agent_rollout(args, 0, source, False)

    samples = flat_samples(batch.samples)  # type: ignore[union-attr]  # an evaluation returns another record
    assert len(samples) == 8
    assert all(isinstance(sample.index, str) for sample in samples)
    assert all("raw_reward" in sample.metadata for sample in samples)
    consumed = [name for ids in source.get_metadata().values() if isinstance(ids, list) for name in ids]
    assert {sample.index for sample in samples} <= set(consumed)


def test_the_payload_of_the_guide_starts_a_job_with_its_strings_and_numbers(
    buffer: BufferProcess, stand_in_engine: int
) -> None:
    payload = {
        "num_process": 1024,
        "num_epoch": 3,
        "remote_engine_url": f"http://127.0.0.1:{stand_in_engine}",
        "task_type": "math",
        "input_file": str(problems(buffer.folder)),
        "num_repeat_per_sample": "8",
        "max_tokens": 8192,
        "sampling_params": {"max_tokens": 8192, "temperature": 0.8, "top_p": 0.9},
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "skip_instance_ids": ["math_010", "math_011"],
    }

    told = requests.post(f"{buffer.url}/start_rollout", json=payload, timeout=30).json()

    assert told["message"]
    job = buffer.client.job(told["job_id"])
    assert (job["group_size"], job["epochs"], job["slots"]["skipped"]) == (8, 3, 16)
    buffer.client.cancel(told["job_id"])


# --- refused on purpose ----------------------------------------------------------------------------------------------


async def test_problems_without_a_label_cannot_be_rewarded_and_a_timeout_says_so(
    buffer: BufferProcess, stand_in_engine: int
) -> None:
    """The guide's own two lines: each attempt fails with a sentence, and none becomes a reward of 0."""
    unlabelled = buffer.folder / "unlabelled.jsonl"
    unlabelled.write_text('{"instance_id": "math_001", "prompt": [{"role": "user", "content": "Prove it."}]}\n')
    options = {"max_attempts": 1}
    args = arguments(buffer, stand_in_engine, prompt_data=str(unlabelled), rollout_buffer_options=options)
    told = await asyncio.to_thread(start_rollout, buffer.url, args, {})
    job_id = told["job_id"]
    await asyncio.to_thread(wait_until, lambda: buffer.client.job(job_id)["state"] == "failed", 60, "its end")

    with pytest.raises(asyncio.TimeoutError, match=r"is failed: .*attempts failed: instance math_001 needs a label"):
        await get_rollout_data(buffer.url, None, 2.0)
    job = await asyncio.to_thread(buffer.client.job, job_id)
    assert (job["slots"]["failed"], job["slots"]["delivered"], job["outcomes"]) == (4, 0, {})
    assert "needs a label" in json.dumps(await asyncio.to_thread(buffer.client.explanation, job_id))
