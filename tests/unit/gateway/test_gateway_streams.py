"""Streamed turns in every dialect, with the official clients: what goes out when, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import EngineError, StorageFullError
from tests.gateway_support import GatewayUnderTest, counting_engine, gateway_on, start_session_job, tokenizer
from tests.waiting import until

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "🙂"}}\n</tool_call>'
REPLY = f"<think>\nI thínk 🙂.\n</think>\n\nI lóok.\n{CALL}"
QUESTION: Any = [{"role": "user", "content": "What is there?"}]
SCHEMA: Any = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION: Any = {"name": "look", "description": "Looks.", "parameters": SCHEMA}


class HeldEngine:
    """Tells the tokens of its reply up to ``waits_at``, and the others when ``may_go_on``; then it ends or fails."""

    def __init__(
        self, text: str = REPLY, failure: Exception | None = None, *, waits_at: int = 0, finish_reason: str = "stop"
    ) -> None:
        ending = "<|im_end|>" if finish_reason == "stop" else ""
        self.ids = tokenizer.encode(text + ending, add_special_tokens=False)
        self.failure = failure
        self.waits_at = waits_at % len(self.ids)
        self.finish_reason = finish_reason
        self.calls = 0
        self.given_up = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.calls += 1
        for at, token_id in enumerate(self.ids):
            if request.on_tokens is not None:
                request.on_tokens([token_id])
            if at == self.waits_at:
                try:
                    await self.may_go_on.wait()
                except asyncio.CancelledError:
                    self.given_up.set()
                    raise
        if self.failure is not None:
            raise self.failure
        return GenerateReply(
            output_ids=tuple(self.ids),
            output_log_probs=(-0.5,) * len(self.ids),
            finish_reason=self.finish_reason,
            weight_version="7",
        )

    async def close(self) -> None:
        """Has nothing to close."""


Heard = list[tuple[str, Any]]
"""What a client has heard: ``("text", …)``, ``("thought", …)``, ``("arguments", …)``, and at last ``("end", …)``."""


async def chat_heard(gateway: GatewayUnderTest, opened: Any, **options: Any) -> AsyncIterator[tuple[str, Any]]:
    client = gateway.client(opened)
    tools: Any = [{"type": "function", "function": FUNCTION}]
    stream = await client.chat.completions.create(
        model="p", messages=QUESTION, tools=tools, stream=True, extra_body={"separate_reasoning": True}, **options
    )
    async for chunk in stream:
        (choice,) = chunk.choices
        if choice.delta.content:
            yield "text", choice.delta.content
        if (choice.delta.model_extra or {}).get("reasoning_content"):
            yield "thought", choice.delta.model_extra["reasoning_content"]
        for call in choice.delta.tool_calls or ():
            yield "arguments", (call.function and call.function.arguments) or ""
        if choice.finish_reason:
            yield "end", chunk.id


async def messages_heard(gateway: GatewayUnderTest, opened: Any, **options: Any) -> AsyncIterator[tuple[str, Any]]:
    tools: Any = [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}]
    client = gateway.anthropic_client(opened)
    asked = client.messages.stream(model="p", max_tokens=200, messages=QUESTION, tools=tools, **options)
    async with asked as stream:
        async for event in stream:
            if event.type == "text":
                yield "text", event.text
            elif event.type == "thinking":
                yield "thought", event.thinking
            elif event.type == "input_json":
                yield "arguments", event.partial_json
            elif event.type == "message_stop":
                yield "end", event.message.id


async def responses_heard(gateway: GatewayUnderTest, opened: Any, **options: Any) -> AsyncIterator[tuple[str, Any]]:
    client = gateway.client(opened)
    tools: Any = [{"type": "function", **FUNCTION}]
    async with client.responses.stream(model="p", input=QUESTION, tools=tools, **options) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                yield "text", event.delta
            elif event.type == "response.reasoning_text.delta":
                yield "thought", event.delta
            elif event.type == "response.function_call_arguments.delta":
                yield "arguments", event.delta
            elif event.type == "response.completed":
                yield "end", event.response.id


Hear = Callable[..., AsyncIterator[tuple[str, Any]]]
dialects = pytest.mark.parametrize("hear", [chat_heard, messages_heard, responses_heard])


def error_of(hear: Hear) -> type[Exception]:
    """What its client raises for an error event. Imported here: each worker of a run collects this file."""
    if hear is messages_heard:
        import anthropic

        return anthropic.APIError
    import openai

    return openai.APIError


@asynccontextmanager
async def session_with(folder: Path, engine: HeldEngine) -> AsyncIterator[tuple[GatewayUnderTest, dict[str, Any]]]:
    async with gateway_on(folder, engine) as gateway:
        yield gateway, await gateway.open(start_session_job(gateway.buffer, n=1))


async def all_of(heard: AsyncIterator[tuple[str, Any]]) -> Heard:
    return [one async for one in heard]


def joined(heard: Sequence[tuple[str, Any]], kind: str) -> str:
    return "".join(what for said, what in heard if said == kind)


async def turns_of(gateway: GatewayUnderTest, opened: Any) -> int:
    turns: int = (await gateway.call("GET", f"/sessions/{opened['session_id']}")).body["turns"]
    return turns


@dialects
async def test_the_first_event_leaves_before_the_engines_second_token(tmp_path: Path, hear: Hear) -> None:
    engine = HeldEngine("Alpha beta gamma.")
    async with session_with(tmp_path, engine) as (gateway, opened):
        heard: Heard = []
        async for one in hear(gateway, opened):
            heard.append(one)
            engine.may_go_on.set()  # only now the engine samples a second token
        assert heard[0] == ("text", tokenizer.decode(engine.ids[:1]))
        assert len([kind for kind, _ in heard if kind == "text"]) > 2
        assert joined(heard, "text") == "Alpha beta gamma."


@dialects
async def test_arguments_of_a_call_leave_before_the_engines_last_tokens(tmp_path: Path, hear: Hear) -> None:
    last = len(tokenizer.encode('"}}\n</tool_call><|im_end|>', add_special_tokens=False))
    engine = HeldEngine(
        '<tool_call>\n{"name": "look", "arguments": {"at": "the big sea"}}\n</tool_call>', waits_at=-last
    )
    async with session_with(tmp_path, engine) as (gateway, opened), asyncio.timeout(60):
        heard: Heard = []
        async for one in hear(gateway, opened):
            heard.append(one)
            if "sea" in joined(heard, "arguments"):
                engine.may_go_on.set()  # only now the engine ends the call
        assert joined(heard, "arguments") == '{"at":"the big sea"}'
        assert len([kind for kind, _ in heard if kind == "arguments"]) > 3


async def test_a_call_that_was_cut_is_rendered_by_templates_that_take_objects_only(tmp_path: Path) -> None:
    strict: Any = type(tokenizer).from_pretrained(tokenizer.name_or_path, local_files_only=True)
    strict.chat_template = tokenizer.chat_template.replace(
        "called.arguments if called.arguments is string else called.arguments | tojson",
        "called.arguments | items | list | tojson",
    )
    assert strict.chat_template != tokenizer.chat_template
    engine = HeldEngine("Alpha.")
    engine.may_go_on.set()
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1, "by": "ca'}}
    async with gateway_on(tmp_path, engine, load=lambda path: strict) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer, n=1))
        turn = await gateway.chat(opened, [*QUESTION, {"role": "assistant", "tool_calls": [call]}, *QUESTION])
        assert turn.status == 200, turn.body


@dialects
async def test_what_was_streamed_is_what_is_recorded(tmp_path: Path, hear: Hear) -> None:
    engine = HeldEngine()
    engine.may_go_on.set()
    async with session_with(tmp_path, engine) as (gateway, opened):
        (job,) = gateway.buffer.unfinished_jobs()
        heard = await all_of(hear(gateway, opened))
        assert [joined(heard, kind) for kind in ("thought", "text", "arguments")] == [
            "I thínk 🙂.", "I lóok.", '{"at":"🙂"}',
        ]  # fmt: skip
        await gateway.close(opened, reward=1)
        said = gateway.item(job, opened["session_id"])["messages"][-1]
        assert (said["content"], said["reasoning_content"]) == ("I lóok.", "I thínk 🙂.")
        assert said["tool_calls"][0]["function"]["arguments"] == {"at": "🙂"}
        (generation,) = gateway.generations(job, opened["session_id"])
        assert tokenizer.decode(generation.output_ids) == f"{REPLY}<|im_end|>"
        assert generation.output_log_probs is not None
        assert len(generation.output_log_probs) == len(engine.ids)


@dialects
async def test_a_turn_is_stored_before_its_last_event(
    tmp_path: Path, hear: Hear, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HeldEngine()
    async with session_with(tmp_path, engine) as (gateway, opened):
        order: list[str] = []
        write: Callable[[Any], Awaitable[bool]] = gateway.gateway.turns.write

        async def noting(turn: Any) -> bool:
            stored = await write(turn)
            order.append("stored")
            return stored

        monkeypatch.setattr(gateway.gateway.turns, "write", noting)
        engine.may_go_on.set()
        async for kind, _ in hear(gateway, opened):
            order += [kind] if kind == "end" else []
        assert order == ["stored", "end"]


@dialects
async def test_an_engine_that_fails_in_a_stream_is_an_error_event_and_leaves_no_turn(
    tmp_path: Path, hear: Hear
) -> None:
    engine = HeldEngine("Alpha beta.", EngineError("it broke"))
    async with session_with(tmp_path, engine) as (gateway, opened):
        heard: Heard = []

        async def listen() -> None:
            async for one in hear(gateway, opened):
                heard.append(one)
                engine.may_go_on.set()

        with pytest.raises(error_of(hear), match="it broke"):
            await listen()
        assert joined(heard, "text").startswith("Alpha")
        assert (await turns_of(gateway, opened), engine.calls) == (0, 1)
        engine.failure = None
        assert joined(await all_of(hear(gateway, opened)), "text") == "Alpha beta."
        assert (await turns_of(gateway, opened), engine.calls) == (1, 2)


@dialects
async def test_a_session_that_is_abandoned_in_a_stream_ends_it_with_an_error_event_and_the_engines_work(
    tmp_path: Path, hear: Hear
) -> None:
    """Also while the engine's client waits before it continues a broken stream."""
    engine = HeldEngine("Alpha beta.")
    async with session_with(tmp_path, engine) as (gateway, opened):

        async def listen() -> None:
            async for _ in hear(gateway, opened):
                await gateway.abandon(opened)

        with pytest.raises(error_of(hear), match="was abandoned"):
            await asyncio.wait_for(listen(), 20)
        assert engine.given_up.is_set()


async def test_the_error_event_of_a_response_has_the_next_number(tmp_path: Path) -> None:
    engine = HeldEngine("Alpha beta.", EngineError("it broke"))
    engine.may_go_on.set()
    async with session_with(tmp_path, engine) as (gateway, opened):
        path = f"/sessions/{opened['api_key']}/v1/responses"
        answer = await gateway.call("POST", path, {"input": QUESTION, "stream": True})
        events = [json.loads(line.removeprefix("data: ")) for line in answer.body.split("\n") if "data: " in line]
        assert events[-1]["type"] == "error"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


@dialects
async def test_a_full_disk_in_a_stream_is_an_error_event(
    tmp_path: Path, hear: Hear, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HeldEngine("Alpha beta.")
    engine.may_go_on.set()

    async def refuse(turn: Any) -> bool:
        raise StorageFullError("the disk is full")

    async with session_with(tmp_path, engine) as (gateway, opened):
        monkeypatch.setattr(gateway.gateway.turns, "write", refuse)
        with pytest.raises(error_of(hear), match="the disk is full"):
            await all_of(hear(gateway, opened))
        assert await turns_of(gateway, opened) == 0


@dialects
async def test_a_client_that_hangs_up_in_a_stream_ends_the_engines_work_and_leaves_no_turn(
    tmp_path: Path, hear: Hear
) -> None:
    engine = HeldEngine("Alpha beta.")
    async with session_with(tmp_path, engine) as (gateway, opened):
        first = asyncio.Event()

        async def listen() -> None:
            async for _ in hear(gateway, opened):
                first.set()

        listening = asyncio.ensure_future(listen())
        await first.wait()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await asyncio.wait_for(engine.given_up.wait(), 60)
        assert await turns_of(gateway, opened) == 0


@dialects
async def test_a_retry_of_a_stored_turn_is_streamed_from_the_store(tmp_path: Path, hear: Hear) -> None:
    engine = HeldEngine()
    engine.may_go_on.set()
    async with session_with(tmp_path, engine) as (gateway, opened):
        first = await all_of(hear(gateway, opened))
        again = await all_of(hear(gateway, opened, extra_headers={"x-stainless-retry-count": "1"}))
        for kind in ("thought", "text", "arguments", "end"):
            assert joined(again, kind) == joined(first, kind)
        assert (await turns_of(gateway, opened), engine.calls) == (1, 1)


async def test_a_streamed_response_is_a_previous_one(tmp_path: Path) -> None:
    engine = HeldEngine("Alpha.")
    engine.may_go_on.set()
    async with session_with(tmp_path, engine) as (gateway, opened):
        names = [(await all_of(responses_heard(gateway, opened)))[-1][1] for _ in range(2)]
        assert len({*names}) == 2
        for name in names:
            client = gateway.client(opened)
            await client.responses.create(model="p", input="And?", previous_response_id=name)
        assert (await turns_of(gateway, opened)) == 4


async def test_a_streamed_answer_that_could_not_be_sent_is_not_trained_and_is_given_to_a_repetition(
    tmp_path: Path,
) -> None:
    """The client does not read, and the reply, which has its metadata, is larger than what sockets hold."""
    body = {"input": "hi", "stream": True, "metadata": {"a": "x" * 8_000_000}}
    content = json.dumps(body).encode()
    async with gateway_on(tmp_path, counting_engine()) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        session = await gateway.gateway.registry.session(opened["session_id"])
        address, path = urlsplit(gateway.url), f"/sessions/{opened['api_key']}/v1/responses"
        _, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
        head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await until(lambda: session.recording.last_number == 1)
        await asyncio.sleep(0.2)  # it is being sent
        writer.transport.abort()
        await until(lambda: session.recording.num_turns == 0)
        again = await gateway.call("POST", path, {"input": "hi", "metadata": {}})
        assert again.body["output"][0]["content"][0]["text"] == "Answer 1."
        await gateway.close(opened, reward=1.0)
        assert len(gateway.generations(job, opened["session_id"])) == 1
