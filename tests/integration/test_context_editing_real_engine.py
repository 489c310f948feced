"""Edited contexts against a real SGLang server: the log-probs recomputed on training rows are the recorded ones.

A small model calls no tools by itself, so there are two kinds of episodes, each with two deletions:

* *sampled*: every token of every turn is sampled freely by the model; what a turn asks for is not read from its text,
  but given by the test, and carried out by the same code;
* *scored*: a turn is a few sampled tokens and then a scripted call, read from the text as ever; the log-probs of the
  script's tokens are the server's own scores of them.

``ROLLOUT_BUFFER_TEST_ENGINE_URL`` names a server (started in float32) and ``ROLLOUT_BUFFER_TEST_ENGINE_MODEL`` the
folder of its model. Needs torch and transformers.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from slime.rollout.agent_rollout_samples import SampleConverter, finish_batch, rows_of
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.tool_call_parser import ToolCall
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.context_editing.calls import CallReader, read_calls
from slime_plugins.rollout_buffer.generator.context_editing.generator import ContextEditingGenerator
from slime_plugins.rollout_buffer.generator.context_editing.snapshots import snapshots_of
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire.written_items import encode_body
from tests.context_editing_player import LINE, call, request_for
from tests.integration.conftest import engine_url_of
from tests.row_log_probs import recorded_of

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(1800)]

URL_VARIABLE = "ROLLOUT_BUFFER_TEST_ENGINE_URL"
MODEL_VARIABLE = "ROLLOUT_BUFFER_TEST_ENGINE_MODEL"
URL = os.environ.get(URL_VARIABLE, "").rstrip("/")
MODEL = os.environ.get(MODEL_VARIABLE, "")
if not (URL and MODEL):
    pytest.skip(f"{URL_VARIABLE} and {MODEL_VARIABLE} are not both set", allow_module_level=True)
torch: Any = pytest.importorskip("torch", reason="the log-probs are recomputed with torch")
transformers: Any = pytest.importorskip("transformers")

TOLERANCE = 1e-3
FAR = 0.05
"""A difference in nats that rounding cannot make."""
TURN_END = "<|im_end|>"
MUTTERED_TOKENS = 5
SENTENCE_ENDS = [".", ",", "\n", "!", "?", ":", ";"]
MAX_TOKENS = 80

SCRIPT: tuple[tuple[tuple[str, dict[str, Any]], ...], ...] = (
    (("buildIndex", {"chunk_size": 40}),),
    (("readChunk", {"chunk_id": 1}),),
    (("note", {"key": "day 7", "content": "21 boats"}), ("deleteContext", {"message_ids": [4, 5]})),
    (("readChunk", {"chunk_id": 2}),),
    (("deleteContext", {"message_ids": [9, 10, 6]}),),
    (("readNote", {}),),
    (("finish", {"answer": "21"}),),
)


@pytest.fixture(scope="module", autouse=True)
def _server_answers() -> None:
    engine_url_of(URL_VARIABLE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def calls_of_the_script() -> CallReader:
    """What each turn asks for, whatever its text says."""
    turns = iter(SCRIPT)

    def read(text: str) -> list[ToolCall]:
        return [ToolCall(name=name, arguments=arguments) for name, arguments in next(turns)]

    return read


class MutteringScript:
    """An engine whose turns begin with what the model samples and end with the script's calls, scored by the server."""

    def __init__(self, engine: SglangEngine, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._turns = iter(SCRIPT)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        few = replace(request.sampling_params, max_new_tokens=MUTTERED_TOKENS, extra={})
        muttered = await self._engine.generate(replace(request, sampling_params=few))
        said = "\n" + "\n".join(call(name, **arguments) for name, arguments in next(self._turns)) + TURN_END
        ids = self._tokenizer.encode(said, add_special_tokens=False)
        scores = await self._scored([*request.input_ids, *muttered.output_ids], ids)
        return GenerateReply(
            output_ids=(*muttered.output_ids, *ids),
            output_log_probs=(*muttered.output_log_probs, *scores),
            finish_reason="stop",
            weight_version=muttered.weight_version,
        )

    async def close(self) -> None:
        await self._engine.close()

    async def _scored(self, before: Sequence[int], ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": [*before, *ids],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(before) - 1,
        }
        async with aiohttp.ClientSession() as session, session.post(f"{URL}/generate", json=body) as response:
            meta = (await response.json())["meta_info"]
        entries = meta["input_token_logprobs"][-len(ids) :]
        assert [entry[1] for entry in entries] == list(ids)
        return [float(entry[0]) for entry in entries]


async def played(kind: str, tokenizer: Any) -> Trajectory:
    server = SglangEngine(URL, EngineSettings(retry_timeout_s=60.0, deadline_s=900.0))
    engine: Engine = MutteringScript(server, tokenizer) if kind == "scored" else server
    generator = ContextEditingGenerator(read_calls if kind == "scored" else calls_of_the_script())
    options = {"statelm": {"system_prompt": "", "max_model_length": 8000, "train_before_deletion": True}}
    try:
        await generator.start(
            GeneratorContext(job_id="job", engine=engine, tokenizer=tokenizer, concurrency=1, options=options)
        )
        request = request_for(LINE, uid=kind, max_new_tokens=MAX_TOKENS, temperature=1.0, extra={"stop": SENTENCE_ENDS})
        return await generator.play(request)
    finally:
        await generator.close()
        await engine.close()


def delivered(trajectory: Trajectory) -> list[Sample]:
    """Takes a trajectory over the wire and through the trainer's side."""
    body = encode_body(trajectory) | {"uid": trajectory.uid, "instance_id": trajectory.instance_id}
    item = wire.decode_item(body | {"reward": trajectory.reward, "group_index": 0})
    converter = SampleConverter(Namespace(hf_checkpoint=MODEL), samples_per_group=1)
    return rows_of(finish_batch(converter.groups([item]), 0)[0][0])


def log_probs_of(model: Any, tokens: Sequence[int]) -> list[float]:
    """The log-prob of each token after those before it; 0.0 for the first."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        logits = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
    return [0.0, *(float(logits[at - 1, ids[0, at]]) for at in range(1, len(tokens)))]


@pytest.mark.parametrize("kind", ["sampled", "scored"])
async def test_recomputed_log_probs_equal_the_recorded_ones(kind: str, tokenizer: Any, model: Any) -> None:
    trajectory = await played(kind, tokenizer)
    assert trajectory.reward == 1.0, trajectory.stop_reason
    assert len(snapshots_of(trajectory)) == 2
    rows = delivered(trajectory)
    assert len(rows) == 3
    sampled = sum(len(generation.output_ids) for generation in trajectory.generations)
    assert sum(len(recorded_of(row)) for row in rows) == sampled
    differences = []
    for row in rows:
        computed = log_probs_of(model, row.tokens)
        differences += [abs(computed[at] - recorded) for at, recorded in recorded_of(row)]
    assert len(differences) == sampled
    assert max(differences) < TOLERANCE


async def test_recomputed_log_probs_differ_in_the_unedited_context(tokenizer: Any, model: Any) -> None:
    """The turn after a deletion, put after what was there before it: the test above can fail."""
    trajectory = await played("scored", tokenizer)
    before, after = trajectory.generations[2], trajectory.generations[3]
    unedited = [*before.prompt_ids, *before.output_ids, *after.output_ids]
    computed = log_probs_of(model, unedited)[-len(after.output_ids) :]
    assert after.output_log_probs is not None
    assert max(abs(one - two) for one, two in zip(computed, after.output_log_probs, strict=True)) > FAR
