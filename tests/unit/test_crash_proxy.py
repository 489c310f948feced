"""The proxy of the crash test with agents notes a turn as answered with the last byte of the event that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply, pieces_of
from slime_plugins.rollout_buffer.gateway.dialects.dialect import Dialect, dialect_of
from tests.crash.agents_proxy import Exchange, serve

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages?beta=true", "/v1/responses"
TERMINAL = {CHAT: b"data: [DONE]\n\n", MESSAGES: b'data: {"type":"message_stop"}\n\n', RESPONSES: b"}\n\n"}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CALL = {"id": "call_1", "type": "function", "function": {"name": "Bash", "arguments": {"command": "ls"}}}
USAGE = {
    "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
REPLY = ChatReply(
    name="1.0.7.0.1-abc", created=0, model="policy", finish_reason="tool_calls", usage=USAGE, weight_version="1",
    message={"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
)  # fmt: skip


def request(path: str) -> bytes:
    return b"POST /sessions/sk-rollout-1.0.7.0.1-%s%s HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}" % (
        b"0" * 32, path.encode(),
    )  # fmt: skip


def dialect(path: str) -> Dialect:
    found = dialect_of(path.partition("?")[0])
    assert found is not None
    return found


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(content: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def events(path: str) -> Iterator[bytes]:
    """The pieces of a streamed reply, as the gateway encodes them."""
    encoder = dialect(path).events({})
    yield b"".join(encoder.begin(REPLY))
    for piece in pieces_of(REPLY.message):
        yield b"".join(encoder.add(piece))
    yield b"".join(encoder.end(REPLY))


class Noted:
    """An exchange of a connection, and what is noted of it."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        self.exchange = Exchange(lambda **event: self.notes.append(event))

    @property
    def answers(self) -> list[bool]:
        return [note["answered"] for note in self.notes]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_stream_that_is_cut_is_answered_only_behind_its_terminal_event(path: str) -> None:
    wire = STREAM + b"".join(map(chunk, events(path))) + chunk(b"")
    end = wire.rindex(TERMINAL[path]) + len(TERMINAL[path])
    for cut in range(1, len(wire) + 1):
        noted = Noted()
        noted.exchange.asked(request(path))
        noted.exchange.told(wire[:cut])
        assert noted.answers == ([True] if cut >= end else [])
        noted.exchange.closed("gateway")
        assert [note["cut_by"] for note in noted.notes] == ["" if cut >= end else "gateway"]
    assert (noted.notes[0]["session"], noted.notes[0]["text"]) == ("1.0.7.0.1", "I look.")
    assert [[name, orjson.loads(arguments)] for name, arguments in noted.notes[0]["calls"]] == [
        ["Bash", {"command": "ls"}]
    ]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_reply_that_is_not_streamed_is_answered_once_it_is_whole(path: str) -> None:
    wire = whole(orjson.dumps(dialect(path).encode(REPLY, {})))
    noted = Noted()
    for _ in range(2):  # on one connection
        noted.exchange.asked(request(path))
        noted.exchange.told(wire[:-1])
        assert noted.notes == []
        noted.exchange.told(wire[-1:])
        assert noted.answers == [True]
        (note,) = noted.notes
        assert (note["text"], len(note["calls"])) == ("I look.", 1)
        noted.notes.clear()
    noted.exchange.closed("agent")
    assert noted.notes == []


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_errors_are_no_answers(path: str) -> None:
    error = UnavailableError("the engine cannot be reached")
    refused = whole(orjson.dumps(dialect(path).error(error)), "503 Service Unavailable")
    begun, *_ = events(path)
    broken = STREAM + chunk(begun) + chunk(b"".join(dialect(path).events({}).fail(error))) + chunk(b"")
    noted = Noted()
    for wire in (refused, broken):
        noted.exchange.asked(request(path))
        noted.exchange.told(wire)
    assert noted.answers == [False, False]
    assert all("cannot be reached" in note["error"] for note in noted.notes)


def test_chat_completions_that_end_without_a_reason_are_no_answers() -> None:
    begun, *_ = events(CHAT)
    noted = Noted()
    noted.exchange.asked(request(CHAT))
    noted.exchange.told(STREAM + chunk(begun) + chunk(TERMINAL[CHAT]) + chunk(b""))
    assert noted.answers == [False]


def test_only_requests_for_turns_are_noted() -> None:
    noted = Noted()
    for path in ("/v1/messages/count_tokens", "/close"):
        noted.exchange.asked(request(path))
        noted.exchange.told(whole(b"{}"))
    assert noted.notes == []


class Connections:
    """A proxy with the connections of one agent, ``agent`` and ``gateway`` as reader and writer each."""

    def __init__(self) -> None:
        self.noted: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Connections]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.accepted.put((reader, writer))

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as gateway:
            gateway_port = gateway.sockets[0].getsockname()[1]
            note = self.noted.put_nowait
            async with await serve(lambda **event: note(event), "127.0.0.1", 0, gateway_port) as proxy:
                self.agent = await asyncio.open_connection(*proxy.sockets[0].getsockname())
                self.gateway = await self.accepted.get()
                yield self
                for _, writer in (self.agent, self.gateway):
                    writer.close()


async def test_bytes_pass_as_they_come_until_a_side_closes() -> None:
    async with Connections().opened() as between:
        between.agent[1].write(request(MESSAGES))
        assert await between.gateway[0].readexactly(len(request(MESSAGES))) == request(MESSAGES)
        begun, *_ = events(MESSAGES)
        between.gateway[1].write(STREAM + chunk(begun))
        assert await between.agent[0].readexactly(len(STREAM + chunk(begun))) == STREAM + chunk(begun)
        between.gateway[1].close()
        assert await between.agent[0].read() == b""
        note = await between.noted.get()
        assert (note["answered"], note["cut_by"], note["status"]) == (False, "gateway", 200)


async def test_a_gateway_learns_that_its_agent_hung_up() -> None:
    async with Connections().opened() as between:
        between.agent[1].write(request(CHAT))
        await between.gateway[0].readexactly(len(request(CHAT)))
        between.agent[1].close()
        assert await between.gateway[0].read() == b""
        note = await between.noted.get()
        assert (note["answered"], note["cut_by"], note["status"]) == (False, "agent", 0)
