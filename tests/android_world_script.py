"""A scripted policy for AndroidWorld's own tasks: behind the scripted engine it plays from screenshots alone.

Nothing is remembered between two replies. For each, the written solution is played again from the start over the
screenshots in the prompt; its first action for which there is no screenshot any more is the reply.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.policy import Policy
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from rollout_buffer_lab.simulated_phone.screen_records import ReadScreen
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action
from slime_plugins.rollout_buffer.types import Image
from tests.android_world_expert import HEIGHT, WIDTH, model_arguments, say
from tests.android_world_player import SOLUTIONS
from tests.simulated_phone_player import Player

PARAMS_PROGRAM = """
import json, sys, tempfile
from pathlib import Path
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage
package = AndroidWorldPackage(Path(tempfile.mkdtemp()))
print(json.dumps({name: package.new_task(name, 0, 30).params for name in sys.argv[1:]}, default=str))
"""


def task_params(python: str, names: Sequence[str]) -> dict[str, Any]:
    """Asks the package in another Python for the parameters of each task's first instance."""
    command = [python, "-c", PARAMS_PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    params: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return params


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherReply:
    """A reply that a slot gives instead of the solution's at one turn (from 0), in its first ``attempts`` attempts."""

    turn: int
    reply: str
    attempts: int = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The tasks in the order of the input file, their parameters, and by (position, slot) the replies that differ."""

    tasks: Sequence[str]
    params: Mapping[str, Any]
    other_replies: Mapping[tuple[int, int], Sequence[OtherReply]] = field(default_factory=dict)

    def __call__(self, conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
        """The next reply, as a ``Policy`` gives it. The session is the attempt's uid."""
        _, _, position, slot, attempt = map(int, rng.session.split("/")[0].split("."))
        images = [image for turn in conversation.turns for image in turn.images]
        others = [other for other in self.other_replies.get((position, slot), ()) if attempt <= other.attempts]
        for other in others:
            if other.turn == len(images) - 1:
                return other.reply
        # The solution is replayed without the screenshots that were answered by other replies.
        their_turns = {other.turn for other in others}
        of_solution = [image for turn, image in enumerate(images) if turn not in their_turns]
        return next_reply(self.tasks[position], self.params[self.tasks[position]], of_solution)


@contextmanager
def engine_with(policy: Policy) -> Iterator[int]:
    """Runs the scripted engine with this policy in a thread; yields its port."""
    loop, ports = asyncio.new_event_loop(), []
    is_up, is_over = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(ScriptedEngineSettings(port=0), policy=policy) as url:
            ports.append(int(url.rpartition(":")[2]))
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    assert is_up.wait(60)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
        loop.close()


class _NextError(Exception):
    def __init__(self, action: Action) -> None:
        super().__init__("the screenshots are used up")
        self.action = action


class _Replay:
    """A device that shows recorded screenshots, and raises the first action that has no screenshot after it."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self._left = list(images[1:])

    def step(self, action: Action) -> Observation:
        if not self._left:
            raise _NextError(action)
        return look_at(self._left.pop(0))


class _Player(Player):
    """Looks at the same first screenshots again for every reply, so each is read once."""

    @property
    def screen(self) -> ReadScreen:
        return _read(self.observation.screenshot.data)


_read = lru_cache(maxsize=2000)(read_screen)


def look_at(image: bytes) -> Observation:
    """An observation of which only the screenshot is known."""
    return Observation(goal="", screenshot=Image(data=image), screen_width=WIDTH, screen_height=HEIGHT)


def next_reply(task: str, params: Any, images: Sequence[bytes]) -> str:
    """What the solution does after these screenshots; where it finds something missing on the screen, it gives up."""
    device: Any = _Replay(images)
    try:
        SOLUTIONS[task](_Player(device, look_at(images[0])), params)
    except _NextError as wanted:
        return say(**model_arguments(wanted.action))
    except AssertionError as lost:
        return say(thinking=f"I am lost: {str(lost)[:200]}", action="terminate", status="failure")
    return say(action="terminate", status="success")
