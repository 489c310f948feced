"""Episodes of MiniWoB++ while pages are killed at random: is every one accounted for, and none rewarded by a fault?

    python -m tests.miniwob_faults --episodes 1000 --pages 8

The policy solves its tasks, so whatever reward is not 1 would be a fault's. An episode whose page dies is played again,
as the runner does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.miniwob.browser import OpenPage, SharedBrowsers, shared_browsers
from slime_plugins.rollout_buffer.generator.miniwob.config import load_settings
from slime_plugins.rollout_buffer.generator.miniwob.generator import MiniWobGenerator
from slime_plugins.rollout_buffer.simulation.engine.conversation import read_conversation
from slime_plugins.rollout_buffer.simulation.engine.policy import reply_to
from slime_plugins.rollout_buffer.simulation.engine.rng import SessionRng
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine

TASKS = ("click-button", "click-test-2", "enter-text", "click-tab", "click-option", "simple-algebra")
MOST_ATTEMPTS = 30


@dataclass
class Account:
    """What became of the episodes. ``killed`` counts pages, ``failures`` attempts by what they failed with."""

    rewards: Counter[float] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    killed: int = 0
    devices_left: int = 0


async def play_under_faults(episodes: int, pages: int, share: float, seed: int = 0) -> Account:
    """Plays ``episodes`` on ``pages`` pages; in ``share`` of the attempts the page is killed before some turn."""
    os.environ["ROLLOUT_BUFFER_MINIWOB__NUM_WORKERS"] = str(pages)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    account, randomness = Account(), random.Random(seed)
    doomed: set[str] = set()

    def reply(request: GenerateRequest) -> str:
        if request.session_id in doomed:
            doomed.discard(str(request.session_id))
            account.killed += kill_a_page(shared_browsers(), randomness)
        said = read_conversation(tokenizer.decode(request.input_ids), [])
        return reply_to(said, skill=1.0, rng=SessionRng(seed, str(request.session_id)))

    pool = LocalDevicePool(load_settings({}).for_devices(), owner="faults")
    generator = MiniWobGenerator(pool)
    context = GeneratorContext(
        job_id="faults",
        engine=FakeEngine(reply, tokenizer=tokenizer),
        tokenizer=tokenizer,
        concurrency=pages,
        options={"miniwob": {"observation": "elements"}},
    )
    await generator.start(context)
    room = asyncio.Semaphore(pages)

    async def episode(number: int) -> None:
        task = {"task_name": TASKS[number % len(TASKS)], "params_idx": number % 4}
        for attempt in range(MOST_ATTEMPTS):
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
    return account


def kill_a_page(browsers: SharedBrowsers, randomness: random.Random) -> int:
    """Crashes a page that is open, whoever plays on it; returns how many that were."""
    opened = [page for shared in list(browsers._shared) for page in list(shared.pages) if not page.lost]
    if not opened:
        return 0
    asyncio.run_coroutine_threadsafe(_crash(randomness.choice(opened)), browsers._loop)
    return 1


async def _crash(opened: OpenPage) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(opened.protocol.send("Page.crash"), 5.0)


def main() -> int:
    """Prints the account as JSON; returns 1 where it does not balance, or a fault was rewarded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=8)
    parser.add_argument("--share", type=float, default=1 / 3, help="of the attempts in which a page is killed")
    given = parser.parse_args()
    account = asyncio.run(play_under_faults(given.episodes, given.pages, given.share))
    told = {**account.__dict__, "rewards": dict(account.rewards), "failures": dict(account.failures)}
    sys.stdout.write(json.dumps(told) + "\n")
    return int(set(account.rewards) != {1.0} or account.rewards[1.0] + account.given_up != given.episodes)


if __name__ == "__main__":
    sys.exit(main())
