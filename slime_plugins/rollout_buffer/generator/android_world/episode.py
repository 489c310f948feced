"""One Android World episode, append-only: observe, generate, act, until something ends it; then the reward.

    reset → first prompt ─▶ generate ─▶ parse ─▶ act ─▶ bridge with the next screenshot ─┐
                               ▲                                                        │
                               └────────────────────────────────────────────────────────┘

How it ends:

=======================================  ==================  ===========  ==========
what happened                            stop reason         outcome      reward
=======================================  ==================  ===========  ==========
the agent called ``terminate``           terminated          completed    see rewards
the agent called ``answer``              answered            completed    see rewards
the last turn is played                  max_turns           completed    0
a reply reached its own cap              max_tokens          truncated    0
prompt and replies fill the context      max_context         truncated    0
the agent sampled an image token         forbidden_token     truncated    0
the engine was told to give up           aborted             aborted      0
a device, engine or task set-up broke    an ``EpisodeError`` is raised: no trajectory, no reward
=======================================  ==================  ===========  ==========

A reply without a valid action is a turn like any other: the agent is shown the same screen and told what was wrong. An
image token in a reply would shift every later screenshot against its placeholder; it is forbidden at sampling, and if
it comes anyway the episode ends there, with what was sampled before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_plugins.rollout_buffer.engine import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import DeviceError, EngineError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.actions import (
    MalformedAction,
    ParsedAction,
    ParsedReply,
    parse_reply,
)
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.conversation import Conversation
from slime_plugins.rollout_buffer.generator.android_world.device import ActionKind, DeviceLease, Observation
from slime_plugins.rollout_buffer.generator.android_world.prompts import (
    first_turn_message,
    later_turn_message,
    malformed_reply_note,
    system_message,
)
from slime_plugins.rollout_buffer.generator.android_world.rewards import RewardBreakdown, episode_reward
from slime_plugins.rollout_buffer.generator.android_world.stopwatch import Stopwatch
from slime_plugins.rollout_buffer.generator.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.types import (
    EpisodeRequest,
    Instance,
    Outcome,
    SamplingParams,
    StopReason,
    Trajectory,
)

__all__ = ["IncrementalEpisode", "Task", "read_task"]

FALLBACK_MAX_TURNS = 30
"""The limit of turns when neither the settings nor the task have one."""

FORBIDDEN_LOGIT_BIAS = -100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Which task to set up: AndroidWorld's name for it, and which of its parameter variations."""

    name: str
    params_idx: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """Why the loop ended. ``by_agent`` is true when the agent itself said that it was done."""

    stop_reason: StopReason
    outcome: Outcome
    by_agent: bool = False


_TERMINATED = _Ending(stop_reason=StopReason.TERMINATED, outcome=Outcome.COMPLETED, by_agent=True)
_ANSWERED = _Ending(stop_reason=StopReason.ANSWERED, outcome=Outcome.COMPLETED, by_agent=True)
_OUT_OF_TURNS = _Ending(stop_reason=StopReason.MAX_TURNS, outcome=Outcome.COMPLETED)
_OUT_OF_TOKENS = _Ending(stop_reason=StopReason.MAX_TOKENS, outcome=Outcome.TRUNCATED)
_OUT_OF_CONTEXT = _Ending(stop_reason=StopReason.MAX_CONTEXT, outcome=Outcome.TRUNCATED)
_FORBIDDEN_TOKEN = _Ending(stop_reason=StopReason.FORBIDDEN_TOKEN, outcome=Outcome.TRUNCATED)
_ABORTED = _Ending(stop_reason=StopReason.ABORTED, outcome=Outcome.ABORTED)


def read_task(instance: Instance) -> Task:
    """Returns the task that an input line names in its ``metadata``.

    Raises:
        EnvironmentSetupError: the line has no ``metadata`` with a ``task_name`` and a whole ``params_idx``.
    """
    metadata = instance.data.get("metadata")
    name = metadata.get("task_name") if isinstance(metadata, Mapping) else None
    index = metadata.get("params_idx") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not isinstance(index, int) or isinstance(index, bool):
        raise EnvironmentSetupError(
            f"instance {instance.instance_id} needs metadata with a task_name and a whole params_idx"
        )
    return Task(name=name, params_idx=index)


class IncrementalEpisode:
    """One episode on a leased device. Made for a single ``play``."""

    def __init__(
        self,
        *,
        request: EpisodeRequest,
        task: Task,
        device: DeviceLease,
        engine: Engine,
        chat: ChatTokens,
        settings: AndroidWorldSettings,
        stopwatch: Stopwatch,
    ) -> None:
        self._request = request
        self._task = task
        self._device = device
        self._engine = engine
        self._chat = chat
        self._settings = settings
        self._stopwatch = stopwatch
        self._conversation = Conversation(
            chat, max_context_len=settings.max_context_len, image_tokens=settings.image_tokens
        )
        self._sampling_params = _without_vision_tokens(request.sampling_params, chat, settings)
        self._allowed_tokens = 0
        self._turns = 0
        self._malformed_turns = 0
        self._thinking_tokens: list[int] = []
        self._steps_log: list[dict[str, Any]] = []

    async def play(self) -> Trajectory:
        """Plays to the end and returns the record, under the request's uid.

        Raises:
            EpisodeError: the device, the engine or the task's set-up broke.
        """
        with self._stopwatch.phase("reset"):
            first = await self._device.reset(self._task.name, self._task.params_idx)
        max_turns = self._settings.max_turns or first.step_budget or FALLBACK_MAX_TURNS
        self._open(first)
        ending = await self._play_turns(first, max_turns)
        success = await self._read_success() if ending.by_agent else None
        breakdown = episode_reward(
            success=success,
            thinking_tokens=self._thinking_tokens,
            max_turns=max_turns,
            settings=self._settings.reward,
        )
        return self._trajectory(first, max_turns, ending, breakdown)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def _open(self, first: Observation) -> None:
        messages = [system_message(), first_turn_message(first.goal, first.screenshot.sha256)]
        self._conversation.open(messages, first.screenshot)

    async def _play_turns(self, observation: Observation, max_turns: int) -> _Ending:
        """Plays turn after turn until one of them ends the episode."""
        while self._turns < max_turns:
            reply = await self._generate()
            if reply is None:
                return _OUT_OF_CONTEXT
            text = self._conversation.add_reply(reply)
            cut = self._why_cut(reply)
            if cut is not None:
                return cut
            parsed = parse_reply(text, screen_width=observation.screen_width, screen_height=observation.screen_height)
            ending, observation = await self._act(parsed, observation)
            if ending is not None:
                return ending
            if self._turns < max_turns and not self._show(observation, max_turns):
                return _OUT_OF_CONTEXT
        return _OUT_OF_TURNS

    async def _generate(self) -> GenerateReply | None:
        """Samples the next turn within the room that is left; None when there is none."""
        room = self._conversation.room
        if room <= 0:
            return None
        self._turns += 1
        self._allowed_tokens = min(self._sampling_params.max_new_tokens, room)
        request = GenerateRequest(
            input_ids=tuple(self._conversation.held_ids),
            sampling_params=replace(self._sampling_params, max_new_tokens=self._allowed_tokens),
            session_id=self._request.uid,
            images=tuple(self._conversation.images),
        )
        with self._stopwatch.phase("generate"):
            reply = await self._engine.generate(request)
        if not reply.output_ids and reply.finish_reason == "stop":
            raise EngineError("the engine ended a turn without sampling a single token")
        return reply

    def _why_cut(self, reply: GenerateReply) -> _Ending | None:
        """Returns the ending of a reply that did not come to its own end."""
        if reply.finish_reason == "abort":
            return _ABORTED
        if self._conversation.has_forbidden_token(reply):
            return _FORBIDDEN_TOKEN
        if reply.finish_reason == "length":
            own_cap = self._allowed_tokens == self._sampling_params.max_new_tokens
            return _OUT_OF_TOKENS if own_cap else _OUT_OF_CONTEXT
        return None

    async def _act(self, parsed: ParsedReply, seen: Observation) -> tuple[_Ending | None, Observation]:
        """Does what the reply asks for; returns the ending if that ends the episode, and what there is to see now."""
        thinking_tokens = self._chat.count(parsed.thinking)
        if isinstance(parsed.action, MalformedAction):
            self._malformed_turns += 1
            after = replace(seen, note=malformed_reply_note(parsed.action.reason))
            self._log_step(seen, thinking_tokens, malformed=parsed.action.reason)
            return None, after
        self._thinking_tokens.append(thinking_tokens)
        ending, after = await self._do(parsed.action, seen)
        self._log_step(seen, thinking_tokens, note=after.note, **_described(parsed.action))
        return ending, after

    async def _do(self, parsed: ParsedAction, seen: Observation) -> tuple[_Ending | None, Observation]:
        """Carries the action to the device; ``terminate`` changes nothing there and stays here."""
        if parsed.action.kind is ActionKind.TERMINATE:
            return _TERMINATED, replace(seen, note="")
        with self._stopwatch.phase("act"):
            after = await self._device.step(parsed.action)
        return (_ANSWERED if parsed.action.kind is ActionKind.ANSWER else None), after

    def _show(self, observation: Observation, max_turns: int) -> bool:
        """Appends the next observation to the conversation; False when it no longer fits."""
        shown = observation.screenshot
        message = later_turn_message(self._turns + 1, max_turns, shown.sha256, observation.note)
        return self._conversation.add_observation(message, shown)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def _read_success(self) -> float:
        with self._stopwatch.phase("score"):
            success = await self._device.score()
        if not (math.isfinite(success) and 0 <= success <= 1):
            raise DeviceError(f"the device scored {success!r}, which is no success rate", {"task": self._task.name})
        return success

    def _log_step(self, seen: Observation, thinking_tokens: int, **facts: Any) -> None:
        """Notes what the agent saw and did; empty facts are left out."""
        entry = {"turn": self._turns, "screenshot": seen.screenshot.sha256, "thinking_tokens": thinking_tokens}
        self._steps_log.append(entry | {name: fact for name, fact in facts.items() if fact not in (None, "")})

    def _trajectory(
        self, first: Observation, max_turns: int, ending: _Ending, breakdown: RewardBreakdown
    ) -> Trajectory:
        return Trajectory(
            uid=self._request.uid,
            instance_id=self._request.instance.instance_id,
            messages=tuple(self._conversation.messages),
            reward=breakdown.reward,
            outcome=ending.outcome,
            stop_reason=ending.stop_reason,
            generations=tuple(self._conversation.generations),
            images=tuple(self._conversation.distinct_images()),
            extra_info=self._extra_info(first, max_turns, ending, breakdown),
            timings_s=self._stopwatch.seconds(),
        )

    def _extra_info(
        self, first: Observation, max_turns: int, ending: _Ending, breakdown: RewardBreakdown
    ) -> dict[str, Any]:
        generations = self._conversation.generations
        return {
            "task_name": self._task.name,
            "params_idx": self._task.params_idx,
            "app": first.details.get("app"),
            "goal": first.goal,
            "rollout_mode": str(self._settings.rollout_mode),
            "device_id": self._device.device_id,
            "screen": [first.screen_width, first.screen_height],
            "turns": self._turns,
            "max_turns": max_turns,
            "steps": breakdown.steps,
            "malformed_turns": self._malformed_turns,
            "thinking_tokens": sum(self._thinking_tokens),
            "success": breakdown.success is not None and breakdown.success >= 1,
            "stop_reason": str(ending.stop_reason),
            "finish_reason": generations[-1].finish_reason if generations else None,
            "reward_breakdown": breakdown.as_dict(),
            "steps_log": self._steps_log,
        }


def _described(parsed: ParsedAction) -> dict[str, Any]:
    """Returns an action as JSON: points in device pixels, and as the model gave them under ``coordinate``."""
    action = parsed.action
    return {
        "action": str(action.kind),
        "point": action.point,
        "end_point": action.end_point,
        "coordinate": parsed.coordinate,
        "coordinate2": parsed.coordinate2,
        "text": action.text,
        "button": None if action.button is None else str(action.button),
        "duration_s": action.duration_s,
        "status": action.status,
    }


def _without_vision_tokens(params: SamplingParams, chat: ChatTokens, settings: AndroidWorldSettings) -> SamplingParams:
    """Forbids the tokens that only the template may write, beside what the job's own bias says."""
    if not settings.ban_vision_tokens or not chat.vision_ids:
        return params
    forbidden = {str(token): FORBIDDEN_LOGIT_BIAS for token in sorted(chat.vision_ids)}
    bias = {**(params.extra.get("logit_bias") or {}), **forbidden}
    return replace(params, extra={**params.extra, "logit_bias": bias})
