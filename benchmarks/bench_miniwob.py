"""Episodes per second of MiniWoB++, compared with plain Playwright that makes the same steps in the same browser.

    python -m benchmarks.bench_miniwob --json miniwob.json            # 16 and 64 pages

An episode loads a page, seeds it, takes an observation, taps a few times on an empty place with an observation after
each tap, and reads the score. Contenders alternate within each round, in a different order every time:

* playwright: one coroutine per page, which calls Playwright directly: load, seed, wait, screenshot, tap, screenshot,
  score. An observation is the same for all: two frames, the elements, a screenshot.
* pool: the same through leases of the device pool, as every generator uses it.
* generator: whole episodes of the task type, with prompts, tokens, screenshots in them and a trajectory in the end; the
  engine answers at once, with a script.

Pages are distributed over browsers equally. Also measured, on the pool: the time of a reset, with one page busy and
with all; and the memory of browsers and driver per page, shared pages counted once (PSS).

Caveats: browsers, Playwright's driver and the contender share the cores, so our own computation slows the browser down.
A real engine takes seconds for a reply, during which the pages idle.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.ratios import spread
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.miniwob.browser import LAUNCH_ARGUMENTS, context_options
from slime_plugins.rollout_buffer.generator.miniwob.config import POINTS, MiniWobSettings, load_settings
from slime_plugins.rollout_buffer.generator.miniwob.device import LIFTED_LIMIT_MS, launch_options
from slime_plugins.rollout_buffer.generator.miniwob.package import find_pages
from slime_plugins.rollout_buffer.generator.miniwob_generator import MiniWobGenerator
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine

TASKS = ("click-button", "click-tab", "enter-text", "choose-list", "email-inbox", "use-slider")
NOWHERE = (80, 25)
"""In CSS points: a place above every page's content, where a tap has no effect."""
SCALE = 2  # screenshot pixels per CSS point, the generator's default
WARM_UP = 1
"""Episodes of each page, for each contender, before the measurement."""


@dataclass
class Measured:
    """Results for one number of pages. Rates are episodes per second, one per round; times are seconds."""

    pages: int
    taps: int
    episodes: int
    playwright: list[float] = field(default_factory=list)
    pool: list[float] = field(default_factory=list)
    generator: list[float] = field(default_factory=list)
    reset_alone_s: list[float] = field(default_factory=list)
    reset_all_s: list[float] = field(default_factory=list)
    memory_per_page: int = 0
    opened_s: float = 0.0


Play = Callable[[int], Awaitable[None]]
"""Plays the episode with this number, on any free page."""


# --- the contenders ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def plain_playwright(pages: int, taps: int, settings: MiniWobSettings) -> AsyncIterator[Play]:
    """Yields a play function that calls Playwright directly, with browsers and pages like ours."""
    from playwright.async_api import async_playwright

    folder = find_pages()
    options = launch_options(settings, folder)
    free: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()

    async def look(page: Any, protocol: Any) -> None:
        await page.evaluate("() => rollout.observe()")
        clip = {"x": 0, "y": 0, "width": POINTS[0], "height": POINTS[1], "scale": SCALE}
        shot = await protocol.send("Page.captureScreenshot", {"format": "png", "optimizeForSpeed": True, "clip": clip})
        base64.b64decode(shot["data"])

    async def play(number: int) -> None:
        page, protocol = await free.get()
        await page.goto((folder / f"{TASKS[number % len(TASKS)]}.html").as_uri())
        await page.evaluate(
            "([seed, mode, limit]) => rollout.start(seed, mode, limit)", [number % 4, "train", LIFTED_LIMIT_MS]
        )
        await page.wait_for_function("() => WOB_TASK_READY")
        await look(page, protocol)
        for _ in range(taps):
            await page.touchscreen.tap(*NOWHERE)
            await look(page, protocol)
        await page.evaluate("() => [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        free.put_nowait((page, protocol))

    async with async_playwright() as playwright:
        browsers = []
        for first in range(0, pages, options.pages_per_browser):
            browser = await playwright.chromium.launch(
                executable_path=options.executable or None,
                args=list(LAUNCH_ARGUMENTS),
                chromium_sandbox=os.geteuid() != 0,
            )
            browsers.append(browser)
            for _ in range(first, min(first + options.pages_per_browser, pages)):
                context = await browser.new_context(**context_options(options))
                await context.add_init_script(options.script)
                page = await context.new_page()
                free.put_nowait((page, await context.new_cdp_session(page)))
        yield play
        for browser in browsers:
            await browser.close()


def through_the_pool(pool: LocalDevicePool, taps: int) -> Play:
    """Returns a play function on leased devices."""

    async def play(number: int) -> None:
        async with await pool.acquire() as device:
            await device.reset(TASKS[number % len(TASKS)], number % 4)
            for _ in range(taps):
                await device.step(Action(kind=ActionKind.CLICK, point=(NOWHERE[0] * SCALE, NOWHERE[1] * SCALE)))
            await device.score()

    return play


async def whole_episodes(pool: LocalDevicePool, pages: int, taps: int) -> Play:
    """Returns a play function of whole episodes; the last reply of an episode ends it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    x, y = (round(coordinate / size * 999) for coordinate, size in zip(NOWHERE, POINTS, strict=True))
    replies: dict[str | None, int] = {}

    def reply(request: GenerateRequest) -> str:
        turn = replies[request.session_id] = replies.get(request.session_id, 0) + 1
        arguments: dict[str, Any] = {"action": "terminate", "status": "failure"}
        if turn <= taps:
            arguments = {"action": "click", "coordinate": [x, y]}
        else:
            del replies[request.session_id]
        call = json.dumps({"name": "mobile_use", "arguments": arguments})
        return f"<thinking>\nI tap.\n</thinking>\n<tool_call>\n{call}\n</tool_call>\n<conclusion>\nDone.\n</conclusion>"

    engine = FakeEngine(reply, tokenizer=tokenizer)
    generator = MiniWobGenerator(pool)
    await generator.start(
        GeneratorContext(job_id="bench", engine=engine, tokenizer=tokenizer, concurrency=pages, options={})
    )

    async def play(number: int) -> None:
        task = {"task_name": TASKS[number % len(TASKS)], "params_idx": number % 4}
        trajectory = await generator.play(episode_request({"instance_id": f"e{number}", "metadata": task}))
        if len(trajectory.generations) != taps + 1 or trajectory.reward != 0.0:
            raise SystemExit(f"an episode of {task} ended unexpectedly: {trajectory.stop_reason}")
        engine.requests.clear()  # they hold all screenshots

    return play


# --- measuring --------------------------------------------------------------------------------------------------------


async def rate_of(play: Play, episodes: int, pages: int) -> float:
    """Returns episodes per second, with ``pages`` concurrent ones."""
    limit = asyncio.Semaphore(pages)

    async def play_one(number: int) -> None:
        async with limit:
            await play(number)

    began = time.monotonic()
    await asyncio.gather(*(play_one(number) for number in range(episodes)))
    return episodes / (time.monotonic() - began)


async def resets_of(pool: LocalDevicePool, at_once: int, count: int) -> list[float]:
    """Returns the seconds of each of ``count`` resets, with ``at_once`` concurrent ones."""
    limit, durations = asyncio.Semaphore(at_once), []

    async def reset_one(number: int) -> None:
        async with limit, await pool.acquire() as device:
            began = time.monotonic()
            await device.reset(TASKS[number % len(TASKS)], number % 4)
            durations.append(time.monotonic() - began)

    await asyncio.gather(*(reset_one(number) for number in range(count)))
    return durations


async def measure(pages: int, options: argparse.Namespace) -> Measured:
    """Opens the pages of all contenders and measures them alternately."""
    os.environ["ROLLOUT_BUFFER_MINIWOB__NUM_WORKERS"] = str(pages)
    settings = load_settings({})
    result = Measured(pages=pages, taps=options.taps, episodes=options.episodes or 4 * pages)
    pool, began = LocalDevicePool(settings.for_devices(), owner="bench"), time.monotonic()
    generator = await whole_episodes(pool, pages, options.taps)
    while sum(device["state"] == "ready" for device in await pool.counters()) < pages:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    result.opened_s = round(time.monotonic() - began, 2)
    leased = through_the_pool(pool, options.taps)
    await rate_of(leased, WARM_UP * pages, pages)
    result.memory_per_page = memory_of_descendants() // pages
    async with plain_playwright(pages, options.taps, settings) as plain:
        contenders: dict[str, Play] = {"playwright": plain, "pool": leased, "generator": generator}
        for play in contenders.values():
            await rate_of(play, WARM_UP * pages, pages)
        orders = itertools.cycle(itertools.permutations(contenders))
        for _, order in zip(range(options.rounds), orders, strict=False):
            for name in order:
                getattr(result, name).append(await rate_of(contenders[name], result.episodes, pages))
    result.reset_alone_s = await resets_of(pool, 1, 2 * len(TASKS))
    result.reset_all_s = await resets_of(pool, pages, 2 * pages)
    await pool.close()
    return result


def memory_of_descendants() -> int:
    """Returns the memory of all processes started by this one, and by those, in bytes (PSS)."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has exited
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    below, newest = set[int](), {os.getpid()}
    while newest := {child for child, parent in parents.items() if parent in newest} - below:
        below |= newest
    return sum(_pss(process) for process in below)


def _pss(process: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
    return 0


# --- output -----------------------------------------------------------------------------------------------------------


def show(results: list[Measured]) -> None:
    """Prints one row per number of pages."""
    table = Table(title="Episodes per second, median of the rounds; shares are of playwright's")
    columns = ("pages", "playwright", "pool", "share", "generator", "share", "reset alone", "reset, all", "MB a page")
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result.pages), spread(result.playwright, "{:.1f}"),
            spread(result.pool, "{:.1f}"), _share(result.pool, result.playwright),
            spread(result.generator, "{:.1f}"), _share(result.generator, result.playwright),
            f"{statistics.median(result.reset_alone_s):.2f} s", f"{statistics.median(result.reset_all_s):.2f} s",
            f"{result.memory_per_page / 1e6:.0f}",
        )  # fmt: skip
    Console(width=150).print(table)


def _share(ours: list[float], theirs: list[float]) -> str:
    return spread([a / b for a, b in zip(ours, theirs, strict=True)], "{:.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, nargs="+", default=[16, 64], help="pages at once")
    parser.add_argument("--episodes", type=int, help="of each contender per round; default: four per page")
    parser.add_argument("--taps", type=int, default=3, help="of each episode")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()
    results: list[Measured] = []
    for pages in options.pages:
        results.append(asyncio.run(measure(pages, options)))
        if options.json:
            options.json.write_text(json.dumps([*map(asdict, results)], indent=1) + "\n", encoding="utf-8")
    show(results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
