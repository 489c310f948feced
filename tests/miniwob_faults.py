"""Episodes of MiniWoB++ while pages are killed at random: is every one accounted for, and none rewarded by a fault?

    python -m tests.miniwob_faults --episodes 1000 --pages 8

A page is closed, its renderer crashes, its browser is killed with all pages in it, or the Playwright driver of all
browsers is killed. The policy solves every task, so a reward other than 1 would come from a fault. An episode whose
page dies is played again, as the runner does. In the end nothing may be left: no process, no thread, and not much more
memory than after the first episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rollout_buffer_lab.scripted_engine.conversation import read_conversation
from rollout_buffer_lab.scripted_engine.policy import reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.miniwob.browser import OpenPage, SharedBrowsers, shared_browsers
from slime_plugins.rollout_buffer.generator.miniwob.config import load_settings
from slime_plugins.rollout_buffer.generator.miniwob_generator import MiniWobGenerator
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.demo_tokens import tokenizer
from tests.miniwob_browsers import browser_process, driver_process
from tests.processes import descendants

TASKS = ("click-button", "click-test-2", "enter-text", "click-tab", "click-option", "simple-algebra")
MAX_ATTEMPTS = 30
MAX_DELAY_S = 0.3
"""A fault follows the reply that caused it within this time, so that faults hit every part of an episode."""
MAX_GROWTH = 1.3
"""Memory in the end, as a multiple of that after a tenth of the episodes. A leak would exceed it."""
MAX_END_S = 60.0
THREADS_OF_THE_BROWSERS = 1
"""Playwright's loop has a thread, which stays when all pages are closed."""


class Fault(StrEnum):
    PAGE_CLOSED = "page closed"
    RENDERER_CRASHED = "renderer crashed"
    BROWSER_KILLED = "browser killed"
    DRIVER_KILLED = "driver killed"


WEIGHTS = {Fault.PAGE_CLOSED: 8, Fault.RENDERER_CRASHED: 8, Fault.BROWSER_KILLED: 3, Fault.DRIVER_KILLED: 1}


@dataclass
class Account:
    """What became of the episodes. ``killed`` counts faults, ``failures`` failed attempts by fault or error code.

    ``memory`` is what this process holds in bytes after a tenth of the episodes, and after all of them.
    """

    rewards: Counter[float] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    devices_left: int = 0
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0
    left_over: list[str] = field(default_factory=list)

    def complaints(self, episodes: int) -> list[str]:
        complaints = []
        if set(self.rewards) != {1.0}:
            complaints.append(f"a fault was rewarded: {dict(self.rewards)}")
        if self.rewards[1.0] + self.given_up != episodes:
            complaints.append(f"{episodes - self.rewards[1.0] - self.given_up} episodes are not accounted for")
        if self.given_up:
            complaints.append(f"{self.given_up} episodes never came to their end")
        if self.memory and self.memory[-1] > MAX_GROWTH * self.memory[0]:
            complaints.append(f"memory grew from {self.memory[0]} to {self.memory[-1]} bytes")
        return complaints + [f"left over: {each}" for each in self.left_over]


async def play_under_faults(episodes: int, pages: int, share: float, seed: int = 0) -> Account:
    """Plays ``episodes`` on ``pages`` pages. The first reply of a ``share`` of the attempts breaks any open page."""
    os.environ["ROLLOUT_BUFFER_MINIWOB__NUM_WORKERS"] = str(pages)
    os.environ["ROLLOUT_BUFFER_MINIWOB__PAGES_PER_BROWSER"] = str(max(pages // 2, 1))
    os.environ["ROLLOUT_BUFFER_MINIWOB__QUARANTINE_S"] = "1"
    processes_before = set(descendants(os.getpid()))
    threads_before, began = threading.active_count(), time.monotonic()
    account, randomness = Account(), random.Random(seed)
    doomed: set[str] = set()

    def reply(request: GenerateRequest) -> str:
        engine.requests.clear()  # the engine keeps all requests, which would count as memory that grows
        if request.session_id in doomed:
            doomed.discard(str(request.session_id))
            if fault := kill_something(shared_browsers(), randomness):
                account.killed[fault.value] += 1
        said = read_conversation(tokenizer.decode(request.input_ids), [])
        return reply_to(said, skill=1.0, rng=SessionRng(seed, str(request.session_id)))

    pool = LocalDevicePool(load_settings({}).for_devices(), owner="faults")
    generator = MiniWobGenerator(pool)
    engine = FakeEngine(reply, tokenizer=tokenizer)
    options = {"miniwob": {"observation": "elements"}}
    await generator.start(
        GeneratorContext(job_id="faults", engine=engine, tokenizer=tokenizer, concurrency=pages, options=options)
    )
    room = asyncio.Semaphore(pages)

    async def episode(number: int) -> None:
        await play_to_its_end(number)
        if sum(account.rewards.values()) == max(episodes // 10, 1):
            account.memory.append(resident())

    async def play_to_its_end(number: int) -> None:
        task = {"task_name": TASKS[number % len(TASKS)], "params_idx": number % 4}
        for attempt in range(MAX_ATTEMPTS):
            name = f"e{number}a{attempt}"
            if randomness.random() < share:
                doomed.add(f"{name}.0")
            async with room:
                try:
                    trajectory = await generator.play(episode_request({"instance_id": name, "metadata": task}))
                except DeviceError as error:
                    account.failures[str(error.detail.get("fault", error.code))] += 1
                    continue
            account.rewards[trajectory.reward] += 1
            return
        account.given_up += 1

    await asyncio.gather(*(episode(number) for number in range(episodes)))
    account.devices_left = len((await pool.snapshot())["devices"])
    await generator.close()
    account.memory.append(resident())
    account.left_over = await what_is_left(threads_before, processes_before)
    account.seconds = round(time.monotonic() - began, 1)
    return account


async def what_is_left(threads_before: int, processes_before: Collection[int]) -> list[str]:
    """Returns the processes and threads that outlive their pool, which closes its pages without waiting for them."""
    deadline = time.monotonic() + MAX_END_S
    while True:
        now = descendants(os.getpid())
        processes = [command[:80] for pid, command in now.items() if command and pid not in processes_before]
        threads = threading.active_count() - threads_before - THREADS_OF_THE_BROWSERS
        if (not processes and threads <= 0) or time.monotonic() >= deadline:
            return processes + ([f"{threads} threads"] if threads > 0 else [])
        await asyncio.sleep(0.2)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def kill_something(browsers: SharedBrowsers, randomness: random.Random) -> Fault | None:
    """Breaks any open page within ``MAX_DELAY_S``; returns the fault, or None if no page is open."""
    opened = [page for shared in list(browsers._shared) for page in list(shared.pages) if not page.lost]
    if not opened:
        return None
    fault = randomness.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    breaking = _break(randomness.choice(opened), fault, randomness.uniform(0.0, MAX_DELAY_S))
    asyncio.run_coroutine_threadsafe(breaking, browsers._loop)
    return fault


async def _break(opened: OpenPage, fault: Fault, delay_s: float) -> None:
    with contextlib.suppress(Exception):  # somebody else may have killed it before
        await asyncio.sleep(delay_s)
        async with asyncio.timeout(5.0):
            if fault is Fault.PAGE_CLOSED:
                await opened.page.close()
            elif fault is Fault.RENDERER_CRASHED:
                await opened.protocol.send("Page.crash")
            elif fault is Fault.BROWSER_KILLED:
                os.kill(await browser_process(opened), signal.SIGKILL)
            else:
                os.kill(driver_process(), signal.SIGKILL)


def main() -> int:
    """Prints the account as JSON; returns 1 where it does not balance, a fault was rewarded, or something is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--share", type=float, default=1 / 3, help="of the attempts, whose first reply breaks a page")
    given = parser.parse_args()
    account = asyncio.run(play_under_faults(given.episodes, given.pages, given.share))
    complaints = account.complaints(given.episodes)
    sys.stdout.write(json.dumps({**account.__dict__, "complaints": complaints}) + "\n")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
