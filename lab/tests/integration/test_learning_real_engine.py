"""The learning loop with a real SGLang: the log-probs of the embedded engine and of the trainer, and the same learning.

``ROLLOUT_BUFFER_TEST_ENGINE_POLICY_URL`` names a server, in float32, of a folder that ``scripts/learn --only-model``
made on this machine. Its weights are changed on the way, and put back at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
import pytest

URL = os.environ.get("ROLLOUT_BUFFER_TEST_ENGINE_POLICY_URL", "").rstrip("/")
if not URL:
    pytest.skip("ROLLOUT_BUFFER_TEST_ENGINE_POLICY_URL is not set", allow_module_level=True)
torch = pytest.importorskip("torch", reason="the policy and its engine need torch")

from lab.tests.integration.test_learning import Run, learn  # noqa: E402 - below the skip
from rollout_buffer_lab.embedded_engine.server import running  # noqa: E402 - it needs torch
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.losses import token_log_probs  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.policy import load_policy, save_policy  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.service import EngineWeights  # noqa: E402 - below the skip

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(300)]

STEPS = 12
GAP = 1e-4
DIGITS = (0, 3, 6)


async def push(url: str, folder: Path, version: int) -> None:
    """Gives an engine the weights in a folder; not on this loop, where the embedded one may be served."""
    await asyncio.to_thread(EngineWeights(url).push, folder, version)


@pytest.fixture
async def folder() -> AsyncIterator[Path]:
    """Where the server has its policy from; it has it again after the test."""
    async with aiohttp.ClientSession() as session, session.get(f"{URL}/model_info") as response:
        found = Path((await response.json())["model_path"])
    if not (found / "config.json").is_file():
        pytest.skip(f"ROLLOUT_BUFFER_TEST_ENGINE_POLICY_URL serves {found}, which is not on this machine")
    await push(URL, found, 0)
    yield found
    await push(URL, found, 0)


def prompts(tokenizer: Any) -> list[list[int]]:
    """First turns of the task, and one that goes on after a reply."""
    asked = [[{"role": "user", "content": str(digit)}] for digit in DIGITS]
    more = [*asked[0], {"role": "assistant", "content": "1"}, {"role": "user", "content": "5"}]
    return [
        list(tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False))
        for each in (*asked, more)
    ]


async def sampled(url: str, prompt: list[int], **params: Any) -> tuple[list[int], list[float], str]:
    sampling = {"max_new_tokens": 12, "ignore_eos": True, **params}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        meta = (await response.json())["meta_info"]
    entries = meta["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries], meta["weight_version"]


def recomputed(policy: Any, prompt: list[int], ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = policy(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        found: list[float] = token_log_probs(logits, torch.tensor(ids)).tolist()
    return found


async def test_both_engines_and_the_trainer_give_a_token_the_same_log_prob(folder: Path, tmp_path: Path) -> None:
    """With the weights it was started with, and with others that are pushed to both."""
    policy, tokenizer = load_policy(folder)
    async with running(EmbeddedEngineSettings(model_path=folder, port=0, device="cpu", threads=1)) as embedded:
        for version, scale in ((1, 1.0), (2, 1.7)):
            with torch.no_grad():
                policy.lm_head.weight.mul_(scale)
            changed = tmp_path / str(version)
            save_policy(policy, changed)
            await asyncio.gather(*(push(url, changed, version) for url in (URL, embedded)))
            for prompt in prompts(tokenizer):
                greedy = [await sampled(url, prompt, temperature=0) for url in (URL, embedded)]
                assert greedy[0][0] == greedy[1][0]
                assert greedy[0][1] == pytest.approx(greedy[1][1], abs=GAP)
                assert greedy[0][2] == greedy[1][2] == str(version)
                for url in (URL, embedded):
                    ids, log_probs, _ = await sampled(url, prompt, temperature=1.0)
                    assert log_probs == pytest.approx(recomputed(policy, prompt, ids), abs=GAP)


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_a_policy_learns_through_sglang_as_it_does_through_the_embedded_engine(
    folder: Path, tmp_path: Path
) -> None:
    """A run's verdict is a test over the groups of its first and last steps, that is wrong once in a thousand times."""
    shared = ("--model", str(folder), "--steps", str(STEPS), "--seed", "7")
    for name, options in (("sglang", ("--engine", URL)), ("embedded", ())):
        run = await asyncio.to_thread(learn, tmp_path / name, *shared, *options, timeout_s=700)
        assert run.code == 0, shown(run)
        rewards = [float(str(step["reward"])) for step in run.steps]
        assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.1, shown(run)
        assert 0 <= run.largest_gap < GAP, shown(run)


@pytest.mark.slow
@pytest.mark.timeout(800)
async def test_a_late_mask_is_caught_through_sglang_too(folder: Path, tmp_path: Path) -> None:
    arm = ("--model", str(folder), "--steps", "3", "--arm", "late-mask", "--engine", URL)
    run = await asyncio.to_thread(learn, tmp_path, *arm, timeout_s=700)
    assert run.code == 1, shown(run)
    assert "refused before step 0 trained anything" in run.said


def shown(run: Run) -> str:
    return run.said + json.dumps([{"reward": step["reward"], "gap": step["log_prob_gap"]} for step in run.steps])
