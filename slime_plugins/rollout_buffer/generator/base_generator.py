"""The protocol of a generator, which plays one episode per call, and two templates for conversations.

For a generator with one prompt and one reply, copy ``math_generator.py``: subclass ``SingleTurnGenerator``, override
``reward``, and define ``TASK_TYPE`` and ``create_generator`` in your file. For more turns subclass
``MultiTurnGenerator`` and override ``converse``. For other tasks implement the three methods of ``Generator``;
``android_world_generator.py`` is the example.

``BaseGenerator`` and ``query_single_turn`` are slime's, for generators that import them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateRequest
from slime_plugins.rollout_buffer.errors import EnvironmentSetupError, GeneratorError
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Generation,
    Instance,
    Message,
    Outcome,
    StopReason,
    Trajectory,
)

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.generator.plain_generator import SAMPLING_PARAMS, BaseGenerator, query_single_turn

__all__ = [
    "SAMPLING_PARAMS",
    "BaseGenerator",
    "Chat",
    "Generator",
    "GeneratorContext",
    "MultiTurnGenerator",
    "ReplyCutError",
    "ReportsDevices",
    "Score",
    "SingleTurnGenerator",
    "query_single_turn",
]


def __getattr__(name: str) -> Any:
    """Imports slime's names on first use: their HTTP client is not needed by other generators."""
    if name not in ("SAMPLING_PARAMS", "BaseGenerator", "query_single_turn"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from slime_plugins.rollout_buffer.generator import plain_generator

    return getattr(plain_generator, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorContext:
    """Passed to a generator once, before the first episode.

    ``tokenizer`` is the trainer's, loaded from the job's ``tokenizer_path``; None if the job names none.
    ``concurrency`` is the maximum number of concurrent episodes. ``ray_address`` is the Ray cluster of the devices;
    None if the generator needs none. ``options`` are the payload's keys that the job itself does not use.
    ``read_instances`` reads the job's input line by line; it blocks.
    """

    job_id: str
    engine: Engine
    tokenizer: Any
    concurrency: int
    ray_address: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    read_instances: Callable[[], Iterable[Instance]] = tuple


@runtime_checkable
class Generator(Protocol):
    """Plays episodes of one task type. A module in ``generator/`` that defines ``TASK_TYPE`` provides one by
    ``create_generator() -> Generator``; ``registry.py`` lists what else it may define. ``play`` is called concurrently
    on one event loop and must never block it.
    """

    async def start(self, context: GeneratorContext) -> None:
        """Prepares for episodes: connects to devices, compiles prompts. Called once, before the first ``play``."""
        ...

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode and returns its trajectory, under ``episode.uid``.

        Raises:
            EpisodeError: the attempt failed with a device, engine or environment error. It gets no reward and is
            retried.
        """
        ...

    async def close(self) -> None:
        """Releases all resources. Called once, also after a failed ``start``."""
        ...


@runtime_checkable
class ReportsDevices(Protocol):
    """Implemented by a ``Generator`` with devices: their state, for dashboards and metrics."""

    async def devices(self) -> Mapping[str, Any]:
        """Returns ``pool``, the name of the device pool, and ``devices``, a list of records; all fit for JSON.

        Each record has ``device_id``, ``state``, ``last_error``, ``episodes``, ``steps``, ``replacements``,
        ``recyclings``, ``quarantines``, ``failures`` by kind, ``reset_s_p50``, ``reset_s_p95``, ``step_s_p50``,
        ``step_s_p95`` and ``actions_per_minute``; unknown values are None.

        Raises:
            DeviceError: the pool does not answer now.
        """
        ...


class ReplyCutError(Exception):
    """The engine cut a reply, at its token limit or by an abort. ``MultiTurnGenerator`` then ends the episode."""


class Chat:
    """The conversation of one episode. Sampled replies are trained; the messages between them are context.

    ``messages`` holds all of it so far. ``tools``, schemas in OpenAI's form, stand in the prompt when they are set
    before the first reply.
    """

    def __init__(self, episode: EpisodeRequest, engine: Engine, tokens: ChatTokens) -> None:
        self.messages: list[Message] = episode.transcript
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self.generations: list[Generation] = []
        self.timer = PhaseTimer()
        self._episode = episode
        self._engine = engine
        self._tokens = tokens

    async def sample(self, *messages: Message | str) -> str:
        """Appends messages, samples the policy's reply and returns it, without its end-of-turn token.

        A string is a message of ``user``. Later prompts continue the first one, id by id: no reply is tokenized again.

        Raises:
            EngineError: the engine failed; the attempt is retried.
            ReplyCutError: the reply was cut. Do not catch it: the episode ends as truncated, with reward 0.
        """
        new = [{"role": "user", "content": each} if isinstance(each, str) else dict(each) for each in messages]
        if not new:
            raise GeneratorError("chat.sample() needs a message: nothing was said since the last reply")
        prompt_ids = self._prompt(new)
        self.messages.extend(new)
        with self.timer.phase("generate"):
            reply = await self._engine.generate(
                GenerateRequest(
                    input_ids=prompt_ids, sampling_params=self._episode.sampling_params, session_id=self._episode.uid
                )
            )
        text = self._tokens.text(reply.output_ids)
        self.generations.append(reply.as_generation(prompt_ids))
        self.messages.append({"role": "assistant", "content": text})
        if reply.finish_reason != "stop":
            raise ReplyCutError(reply.finish_reason)
        return text

    def _prompt(self, new: Sequence[Message]) -> list[int]:
        if not self.generations:
            return self._tokens.prompt(new, self.tools)
        last = self.generations[-1]
        bridge = self._tokens.bridge_over(new, turn_is_closed=self._tokens.is_closed(last.output_ids))
        return [*last.prompt_ids, *last.output_ids, *bridge]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Reward of an episode. ``success`` is used by charts and filters, None if unknown.

    ``parts`` are components of the reward, for display; ``turn_rewards`` are those of ``Trajectory``.
    """

    reward: float
    success: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] | None = None


# The outcome and stop reason of an episode, by the finish reason of its last reply.
_ENDINGS = {
    "stop": (Outcome.COMPLETED, StopReason.STOP),
    "length": (Outcome.TRUNCATED, StopReason.MAX_TOKENS),
    "abort": (Outcome.ABORTED, StopReason.ABORTED),
}


class MultiTurnGenerator:
    """A template for conversations of any number of turns: override ``converse``.

    A reply that was cut ends the episode with reward 0.
    """

    REQUIRED_KEYS: ClassVar[tuple[str, ...]] = ("tokenizer_path",)
    """A module with a generator of this class and no ``REQUIRED_KEYS`` of its own requires these keys of a payload."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._chat: ChatTokens | None = None

    async def converse(self, chat: Chat, instance: Instance) -> float | Score:
        """Plays one episode in ``chat`` and returns its reward. Override this.

        It runs on the event loop of all episodes: run a computation of more than a few milliseconds in
        ``await asyncio.to_thread(...)``, one that may never end in a process of its own. ``chat.timer.phase(NAME)``
        counts the seconds of a part of it.

        Raises:
            EpisodeError: the episode fails for a reason other than the policy; the attempt is retried.
        """
        raise NotImplementedError(f"{type(self).__name__} must override converse")

    async def start(self, context: GeneratorContext) -> None:
        """Stores the engine and prepares the tokenizer's chat template.

        Raises:
            ConfigError: the job names no tokenizer, or its chat template is unusable.
        """
        self._engine = context.engine
        self._chat = ChatTokens(context.tokenizer, context.options.get("apply_chat_template_kwargs"))

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        """Plays one episode and returns its record.

        Raises:
            EpisodeError: the engine failed, the input line is invalid, or ``converse`` raised it.
        """
        chat = Chat(episode, *self._engine_and_tokens())
        try:
            score = await self.converse(chat, episode.instance)
        except ReplyCutError:
            score = 0.0
        if not isinstance(score, Score):
            score = Score(reward=score)
        if not chat.generations:
            raise GeneratorError(f"{type(self).__name__} sampled no reply")
        finish_reason = chat.generations[-1].finish_reason
        outcome, stop_reason = _ENDINGS[finish_reason]
        success_entry = {} if score.success is None else {"success": score.success}
        return Trajectory(
            uid=episode.uid,
            instance_id=episode.instance.instance_id,
            messages=tuple(chat.messages),
            reward=score.reward,
            turn_rewards=score.turn_rewards,
            outcome=outcome,
            stop_reason=stop_reason,
            generations=chat.timer.with_environment_times(chat.generations),
            extra_info={
                "finish_reason": finish_reason,
                "output_tokens": sum(len(generation.output_ids) for generation in chat.generations),
                **success_entry,
                **({"reward_breakdown": {**success_entry, **score.parts}} if score.parts else {}),
            },
            timings_s=chat.timer.seconds(),
        )

    async def close(self) -> None:
        """Does nothing: the engine belongs to the runner. Override this to close what your ``start`` opened."""

    def _engine_and_tokens(self) -> tuple[Engine, ChatTokens]:
        if self._engine is None or self._chat is None:
            raise GeneratorError(f"{type(self).__name__} was not started")
        return self._engine, self._chat


class SingleTurnGenerator(MultiTurnGenerator):
    """One prompt, one reply, one reward: the template to copy.

    An input line looks like ``{"instance_id": "1", "prompt": [{"role": "user", "content": "..."}], ...}``; a ``prompt``
    that is a string becomes one user message. ``reward`` may use all other keys.

    A reply that was cut gets 0 without a call of ``reward``.
    """

    async def reward(self, instance: Instance, text: str) -> float | Score:
        """Returns the reward of the reply ``text`` to ``instance``. Override this.

        It runs on the event loop of all episodes: run a computation of more than a few milliseconds in
        ``await asyncio.to_thread(...)``, one that may never end in a process of its own.

        Raises:
            EpisodeError: the reward is unknown for a reason other than the policy; the attempt is retried.
        """
        raise NotImplementedError(f"{type(self).__name__} must override reward")

    def messages(self, instance: Instance) -> list[Message]:
        """Returns the prompt of an input line as messages. Override this to build other prompts.

        Raises:
            EnvironmentSetupError: the line has no valid prompt.
        """
        prompt = instance.data.get("prompt")
        if isinstance(prompt, str) and prompt:
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, Sequence) and prompt and all(_is_message(message) for message in prompt):
            return [dict(message) for message in prompt]
        raise EnvironmentSetupError(
            f"instance {instance.instance_id} needs a prompt: a string, or a list of messages with role and content"
        )

    async def converse(self, chat: Chat, instance: Instance) -> float | Score:
        """Samples one reply and returns its ``reward``."""
        text = await chat.sample(*self.messages(instance))
        with chat.timer.phase("reward"):
            return await self.reward(instance, text)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
