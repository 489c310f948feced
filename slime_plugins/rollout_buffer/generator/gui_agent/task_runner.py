"""Plays a task on a device: converts replies into actions, and actions into a reward. Samples nothing.

The buffer's episode loop and slime's environment interface both use it, so that equal replies give equal actions and
rewards in both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from slime_plugins.rollout_buffer.devices.interface import DeviceLease, Observation
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import malformed_reply_note
from slime_plugins.rollout_buffer.generator.gui_agent.reply_parser import (
    MalformedAction,
    ParsedAction,
    ParsedReply,
    parse_reply,
)
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer

FALLBACK_MAX_TURNS = 30
"""The limit of turns when neither the settings nor the task have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task: the environment's name for it, and the index of its parameter variation."""

    name: str
    params_idx: int


def task_of(metadata: object, *, instance_id: str) -> Task:
    """Returns the task in the ``metadata`` of an input line; ``instance_id`` names the line in the error.

    Raises:
        EnvironmentSetupError: there is no ``metadata`` with a ``task_name`` and an integer ``params_idx``.
    """
    name = metadata.get("task_name") if isinstance(metadata, Mapping) else None
    index = metadata.get("params_idx") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not isinstance(index, int) or isinstance(index, bool):
        raise EnvironmentSetupError(f"instance {instance_id} needs metadata with a task_name and an integer params_idx")
    return Task(name=name, params_idx=index)


class TaskEnd(StrEnum):
    """How a task ended before the limit of turns. Each is a ``StopReason``."""

    TERMINATED = "terminated"  # the agent called terminate
    ANSWERED = "answered"  # the agent gave its answer
    TASK_ENDED = "task_ended"  # the task ended by itself


class RewardBreakdown(Protocol):
    """A reward and its parts."""

    @property
    def reward(self) -> float: ...

    @property
    def success(self) -> float | None:
        """The score: success from 1 on; None if no score was read."""
        ...

    @property
    def steps(self) -> int:
        """Number of actions."""
        ...

    def as_dict(self) -> Mapping[str, float | int | None]:
        """Returns the fields as JSON has them."""
        ...


class RewardRule(Protocol):
    """The reward of an episode. ``score_range`` is the range of its devices' scores; any other score is a device
    error."""

    score_range: ClassVar[tuple[float, float]]

    def needs_device_score(self, *, ended_by_agent: bool) -> bool:
        """Returns True if the reward of an episode that ended in this way depends on the device's score."""
        ...

    def earned(
        self, *, score: float | None, ended_by_agent: bool, thinking_tokens: Sequence[int], max_turns: int
    ) -> RewardBreakdown:
        """Returns the reward; ``score`` is None if the device was not scored.

        ``thinking_tokens`` has one entry per action taken: the tokens inside the thinking tags of that reply.
        """
        ...


class TaskRunner:
    """One task on one leased device, from reset to reward.

    ``count_tokens`` counts the tokens of a text, for the thinking bonus. ``max_turns`` overrides the task's own limit
    of steps.
    """

    def __init__(
        self,
        *,
        task: Task,
        device: DeviceLease[Action],
        rewards: RewardRule,
        max_turns: int | None,
        count_tokens: Callable[[str], int],
        timer: PhaseTimer,
    ) -> None:
        self._task = task
        self._device = device
        self._rewards = rewards
        self._wanted_max_turns = max_turns
        self._count_tokens = count_tokens
        self._timer = timer
        self._thinking_tokens: list[int] = []
        self._observation: Observation | None = None
        self.max_turns = max_turns or FALLBACK_MAX_TURNS
        self.malformed_turns = 0
        self.corrected_turns = 0
        self.log: list[dict[str, Any]] = []

    @property
    def observation(self) -> Observation:
        """The newest observation; after a reply without a valid action its note says why."""
        if self._observation is None:
            raise EnvironmentSetupError("the task was not set up: call reset first")
        return self._observation

    @property
    def thinking_tokens(self) -> int:
        """Tokens inside the thinking tags of all actions."""
        return sum(self._thinking_tokens)

    async def reset(self) -> Observation:
        """Sets the task up and returns the first observation.

        Raises:
            DeviceError, EnvironmentSetupError: the task cannot be set up.
        """
        with self._timer.phase("reset"):
            self._observation = await self._device.reset(self._task.name, self._task.params_idx)
        self.max_turns = self._wanted_max_turns or self._observation.step_budget or FALLBACK_MAX_TURNS
        return self._observation

    def read(self, text: str) -> ParsedReply:
        """Returns the parsed reply; accepts any text."""
        width, height = self.observation.screen_width, self.observation.screen_height
        return parse_reply(text, screen_width=width, screen_height=height)

    async def act(self, reply: ParsedReply, turn: int) -> TaskEnd | None:
        """Executes the reply of turn ``turn``; returns how it ended the task, None if the task continues.

        Raises:
            DeviceError: the device failed.
        """
        before, tokens = self.observation, self._count_tokens(reply.thinking)
        if isinstance(reply.action, MalformedAction):
            self.malformed_turns += 1
            self._observation = replace(before, note=malformed_reply_note(reply.action.reason))
            self._log(turn, before, tokens, malformed=reply.action.reason)
            return None
        self._thinking_tokens.append(tokens)
        self.corrected_turns += bool(reply.action.corrected)
        end, self._observation = await self._do(reply.action, before)
        self._log(turn, before, tokens, note=self._observation.note, **_described(reply.action))
        return end

    def repeats(self) -> int:
        """Returns how many times in a row, up to now, the newest action was executed on a screen with equal pixels.

        After a reply without a valid action it is 0.
        """
        others = {"turn", "thinking_tokens", "note", "corrected"}
        actions = [{name: fact for name, fact in entry.items() if name not in others} for entry in self.log]
        if not actions or "malformed" in actions[-1]:
            return 0
        return sum(1 for _ in itertools.takewhile(lambda entry: entry == actions[-1], reversed(actions)))

    async def reward(self, *, ended_by_agent: bool, given_up: bool = False) -> RewardBreakdown:
        """Returns the reward; the device is scored if the rule needs its score and the episode was not ``given_up``.

        Raises:
            DeviceError: the device cannot be scored, or its score is out of range.
        """
        needs_score = not given_up and self._rewards.needs_device_score(ended_by_agent=ended_by_agent)
        return self._rewards.earned(
            score=await self._read_score() if needs_score else None,
            ended_by_agent=ended_by_agent,
            thinking_tokens=self._thinking_tokens,
            max_turns=self.max_turns,
        )

    async def _do(self, parsed: ParsedAction, before: Observation) -> tuple[TaskEnd | None, Observation]:
        """Executes the action on the device; ``terminate`` is not sent to the device."""
        if parsed.action.kind is ActionKind.TERMINATE:
            return TaskEnd.TERMINATED, replace(before, note="")
        with self._timer.phase("act"):
            after = await self._device.step(parsed.action)
        if parsed.action.kind is ActionKind.ANSWER:
            return TaskEnd.ANSWERED, after
        return (TaskEnd.TASK_ENDED if after.done else None), after

    async def _read_score(self) -> float:
        with self._timer.phase("score"):
            score = await self._device.score()
        low, high = self._rewards.score_range
        if not (math.isfinite(score) and low <= score <= high):
            raise DeviceError(
                f"the device scored {score!r}, which is not from {low:g} to {high:g}", {"task": self._task.name}
            )
        return score

    def _log(self, turn: int, before: Observation, thinking_tokens: int, **facts: Any) -> None:
        """Logs a turn's action and the observation before it; empty facts are left out."""
        entry = {"turn": turn, "screenshot": before.screenshot.sha256, "thinking_tokens": thinking_tokens}
        self.log.append(entry | {name: fact for name, fact in facts.items() if fact not in (None, "")})


def _described(parsed: ParsedAction) -> dict[str, Any]:
    """Returns an action for JSON, with points in device pixels, and as ``coordinate`` in the model's space."""
    action = parsed.action
    return {
        "action": str(action.kind),
        "point": action.point,
        "end_point": action.end_point,
        "coordinate": parsed.coordinate,
        "coordinate2": parsed.coordinate2,
        "corrected": parsed.corrected,
        "text": action.text,
        "button": None if action.button is None else str(action.button),
        "duration_s": action.duration_s,
        "status": action.status,
    }
