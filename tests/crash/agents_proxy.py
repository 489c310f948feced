"""The proxy of the crash test with agents: passes bytes between agents and the gateway, and notes what each reply told.

    python -m tests.crash.agents_proxy PLAN GATEWAY_PORT

It listens where the plan says that the gateway is. Each connection of an agent has one to the gateway: when either side
closes, the other is closed. Nothing is retried, held back or changed.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import h11

from tests.crash.workload import Journal, load_plan

SESSION = re.compile(r"/sessions/sk-rollout-(.+)-[0-9a-f]{32}/(?:v1/)+(?:chat/completions|messages|responses)(?:\?|$)")
MAX_HEAD_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
GATEWAY, AGENT = "gateway", "agent"

Note = Callable[..., None]


class Reply:
    """What an agent has received of the reply to one request for a turn; noted once, when that is decided."""

    def __init__(self, session: str, note: Note) -> None:
        self.status = 0
        self.text = ""
        self.calls: list[list[str]] = []
        """Of each tool call the name and its arguments as JSON."""
        self._about = {"session": session, "asked_at": time.time()}
        self._note = note
        self._is_stream = self._is_finished = self._is_noted = False
        self._rest = b""

    def begin(self, response: h11.Response) -> None:
        """Takes the head."""
        self.status = response.status_code
        self._is_stream = dict(response.headers).get(b"content-type", b"").startswith(b"text/event-stream")

    def add(self, data: bytes) -> None:
        """Takes more of the body. A stream is answered with its terminal event."""
        self._rest += data
        while self._is_stream and b"\n\n" in self._rest:
            event, _, self._rest = self._rest.partition(b"\n\n")
            for line in event.split(b"\n"):
                if line == b"data: [DONE]" and self._is_finished:
                    self._end(answered=True)
                elif line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def end(self) -> None:
        """The response came to its end. Without a stream it is answered only now."""
        if self._is_stream or self.status != 200:
            self._end(error=self._rest.decode(errors="replace")[:300])
            return
        body = json.loads(self._rest)
        for block in body.get("content", ()):  # of Messages
            self.text += block.get("text", "")
            if block["type"] == "tool_use":
                self.calls.append([block["name"], json.dumps(block["input"])])
        for choice in body.get("choices", ()):
            self._take_delta(choice["message"])
        self._end(answered=True)

    def cut(self, by: str) -> None:
        """A side closed the connection."""
        self._end(cut_by=by)

    def _take(self, event: dict[str, Any]) -> None:
        delta = event.get("delta", {})
        match event.get("type"):
            case None if "choices" in event:
                for choice in event["choices"]:
                    self._take_delta(choice["delta"])
                    self._is_finished = self._is_finished or choice["finish_reason"] is not None
            case "response.output_text.delta":
                self.text += delta
            case "response.function_call_arguments.delta":
                self.calls[-1][1] += delta
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                self.calls.append([event["item"]["name"], ""])
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                self.calls.append([event["content_block"]["name"], ""])
            case "content_block_delta":
                self.text += delta.get("text", "")
                if "partial_json" in delta:
                    self.calls[-1][1] += delta["partial_json"]
            case "message_stop" | "response.completed" | "response.incomplete":
                self._end(answered=True)
            case "error" | None:
                self._end(error=json.dumps(event)[:300])

    def _take_delta(self, delta: dict[str, Any]) -> None:
        """Takes a message of chat completions, or a piece of one."""
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self.calls.append([call["function"]["name"], ""])
            self.calls[-1][1] += call["function"].get("arguments", "")

    def _end(self, *, answered: bool = False, error: str = "", cut_by: str = "") -> None:
        if not self._is_noted:
            self._is_noted = True
            told = {"status": self.status, "text": self.text, "calls": self.calls}
            self._note(**self._about, **told, answered=answered, error=error, cut_by=cut_by)


class Exchange:
    """Reads the requests and replies of one connection along, once they have been passed on."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._reply: Reply | None = None
        """To the request under way; None if that is not for a turn."""
        self._requests = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._replies = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    def asked(self, data: bytes) -> None:
        """Takes bytes of the agent."""
        self._requests.receive_data(data)
        self._read_requests()

    def _read_requests(self) -> None:
        while isinstance(event := self._requests.next_event(), h11.Request | h11.Data | h11.EndOfMessage):
            self._replies.send(event)
            if isinstance(event, h11.Request):
                found = SESSION.match(event.target.decode())
                self._reply = None if found is None else Reply(found[1], self._note)

    def told(self, data: bytes) -> None:
        """Takes bytes of the gateway that the agent has."""
        self._replies.receive_data(data)
        known = h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
        while isinstance(event := self._replies.next_event(), known):
            self._requests.send(event)
            if isinstance(event, h11.EndOfMessage):
                self._end()
            elif self._reply is not None and isinstance(event, h11.Response):
                self._reply.begin(event)
            elif self._reply is not None and isinstance(event, h11.Data):
                self._reply.add(bytes(event.data))

    def _end(self) -> None:
        if self._reply is not None:
            self._reply.end()
        if self._requests.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            self._requests.start_next_cycle()
            self._replies.start_next_cycle()
            self._read_requests()

    def closed(self, by: str) -> None:
        """A side has closed the connection."""
        if self._reply is not None:
            self._reply.cut(by)


async def serve(note: Note, host: str, port: int, gateway_port: int) -> asyncio.Server:
    """Listens, and passes what comes between its connections and the gateway's port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gateway_reader, gateway_writer = await asyncio.open_connection(host, gateway_port)
        except OSError:
            writer.close()
            return
        exchange = Exchange(note)
        told = asyncio.create_task(_pass_on(gateway_reader, writer, GATEWAY, AGENT, after=exchange.told))
        asked = asyncio.create_task(_pass_on(reader, gateway_writer, AGENT, GATEWAY, before=exchange.asked))
        try:
            await asyncio.wait([told, asked], return_when=asyncio.FIRST_COMPLETED)
            exchange.closed(by=(told if told.done() else asked).result())
        finally:
            for task in (told, asked):
                task.cancel()
            writer.close()
            gateway_writer.close()

    return await asyncio.start_server(connected, host, port)


async def _pass_on(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    source: str,
    target: str,
    *,
    before: Callable[[bytes], None] = lambda data: None,
    after: Callable[[bytes], None] = lambda data: None,
) -> str:
    """Passes bytes on as they come, until a side closes; returns which."""
    while True:
        try:
            data = await reader.read(CHUNK_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            return source
        before(data)
        try:
            writer.write(data)
            await writer.drain()
        except ConnectionError:
            return target
        after(data)


async def _main(plan_path: str, gateway_port: str) -> None:
    plan = load_plan(plan_path)
    address = urlsplit(plan.gateway_url)
    note = Journal(plan.path("proxy.jsonl")).note
    server = await serve(note, address.hostname or "", address.port or 0, int(gateway_port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
