"""Device utilisation and CPU time per step of many concurrent episodes, compared with two other schedulers.

    python -m benchmarks.bench_scheduler --json scheduler.json

One job of 512 episodes on 256 devices. Devices take 3 to 7 s for an action, the engine 1 to 3 s for a reply, all scaled
down by the same factor; both only wait. Everything else is real: runner, leases and manager of the device pool,
prompts, tokens, screenshots over HTTP to an engine in another process, and the durable store. Contenders alternate
within each round:

* runner: the project's ``JobRunner``, coroutines of one event loop;
* threads: a thread per episode, which holds a device and blocks on it;
* lockstep: batches of as many episodes as there are devices, which sample together and act together.

All three play the same ``Episode``. The two others store and lease nothing, which favours them. The ideal is a schedule
in which an episode starts as soon as a device is free and only devices and engine take time.

Caveats: latencies are uniform and independent; real ones are not. Latencies are scaled down, the CPU work of a step is
not: a scale of 0.2 needs five times the steps per second of 256 real devices. An episode holds its device while the
engine replies, so no schedule keeps devices busy all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.latencies import Latencies
from benchmarks.ratios import spread
from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.devices.device_manager import DeviceManager
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world_generator import AndroidWorldGenerator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.types import EpisodeRequest, Image, Instance, SamplingParams
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload

EPISODES, DEVICES = 512, 256
OPTIONS: dict[str, dict[str, Any]] = {"android_world": {"max_turns": 50, "max_context_len": 60_000}}
TASK = "Wait"


class Span:
    """The time from the first call of a device to the last."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def mark(self) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    @property
    def seconds(self) -> float:
        return self._last - (self._first or self._last)


class TimedFakeDevice:
    """A device that only waits: a real package and emulator would not use this process's CPU either."""

    def __init__(self, latencies: Latencies, screenshots: list[Image], span: Span) -> None:
        self._latencies = latencies
        self._span = span
        self._screenshots = screenshots
        self._position = 0
        self._actions = 0

    def begin(self, position: int) -> float:
        """Begins an episode; returns the seconds of its set-up."""
        self._position, self._actions = position, 0
        self._span.mark()
        return self._latencies.step(position, 0)

    def act(self, action: Action) -> float:
        """Returns the seconds of the action; ending the task takes none."""
        if action.kind is ActionKind.TERMINATE:
            return 0.0
        self._actions += 1
        return self._latencies.step(self._position, self._actions)

    def score(self) -> float:
        """Returns the score; the last call of an episode."""
        self._span.mark()
        return 1.0

    def observe(self) -> Observation:
        shown = self._screenshots[(self._position + self._actions) % len(self._screenshots)]
        return Observation(goal="Press it.", screenshot=shown, screen_width=1080, screen_height=2400, step_budget=50)


class Lease:
    """A device of a contender without leases: ``wait`` blocks or awaits."""

    device_id = "timed"

    def __init__(
        self, device: TimedFakeDevice, wait: Callable[[float], Any], give_back: Callable[[TimedFakeDevice], None]
    ) -> None:
        self._device = device
        self._wait = wait
        self._give_back = give_back

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_back(self._device)

    async def reset(self, task_name: str, params_idx: int) -> Observation:
        """As ``DeviceLease.reset``."""
        await self._wait(self._device.begin(params_idx))
        return self._device.observe()

    async def step(self, action: Action) -> Observation:
        """As ``DeviceLease.step``."""
        await self._wait(self._device.act(action))
        return self._device.observe()

    async def score(self) -> float:
        """As ``DeviceLease.score``."""
        return self._device.score()


class Pool:
    """Devices of a contender without leases: ``acquire`` blocks until a queue has one."""

    def __init__(self, devices: list[TimedFakeDevice], wait: Callable[[float], Any]) -> None:
        self._free: queue.SimpleQueue[TimedFakeDevice] = queue.SimpleQueue()
        for device in devices:
            self._free.put(device)
        self._wait = wait

    async def start(self) -> None:
        """Nothing to do."""

    async def check_playable(self, *_: Any) -> None:
        """Every task can be played."""

    async def acquire(self, *_: Any) -> Any:
        """Waits until a device is free."""
        return Lease(self._free.get(), self._wait, self._free.put)

    async def counters(self) -> list[dict[str, Any]]:
        """Returns nothing."""
        return []

    async def close(self) -> None:
        """Nothing to do."""


# ---- runner ----------------------------------------------------------------------------------------------------------


class Worker:
    """The manager's worker of a device, and its calls, in this process."""

    def __init__(self, device: TimedFakeDevice) -> None:
        self._device = device

    @property
    def calls(self) -> Worker:
        return self

    async def prepare(self) -> None:
        """There is nothing to prepare."""

    async def boot(self) -> str:
        return "here"

    async def check_health(self) -> None:
        """The device is healthy."""

    def kill(self) -> None:
        """Nothing to end."""

    async def reset(self, lease_id: int, task_name: str, params_idx: int) -> Observation:
        """As ``DeviceCalls.reset``."""
        await asyncio.sleep(self._device.begin(params_idx))
        return self._device.observe()

    async def step(self, lease_id: int, action: Action) -> Observation:
        """As ``DeviceCalls.step``."""
        await asyncio.sleep(self._device.act(action))
        return self._device.observe()

    async def score(self, lease_id: int) -> float:
        """As ``DeviceCalls.score``."""
        return self._device.score()


def run_runner(bench: Bench) -> None:
    """Runs the project's runner, with its store in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench_scheduler_") as folder:
        buffer = Buffer(Store(Path(folder)))
        instances = [Instance(instance_id=str(number), data=line(number)) for number in range(bench.episodes)]
        body = {
            "task_type": "android_world",
            "instances": [instance.data for instance in instances],
            "remote_engine_url": bench.engine_url,
            "num_process": bench.devices,
            "tokenizer_path": str(DEMO_TOKENIZER_PATH),
            "max_groups_ahead": None,
            "group_timeout_seconds": 3600,
            **OPTIONS,
        }
        job = buffer.start_job(parse(StartPayload, body), instances).job
        plugin = Plugin(
            task_type="android_world",
            source=Path(__file__),
            needs_ray=False,
            reward_range=(-1.0, 2.0),
            functions=DEFAULT_FUNCTIONS,
            create_generator=lambda: AndroidWorldGenerator(bench.manager_pool()),
        )
        asyncio.run(JobRunner(buffer, job.key, plugin, buffer_url="http://127.0.0.1:9").run())
        played = describe_job(buffer.store, buffer.job_by_key(job.key))["slots"]
        buffer.store.close()
        if played["ready"] != bench.episodes:
            raise RuntimeError(f"not every episode was played: {played}")


# ---- threads ---------------------------------------------------------------------------------------------------------


class EngineOfThread:
    """An engine client for each thread, because each thread has its own event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._own = threading.local()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """As ``Engine.generate``."""
        return await self.client().generate(request)

    def client(self) -> SglangEngine:
        if not hasattr(self._own, "engine"):
            self._own.engine = SglangEngine(self._url)
        engine: SglangEngine = self._own.engine
        return engine

    async def close(self) -> None:
        """Ends this thread's client."""
        if hasattr(self._own, "engine"):
            await self._own.engine.close()
            del self._own.engine


async def block(seconds: float) -> None:
    """Blocks the thread."""
    time.sleep(seconds)  # noqa: ASYNC251 - this thread's loop has one episode


def run_threads(bench: Bench) -> None:
    """Runs a thread per episode, at most one per device at once."""
    engine = EngineOfThread(bench.engine_url)
    generator = AndroidWorldGenerator(Pool(bench.new_devices(), block))  # type: ignore[arg-type]  # no DevicePool
    asyncio.run(generator.start(bench.context(engine)))

    async def episode(position: int) -> None:
        try:
            await generator.play(request(position))
        finally:
            await engine.close()

    with ThreadPoolExecutor(bench.devices) as threads:
        list(threads.map(lambda position: asyncio.run(episode(position)), range(bench.episodes)))


# ---- lockstep --------------------------------------------------------------------------------------------------------


class Step:
    """A barrier of all episodes of a batch, after each reply and each action."""

    def __init__(self) -> None:
        self._taking_part = 0
        self._arrived = 0
        self._next = asyncio.Event()

    def join(self, count: int) -> None:
        """Begins a batch of ``count`` episodes."""
        self._taking_part = count

    async def arrive(self) -> None:
        """Waits for all running episodes."""
        self._arrived += 1
        turn = self._next
        self._go_on_if_all_are_here()
        await turn.wait()

    def leave(self) -> None:
        """Removes an ended episode."""
        self._taking_part -= 1
        self._go_on_if_all_are_here()

    def _go_on_if_all_are_here(self) -> None:
        if self._arrived >= self._taking_part:
            self._arrived = 0
            self._next.set()
            self._next = asyncio.Event()


class EngineInStep(SglangEngine):
    """An engine whose replies wait for those of the other episodes of the batch."""

    def __init__(self, url: str, step: Step) -> None:
        super().__init__(url)
        self._step = step

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """As ``Engine.generate``."""
        reply = await super().generate(request)
        await self._step.arrive()
        return reply


async def lockstep(bench: Bench) -> None:
    """Plays batch after batch."""
    step = Step()

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        if seconds > 0:
            await step.arrive()

    engine = EngineInStep(bench.engine_url, step)
    generator = AndroidWorldGenerator(Pool(bench.new_devices(), wait))  # type: ignore[arg-type]  # no DevicePool
    await generator.start(bench.context(engine))

    async def episode(position: int) -> None:
        await generator.play(request(position))
        step.leave()

    for first in range(0, bench.episodes, bench.devices):
        batch = range(first, min(first + bench.devices, bench.episodes))
        step.join(len(batch))
        await asyncio.gather(*map(episode, batch))
    await engine.close()


def run_lockstep(bench: Bench) -> None:
    asyncio.run(lockstep(bench))


# ---- measuring -------------------------------------------------------------------------------------------------------

CONTENDERS: Mapping[str, Callable[[Bench], None]] = {
    "runner": run_runner,
    "threads": run_threads,
    "lockstep": run_lockstep,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Parameters of the run."""

    latencies: Latencies
    episodes: int
    devices: int
    engine_url: str
    screenshots: list[Image]
    tokenizer: Any
    span: Span

    def new_devices(self) -> list[TimedFakeDevice]:
        return [TimedFakeDevice(self.latencies, self.screenshots, self.span) for _ in range(self.devices)]

    def manager_pool(self) -> DevicePool:
        """Returns the project's pool over devices of this process."""
        settings = AndroidWorldSettings(num_workers=self.devices, **OPTIONS["android_world"])
        manager = DeviceManager(lambda *_: Worker(TimedFakeDevice(self.latencies, self.screenshots, self.span)))
        return DevicePool(manager, settings.for_devices(), owner="bench")

    def context(self, engine: Any) -> GeneratorContext:
        """Returns the context that a runner would pass."""
        return GeneratorContext(
            job_id="bench", engine=engine, tokenizer=self.tokenizer, concurrency=self.devices, options=OPTIONS
        )

    @property
    def steps(self) -> int:
        """Number of replies of all episodes."""
        return sum(self.latencies.turns(position) for position in range(self.episodes))

    @property
    def device_s(self) -> float:
        """Total seconds of device work."""
        return sum(self.latencies.device_s(position) for position in range(self.episodes))


def line(position: int) -> dict[str, Any]:
    """Returns an episode's input line."""
    return {"instance_id": str(position), "metadata": {"task_name": TASK, "params_idx": position}}


def request(position: int) -> EpisodeRequest:
    """Returns the request of a runner for an episode."""
    return EpisodeRequest(
        uid=f"1.0.{position}.0.1",
        job_id="bench",
        instance=Instance(instance_id=str(position), data=line(position)),
        epoch=0,
        slot=0,
        attempt=1,
        sampling_params=SamplingParams(max_new_tokens=512),
    )


def screenshots() -> list[Image]:
    """Returns encoded screens of the simulated phone."""
    phone = SimulatedPhone()
    first = phone.reset("ContactsAddContact", 0).screenshot
    apps = ("Settings", "Contacts", "Markor", "Clock", "Files", "Simple Calendar Pro", "Camera", "Clipper")
    return [first, *(phone.step(Action(kind=ActionKind.OPEN, text=app)).screenshot for app in apps)]


@contextmanager
def engine(latencies: Latencies) -> Iterator[str]:
    """Runs the engine; yields its address."""
    command = [sys.executable, "-m", "benchmarks.latent_engine", str(latencies.seed), str(latencies.scale)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        if process.stdout is None:
            raise RuntimeError("the engine has no output")
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def measure(run: Callable[[Bench], None], bench: Bench) -> dict[str, float]:
    """Plays everything once; returns seconds, shares of device time and of the ideal, CPU milliseconds per step."""
    ideal_s = bench.latencies.ideal_s(bench.episodes, bench.devices)
    bench = dataclasses.replace(bench, span=Span())
    cpu = time.process_time()
    run(bench)
    seconds, cpu_s = bench.span.seconds, time.process_time() - cpu
    return {
        "seconds": seconds,
        "busy": bench.device_s / (bench.devices * seconds),
        "of_ideal": ideal_s / seconds,
        "cpu_ms_per_step": 1000 * cpu_s / bench.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--scale", type=float, default=0.2, help="factor of all latencies")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(CONTENDERS), help="one contender alone")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads but those that are measured
    console = Console(width=120)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    shown, names = screenshots(), [arguments.only] if arguments.only else list(CONTENDERS)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        latencies = Latencies(seed=number, scale=arguments.scale)
        with engine(latencies) as url:
            bench = Bench(
                latencies=latencies,
                episodes=arguments.episodes,
                devices=arguments.devices,
                engine_url=url,
                screenshots=shown,
                tokenizer=tokenizer,
                span=Span(),
            )
            for name in names:
                rounds[name].append(measure(CONTENDERS[name], bench))
                console.print(f"round {number + 1}: {name}: {rounds[name][-1]}")
    console.print(table(rounds, arguments))
    if arguments.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        arguments.json.write_text(json.dumps({**facts, **settings, "rounds": rounds}, indent=1), encoding="utf-8")


def table(rounds: Mapping[str, list[dict[str, float]]], arguments: argparse.Namespace) -> Table:
    """Returns medians, with the lowest and the highest round."""
    title = f"{arguments.episodes} episodes on {arguments.devices} devices, latencies x {arguments.scale}"
    result = Table(title=title, title_justify="left")
    for heading in ("scheduler", "seconds", "of the ideal", "devices busy", "CPU per step"):
        result.add_column(heading, justify="left" if heading == "scheduler" else "right")
    for name, measured in rounds.items():
        formats = {"seconds": "{:.1f}", "of_ideal": "{:.1%}", "busy": "{:.1%}", "cpu_ms_per_step": "{:.1f} ms"}
        result.add_row(name, *(spread([each[key] for each in measured], form) for key, form in formats.items()))
    return result


if __name__ == "__main__":
    main()
