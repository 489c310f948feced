"""Optional parts of a task's file for learning: instances, a scripted policy, recorded episodes.

    instances(rng, count) -> [{...}, ...]            input lines; without it they hold nothing but their instance_id
    scripted_reply(prompt, instance, rng) -> text    a scripted policy that knows the format and is right sometimes
    warm_up_traces(rng) -> [messages, ...]           conversations to imitate, where there is no scripted policy
    MAX_NEW_TOKENS = 16                              longest reply
    MODES = {name: {...}, ...}                       what --mode adds to the job's payload; the first is the default
    PHRASES = [text, ...]                            texts that are one token each of a new policy
    PATCH_SIZE = 8                                   a new policy takes images, in patches 8 pixels wide and high
    WARM_UP = {"episodes": 2000, "updates": 600}     fields of ``WarmUpPlan``

A scripted policy plays through the task's generator, so that a new policy warms up on the same tokens and masks that it
is trained on later.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import EpisodeRequest, Image, Instance, SamplingParams
from slime_plugins.rollout_buffer.wire import RolloutItem

TASKS = Path(__file__).parent / "tasks"


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUpPlan:
    """A new policy imitates ``episodes`` episodes in ``updates`` updates of ``batch`` each: every episode many times.

    The learning rate rises over the first ``rising`` updates.
    """

    episodes: int = 2000
    updates: int = 600
    batch: int = 64
    learning_rate: float = 2e-3
    rising: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """Episodes to imitate, and their screenshots by sha256."""

    items: Sequence[RolloutItem] = ()
    images: Mapping[str, bytes] = field(default_factory=dict)


class TaskFile:
    """A file with ``TASK_TYPE`` and the optional parts for learning."""

    def __init__(self, path: Path, module: ModuleType) -> None:
        self.path = path
        self.task_type: str = module.TASK_TYPE
        self.max_new_tokens: int = getattr(module, "MAX_NEW_TOKENS", 16)
        self.phrases: Sequence[str] = getattr(module, "PHRASES", ())
        self.patch_size: int | None = getattr(module, "PATCH_SIZE", None)
        self.warm_up_plan = WarmUpPlan(**getattr(module, "WARM_UP", {}))
        self._modes: Mapping[str, Mapping[str, Any]] = getattr(module, "MODES", {})
        self._module = module

    def check_generator(self) -> None:
        """Creates the generator once without starting it, so that a missing requirement is found before a run starts.

        Raises:
            ConfigError: it cannot be created; the message has the reason.
        """
        try:
            self._module.create_generator()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"create_generator() of {self.path} fails: {type(error).__name__}: {error}") from error

    def instances(self, rng: random.Random, count: int) -> list[dict[str, Any]]:
        """Returns input lines, each with an ``instance_id``."""
        make = getattr(self._module, "instances", None)
        lines = [{} for _ in range(count)] if make is None else make(rng, count)
        return [{"instance_id": str(number), **line} for number, line in enumerate(lines)]

    def options(self, mode: str | None) -> Mapping[str, Any]:
        """Returns the options of a mode for the job's payload; None is the first mode, if any.

        Raises:
            ConfigError: there is no such mode.
        """
        if mode is None:
            return next(iter(self._modes.values()), {})
        if mode not in self._modes:
            known = ", ".join(self._modes) or "none"
            raise ConfigError(f"the task {self.task_type} has no mode {mode!r}; its modes: {known}")
        return self._modes[mode]

    def warm_up(
        self, tokenizer: Any, rng: random.Random, episodes: int, options: Mapping[str, Any] = MappingProxyType({})
    ) -> WarmUp:
        """Returns episodes to imitate: of the file's scripted policy, else its recorded ones, else none.

        ``options`` are those of the mode.
        """
        if (reply := getattr(self._module, "scripted_reply", None)) is not None:
            return asyncio.run(self._play_episodes(reply, tokenizer, rng, episodes, options))
        if (traces := getattr(self._module, "warm_up_traces", None)) is not None:
            return WarmUp(
                items=[
                    RolloutItem(uid=str(n), instance_id=str(n), messages=messages, reward=0.0, group_index=n)
                    for n, messages in enumerate(traces(rng))
                ]
            )
        return WarmUp()

    async def _play_episodes(
        self, reply: Callable[..., str], tokenizer: Any, rng: random.Random, episodes: int, options: Mapping[str, Any]
    ) -> WarmUp:
        lines = {str(number): line for number, line in enumerate(self.instances(rng, episodes))}

        def answer(request: GenerateRequest) -> str:
            prompt = tokenizer.decode(list(request.input_ids), skip_special_tokens=False)
            return reply(prompt, lines[str(request.session_id)], rng)

        generator: Generator = self._module.create_generator()
        engine = FakeEngine(answer, tokenizer=tokenizer)
        await generator.start(
            GeneratorContext(job_id="warm-up", engine=engine, tokenizer=tokenizer, concurrency=1, options=options)
        )
        try:
            played = [await self._play_episode(generator, uid, line) for uid, line in lines.items()]
        finally:
            await generator.close()
        return WarmUp(
            items=[item for item, _ in played],
            images={image.sha256: image.data for _, images in played for image in images},
        )

    async def _play_episode(
        self, generator: Generator, uid: str, line: Mapping[str, Any]
    ) -> tuple[RolloutItem, Sequence[Image]]:
        sampling = SamplingParams(max_new_tokens=self.max_new_tokens)
        instance = Instance(instance_id=str(line["instance_id"]), data=line)
        played = await generator.play(
            EpisodeRequest(
                uid=uid, job_id="warm-up", instance=instance, epoch=0, slot=0, attempt=1, sampling_params=sampling
            )
        )
        item = RolloutItem(
            uid=uid,
            instance_id=uid,
            messages=played.messages,
            reward=played.reward,
            generations=played.generations,
            group_index=int(uid),
        )
        return item, played.images


def find_task(name: str, folder: Path | None) -> TaskFile:
    """Returns the file with ``TASK_TYPE = name`` in a folder, or among the shipped ones.

    Raises:
        ConfigError: there is none, or one of the task files in the folder cannot be loaded.
    """
    tasks: dict[str, TaskFile] = {}
    for path in sorted((folder or TASKS).glob("*.py")):
        if "TASK_TYPE" in path.read_text(encoding="utf-8"):
            task = _load(path)
            tasks[task.task_type] = task
    if name not in tasks:
        known = ", ".join(sorted(tasks)) or "none"
        raise ConfigError(f"no file in {folder or TASKS} has TASK_TYPE = {name!r}; the tasks there: {known}")
    return tasks[name]


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
