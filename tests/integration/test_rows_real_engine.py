"""What the trainer computes on the delivered rows is what the engine computed while it sampled all their turns.

A real SGLang server of a text model, ``rollout-buffer serve`` with its runner, and the trainer's side: the math
generator (one turn), and conversations of three turns with questions and tool results between them, whose prompts only
grow or are rendered again each time. No turn is scripted. Then the same model in transformers (fp32) over the delivered
tokens. The same behind a proxy that decodes prompts and tokenises them again, which says what it ran or does not.

``ROLLOUT_BUFFER_TEST_ENGINE_URL`` names the server (started in float32), ``ROLLOUT_BUFFER_TEST_MODEL`` the folder of
its model, and ``ROLLOUT_BUFFER_TEST_TORCH_PYTHON`` a Python that has torch and transformers (this one, if it has).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollout_buffer_lab.mock_trainer import MockTrainer, trainer_args
from slime.rollout.agent_rollout import reset_jobs
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from tests.integration.conftest import BufferProcess, engine_url_of
from tests.prompt_faults import changing, retokenised, unchanged, without_ids
from tests.row_log_probs import recomputed, recorded_of

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(1800)]

logger = logging.getLogger(__name__)

URL_VARIABLE = "ROLLOUT_BUFFER_TEST_ENGINE_URL"
MODEL_VARIABLE = "ROLLOUT_BUFFER_TEST_MODEL"
PYTHON_VARIABLE = "ROLLOUT_BUFFER_TEST_TORCH_PYTHON"
URL = os.environ.get(URL_VARIABLE, "").rstrip("/")
MODEL = os.environ.get(MODEL_VARIABLE, "")
PYTHON = os.environ.get(PYTHON_VARIABLE) or sys.executable
if not (URL and MODEL):
    pytest.skip(f"{URL_VARIABLE} and {MODEL_VARIABLE} are not both set", allow_module_level=True)
if sys.executable == PYTHON and importlib.util.find_spec("torch") is None:
    pytest.skip(f"there is no torch here, and {PYTHON_VARIABLE} names no other Python", allow_module_level=True)

TESTS = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-4
FAR = 0.02
"""A difference in nats that rounding cannot make."""

MATH = [
    {"instance_id": f"sum-{number}", "prompt": f"What is {number} + {number}? Say it in \\boxed{{}}.", "label": "0"}
    for number in (3, 41)
]
TALKS = [
    {
        "instance_id": "travel",
        "questions": [
            {"role": "user", "content": "Name a city by the sea."},
            {"role": "user", "content": 'Tool result: {"weather": "rain, 9 °C", "wind": null}'},
            {"role": "user", "content": "  And what should I pack?\n\n"},
        ],
    },
    {
        "instance_id": "markers",
        "questions": [
            {"role": "user", "content": "Finish the sentence: the quick brown fox"},
            {"role": "user", "content": "What does it say after <think>, 你好 and e\u0301?"},
            {"role": "user", "content": "Thanks."},
        ],
    },
]

StartBuffer = Callable[..., BufferProcess]
Recorded = list[tuple[int, float]]


@pytest.fixture(scope="module", autouse=True)
def _server_answers() -> None:
    engine_url_of(URL_VARIABLE)


def delivered(
    buffer: BufferProcess, task_type: str, instances: Sequence[dict[str, Any]], tokens: int, url: str = URL
) -> list[Sample]:
    """Plays every instance once in the buffer's runner, and takes the rows as slime's trainer would."""
    path = buffer.folder / f"{task_type}.jsonl"
    path.write_text("".join(json.dumps(instance) + "\n" for instance in instances), encoding="utf-8")
    reset_jobs()
    address = urlsplit(url)
    args = trainer_args(
        rollout_buffer_url=buffer.url,
        rollout_task_type=task_type,
        prompt_data=str(path),
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        hf_checkpoint=MODEL,
        save=str(buffer.folder / "checkpoints"),
        load=str(buffer.folder / "checkpoints"),
        rollout_num_process=4,
        rollout_batch_size=len(instances),
        n_samples_per_prompt=1,
        rollout_max_response_len=tokens,
    )
    (record,) = MockTrainer(args).train(1)
    return list(record.samples)


def largest_difference(computed: Sequence[float], recorded: Recorded) -> float:
    return max(abs(computed[at] - log_prob) for at, log_prob in recorded)


def swapped(computed: Sequence[float], recorded: Recorded) -> float:
    """The difference when the log-probs of one row are held against another."""
    inside = [(at, log_prob) for at, log_prob in recorded if at < len(computed)]
    return largest_difference(computed, inside) if inside else 0.0


def check(samples: Sequence[Sample], name: str) -> None:
    """Every trained position agrees; each kind of planted mistake does not."""
    rows = [list(sample.tokens) for sample in samples]
    recorded = [recorded_of(sample) for sample in samples]
    off_by_one_token = [[*row[:3], row[3] + 1, *row[4:]] for row in rows]
    computed_log_probs = recomputed(PYTHON, MODEL, [*rows, *off_by_one_token])
    true, wrong = computed_log_probs[: len(rows)], computed_log_probs[len(rows) :]
    for sample, computed, mistaken, own in zip(samples, true, wrong, recorded, strict=True):
        assert sample.metadata["token_source"] == "generations"
        assert own
        assert largest_difference(computed, own) < TOLERANCE
        assert largest_difference(mistaken, own) > FAR
        assert largest_difference(computed, [(at - 1, log_prob) for at, log_prob in own]) > FAR
    assert len(true) == 1 or max(swapped(true[0], recorded[1]), swapped(true[1], recorded[0])) > FAR
    worst = max(largest_difference(computed, own) for computed, own in zip(true, recorded, strict=True))
    logger.info("%s: %d trained positions, largest difference %.1e", name, sum(map(len, recorded)), worst)


def test_one_sampled_turn_has_the_engines_log_probs(start_buffer: StartBuffer) -> None:
    samples = delivered(start_buffer("--allow-tokenizer", MODEL), "math", MATH, 48)
    assert len(samples) == len(MATH)
    check(samples, "math")


@pytest.mark.parametrize("mode", ["incremental", "history"])
@pytest.mark.parametrize("engine", ["keeps ids", "re-tokenises", "re-tokenises and does not say so"])
async def test_three_sampled_turns_have_the_engines_log_probs(
    start_buffer: StartBuffer, mode: str, engine: str
) -> None:
    """Every trained token has the log-prob that the engine recorded, and no token is left out without need."""
    buffer = start_buffer("--allow-tokenizer", MODEL, "--generator-dir", str(TESTS / "data" / "generators"))
    talks = [talk | {"mode": mode, "spelled": engine != "keeps ids" and talk is TALKS[0]} for talk in TALKS]
    change = unchanged if engine == "keeps ids" else retokenised(load_tokenizer(MODEL))
    async with changing(URL, change, without_ids if "does not say" in engine else unchanged) as url:
        samples = await asyncio.to_thread(delivered, buffer, "follow_up", talks, 32, url)
    (job,) = await asyncio.to_thread(buffer.client.jobs)
    prompts = (await asyncio.to_thread(buffer.client.job, job["job_id"]))["measures"]["prompts"]
    logger.info("%s, %s: %s", engine, mode, prompts)
    sampled = sum({sample.metadata["instance_id"]: sample.metadata["sampled_tokens"] for sample in samples}.values())
    trained = sum(len(recorded_of(sample)) for sample in samples if not sample.remove_sample)
    if engine == "keeps ids":
        assert prompts["equal"] == 6
        assert mode == "history" or len(samples) == len(TALKS), "a conversation that only grows is one row"
    if "does not say" in engine:
        assert prompts["unknown"] == 6
        assert prompts["untrained"] >= 1
        assert trained < sampled
        samples = [sample for sample in samples if not sample.remove_sample]
    else:
        assert (prompts["checked"], prompts["unknown"]) == (6, 0)
        assert trained == sampled
    if engine == "re-tokenises":
        assert prompts["differing"] >= 1
    await asyncio.to_thread(check, samples, f"{engine}, {mode}")
