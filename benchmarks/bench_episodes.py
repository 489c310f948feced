"""Bytes and memory of long episodes: 64 concurrent ones on simulated phones, in both rollout modes.

    python -m benchmarks.bench_episodes --json episodes.json            # 10, 25 and 50 steps; takes a while
    python -m benchmarks.bench_episodes --steps 50 --modes history

Everything runs as in production: ``rollout-buffer serve`` with its runner, an ``android_world`` job, the scripted
engine as a separate process over HTTP; every trajectory is stored, delivered and acknowledged, its screenshots fetched
by hash. The phones are simulated in the runner's process (``device_pool: local``). The policy is the scripted engine's,
modified not to end episodes: instead it makes random moves, and a share ``--bad`` of its replies is malformed (no tool
call, two, broken JSON, coordinates off the screen). So every episode has all its steps, except the few in which the
policy writes image tokens: those end as truncated.

For each mode and number of steps it prints the outcomes, and per step of one episode the bytes in the data directory,
the bytes delivered (once more with all screenshots, each fetched once) and the bytes of requests to the engine; then
the peak resident memory of the runner and of the largest server process. A constant column means linear growth.
Requests to the engine are not constant in mode incremental: SGLang needs every screenshot of a prompt in every request.

Caveats: loopback; the scripted engine reads screens instead of running a model; small texts, so screenshots weigh most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.table import Table

from benchmarks.servers import is_healthy, running, serve_command
from rollout_buffer_lab.simulated_phone.tasks.registry import TASKS
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port

MODES = ("incremental", "history")
OWN_PROGRAM = (sys.executable, "-m", "benchmarks.bench_episodes")
ENDINGS = ('"terminate"', '"answer"')
CONTEXT = 262_144
PARAMS = 20  # parameter variations of each task


# --- the engine process ----------------------------------------------------------------------------------------------


def _call(arguments: dict[str, Any]) -> str:
    return "<tool_call>\n" + json.dumps({"name": "mobile_use", "arguments": arguments}) + "\n</tool_call>\n"


_CLICK = {"action": "click", "coordinate": [500, 500]}
_BAD_REPLIES = (
    "I would rather talk about it.",
    "<tool_call>{broken</tool_call>",
    _call(_CLICK) + _call({"action": "system_button", "button": "Back"}),
    _call({"action": "click", "coordinate": [5000, -3]}),
)
_IMAGE_TOKENS = "<|vision_start|><|image_pad|><|vision_end|> is what I see.\n" + _call(_CLICK)
_SHARE_OF_IMAGE_TOKENS = 0.02  # they end an episode, as truncated


class RestlessPolicy:
    """The scripted engine's policy without endings, and with malformed replies."""

    def __init__(self, bad: float) -> None:
        self._bad = bad

    def __call__(self, conversation: Any, *, skill: float, rng: Any) -> str:
        from rollout_buffer_lab.scripted_engine.policy import reply_to

        chance: random.Random = rng.about("restless", len(conversation.turns), conversation.turns[-1].text)
        if chance.random() < _SHARE_OF_IMAGE_TOKENS * self._bad:
            return _IMAGE_TOKENS
        if chance.random() < self._bad:
            return chance.choice(_BAD_REPLIES)
        reply = reply_to(conversation, skill=skill, rng=rng)
        return _wander(chance) if any(ending in reply for ending in ENDINGS) else reply


def _wander(chance: random.Random) -> str:
    point = [chance.randrange(1000), chance.randrange(1000)]
    moves: list[dict[str, Any]] = [
        {"action": "click", "coordinate": point},
        {"action": "long_press", "coordinate": point, "time": 1},
        {"action": "swipe", "coordinate": [500, 800], "coordinate2": [500, 200]},
        {"action": "system_button", "button": chance.choice(["Back", "Home"])},
        {"action": "open", "text": chance.choice(["Contacts", "Settings", "Clock", "Markor", "Nope"])},
    ]
    answer = f"<thinking>\nI look around.\n</thinking>\n{_call(chance.choice(moves))}"
    return f"{answer}<conclusion>\nI looked around.\n</conclusion>"


async def serve_engine(port: int, bad: float) -> None:
    """Serves the scripted engine with this policy and counts request bytes, at ``/bytes_received``."""
    from aiohttp import web

    from rollout_buffer_lab.scripted_engine.server import create_app
    from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings

    received = 0

    @web.middleware
    async def count(request: web.Request, handler: Any) -> Any:
        nonlocal received
        received += (request.content_length or 0) if request.path == "/generate" else 0
        return await handler(request)

    async def reported(_request: web.Request) -> web.Response:
        return web.json_response(received)

    settings = ScriptedEngineSettings(port=port, skill=0.8, context_length=CONTEXT)
    app = create_app(settings, policy=RestlessPolicy(bad))
    app.middlewares.append(count)
    app.router.add_get("/bytes_received", reported)
    async with serving(app, port=port, handler_cancellation=True):
        await asyncio.Event().wait()


# --- processes -------------------------------------------------------------------------------------------------------


def peak_memory(supervisor: int) -> dict[str, int]:
    """Returns the peak resident memory in bytes, of the runner and of the largest server process."""
    peaks = {"runner": 0, "server": 0}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, StopIteration):  # the process has exited
            status = (folder / "status").read_text()
            command = (folder / "cmdline").read_bytes()
            if int(folder.name) == supervisor or _field(status, "PPid:") == supervisor:
                name = "runner" if b"rollout_buffer.runner.main" in command else "server"
                peaks[name] = max(peaks[name], _field(status, "VmHWM:") * 1024)
    return peaks


def _field(status: str, name: str) -> int:
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


# --- one measurement -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Bytes and seconds of one run."""

    mode: str
    steps: int
    episodes: int
    outcomes: dict[str, int]
    turns: int
    malformed: int
    rows: int
    screenshots: int
    slots: dict[str, int]
    seconds: float
    stored: int
    delivered: int
    fetched: int
    to_engine: int
    runner_memory: int
    server_memory: int


def measure(mode: str, steps: int, options: argparse.Namespace) -> Cost:
    """Plays the episodes with a new server and a new engine."""
    with tempfile.TemporaryDirectory(prefix="bench_episodes_", dir=options.folder) as name:
        folder = Path(name)
        config = folder / "android_world.yaml"
        config.write_text(f"device_pool: local\nnum_workers: {options.episodes}\n", encoding="utf-8")
        engine, buffer = free_port(), free_port()
        engine_url, url = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{buffer}"
        with (
            running(
                [*OWN_PROGRAM, "--serve-engine", str(engine), "--bad", str(options.bad)],
                folder / "engine.log", lambda: is_healthy(engine),
            ),
            running(
                serve_command(buffer, folder, "--data-root", str(folder), "--ray-address", "not needed"),
                folder / "serve.log", lambda: is_healthy(buffer), **{CONFIG_VARIABLE: str(config)},
            ) as server,
        ):  # fmt: skip
            return _played(mode, steps, options, folder, url, engine_url, server.pid)


def _played(
    mode: str, steps: int, options: argparse.Namespace, folder: Path, url: str, engine_url: str, supervisor: int
) -> Cost:
    client = RolloutBufferClient(url, timeout_s=120)
    empty_size, began = bytes_under(folder / "data"), time.monotonic()
    job_id = client.start_rollout(payload(mode, steps, options.episodes, folder, engine_url)).job_id
    memory = {"runner": 0, "server": 0}
    accounting: dict[str, Any] = {}
    while not accounting or accounting["submitted"] < options.episodes or accounting["open"]:
        time.sleep(1)
        job = client.job(job_id)
        accounting = job["slots"]
        if job["state"] == "failed":
            raise SystemExit(f"the job failed: {job}")
        memory = {name: max(memory[name], peak) for name, peak in peak_memory(supervisor).items()}
    seconds = time.monotonic() - began
    to_engine = int(requests.get(f"{engine_url}/bytes_received", timeout=30).json())
    stored = bytes_under(folder / "data") - empty_size
    received = Received(client, job_id)
    return Cost(
        mode=mode,
        steps=steps,
        episodes=options.episodes,
        outcomes=dict(received.outcomes),
        turns=received.turns,
        malformed=received.malformed,
        rows=received.rows,
        screenshots=received.screenshots,
        slots={state: count for state, count in client.job(job_id)["slots"].items() if count},
        seconds=seconds,
        stored=stored,
        delivered=received.bytes,
        fetched=received.image_bytes,
        to_engine=to_engine,
        runner_memory=memory["runner"],
        server_memory=memory["server"],
    )


def bytes_under(folder: Path) -> int:
    """Returns the size of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def payload(mode: str, steps: int, episodes: int, folder: Path, engine_url: str) -> dict[str, Any]:
    """Returns the job's payload: one episode per instance, the tasks in rotation."""
    names = sorted(TASKS)
    lines = [
        {"instance_id": f"episode-{n}", "metadata": {"task_name": names[n % len(names)], "params_idx": n % PARAMS}}
        for n in range(episodes)
    ]
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {
        "task_type": "android_world",
        "input_file": str(path),
        "remote_engine_url": engine_url,
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "num_repeat_per_sample": 1,
        "num_process": episodes,
        "max_tokens": 512,
        "evaluation": True,
        "android_world": {"rollout_mode": mode, "max_turns": steps, "max_context_len": CONTEXT},
    }


class Received:
    """All data of a job as a trainer gets it: delivered, screenshots fetched once by hash, acknowledged."""

    def __init__(self, client: RolloutBufferClient, job_id: str) -> None:
        from slime.utils.mask_utils import pack_training_rows

        self.bytes = self.image_bytes = self.turns = self.malformed = self.rows = 0
        self.outcomes: Counter[str] = Counter()
        hashes: set[str] = set()
        while True:
            data = client.get_rollout_data(job_id=job_id, max_groups=8, wait_s=1, lease_s=300, images="hash")
            if data.delivery_id is not None:
                self.bytes += len(client.delivery_body(data.delivery_id, images="hash"))
            for item in data.items:
                self.outcomes[_ending(item)] += 1
                self.turns += int(item.extra_info.get("turns", 0))
                self.malformed += int(item.extra_info.get("malformed_turns", 0))
                self.rows += len(pack_training_rows(item.generations))
                hashes.update(item.images)
            if data.delivery_id is not None:
                client.ack([data.delivery_id])
            if data.exhausted:
                break
        self.screenshots = len(hashes)
        self.image_bytes = sum(len(client.get_image(sha256)) for sha256 in hashes)


def _ending(item: wire.RolloutItem) -> str:
    return f"{item.outcome}/{item.extra_info.get('stop_reason', item.extra_info.get('finish_reason', ''))}"


# --- the table -------------------------------------------------------------------------------------------------------


def show(costs: list[Cost]) -> None:
    table = Table(title="One step of one episode, in kB; memory in MB for all episodes at once")
    columns = ("mode", "steps", "ended", "malformed", "rows", "screens", "stored", "delivered", "with screens")
    for column in (*columns, "to engine", "runner MB", "server MB", "seconds"):
        table.add_column(column)
    for cost in costs:
        per_step = [value / cost.turns / 1000 for value in _traffic(cost)]
        table.add_row(
            cost.mode, str(cost.steps), ", ".join(f"{count} {name}" for name, count in cost.outcomes.items()),
            f"{cost.malformed} of {cost.turns}", str(cost.rows), str(cost.screenshots),
            *(f"{value:.1f}" for value in per_step),
            f"{cost.runner_memory / 1e6:.0f}", f"{cost.server_memory / 1e6:.0f}", f"{cost.seconds:.0f}",
        )  # fmt: skip
    Console(width=170).print(table)


def _traffic(cost: Cost) -> tuple[int, int, int, int]:
    return cost.stored, cost.delivered, cost.delivered + cost.fetched, cost.to_engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 25, 50], help="steps of every episode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="rollout modes")
    parser.add_argument("--episodes", type=int, default=64, help="episodes at once")
    parser.add_argument("--bad", type=float, default=0.1, help="share of malformed replies")
    parser.add_argument("--folder", type=Path, help="parent of the temporary data directories")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--serve-engine", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_engine is not None:
        asyncio.run(serve_engine(options.serve_engine, options.bad))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))  # so that the processes it started end too
    costs: list[Cost] = []
    for mode in options.modes:
        for steps in options.steps:
            costs.append(measure(mode, steps, options))
            show(costs[-1:])
            if options.json:
                options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", encoding="utf-8")
    show(costs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
