"""What a task's file tells about learning, beside its generator: instances, a scripted player, recorded episodes.

    instances(rng, count) -> [{...}, ...]            input lines; without it they hold nothing but their instance_id
    scripted_reply(prompt, instance, rng) -> text    what somebody says who knows the form and is right now and then
    warm_up_traces(rng) -> [messages, ...]           conversations instead of the player
    MAX_NEW_TOKENS = 16                              longest reply

All are optional. A scripted player plays the generator itself, so that a policy warms up on the very tokens and masks
that it is trained on later.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, SamplingParams
from slime_plugins.rollout_buffer.wire import RolloutItem

__all__ = ["TaskFile", "find_task"]

TASKS = Path(__file__).parent / "tasks"
AT_ONCE = 64


class TaskFile:
    """One file with a ``TASK_TYPE``."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.path = path
        self.task_type: str = module.TASK_TYPE
        self.max_new_tokens: int = getattr(module, "MAX_NEW_TOKENS", 16)
        self._module = module

    def instances(self, rng: random.Random, count: int) -> list[dict[str, Any]]:
        """Input lines, each with its ``instance_id``."""
        make = getattr(self._module, "instances", None)
        lines = [{} for _ in range(count)] if make is None else make(rng, count)
        return [{"instance_id": str(number), **line} for number, line in enumerate(lines)]

    def warm_up(self, tokenizer: Any, rng: random.Random, episodes: int) -> list[RolloutItem]:
        """Episodes to imitate: played by the file's scripted player, else its recorded ones; else none."""
        if (reply := getattr(self._module, "scripted_reply", None)) is not None:
            return asyncio.run(self._played(reply, tokenizer, rng, episodes))
        if (traces := getattr(self._module, "warm_up_traces", None)) is not None:
            return [
                RolloutItem(uid=str(at), instance_id=str(at), messages=messages, reward=0.0, group_index=at)
                for at, messages in enumerate(traces(rng))
            ]
        return []

    async def _played(
        self, reply: Callable[..., str], tokenizer: Any, rng: random.Random, episodes: int
    ) -> list[RolloutItem]:
        lines = {str(number): line for number, line in enumerate(self.instances(rng, episodes))}

        def say(request: GenerateRequest) -> str:
            prompt = tokenizer.decode(list(request.input_ids), skip_special_tokens=False)
            return reply(prompt, lines[str(request.session_id)], rng)

        generator: Generator = self._module.create_generator()
        engine = FakeEngine(say, tokenizer=tokenizer)
        await generator.start(
            GeneratorContext(job_id="warm-up", engine=engine, tokenizer=tokenizer, concurrency=AT_ONCE)
        )
        try:
            return [await self._episode(generator, uid, line) for uid, line in lines.items()]
        finally:
            await generator.close()

    async def _episode(self, generator: Generator, uid: str, line: Mapping[str, Any]) -> RolloutItem:
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens)
        instance = Instance(instance_id=str(line["instance_id"]), data=line)
        played = await generator.play(
            EpisodeRequest(
                uid=uid, job_id="warm-up", instance=instance, epoch=0, slot=0, attempt=1, sampling_params=sampling
            )
        )
        return RolloutItem(
            uid=uid,
            instance_id=uid,
            messages=played.messages,
            reward=played.reward,
            generations=played.generations,
            group_index=int(uid),
        )


def find_task(name: str, folder: Path | None) -> TaskFile:
    """The file with ``TASK_TYPE = name`` in a folder, or among those that come along.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    found: dict[str, TaskFile] = {}
    for path in sorted((folder or TASKS).glob("*.py")):
        if "TASK_TYPE" in path.read_text(encoding="utf-8"):
            task = _load(path)
            found[task.task_type] = task
    if name not in found:
        there = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"no file in {folder or TASKS} has TASK_TYPE = {name!r}; the tasks there: {there}")
    return found[name]


def _load(path: Path) -> TaskFile:
    spec = importlib.util.spec_from_file_location(f"learning_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return TaskFile(path, module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
