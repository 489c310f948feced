"""The engine contract on the shipped fake, and on the SGLang client against the stand-in server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.openai import OpenAiEngine
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.testing.engine_conformance import EngineContract
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import SamplingParams
from tests.demo_tokens import chat_ids, tokenizer
from tests.engine_contracts import HttpClientContract, SglangServerContract, VisionContract
from tests.pictures import picture

QUICK = EngineSettings(retry_timeout_s=10.0, deadline_s=30.0, backoff_first_s=0.02, backoff_longest_s=0.1)
VISION = "<|vision_start|><|image_pad|><|vision_end|>"


class StreamedEngine:
    """Streams each turn of an engine, and asserts that the streamed ids are those of the reply."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.close = engine.close

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if request.on_tokens is not None:
            return await self._engine.generate(request)
        streamed: list[int] = []
        reply = await self._engine.generate(replace(request, on_tokens=streamed.extend))
        assert streamed == list(reply.output_ids)
        return reply


class TestFakeEngine(EngineContract):
    prompt_ids = chat_ids("Solve x + 5 = 12")

    @pytest.fixture
    def engine(self) -> Engine:
        return StreamedEngine(FakeEngine(lambda _: "x = 7. The answer is \\boxed{7}.", tokenizer=tokenizer))


class TestSglangEngineWithTheStandIn(SglangServerContract, VisionContract):
    prompt_ids = chat_ids("Solve x + 5 = 12")
    image_prompt_ids = chat_ids(f"One: {VISION} Two: {VISION} What is 2 + 2?")
    images = (picture(64, 128), picture(128, 64))

    @pytest.fixture
    async def base_url(self) -> AsyncIterator[str]:
        async with running(ScriptedEngineSettings(port=0, token_latency_s=0.005)) as url:
            yield url

    @pytest.fixture(params=[False, True], ids=["whole", "streamed"])
    async def engine(self, base_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
        engine = SglangEngine(base_url, QUICK)
        yield StreamedEngine(engine) if request.param else engine
        await engine.close()


class TestSglangEngineBehindAProxy(HttpClientContract):
    own_reply = (
        b'{"text": "", "output_ids": [7], "meta_info": {"finish_reason": {"type": "stop"}, '
        b'"output_token_logprobs": [[-0.5, 7, null]]}}'
    )

    def connect(self, base_url: str, settings: EngineSettings) -> SglangEngine:
        return SglangEngine(base_url, settings)


class TestOpenAiEngineBehindAProxy(HttpClientContract):
    own_reply = b'{"choices": [{"message": {"content": "seven"}, "finish_reason": "stop"}]}'

    def connect(self, base_url: str, settings: EngineSettings) -> OpenAiEngine:
        return OpenAiEngine(base_url, settings, model="m", tokenizer=tokenizer)

    def turn(self, max_new_tokens: int = 20) -> GenerateRequest:
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        return GenerateRequest(input_ids=chat_ids("Say seven."), sampling_params=sampling, session_id="contract")
