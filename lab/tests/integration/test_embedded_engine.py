"""The embedded engine: the engine contract on a tiny model, its log-probs against a plain forward pass, its refusals.

Needs torch, which nothing else of the project does; the model is made here, from a configuration.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from slime_plugins.rollout_buffer.engine.base import Engine, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.types import SamplingParams
from tests.demo_tokens import chat_ids, tokenizer
from tests.engine_contracts import SglangServerContract, until

torch: Any = pytest.importorskip("torch", reason="the embedded engine needs torch")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402 - they need torch

from rollout_buffer_lab.embedded_engine import decoder, service  # noqa: E402 - below the skip
from rollout_buffer_lab.embedded_engine.language_model import load_language_model  # noqa: E402 - below the skip
from rollout_buffer_lab.embedded_engine.server import running  # noqa: E402 - below the skip
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.errors import ConfigError  # noqa: E402 - below the skip

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = EngineSettings(retry_timeout_s=10.0, deadline_s=50.0, backoff_first_s=0.02, backoff_longest_s=0.1)
CONTEXT = 32768
END: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
PROMPT = chat_ids("Solve x + 5 = 12")


def policy(seed: int, hidden: int = 64) -> Any:
    """A random Qwen3 over the demo tokenizer's vocabulary."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        eos_token_id=END,
        tie_word_embeddings=True,
        initializer_range=0.2,  # far from uniform, so that a wrong mask or position shows in the log-probs
    )
    return Qwen3ForCausalLM(config).eval()


@dataclass(frozen=True)
class Policies:
    """Two models of one shape, in memory and on disk, and one of another shape."""

    first: Any
    second: Any
    folder: Path

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        return self.folder / "first", self.folder / "second", self.folder / "larger"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    made = Policies(policy(1), policy(2), tmp_path_factory.mktemp("policies"))
    for model, path in zip((made.first, made.second, policy(3, hidden=96)), made.paths, strict=True):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return made


@pytest.fixture
async def base_url(policies: Policies) -> AsyncIterator[str]:
    async with running(EmbeddedEngineSettings(model_path=policies.paths[0], port=0, seed=7, device="cpu")) as url:
        yield url


@pytest.fixture
async def engine(base_url: str) -> AsyncIterator[Engine]:
    engine = SglangEngine(base_url, QUICK)
    yield engine
    await engine.close()


def turn(
    prompt: Sequence[int] = PROMPT, *, most: int = 40, session: str = "s", temperature: float = 1.0, **extra: Any
) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=most, temperature=temperature, extra=extra)
    return GenerateRequest(input_ids=tuple(prompt), sampling_params=params, session_id=session)


def recomputed(model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The log-probs of ``output`` after ``prompt`` by one plain forward pass, without any cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].float()
    found = torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(output)[:, None])
    return [float(log_prob) for log_prob in found[:, 0]]


async def until_running(url: str) -> None:
    """Waits until the engine samples, and a moment longer, so that there is output to lose."""
    await until(url, lambda load: load > 0)
    await asyncio.sleep(0.1)


async def post(url: str, route: str, body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/{route}", json=body) as response:
        return response.status, await response.json(content_type=None)


async def post_raw(url: str, route: str, body: Any) -> int:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/{route}", json=body) as response:
        return response.status


async def generate(url: str, prompt: Sequence[int] = PROMPT, **params: Any) -> Any:
    body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True}
    status, reply = await post(url, "generate", body)
    assert status == 200, reply
    return reply


class TestSglangEngineWithTheEmbeddedEngine(SglangServerContract):
    prompt_ids = PROMPT
    tokens_of_a_long_turn = 800


# --- log-probs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "cut"), [(1.0, {}), (0.6, {}), (2.0, {}), (1.5, {"top_k": 5})])
async def test_log_probs_are_those_of_a_plain_forward_pass_before_top_k_cuts(
    engine: Engine, policies: Policies, temperature: float, cut: dict[str, Any]
) -> None:
    reply = await engine.generate(turn(temperature=temperature, ignore_eos=True, **cut))
    expected = recomputed(policies.first, PROMPT, reply.output_ids, temperature)
    assert reply.output_log_probs == pytest.approx(expected, abs=1e-4)


async def test_32_at_once_of_every_length_have_the_log_probs_that_each_has_alone(
    engine: Engine, policies: Policies
) -> None:
    """Prompts of 1 to 400 tokens join and leave at their own time; more than one forward pass reads them."""
    prompts = [[(7 * n + at) % 4000 for at in range(1 + (37 * n) % 400)] for n in range(32)]
    requests = [
        turn(prompt, most=5 + 3 * n, session=str(n), temperature=0.5 + n / 32, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    replies = await asyncio.gather(*map(engine.generate, requests))
    for n, reply in enumerate(replies):
        assert len(reply.output_ids) == 5 + 3 * n
        expected = recomputed(policies.first, prompts[n], reply.output_ids, 0.5 + n / 32)
        assert reply.output_log_probs == pytest.approx(expected, abs=1e-4), n


async def test_a_turn_on_a_cached_prefix_has_the_same_log_probs(engine: Engine, policies: Policies) -> None:
    first = await engine.generate(turn(ignore_eos=True))
    longer = [*PROMPT, *first.output_ids, *PROMPT]
    second = await engine.generate(turn(longer, ignore_eos=True))
    assert second.cached_tokens == len(PROMPT) + len(first.output_ids) - 1
    assert second.output_log_probs == pytest.approx(recomputed(policies.first, longer, second.output_ids), abs=1e-4)


async def test_a_seeded_turn_says_the_same_alone_in_company_and_resumed(engine: Engine, base_url: str) -> None:
    request = turn(most=600, ignore_eos=True, sampling_seed=5)
    alone = await engine.generate(request)
    others = [turn(PROMPT[n:], most=100, session=str(n), ignore_eos=True) for n in range(1, 8)]
    in_company, *_ = await asyncio.gather(*map(engine.generate, [request, *others]))
    resumed = asyncio.create_task(engine.generate(request))
    await until_running(base_url)
    await post(base_url, "abort_request", {"abort_all": True})
    assert alone.output_ids == in_company.output_ids == (await resumed).output_ids


# --- new weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "retract"])
async def test_each_token_has_the_log_prob_of_the_weights_that_its_version_names(
    engine: Engine, base_url: str, policies: Policies, mode: str
) -> None:
    waiting = asyncio.create_task(engine.generate(turn(most=1000, ignore_eos=True)))
    await until_running(base_url)
    await post(base_url, "pause_generation", {"mode": mode})
    status, said = await post(
        base_url, "update_weights_from_disk", {"model_path": str(policies.paths[1]), "weight_version": "8"}
    )
    await post(base_url, "continue_generation", {})
    reply = await waiting
    assert (status, said["success"]) == (200, True)
    assert [span.weight_version for span in reply.weight_version_spans] == ["default", "8"]
    cut = reply.weight_version_spans[0].end
    assert 0 < cut < 1000
    by_first = recomputed(policies.first, PROMPT, reply.output_ids[:cut])
    by_second = recomputed(policies.second, [*PROMPT, *reply.output_ids[:cut]], reply.output_ids[cut:])
    assert reply.output_log_probs == pytest.approx(by_first + by_second, abs=1e-4)
    assert reply.output_log_probs != pytest.approx(recomputed(policies.first, PROMPT, reply.output_ids), abs=1e-2)


async def test_keys_of_old_weights_are_no_prefix_for_the_new_ones(
    engine: Engine, base_url: str, policies: Policies
) -> None:
    """Neither those of finished turns nor those of one that was kept in place over the update."""
    await engine.generate(turn())
    waiting = asyncio.create_task(engine.generate(turn(most=1000, ignore_eos=True)))
    await until_running(base_url)
    await post(base_url, "pause_generation", {"mode": "in_place"})
    await post(base_url, "update_weights_from_disk", {"model_path": str(policies.paths[1]), "weight_version": "2"})
    await post(base_url, "continue_generation", {})
    await waiting
    reply = await engine.generate(turn())
    assert reply.cached_tokens == 0
    assert reply.output_log_probs == pytest.approx(recomputed(policies.second, PROMPT, reply.output_ids), abs=1e-4)


async def test_without_a_pause_new_weights_wait_for_those_who_run_and_hold_the_next(
    base_url: str, policies: Policies
) -> None:
    runs = asyncio.create_task(generate(base_url, max_new_tokens=1000, ignore_eos=True))
    await until_running(base_url)
    update = {"model_path": str(policies.paths[1]), "weight_version": "2"}
    updating = asyncio.create_task(post(base_url, "update_weights_from_disk", update))
    await asyncio.sleep(0.1)
    comes_later = asyncio.create_task(generate(base_url, max_new_tokens=4))
    assert (await runs)["meta_info"]["weight_version"] == "default"
    assert (await updating)[0] == 200
    assert (await comes_later)["meta_info"]["weight_version"] == "2"


def spoilt_folder(spoilt: str, policies: Policies, folder: Path) -> Path:
    """The folder of weights that cannot be taken."""
    path = folder / spoilt
    if spoilt == "larger":
        return policies.paths[2]
    if spoilt == "name of 5000 letters":
        return folder / ("x" * 5000)
    if spoilt in ("half", "a pipe", "nan", "inf"):
        model = policy(2)
        if spoilt in ("nan", "inf"):
            model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float(spoilt)
        model.save_pretrained(path)
    if spoilt == "half":
        whole = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif spoilt == "a pipe":
        (path / "model.safetensors").unlink()
        os.mkfifo(path / "model.safetensors")
    return path


@pytest.mark.parametrize("spoilt", ["nowhere", "larger", "half", "a pipe", "name of 5000 letters", "nan", "inf"])
async def test_weights_that_cannot_be_taken_are_refused_and_the_old_ones_stay(
    engine: Engine, base_url: str, policies: Policies, spoilt: str, tmp_path: Path
) -> None:
    path = spoilt_folder(spoilt, policies, tmp_path)
    async with asyncio.timeout(60):
        status, said = await post(
            base_url, "update_weights_from_disk", {"model_path": str(path), "weight_version": "2"}
        )
    assert (status, said["success"]) == (400, False)
    assert str(path)[:200] in said["message"]
    reply = await engine.generate(turn())
    assert reply.weight_version == "default"
    assert reply.output_log_probs == pytest.approx(recomputed(policies.first, PROMPT, reply.output_ids), abs=1e-4)


async def test_weights_for_which_no_room_comes_are_answered_within_the_limit_and_never_taken(
    base_url: str, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ANSWER_LIMIT_S", 0.3)
    body = {"input_ids": PROMPT, "rid": "r", "sampling_params": {"max_new_tokens": 20000, "ignore_eos": True}}
    long = asyncio.create_task(post(base_url, "generate", body))
    await until_running(base_url)
    new = {"model_path": str(policies.paths[1]), "weight_version": "2"}
    status, said = await post(base_url, "update_weights_from_disk", new)
    assert (status, said["success"]) == (400, False)
    monkeypatch.undo()
    await post_raw(base_url, "abort_request", {"rid": "r"})
    await long
    assert (await generate(base_url, max_new_tokens=2))["meta_info"]["weight_version"] == "default"


async def test_a_command_that_breaks_is_answered_and_the_engine_goes_on(
    base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise RuntimeError("no more memory")

    with monkeypatch.context() as patched:
        for name in ("flush_cache", "resume"):
            patched.setattr(decoder.Decoder, name, breaks)
        assert await post_raw(base_url, "flush_cache", {}) == 500
        assert await post_raw(base_url, "continue_generation", {}) == 500
    assert (await generate(base_url, max_new_tokens=2))["output_ids"]


# --- parameters ------------------------------------------------------------------------------------------------------


async def test_greedy_takes_the_most_likely_token(base_url: str, policies: Policies) -> None:
    reply = await generate(base_url, temperature=0, max_new_tokens=30, ignore_eos=True)
    with torch.no_grad():
        logits = policies.first(torch.tensor([[*PROMPT, *reply["output_ids"]]])).logits[0]
    assert reply["output_ids"] == logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.5}])
async def test_only_tokens_that_the_parameters_leave_are_sampled(
    base_url: str, policies: Policies, params: dict[str, Any]
) -> None:
    reply = await generate(base_url, max_new_tokens=100, ignore_eos=True, **params)
    output = reply["output_ids"]
    with torch.no_grad():
        logits = policies.first(torch.tensor([[*PROMPT, *output]])).logits[0, len(PROMPT) - 1 : -1]
    for probs, token_id in zip(logits.softmax(dim=-1), output, strict=True):
        likelier = probs[probs > probs[token_id]]
        assert len(likelier) < params.get("top_k", 10**9)
        assert likelier.sum() < params.get("top_p", 2.0) + 1e-4
        assert probs[token_id] >= params.get("min_p", 0.0) * probs.max() - 1e-6


async def test_what_is_sampled_is_as_frequent_as_it_is_likely(base_url: str, policies: Policies) -> None:
    """First tokens of 600 turns against the probabilities: the share of the likeliest five, within five deviations."""
    await generate(base_url, max_new_tokens=1)
    replies = await asyncio.gather(*(generate(base_url, max_new_tokens=1, temperature=0.5) for _ in range(600)))
    with torch.no_grad():
        probs = (policies.first(torch.tensor([PROMPT])).logits[0, -1] / 0.5).softmax(dim=-1)
    likely = set(probs.topk(5).indices.tolist())
    share, expected = sum(r["output_ids"][0] in likely for r in replies) / 600, float(probs.topk(5).values.sum())
    assert abs(share - expected) < 5 * (expected * (1 - expected) / 600) ** 0.5


async def test_a_biased_token_is_sampled_or_never(base_url: str) -> None:
    greedy = await generate(base_url, temperature=0, max_new_tokens=1)
    banned = greedy["output_ids"][0]
    bias = {str(banned): -1e9}
    reply = await generate(base_url, temperature=0, max_new_tokens=20, ignore_eos=True, logit_bias=bias)
    assert banned not in reply["output_ids"]
    wanted = await generate(base_url, max_new_tokens=3, ignore_eos=True, logit_bias={"99": 1e9})
    assert wanted["output_ids"] == [99, 99, 99]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_beside_banned_tokens_are_those_of_the_whole_distribution(
    engine: Engine, policies: Policies, temperature: float
) -> None:
    """Half of the likeliest tokens are banned: without their mass the gap would be tenths."""
    with torch.no_grad():
        likeliest = policies.first(torch.tensor([PROMPT])).logits[0, -1].topk(20).indices.tolist()
    params = SamplingParams(max_new_tokens=20, temperature=temperature, extra={"ignore_eos": True})
    banned = frozenset(likeliest[::2])
    reply = await engine.generate(
        GenerateRequest(input_ids=PROMPT, sampling_params=params, session_id="s", banned_ids=banned)
    )
    assert not banned & set(reply.output_ids)
    expected = recomputed(policies.first, PROMPT, reply.output_ids, temperature)
    assert reply.output_log_probs == pytest.approx(expected, abs=1e-4)


async def test_a_turn_stops_at_its_end_token_and_keeps_it(base_url: str) -> None:
    reply = await generate(base_url, max_new_tokens=9, logit_bias={str(END): 1e9}, no_stop_trim=True)
    assert reply["output_ids"] == [END]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    assert len(reply["meta_info"]["output_token_logprobs"]) == 1
    trimmed = await generate(base_url, max_new_tokens=9, logit_bias={str(END): 1e9})
    assert (trimmed["output_ids"], trimmed["text"]) == ([END], "")


async def test_a_turn_stops_at_a_stop_token_and_at_a_stop_string(base_url: str) -> None:
    free = await generate(base_url, max_new_tokens=12, ignore_eos=True, temperature=0)
    fifth = free["output_ids"][4]
    stopped = await generate(base_url, max_new_tokens=12, temperature=0, stop_token_ids=[fifth])
    assert stopped["output_ids"] == free["output_ids"][: free["output_ids"].index(fifth) + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": fifth}
    said = tokenizer.decode(free["output_ids"][2:4])
    by_text = await generate(base_url, max_new_tokens=12, temperature=0, stop=[said], no_stop_trim=True)
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": said}
    assert said in by_text["text"]
    assert len(by_text["output_ids"]) <= 4
    trimmed = await generate(base_url, max_new_tokens=12, temperature=0, stop=said)
    assert (trimmed["output_ids"], said in trimmed["text"]) == (by_text["output_ids"], False)


# --- places ----------------------------------------------------------------------------------------------------------


async def test_an_aborted_turn_and_one_whose_client_left_give_their_places_to_those_who_wait(
    policies: Policies,
) -> None:
    settings = EmbeddedEngineSettings(model_path=policies.paths[0], port=0, max_running=2, device="cpu")
    async with running(settings) as url:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
        named = asyncio.create_task(post(url, "generate", body | {"rid": "named"}))
        leaving = asyncio.create_task(post(url, "generate", body))
        await until(url, lambda load: load == 2)
        third = asyncio.create_task(generate(url, max_new_tokens=2))
        fourth = asyncio.create_task(generate(url, max_new_tokens=2))
        await until(url, lambda load: load == 4)
        assert not third.done()
        await post(url, "abort_request", {"rid": "named"})
        _, partial = await named
        assert partial["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 <= len(partial["output_ids"]) < 8000
        leaving.cancel()
        await asyncio.gather(third, fourth)
        await until(url, lambda load: load == 0)


async def test_a_turn_that_waits_can_be_aborted_and_has_nothing(policies: Policies) -> None:
    settings = EmbeddedEngineSettings(model_path=policies.paths[0], port=0, max_running=1, device="cpu")
    async with running(settings) as url:
        first = asyncio.create_task(generate(url, max_new_tokens=8000, ignore_eos=True))
        await until_running(url)
        body = {"input_ids": PROMPT, "rid": "waits", "return_logprob": True}
        second = asyncio.create_task(post(url, "generate", body))
        await until(url, lambda load: load == 2)
        await post(url, "abort_request", {"rid": "waits"})
        status, reply = await second
        assert (status, reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]) == (200, [], "abort")
        first.cancel()


async def test_a_prompt_longer_than_one_pass_is_read_in_several(policies: Policies) -> None:
    settings = EmbeddedEngineSettings(model_path=policies.paths[0], port=0, prefill_tokens=64, device="cpu")
    prompts = [[(11 * at + n) % 4000 for at in range(length)] for n, length in enumerate((500, 30, 10, 200, 64, 65))]
    async with running(settings) as url:
        replies = await asyncio.gather(*(generate(url, p, max_new_tokens=20, ignore_eos=True) for p in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        found = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(recomputed(policies.first, prompt, reply["output_ids"]), abs=1e-4)


# --- refusals --------------------------------------------------------------------------------------------------------

NO_IMAGE = base64.b64encode(b"nothing").decode()
WRONG_BODIES: list[Any] = [
    {"text": ""},
    *({"input_ids": [wrong]} for wrong in (1.5, True, -1, 10**30, len(tokenizer) + 10_000, None, [1, 2])),
    {"input_ids": [1], "image_data": [NO_IMAGE]},
    {"input_ids": [1] * (CONTEXT + 1)},
    *(
        {"input_ids": [1], "sampling_params": params}
        for params in (
            {"max_new_tokens": CONTEXT},
            {"logit_bias": {"999999": 1}},
            {"repetition_penalty": 1.5},
            {"frequency_penalty": 0.5},
            {"regex": "a+"},
        )
    ),
]
"""What the routes, which it shares with the scripted engine, leave to it."""


async def test_a_wrong_request_is_refused_in_a_sentence_and_the_engine_goes_on(base_url: str) -> None:
    for body in WRONG_BODIES:
        status, said = await post(base_url, "generate", body)
        assert status == 400, (body, status, said)
        sentence = said["error"] if isinstance(said["error"], str) else said["error"]["message"]
        assert 10 < len(sentence) < 1000
    for body in ({}, {"model_path": 5}):
        assert (await post(base_url, "update_weights_from_disk", body))[0] == 400
    assert (await generate(base_url, max_new_tokens=2))["output_ids"]


async def test_a_forward_pass_that_breaks_is_an_error_500_and_the_engine_goes_on(policies: Policies) -> None:
    settings = EmbeddedEngineSettings(model_path=policies.paths[0], port=0, device="cpu")
    model = load_language_model(settings)
    working = model.logits

    def breaks(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    async with running(settings, model) as url:
        model.logits = breaks  # type: ignore[method-assign, assignment]  # memory that is really used up harms the machine
        body = {"input_ids": PROMPT}
        broken = await asyncio.gather(*(post_raw(url, "generate", body) for _ in range(3)))
        model.logits = working  # type: ignore[method-assign]
        assert broken == [500, 500, 500]
        assert (await generate(url, max_new_tokens=2))["output_ids"]
        assert (await post_raw(url, "flush_cache", {})) == 200


async def test_the_same_rid_twice_in_flight_is_refused(base_url: str) -> None:
    body = {"input_ids": PROMPT, "rid": "r", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    first = asyncio.create_task(post(base_url, "generate", body))
    await until_running(base_url)
    status, said = await post(base_url, "generate", body)
    assert (status, "Duplicate request ID" in str(said)) == (400, True)
    await post(base_url, "abort_request", {"rid": "r"})
    assert (await first)[0] == 200


async def test_chat_completions_are_rendered_with_the_models_template(base_url: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 5, "return_token_ids": True, "ignore_eos": True}
    status, reply = await post(base_url, "v1/chat/completions", body)
    choice = reply["choices"][0]
    assert (status, len(choice["response_token_ids"]), choice["finish_reason"]) == (200, 5, "length")
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert choice["prompt_token_ids"] == tokenizer.encode(rendered, add_special_tokens=False)


def test_a_model_that_does_not_look_at_all_tokens_is_refused(tmp_path: Path) -> None:
    config = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="full attention only"):
        load_language_model(EmbeddedEngineSettings(model_path=tmp_path))


def test_a_folder_without_a_model_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        EmbeddedEngineSettings(model_path=tmp_path)


def test_a_model_with_weights_missing_is_refused(policies: Policies, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    from safetensors.torch import save_file

    state = dict(policies.first.state_dict())
    del state["model.layers.1.mlp.up_proj.weight"], state["lm_head.weight"]
    policies.first.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_language_model(EmbeddedEngineSettings(model_path=tmp_path))
