"""What an agent's session trains is what the engine computed while it sampled: every log-prob, over all its branches.

A real SGLang server of a text model behind the gateway, official clients of each dialect before it, which stream; every
turn is wholly sampled. A server with ``--incremental-streaming-output`` is another case.
Then the same model in transformers (fp32) over the rows of the stored trajectory.

``ROLLOUT_BUFFER_TEST_ENGINE_URL`` names the server (started in float32), ``ROLLOUT_BUFFER_TEST_MODEL`` the folder of
its model, and ``ROLLOUT_BUFFER_TEST_TORCH_PYTHON`` a Python that has torch and transformers (this one, if it has).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from tests.gateway_support import GatewayUnderTest, gateway_on, start_session_job
from tests.row_log_probs import recomputed

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(1800)]

logger = logging.getLogger(__name__)

URL = os.environ.get("ROLLOUT_BUFFER_TEST_ENGINE_URL", "").rstrip("/")
MODEL = os.environ.get("ROLLOUT_BUFFER_TEST_MODEL", "")
PYTHON = os.environ.get("ROLLOUT_BUFFER_TEST_TORCH_PYTHON") or sys.executable
if not (URL and MODEL):
    pytest.skip(
        "ROLLOUT_BUFFER_TEST_ENGINE_URL and ROLLOUT_BUFFER_TEST_MODEL are not both set", allow_module_level=True
    )
if sys.executable == PYTHON and importlib.util.find_spec("torch") is None:
    pytest.skip("there is no torch here, and ROLLOUT_BUFFER_TEST_TORCH_PYTHON names no Python", allow_module_level=True)

TOLERANCE = 1e-4
FAR = 0.02
"""A difference in nats that rounding cannot make."""


Ask = Callable[[GatewayUnderTest, Mapping[str, Any], list[Any]], Awaitable[str]]


async def ask_chat(gateway: GatewayUnderTest, opened: Mapping[str, Any], messages: list[Any]) -> str:
    client = gateway.client(opened, timeout=600)
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def ask_messages(gateway: GatewayUnderTest, opened: Mapping[str, Any], messages: list[Any]) -> str:
    client = gateway.anthropic_client(opened)
    async with client.messages.stream(model="policy", max_tokens=16, messages=messages) as stream:
        return await stream.get_final_text()


async def ask_responses(gateway: GatewayUnderTest, opened: Mapping[str, Any], messages: list[Any]) -> str:
    client = gateway.client(opened, timeout=600)
    stream = await client.responses.create(model="policy", input=messages, stream=True)
    return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


@pytest.mark.parametrize("ask", [ask_chat, ask_messages, ask_responses])
async def test_every_trained_position_of_a_session_agrees_with_the_model(tmp_path: Path, ask: Ask) -> None:
    async with gateway_on(tmp_path, SglangEngine, load=load_tokenizer) as gateway:
        job = start_session_job(gateway.buffer, n=1, remote_engine_url=URL, tokenizer_path=MODEL, max_tokens=16)
        opened = await gateway.open(job)
        messages: list[Any] = [{"role": "user", "content": "Name a city by the sea."}]
        for question in ("And what should I pack?\n\n", "  Write 你好 and e\u0301, please.", "Thanks."):
            said = await ask(gateway, opened, messages)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        client = gateway.client(opened, timeout=600)
        await client.chat.completions.create(model="policy", messages=messages)  # a fourth turn
        await client.chat.completions.create(model="policy", messages=messages[:3])  # the second, asked again
        messages[1] = {"role": "assistant", "content": "Lisbon."}
        await client.chat.completions.create(model="policy", messages=messages)  # an edited history
        closed = await gateway.close(opened, reward=1)
        assert closed.body["turns"] == 6
        generations = gateway.generations(job, opened["session_id"])
        rows = pack_training_rows(generations)
        assert len(rows) == closed.body["branches"] == 3
        assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.output_ids) for one in generations)
        true = recomputed(PYTHON, MODEL, [row.token_ids for row in rows])
        off_by_one_token = [[*row.token_ids[:3], row.token_ids[3] + 1, *row.token_ids[4:]] for row in rows]
        wrong = recomputed(PYTHON, MODEL, off_by_one_token)
        worst = 0.0
        for row, computed, mistaken in zip(rows, true, wrong, strict=True):
            assert row.log_probs is not None
            places = [at for at, mask in enumerate(row.loss_mask) if mask]
            worst = max([worst, *(abs(computed[at] - row.log_probs[at]) for at in places)])
            assert max(abs(mistaken[at] - row.log_probs[at]) for at in places) > FAR
        trained = sum(sum(row.loss_mask) for row in rows)
        logger.info("%d trained positions in %d rows, largest difference %.1e", trained, len(rows), worst)
        assert worst < TOLERANCE
