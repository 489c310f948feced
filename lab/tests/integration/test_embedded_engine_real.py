"""The embedded engine beside a real SGLang with the same model: the same tokens, the same log-probs.

``ROLLOUT_BUFFER_TEST_ENGINE_URL`` names a server of a text model in float32 whose folder lies on this machine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

URL = os.environ.get("ROLLOUT_BUFFER_TEST_ENGINE_URL", "").rstrip("/")
if not URL:
    pytest.skip("ROLLOUT_BUFFER_TEST_ENGINE_URL is not set", allow_module_level=True)
pytest.importorskip("torch", reason="the embedded engine needs torch")

from rollout_buffer_lab.embedded_engine.server import running  # noqa: E402 - it needs torch
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings  # noqa: E402 - below the skip

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(300)]

QUESTIONS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Name three colours and say why you like them.",
)


@dataclass(frozen=True)
class Both:
    """The two servers, SGLang first, and a session to ask them with."""

    urls: tuple[str, str]
    session: aiohttp.ClientSession

    async def ask(self, body: dict[str, Any]) -> list[Any]:
        return await asyncio.gather(*(self._ask(url, body) for url in self.urls))

    async def _ask(self, url: str, body: dict[str, Any]) -> Any:
        async with self.session.post(f"{url}/generate", json={**body, "return_logprob": True}) as response:
            assert response.status == 200, await response.text()
            return await response.json()


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{URL}/model_info") as response:
            folder = Path((await response.json())["model_path"])
        if not (folder / "config.json").is_file():
            pytest.skip(f"ROLLOUT_BUFFER_TEST_ENGINE_URL serves {folder}, which is not on this machine")
        async with running(EmbeddedEngineSettings(model_path=folder, port=0, device="cpu")) as url:
            yield Both((URL, url), session)


def log_probs(reply: Any) -> list[float]:
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("question", QUESTIONS)
async def test_greedy_turns_are_the_same_tokens_with_the_same_log_probs(both: Both, question: str) -> None:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    params = {"temperature": 0, "max_new_tokens": 40, "no_stop_trim": True, "skip_special_tokens": False}
    real, embedded = await both.ask({"text": prompt, "sampling_params": params, "return_prompt_token_ids": True})
    assert embedded["prompt_token_ids"] == real["prompt_token_ids"]
    assert embedded["output_ids"] == real["output_ids"]
    assert embedded["text"] == real["text"]
    assert log_probs(embedded) == pytest.approx(log_probs(real), abs=1e-3)
    reasons = [reply["meta_info"]["finish_reason"] for reply in (embedded, real)]
    assert reasons[0] == reasons[1]
    counts = [reply["meta_info"]["completion_tokens"] for reply in (embedded, real)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0.7}, {"temperature": 1.5, "top_k": 4}, {"temperature": 0.8, "top_p": 0.3}, {"min_p": 0.5}],
)
async def test_the_log_prob_of_a_sampled_token_is_of_the_same_distribution(both: Both, params: dict[str, Any]) -> None:
    """Where both sample the same token first, it has the same log-prob: no temperature or cut is left out or added."""
    body = {"text": "The capital of France is", "sampling_params": {**params, "max_new_tokens": 1}}
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for _ in range(8):
        for at, reply in enumerate(await both.ask(body)):
            ((log_prob, token_id, _text),) = reply["meta_info"]["output_token_logprobs"]
            found[at][token_id] = log_prob
    shared = found[0].keys() & found[1].keys()
    assert shared
    for token_id in shared:
        assert found[1][token_id] == pytest.approx(found[0][token_id], abs=1e-3)


async def test_stops_and_ends_are_the_same(both: Both) -> None:
    for stop in ({"stop": [","]}, {"stop": "three", "no_stop_trim": True}, {"stop_token_ids": [28]}, {}):
        params = {"temperature": 0, "max_new_tokens": 30, **stop}
        prompt = "<|im_start|>user\nCount: one, two, three, four<|im_end|>\n<|im_start|>assistant\n"
        real, embedded = await both.ask({"text": prompt, "sampling_params": params})
        assert embedded["output_ids"] == real["output_ids"], stop
        assert embedded["text"] == real["text"], stop
        assert embedded["meta_info"]["finish_reason"] == real["meta_info"]["finish_reason"], stop
