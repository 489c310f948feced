"""An engine over chat completions: prompts become messages again, replies ids, refusals what they mean."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.credentials import KEY_URL_VARIABLE, KEY_VARIABLE, api_key_for
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.engine.openai import ENVELOPE_TOKENIZER_PATH, OpenAiEngine
from slime_plugins.rollout_buffer.engine.openai_protocol import Envelope
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.types import Image, SamplingParams
from tests.example_counts import examples

TOKENIZER = AutoTokenizer.from_pretrained(ENVELOPE_TOKENIZER_PATH)
CHAT = ChatTokens(TOKENIZER)
ENVELOPE = Envelope(TOKENIZER)
PICTURES = (Image(data=b"first"), Image(data=b"second"))
QUICK = EngineSettings(retry_timeout_s=20.0, backoff_first_s=0.01, backoff_longest_s=0.02)

texts = st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=40).filter(lambda text: "<|" not in text)


def completion(text: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, **message}
    return {"choices": [{"index": 0, "message": said, "finish_reason": finish_reason}]}


@asynccontextmanager
async def asked(replies: Sequence[tuple[int, Any]], **options: Any) -> AsyncIterator[tuple[OpenAiEngine, list[Any]]]:
    """An engine whose server gives ``replies`` in order; yields it and the bodies that the server gets."""
    left, bodies = list(replies), []

    async def answer(request: web.Request) -> web.Response:
        bodies.append({**await request.json(), "authorization": request.headers.get("Authorization")})
        status, body = left.pop(0)
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with serving(app) as url:
        engine = OpenAiEngine(f"{url}/v1", QUICK, model="some-model", tokenizer=TOKENIZER, **options)
        try:
            yield engine, bodies
        finally:
            await engine.close()


def turn(messages: list[dict[str, Any]] | None = None, images: Sequence[Image] = (), **extra: Any) -> GenerateRequest:
    prompt = CHAT.prompt(messages or [{"role": "user", "content": "2 + 2?"}])
    params = SamplingParams(max_new_tokens=64, temperature=0.5, top_p=0.9, extra=extra)
    return GenerateRequest(input_ids=prompt, sampling_params=params, session_id="s", images=images)


# --- the envelope ----------------------------------------------------------------------------------------------------


@examples(150)
@given(st.lists(texts, min_size=1, max_size=5))
def test_a_conversation_comes_out_of_its_ids_as_it_went_in(contents: list[str]) -> None:
    roles = ["system", *(["user", "assistant"] * 3)]
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    assert ENVELOPE.messages_of(CHAT.prompt(messages), ()) == messages


def test_a_growing_conversation_with_screenshots_is_read_back() -> None:
    shown = {"type": "image_url", "image_url": {"url": "sha256:00"}}
    first: list[dict[str, Any]] = [
        {"role": "system", "content": "You act."},
        {"role": "user", "content": [{"type": "text", "text": "Look: "}, shown]},
    ]
    ids = CHAT.prompt(first)
    said = ENVELOPE.reply_ids("I tap.", closed=True)
    seen = {"role": "user", "content": [shown, {"type": "text", "text": "Step 2"}]}
    ids = [*ids, *said, *CHAT.bridge(seen, turn_is_closed=CHAT.is_closed(said))]
    system, user, assistant, later = ENVELOPE.messages_of(ids, PICTURES)
    assert system == first[0]
    assert [part["type"] for part in user["content"]] == ["text", "image_url"]
    assert user["content"][1]["image_url"]["url"] == "data:image/png;base64,Zmlyc3Q="
    assert assistant == {"role": "assistant", "content": "I tap."}
    assert [part["type"] for part in later["content"]] == ["image_url", "text"]
    assert later["content"][0]["image_url"]["url"] == "data:image/png;base64,c2Vjb25k"


@pytest.mark.parametrize("images", [PICTURES, ()])
def test_images_that_do_not_fit_the_placeholders_are_refused(images: Sequence[Image]) -> None:
    shown = {"type": "image_url", "image_url": {"url": "sha256:00"}}
    ids = CHAT.prompt([{"role": "user", "content": [shown]}])
    with pytest.raises(EngineError, match="image placeholders"):
        ENVELOPE.messages_of(ids, images)


def test_ids_of_another_template_are_refused() -> None:
    with pytest.raises(EngineError, match="ChatML"):
        ENVELOPE.messages_of(TOKENIZER.encode("USER: hello"), ())
    with pytest.raises(EngineError, match="no role"):
        ENVELOPE.messages_of(TOKENIZER.encode("<|im_start|>wizard\nhello<|im_end|>"), ())


# --- the engine ------------------------------------------------------------------------------------------------------


async def test_a_turn_is_asked_as_messages_and_comes_back_as_a_closed_turn() -> None:
    async with asked([(200, completion("4"))], api_key="secret") as (engine, bodies):
        reply = await engine.generate(turn(logit_bias={"5": -100}, sampling_seed=7, frequency_penalty=0.1))
    assert CHAT.text(reply.output_ids) == "4"
    assert CHAT.is_closed(reply.output_ids)
    assert (reply.finish_reason, reply.weight_version, reply.prompt_tokens) == ("stop", None, None)
    assert all(math.isnan(log_prob) for log_prob in reply.output_log_probs)
    assert bodies == [
        {
            "model": "some-model",
            "messages": [{"role": "user", "content": "2 + 2?"}],
            "max_tokens": 64,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "frequency_penalty": 0.1,
            "authorization": "Bearer secret",
        }
    ]


async def test_a_busy_server_is_asked_again() -> None:
    busy = {"error": {"message": "Rate limit reached", "code": "rate_limit_exceeded"}}
    async with asked([(429, busy), (503, busy), (200, completion("4"))]) as (engine, bodies):
        assert CHAT.text((await engine.generate(turn())).output_ids) == "4"
    assert len(bodies) == 3


async def test_a_conversation_beyond_the_context_is_a_turn_that_was_cut() -> None:
    refusal = {"error": {"message": "This model's maximum context length is 8192 tokens.", "code": None}}
    async with asked([(400, refusal)]) as (engine, _):
        reply = await engine.generate(turn())
    assert (reply.output_ids, reply.finish_reason) == ((), "length")


async def test_a_server_that_calls_the_cap_otherwise_is_asked_its_way_from_then_on() -> None:
    refusal = {"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}}
    async with asked([(400, refusal), (200, completion("4")), (200, completion("5"))]) as (engine, bodies):
        await engine.generate(turn())
        await engine.generate(turn())
    caps = [sorted(key for key in body if key.startswith("max_")) for body in bodies]
    assert caps == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, {"error": {"message": "Incorrect API key provided"}}, "Incorrect API key"),
        (400, {"error": {"message": "temperature is not supported"}}, "temperature is not supported"),
        (200, completion("", "content_filter"), "content_filter"),
        (200, completion(None, "tool_calls"), "tool calls"),
        (200, completion([{"type": "text"}]), "not a string"),  # type: ignore[arg-type]  # what a server may send
    ],
)
async def test_what_is_no_reply_is_an_engine_error(status: int, body: Any, says: str) -> None:
    async with asked([(status, body)]) as (engine, _):
        with pytest.raises(EngineError, match=says):
            await engine.generate(turn())


async def test_a_turn_that_alone_is_a_server_error_is_an_engine_error() -> None:
    async with asked([(500, {}), (500, {}), (500, {}), (200, completion("OK"))]) as (engine, bodies):
        with pytest.raises(EngineError, match="HTTP 500"):
            await engine.generate(turn())
    assert [body["max_tokens"] for body in bodies] == [bodies[0]["max_tokens"]] * 3 + [1]


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://api.example.com/v1", "secret"),
        ("https://api.example.com/other", "secret"),
        ("https://api.example.com:444/v1", None),
        ("http://api.example.com/v1", None),
        ("https://evil.example.com/v1", None),
    ],
)
def test_the_key_goes_to_the_server_it_belongs_to_and_to_no_other(
    monkeypatch: pytest.MonkeyPatch, url: str, key: str | None
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    monkeypatch.setenv(KEY_URL_VARIABLE, "https://api.example.com/v1")
    assert api_key_for(url) == key


def test_without_an_owner_no_server_gets_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    monkeypatch.delenv(KEY_URL_VARIABLE, raising=False)
    assert api_key_for("https://api.example.com/v1") is None
