"""The load client of the buffer benchmark, as a separate process: creates, writes and reads items, and measures times.

Takes one JSON command per line on its standard input, and answers each with one line. It speaks HTTP/1.1 over plain
sockets with prepared bodies, so that the client's own time is small.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

GROUP_SIZE = 8
SCREENSHOTS = 25
SCREENSHOT_BYTES = 30_000
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
TIMEOUT_S = 120.0
REPLY_BYTES = 192 * 2**20
"""Large enough for a whole round's items: the largest reply fits without an allocation."""


class Connection:
    """One keep-alive connection: sends a request, reads the reply into preallocated memory."""

    def __init__(self, port: int, memory: bytearray | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = bytearray()
        self._reply = bytearray(2**20) if memory is None else memory

    def post(self, request: bytes) -> memoryview:
        """Returns the body of the reply, valid until the next call; raises unless it is a 200."""
        self._socket.sendall(request)
        head = bytes(self._read_until(b"\r\n\r\n")).lower()
        size = self._chunks() if b"transfer-encoding: chunked" in head else self._read(0, _content_length(head))
        body = memoryview(self._reply)[:size]
        if not head.startswith((b"http/1.1 200", b"http/1.0 200")):
            raise RuntimeError(f"{head.splitlines()[0]!r}: {bytes(body[:300])!r}")
        return body

    def close(self) -> None:
        self._socket.close()

    def _chunks(self) -> int:
        offset = 0
        while size := int(bytes(self._read_until(b"\r\n")), 16):
            offset = self._read(offset, size)
            self._read_until(b"\r\n")
        self._read_until(b"\r\n")
        return offset

    def _read_until(self, mark: bytes) -> bytearray:
        """Reads up to and including the mark."""
        while (end := self._held.find(mark)) < 0:
            data = self._socket.recv(4096)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._held += data
        content = self._held[:end]
        del self._held[: end + len(mark)]
        return content

    def _read(self, offset: int, size: int) -> int:
        """Reads ``size`` bytes into the reply at ``offset``; returns their end."""
        end = offset + size
        if end > len(self._reply):
            larger = bytearray(max(end, 2 * len(self._reply)))
            larger[:offset] = memoryview(self._reply)[:offset]
            self._reply = larger
        held = min(size, len(self._held))
        self._reply[offset : offset + held] = self._held[:held]
        del self._held[:held]
        offset += held
        with memoryview(self._reply) as view:
            while offset < end:
                received = self._socket.recv_into(view[offset:end])
                if received == 0:
                    raise ConnectionError("the server closed the connection in the middle of a reply")
                offset += received
        return end


def _content_length(head: bytes) -> int:
    line = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return int(line.split(b":")[1])


def as_request(path: str, body: Any) -> bytes:
    """Returns a whole POST request; a body of bytes is sent unchanged."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


# --- items -----------------------------------------------------------------------------------------------------------


def text(rng: random.Random, size: int) -> str:
    """Returns random words of about ``size`` characters."""
    words = ("tap", "the", "settings", "button", "scroll", "down", "until", "network", "list", "appears", "then", "go")
    return " ".join(rng.choices(words, k=size // 6))


def make_item(kind: str, uid: str, instance_id: str, reward: float, shared: Sequence[str]) -> dict[str, Any]:
    """Returns an item: 2k and 64k are text, 1m is an episode of 25 steps with a screenshot each."""
    rng = random.Random(uid)
    item = {"uid": uid, "instance_id": instance_id, "reward": reward, "extra_info": {"task": instance_id}}
    if kind == "2k":
        return {**item, "messages": _turns(rng, [900, 900])}
    if kind == "64k":
        return {**item, "messages": _turns(rng, [3200] * 20)}
    shots = [*shared, *(screenshot(rng) for _ in range(SCREENSHOTS - len(shared)))]
    messages: list[dict[str, Any]] = []
    for shot in shots:
        parts = [{"type": "image_url", "image_url": {"url": shot}}, {"type": "text", "text": text(rng, 200)}]
        messages += ({"role": "user", "content": parts}, {"role": "assistant", "content": text(rng, 400)})
    if kind == "1m-ids":
        item["generations"] = [_generation(rng) for _ in shots]
    return {**item, "messages": messages}


def _turns(rng: random.Random, sizes: Sequence[int]) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text(rng, size)} for number, size in enumerate(sizes)]


def _generation(rng: random.Random) -> dict[str, Any]:
    output = [rng.randrange(150_000) for _ in range(120)]
    log_probs = [-rng.random() for _ in output]
    return {"keep": 0, "prompt_ids": output[:60], "output_ids": output, "output_log_probs": log_probs}


def screenshot(rng: random.Random) -> str:
    """Returns a data URI of incompressible bytes."""
    data = PNG_MAGIC + rng.randbytes(SCREENSHOT_BYTES - len(PNG_MAGIC))
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def make_requests(kind: str, count: int, run: str, job_id: str | None) -> list[bytes]:
    """Returns write requests of whole groups, the members of a group in sequence."""
    requests = []
    for number in range(count):
        group, member = divmod(number, GROUP_SIZE)
        group_rng = random.Random(f"{run}-{group}")
        shared = [screenshot(group_rng) for _ in range(SCREENSHOTS // 2)] if kind == "1m-shared" else []
        item = make_item(kind, f"{run}-{number}", f"{run}-g{group}", float(member % 2), shared)
        requests.append(as_request("/buffer/write", item if job_id is None else {**item, "job_id": job_id}))
    return requests


# --- commands --------------------------------------------------------------------------------------------------------


def start(port: int, job_id: str | None) -> dict[str, Any]:
    """Starts an external job."""
    body = {"task_type": "external", "num_repeat_per_sample": str(GROUP_SIZE), "max_groups_ahead": None}
    connection = Connection(port)
    reply = connection.post(as_request("/start_rollout", body if job_id is None else {**body, "job_id": job_id}))
    connection.close()
    return {"reply": json.loads(bytes(reply))}


class Writer:
    """One of several concurrent write connections, driven by a selector loop.

    No threads: 32 of them would compete for the interpreter's lock, on cores that the buffer needs.
    """

    def __init__(self, port: int, requests: Sequence[bytes], selector: selectors.BaseSelector) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._requests = iter(requests)
        self._unsent = memoryview(b"")
        self._reply = bytearray()
        self._selector = selector
        self._selector.register(self._socket, selectors.EVENT_READ, self)

    def begin(self) -> None:
        """Sends the next request, or closes the connection after the last."""
        request = next(self._requests, None)
        if request is None:
            self.close()
            return
        self._unsent = memoryview(request)
        self.send()

    def send(self) -> None:
        """Sends as much as the socket accepts."""
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self)

    def receive(self) -> None:
        """Receives available bytes; sends the next request after a complete reply. Raises unless it is a 200."""
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("the server closed the connection")
        self._reply += data
        head, separator, body = self._reply.partition(b"\r\n\r\n")
        if separator and len(body) >= _content_length(bytes(head).lower()):
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{bytes(head.splitlines()[0])!r}: {bytes(body[:300])!r}")
            self._reply.clear()
            self.begin()

    def close(self) -> None:
        self._selector.unregister(self._socket)
        self._socket.close()


def write(port: int, kind: str, count: int, run: str, job_id: str | None, connections: int) -> dict[str, Any]:
    """Writes items over several connections; measures from the first byte to the last reply."""
    requests = make_requests(kind, count, run, job_id)
    failures: list[str] = []
    with selectors.DefaultSelector() as selector:
        writers = [Writer(port, requests[number::connections], selector) for number in range(connections)]
        began = time.perf_counter()
        for writer in writers:
            writer.begin()
        while selector.get_map():
            for key, events in selector.select():
                try:
                    if events & selectors.EVENT_WRITE:
                        key.data.send()
                    if events & selectors.EVENT_READ:
                        key.data.receive()
                except (OSError, RuntimeError) as error:
                    failures.append(str(error))
                    key.data.close()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "failures": failures, "bytes": sum(map(len, requests))}


@cache
def touched_memory() -> bytearray:
    """Returns memory that was written to, so that page faults are not measured."""
    memory = bytearray(REPLY_BYTES)
    memory[::4096] = b"x" * len(memory[::4096])
    return memory


def read(port: int, job_id: str | None, parse: bool) -> dict[str, Any]:
    """Polls until nothing is left, as a trainer does: leased and acknowledged if the buffer supports it.

    Every call reads into the same memory, for either contender.
    """
    connection = Connection(port, touched_memory())
    body: dict[str, Any] = {} if job_id is None else {"job_id": job_id, "lease_s": 600}
    seconds, items, size = 0.0, 0, 0
    while True:
        request = as_request("/get_rollout_data", body)
        began = time.perf_counter()
        reply = connection.post(request)
        parsed = json.loads(bytes(reply)) if parse else None
        seconds += time.perf_counter() - began
        # The benchmark's own check is not measured.
        content = parsed if parsed is not None else json.loads(bytes(reply))
        if not content["success"]:
            break
        items, size = items + len(content["data"]["data"]), size + len(reply)
        if job_id is not None:
            body["ack"] = [content["data"]["meta_info"]["delivery_id"]]
    connection.close()
    return {"seconds": seconds, "items": items, "bytes": size}


def wait(port: int, job_id: str, count: int, run: str) -> dict[str, Any]:
    """Measures the time from the write that completes a group to its arrival at a waiting poll."""
    writer, poller = Connection(port), Connection(port)
    times = []
    for number in range(count):
        requests = make_requests("2k", GROUP_SIZE, f"{run}-{number}", job_id)
        for request in requests[:-1]:
            writer.post(request)
        arrived: list[float] = []

        def poll(arrived: list[float] = arrived) -> None:
            reply = poller.post(as_request("/get_rollout_data", {"job_id": job_id, "wait_s": 20}))
            arrived.append(time.perf_counter() if b'"success":true' in bytes(reply[:20]) else float("inf"))

        waiting = threading.Thread(target=poll)
        waiting.start()
        time.sleep(0.05 + 0.01 * random.random())
        sent = time.perf_counter()
        writer.post(requests[-1])
        waiting.join()
        times.append(arrived[0] - sent)
    writer.close()
    poller.close()
    return {"times": times}


def many(port: int, job_id: str, count: int, run: str, batch: int, start_at: int) -> dict[str, Any]:
    """Writes small items in batches, then times single polls for a few groups."""
    connection = Connection(port)
    items = [
        make_item("2k", f"{run}-{number}", f"{run}-g{number // GROUP_SIZE}", float(number % 2), ())
        for number in range(start_at, start_at + count)
    ]
    began = time.perf_counter()
    for start in range(0, count, batch):
        connection.post(as_request("/buffer/write", {"job_id": job_id, "items": items[start : start + batch]}))
    written = time.perf_counter() - began
    polls = []
    for _ in range(10):
        began = time.perf_counter()
        connection.post(as_request("/get_rollout_data", {"job_id": job_id, "max_groups": 4}))
        polls.append(time.perf_counter() - began)
    connection.close()
    return {"seconds": written, "polls": polls, "pid": os.getpid()}


def can(kind: str, count: int, path: str) -> dict[str, Any]:
    """Writes a read reply with ``count`` items into a file, for ``canned_server.py``."""
    items = [request.split(b"\r\n\r\n", 1)[1] for request in make_requests(kind, count, "canned", None)]
    size = Path(path).write_bytes(b'{"success":true,"data":{"meta_info":{},"data":[' + b",".join(items) + b"]}}")
    return {"bytes": size}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "start": start,
    "write": write,
    "read": read,
    "wait": wait,
    "many": many,
    "can": can,
}


def main() -> None:
    """Answers commands until its input closes."""
    for line in sys.stdin:
        command = json.loads(line)
        answer = COMMANDS[command.pop("do")](**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
