"""Overhead of the gateway with recording: the same small turns through it and directly to an instant engine.

    python benchmarks/bench_gateway.py [--rounds 5] [--seconds 2] [--json FILE]

Processes: an engine that answers every ``/generate`` at once with 16 tokens, and one that answers after 300 ms;
``rollout-buffer gateway`` with its own store, one with two processes, one that stores turns without fsync, and one that
keeps them in memory alone; and this one, which plays the agents. Direct calls carry what the gateway would send: ids
in, ids and log-probs out. All are measured alternately, round by round, with the same client. A conversation has eight
turns of a dozen words and then starts again. ``episodes`` opens and closes a session around each conversation.
``streamed`` turns come token by token, and their latency is that of the first event: the engine of 300 ms gives its
first token at once, and the others after its wait.

Wall-clock numbers depend on the machine's load; the gateway's CPU time per request hardly does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.types import Instance
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload

TURNS = 8
REPLY_TOKENS = 16
CONCURRENCY = 16
CONCURRENCIES = (1, CONCURRENCY, 64, 256)
WAIT_S = 0.3
GATEWAYS = ("gateway", "two processes", "without fsync", "in memory")
TICKS = os.sysconf("SC_CLK_TCK")


# --- the engine ------------------------------------------------------------------------------------------------------


class InstantEngine(asyncio.Protocol):
    """One connection to the engine, with minimal HTTP. Replies wait ``wait_s``, streams after their first token."""

    def __init__(self, reply: bytes, events: tuple[bytes, bytes], wait_s: float) -> None:
        self._reply, self._events, self._wait_s = reply, events, wait_s
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            head = self._pending[:end].lower()
            fields = head.split(b"content-length:")
            size = end + 4 + (int(fields[1].split(b"\r\n")[0]) if len(fields) > 1 else 0)
            if len(self._pending) < size:
                return
            is_streamed = b'"stream":true' in self._pending[end:size]
            self._pending = self._pending[size:]
            if is_streamed:
                self._transport.write(self._events[0])
            content = self._events[1] if is_streamed else self._reply
            if self._wait_s:
                asyncio.get_running_loop().call_later(self._wait_s, self._transport.write, content)
            else:
                self._transport.write(content)


def reply_body(count: int = REPLY_TOKENS) -> bytes:
    """Returns the body of the constant reply when ``count`` of its tokens are sampled."""
    ids = list(range(400, 400 + count))
    meta = {
        "finish_reason": {"type": "stop", "matched": ids[-1]} if count == REPLY_TOKENS else None,
        "prompt_tokens": None,
        "completion_tokens": count,
        "weight_version": "1",
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
    }
    return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


def engine_events() -> tuple[bytes, bytes]:
    """Returns the constant reply as a stream: up to its first token, and the rest."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    first, *rest = (chunk(b"data: " + reply_body(count + 1) + b"\n\n") for count in range(REPLY_TOKENS))
    return head + first, b"".join([*rest, chunk(b"data: [DONE]\n\n"), chunk(b"")])


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def engine_reply() -> bytes:
    """Returns the constant reply."""
    body = reply_body()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def serve_engine(wait_s: float) -> None:
    reply, events = engine_reply(), engine_events()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: InstantEngine(reply, events, wait_s), "127.0.0.1", 0)
    print_port(server.sockets[0].getsockname()[1])
    await server.serve_forever()


# --- the minimal client ----------------------------------------------------------------------------------------------


class Connection:
    """One keep-alive connection; one request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def post(self, path: str, body: bytes) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        content = await self._reader.readexactly(int(answer.split(b"content-length:")[1].split(b"\r\n")[0]))
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(content.decode())
        return content

    async def stream(self, path: str, body: bytes) -> tuple[float, list[Any]]:
        """Returns the time at which the first event arrived, and all events."""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        self._writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer.decode())
        content, arrived_at = bytearray(), 0.0
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            content += (await self._reader.readexactly(size + 2))[:-2]
            arrived_at = arrived_at or time.perf_counter()
        await self._reader.readexactly(2)
        events = [event[6:] for event in bytes(content).split(b"\n\n") if event.startswith(b"data: ")]
        return arrived_at, [orjson.loads(event) for event in events if event != b"[DONE]"]

    def close(self) -> None:
        self._writer.close()


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Samples:
    """Seconds of each request, and requests per second of each round."""

    latencies: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    """Where agents send their turns: an engine, a gateway in front of it, and a job of the gateway."""

    engine_port: int
    gateway_port: int
    gateway_pid: int
    job_id: str
    wait_s: float = 0.0


Begin = Callable[[], Awaitable[float]]
"""Waits until all agents are ready, and returns the time at which the agent shall end."""


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"Please look at item {number} of the list and say what it is about."}


async def direct_agent(target: Target, begin: Begin, latencies: list[float], *, is_streamed: bool = False) -> None:
    """Calls the engine as the gateway does, with prepared ids."""
    connection = await Connection(target.engine_port).open()
    until = await begin()
    bodies = direct_bodies()
    number = 0
    while time.perf_counter() < until:
        body = bodies[number % len(bodies)]
        began = time.perf_counter()
        if is_streamed:
            ended, _ = await connection.stream("/generate", body[:-1] + b',"stream":true}')
        else:
            orjson.loads(await connection.post("/generate", body))
            ended = time.perf_counter()
        latencies.append(ended - began)
        number += 1
    connection.close()


_bodies: list[bytes] = []


def direct_bodies() -> list[bytes]:
    """Returns the eight requests of one conversation."""
    if not _bodies:
        from transformers import AutoTokenizer

        chat = ChatTokens(AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True))
        ids = chat.prompt([question(0)])
        for turn in range(TURNS):
            params = {"max_new_tokens": REPLY_TOKENS, "temperature": 1.0, "top_p": 1.0}
            _bodies.append(orjson.dumps({"input_ids": ids, "sampling_params": params, "return_logprob": True}))
            ids = [*ids, *range(400, 400 + REPLY_TOKENS), *chat.bridge(question(turn + 1), turn_is_closed=False)]
    return _bodies


async def session_agent(target: Target, begin: Begin, latencies: list[float], *, is_streamed: bool = False) -> None:
    """Plays conversations in one session."""
    connection = await Connection(target.gateway_port).open()
    session = await open_session(connection, target)
    number, until = 0, await begin()
    while time.perf_counter() < until:
        number = await converse(connection, session, number, until, latencies, is_streamed=is_streamed)
    await connection.post(f"/sessions/{session['session_id']}/abandon", b"{}")
    connection.close()


async def episode_agent(target: Target, begin: Begin, latencies: list[float]) -> None:
    """Opens a session, plays eight turns, closes it with a reward; repeats."""
    connection = await Connection(target.gateway_port).open()
    number, until = 0, await begin()
    while time.perf_counter() < until:
        session = await open_session(connection, target)
        number = await converse(connection, session, number, float("inf"), latencies)
        await connection.post(f"/sessions/{session['session_id']}/close", b'{"reward": 1}')
    connection.close()


async def open_session(connection: Connection, target: Target) -> dict[str, Any]:
    opened: dict[str, Any] = orjson.loads(await connection.post("/sessions", orjson.dumps({"job_id": target.job_id})))
    return opened


async def converse(
    connection: Connection,
    session: dict[str, Any],
    number: int,
    until: float,
    latencies: list[float],
    *,
    is_streamed: bool = False,
) -> int:
    path = f"/sessions/{session['api_key']}/v1/chat/completions"
    messages: list[Any] = []
    for _ in range(TURNS):
        if time.perf_counter() >= until:
            break
        number += 1
        messages.append(question(number))
        body = orjson.dumps({"model": "policy", "messages": messages, "stream": is_streamed})
        began = time.perf_counter()
        if is_streamed:
            ended, events = await connection.stream(path, body)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            messages.append({"role": "assistant", "content": text})
        else:
            reply = orjson.loads(await connection.post(path, body))
            ended = time.perf_counter()
            messages.append(reply["choices"][0]["message"])
        latencies.append(ended - began)
    return number


streamed_directly = partial(direct_agent, is_streamed=True)
streamed_session = partial(session_agent, is_streamed=True)


Agent = Callable[[Target, Begin, list[float]], Awaitable[None]]


async def measure(agent: Agent, target: Target, concurrency: int, seconds: float, samples: Samples) -> None:
    """Runs ``concurrency`` agents for ``seconds``, one round.

    If the engine waits, the agents' starts are spread over its wait, so that their requests do not arrive all at once.
    """
    latencies: list[float] = []
    all_ready = asyncio.Barrier(concurrency)
    began: list[float] = []

    async def play(number: int) -> None:
        async def begin() -> float:
            await all_ready.wait()
            began.append(time.perf_counter())
            await asyncio.sleep(target.wait_s * number / concurrency)
            return began[0] + seconds

        await agent(target, begin, latencies)

    await asyncio.gather(*map(play, range(concurrency)))
    samples.latencies += latencies
    samples.rates.append(len(latencies) / seconds)


def processor_seconds(pid: int) -> float:
    """Returns user and system time of a process and its children so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(processor_seconds(int(child)) for child in children)


# --- comparison ------------------------------------------------------------------------------------------------------


async def compare(targets: dict[str, Target], rounds: int, seconds: float) -> dict[str, Any]:
    """Measures all variants alternately and returns the numbers."""
    instant, waiting = targets["gateway"], targets["gateway, waiting"]
    kinds: dict[str, tuple[Agent, Target, int]] = {
        **{f"direct c={concurrency}": (direct_agent, instant, concurrency) for concurrency in CONCURRENCIES},
        **{
            f"{name} c={concurrency}": (session_agent, targets[name], concurrency)
            for concurrency in CONCURRENCIES
            for name in GATEWAYS
        },
        f"episodes c={CONCURRENCY}": (episode_agent, instant, CONCURRENCY),
        **{
            f"{name}, {WAIT_S:g} s, c={concurrency}": (session_agent, targets[f"{name}, waiting"], concurrency)
            for concurrency in CONCURRENCIES
            for name in GATEWAYS
            if name != "without fsync"
        },
    }
    for concurrency in CONCURRENCIES:
        for kind, target in (
            (f"streamed c={concurrency}", instant),
            (f"streamed, {WAIT_S:g} s, c={concurrency}", waiting),
        ):
            kinds[f"direct {kind}"] = streamed_directly, target, concurrency
            kinds[f"gateway {kind}"] = streamed_session, target, concurrency
    samples = {name: Samples() for name in kinds}
    cpu_s = dict.fromkeys(kinds, 0.0)
    direct_bodies()
    for target in targets.values():
        await measure(session_agent, target, CONCURRENCY, min(seconds, 1.0), Samples())
    for _ in range(rounds):
        for name, (agent, target, concurrency) in kinds.items():
            before = processor_seconds(target.gateway_pid)
            await measure(agent, target, concurrency, seconds, samples[name])
            cpu_s[name] += processor_seconds(target.gateway_pid) - before
    return {name: summary(samples[name], cpu_s[name]) for name in kinds} | {"load": os.getloadavg()[0]}


def summary(samples: Samples, cpu_s: float) -> dict[str, Any]:
    ordered = sorted(samples.latencies)
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 3),
        "p99_ms": round(1000 * ordered[int(len(ordered) * 0.99)], 3),
        "requests_per_s": round(statistics.median(samples.rates), 1),
        "lowest_round": round(min(samples.rates), 1),
        "highest_round": round(max(samples.rates), 1),
        "gateway_cpu_ms_per_request": round(1000 * cpu_s / len(ordered), 3),
    }


def start_job(folder: Path, engine_port: int, job_id: str) -> None:
    """Starts a job with more slots than are used."""
    store = Store(folder)
    lines = [{"instance_id": str(number)} for number in range(20_000)]
    body = {
        "task_type": "external",
        "job_id": job_id,
        "num_repeat_per_sample": 1,
        "remote_engine_url": f"http://127.0.0.1:{engine_port}",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "max_groups_ahead": None,
        "max_attempts": 100,
        "instances": lines,
    }
    instances = [Instance(instance_id=line["instance_id"], data=line) for line in lines]
    Buffer(store).start_job(parse(StartPayload, body), instances)
    store.close()


def run(rounds: int, seconds: float) -> dict[str, Any]:
    """Starts the processes, measures, stops them."""
    started: list[subprocess.Popen[str]] = []
    targets: dict[str, Target] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            ports = {}
            for job_id, wait_s in (("instant", 0.0), ("waiting", WAIT_S)):
                started.append(spawn([__file__, "--engine", str(wait_s)]))
                ports[job_id] = int(first_line(started[-1]))
            for name in GATEWAYS:
                data_dir = Path(folder, name)
                for job_id, port in ports.items():
                    start_job(data_dir, port, job_id)
                started.append(spawn(["-m", "benchmarks.bench_gateway", "--gateway", str(data_dir), "--variant", name]))
                gateway_port = int(first_line(started[-1]))
                targets[name] = Target(ports["instant"], gateway_port, started[-1].pid, "instant")
                targets[f"{name}, waiting"] = Target(ports["waiting"], gateway_port, started[-1].pid, "waiting", WAIT_S)
            return asyncio.run(compare(targets, rounds, seconds))
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(30)


def spawn(arguments: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, env=environment)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def print_port(port: object) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def run_gateway(folder: str, variant: str) -> None:
    """Runs the gateway on a free port and prints it; ``variant`` is one of ``GATEWAYS``."""
    from slime_plugins.rollout_buffer.gateway.main import main as serve
    from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
    from slime_plugins.rollout_buffer.gateway.turn_store import TurnStore
    from slime_plugins.rollout_buffer.http_serving import listen
    from slime_plugins.rollout_buffer.observability.liveness import Heartbeat
    from slime_plugins.rollout_buffer.storage import store
    from slime_plugins.rollout_buffer.supervisor.gateway_processes import serve_gateway

    set_up = store._set_up

    def without_fsync(connection: sqlite3.Connection) -> None:
        set_up(connection)
        connection.execute("PRAGMA synchronous=OFF")

    async def not_stored(self: TurnStore, turn: object) -> bool:
        return True

    if variant == "without fsync":
        store._set_up = without_fsync
    if variant == "in memory":
        TurnStore.write = not_stored  # type: ignore[method-assign]  # the variant without a store

    workers = 2 if variant == "two processes" else 1
    settings = GatewaySettings(data_dir=Path(folder), port=0, max_turns=10_000_000, workers=workers)
    if settings.workers > 1:
        serve_gateway(settings, lambda url: print_port(url.rsplit(":", 1)[1]))
        return
    (listening,) = listen("127.0.0.1", 0)
    print_port(listening.getsockname()[1])
    serve([settings.model_dump_json(), "1", str(Heartbeat().descriptor), str(listening.fileno())])


def report(results: dict[str, Any]) -> str:
    lines = []
    for name, numbers in results.items():
        if isinstance(numbers, dict):
            shown = "  ".join(f"{key} {value}" for key, value in numbers.items())
            lines.append(f"{name:24} {shown}")
    added = results["gateway c=1"]["p50_ms"] - results["direct c=1"]["p50_ms"]
    ratio = results[f"direct c={CONCURRENCY}"]["requests_per_s"] / results[f"gateway c={CONCURRENCY}"]["requests_per_s"]
    lines.append(f"added at the median, c=1: {added:.2f} ms; direct / gateway at c={CONCURRENCY}: {ratio:.1f}")
    for concurrency in CONCURRENCIES:
        on_disk, in_memory = (
            results[f"{name}, {WAIT_S:g} s, c={concurrency}"]["p50_ms"] for name in ("gateway", "in memory")
        )
        lines.append(f"added by storing turns at the median, c={concurrency}: {on_disk - in_memory:.2f} ms")
        kind = f"streamed, {WAIT_S:g} s, c={concurrency}"
        alone, through = (results[f"{name} {kind}"]["p50_ms"] for name in ("direct", "gateway"))
        lines.append(f"added to the first event at the median, c={concurrency}: {through - alone:.2f} ms")
    lines.append(f"load of the machine: {results['load']:.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=GATEWAYS, default="gateway", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        asyncio.run(serve_engine(options.engine))
    elif options.gateway:
        run_gateway(options.gateway, options.variant)
    else:
        results = run(options.rounds, options.seconds)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
        sys.stdout.write(report(results) + "\n")


if __name__ == "__main__":
    main()
