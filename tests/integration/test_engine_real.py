"""The engine contract against a real SGLang server. Its log-probs cannot be checked here: that needs its weights.

``ROLLOUT_BUFFER_TEST_ENGINE_URL`` names a server of a text model, ``ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL`` one of a
Qwen3-VL model. The tests pause these servers, abort their requests and rename their weight version.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import aiohttp
import pytest

from slime_plugins.rollout_buffer.engine.base import Engine, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.types import SamplingParams
from tests.engine_contracts import SglangServerContract, VisionContract
from tests.integration.conftest import engine_url_of
from tests.pictures import picture

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(300)]

TEXT_URL = "ROLLOUT_BUFFER_TEST_ENGINE_URL"
VISION_URL = "ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL"
if not (os.environ.get(TEXT_URL) or os.environ.get(VISION_URL)):
    pytest.skip(f"neither {TEXT_URL} nor {VISION_URL} is set", allow_module_level=True)

SETTINGS = EngineSettings(retry_timeout_s=60.0, deadline_s=240.0)

# Ids of Qwen3's vocabulary: user turn with two images and "Hello", then the generation prompt.
START, END, NEW_LINE = 151644, 151645, 198
IMAGE_IDS = (151652, 151655, 151653)
USER, ASSISTANT, HELLO = 872, 77091, 9707


class RealServerTests(SglangServerContract):
    """The contract with an engine whose address is in ``url_variable``."""

    url_variable: ClassVar[str]

    @pytest.fixture
    async def base_url(self) -> AsyncIterator[str]:
        url = engine_url_of(self.url_variable)
        yield url
        async with aiohttp.ClientSession() as session, session.post(f"{url}/continue_generation", json={}) as response:
            await response.read()

    @pytest.fixture
    async def engine(self, base_url: str) -> AsyncIterator[Engine]:
        engine = SglangEngine(base_url, SETTINGS)
        yield engine
        await engine.close()


class TestTextEngine(RealServerTests):
    url_variable = TEXT_URL
    prompt_ids: ClassVar[Sequence[int]] = tuple(range(500, 520))
    tokens_of_a_long_turn = 60

    async def test_the_reply_to_ids_is_that_to_their_text(self, engine: Engine, base_url: str) -> None:
        """Greedy: ids in and ids out are the same conversation as text in and text out."""
        question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        asked = {"text": question, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}
        body = asked | {"return_logprob": True, "return_prompt_token_ids": True}
        async with aiohttp.ClientSession() as session, session.post(f"{base_url}/generate", json=body) as response:
            by_text = await response.json()
        params = SamplingParams(max_new_tokens=16, temperature=0.0)
        request = GenerateRequest(
            input_ids=by_text["prompt_token_ids"], sampling_params=params, session_id="contract/greedy"
        )
        reply = await engine.generate(request)
        assert list(reply.output_ids) == by_text["output_ids"]
        expected = [entry[0] for entry in by_text["meta_info"]["output_token_logprobs"]]
        assert reply.output_log_probs == pytest.approx(expected, abs=1e-3)

    async def test_a_resumed_greedy_turn_is_that_of_an_undisturbed_one(self, engine: Engine, base_url: str) -> None:
        params = SamplingParams(max_new_tokens=self.tokens_of_a_long_turn, temperature=0.0, extra={"ignore_eos": True})
        request = GenerateRequest(input_ids=self.prompt_ids, sampling_params=params, session_id="contract/resumed")
        undisturbed = await engine.generate(request)
        resumed = await self.aborted_once(engine, base_url, request)
        assert resumed.output_ids == undisturbed.output_ids
        assert resumed.output_log_probs == pytest.approx(undisturbed.output_log_probs, abs=1e-3)


class TestVisionEngine(RealServerTests, VisionContract):
    url_variable = VISION_URL
    prompt_ids: ClassVar[Sequence[int]] = (START, USER, NEW_LINE, HELLO, END, NEW_LINE, START, ASSISTANT, NEW_LINE)
    image_prompt_ids: ClassVar[Sequence[int]] = (START, USER, NEW_LINE, *IMAGE_IDS, *IMAGE_IDS, *prompt_ids[3:])
    images = (picture(64, 128), picture(128, 64))


@pytest.mark.parametrize("contract", [TestTextEngine, TestVisionEngine])
async def test_log_probs_beside_banned_tokens_are_those_of_the_whole_distribution(
    contract: type[RealServerTests],
) -> None:
    """Compared with the same server's log-probs of these ids in a prompt, which banned tokens do not change."""
    url = engine_url_of(contract.url_variable)
    prompt = list(contract.prompt_ids)
    async with aiohttp.ClientSession() as session:

        async def ask(**body: Any) -> Any:
            async with session.post(f"{url}/generate", json={"return_logprob": True, **body}) as response:
                return (await response.json())["meta_info"]

        greedy = {"max_new_tokens": 1, "temperature": 0.0}
        first = await ask(input_ids=prompt, sampling_params=greedy, top_logprobs_num=4)
        banned = frozenset(int(entry[1]) for entry in first["output_top_logprobs"][0])
        engine = SglangEngine(url, SETTINGS)
        try:
            params = SamplingParams(max_new_tokens=12, extra={"ignore_eos": True})
            request = GenerateRequest(input_ids=prompt, sampling_params=params, session_id="ban", banned_ids=banned)
            reply = await engine.generate(request)
        finally:
            await engine.close()
        whole = [*prompt, *reply.output_ids]
        read = await ask(input_ids=whole, sampling_params=greedy, logprob_start_len=len(prompt) - 1)

    assert not banned & set(reply.output_ids)
    expected = [entry[0] for entry in read["input_token_logprobs"]][-len(reply.output_ids) :]
    assert reply.output_log_probs == pytest.approx(expected, abs=1e-4)
