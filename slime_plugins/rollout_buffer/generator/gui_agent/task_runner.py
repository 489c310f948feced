"""A task being played on a device: replies become actions, actions become a reward. Knows no tokens and no engine.

The episode loop of the buffer and slime's environment interface both stand on it, so that the same words do the same
things and earn the same in either.
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
    """Which task to set up: the environment's name for it, and which of its parameter variations."""

    name: str
    params_idx: int


def task_of(metadata: object, *, of: str) -> Task:
    """Returns the task that the ``metadata`` of an input line names; ``of`` names the line in the error.

    Raises:
        EnvironmentSetupError: there is no ``metadata`` with a ``task_name`` and a whole ``params_idx``.
    """
    name = metadata.get("task_name") if isinstance(metadata, Mapping) else None
    index = metadata.get("params_idx") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not isinstance(index, int) or isinstance(index, bool):
        raise EnvironmentSetupError(f"instance {of} needs metadata with a task_name and a whole params_idx")
    return Task(name=name, params_idx=index)


class TaskEnd(StrEnum):
    """How the task came to its end before the turns did."""

    TERMINATED = "terminated"  # the agent called terminate
    ANSWERED = "answered"  # the agent gave its answer
    TASK_ENDED = "task_ended"  # the task said that it is over


class RewardBreakdown(Protocol):
    """A reward and what it is made of."""

    @property
    def reward(self) -> float: ...

    @property
    def success(self) -> float | None:
        """1 or more is success; None where nobody asked."""
        ...

    @property
    def steps(self) -> int:
        """How many actions were taken."""
        ...

    def as_dict(self) -> Mapping[str, float | int | None]:
        """Returns the fields as JSON has them."""
        ...


class RewardRule(Protocol):
    """What an episode earns. ``score_range`` is what its devices may score; anything else is a broken device."""

    score_range: ClassVar[tuple[float, float]]

    def asks_device(self, *, ended_by_agent: bool) -> bool:
        """Returns whether the device's score counts for an episode that ended so."""
        ...

    def earned(
        self, *, score: float | None, ended_by_agent: bool, thinking_tokens: Sequence[int], max_turns: int
    ) -> RewardBreakdown:
        """Returns the reward; ``score`` is None where the device was not asked.

        ``thinking_tokens`` has one entry per action taken: the tokens inside the thinking tags of that reply.
        """
        ...


class TaskRunner:
    """One task on one leased device, from reset to reward. ``seen`` is what there is to see now.

    ``count_tokens`` counts the tokens of a text: the thinking bonus is about tokens. ``max_turns`` overrides the task's
    own step budget.
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
        self._seen: Observation | None = None
        self.max_turns = max_turns or FALLBACK_MAX_TURNS
        self.malformed_turns = 0
        self.log: list[dict[str, Any]] = []

    @property
    def seen(self) -> Observation:
        """The newest observation; its note says what went wrong with the last reply."""
        if self._seen is None:
            raise EnvironmentSetupError("the task was not set up: reset comes first")
        return self._seen

    @property
    def thinking_tokens(self) -> int:
        """The tokens inside the thinking tags of all actions taken."""
        return sum(self._thinking_tokens)

    async def reset(self) -> Observation:
        """Sets the task up and returns the first look at it.

        Raises:
            DeviceError, EnvironmentSetupError: it cannot be set up.
        """
        with self._timer.phase("reset"):
            self._seen = await self._device.reset(self._task.name, self._task.params_idx)
        self.max_turns = self._wanted_max_turns or self._seen.step_budget or FALLBACK_MAX_TURNS
        return self._seen

    def read(self, text: str) -> ParsedReply:
        """Returns a reply in its parts; any text whatever gives one."""
        return parse_reply(text, screen_width=self.seen.screen_width, screen_height=self.seen.screen_height)

    async def act(self, reply: ParsedReply, turn: int) -> TaskEnd | None:
        """Does what the reply to turn ``turn`` asks for; returns how that ended the task, None if it goes on.

        Raises:
            DeviceError: the device broke.
        """
        seen, tokens = self.seen, self._count_tokens(reply.thinking)
        if isinstance(reply.action, MalformedAction):
            self.malformed_turns += 1
            self._seen = replace(seen, note=malformed_reply_note(reply.action.reason))
            self._log(turn, seen, tokens, malformed=reply.action.reason)
            return None
        self._thinking_tokens.append(tokens)
        done, self._seen = await self._do(reply.action, seen)
        self._log(turn, seen, tokens, note=self._seen.note, **_described(reply.action))
        return done

    def repeats(self) -> int:
        """Counts how many times in a row the newest action was done, each time at the same screen, pixel by pixel.

        0 after a reply without a valid action: it did nothing.
        """
        done = [_without(entry, "turn", "thinking_tokens", "note") for entry in self.log]
        if not done or "malformed" in done[-1]:
            return 0
        return sum(1 for _ in itertools.takewhile(lambda entry: entry == done[-1], reversed(done)))

    async def reward(self, *, ended_by_agent: bool, given_up: bool = False) -> RewardBreakdown:
        """Returns what was earned; the device is asked for its score, unless the episode was ``given_up``.

        Raises:
            DeviceError: the device cannot tell, or tells what its tasks never score.
        """
        counts = not given_up and self._rewards.asks_device(ended_by_agent=ended_by_agent)
        return self._rewards.earned(
            score=await self._read_score() if counts else None,
            ended_by_agent=ended_by_agent,
            thinking_tokens=self._thinking_tokens,
            max_turns=self.max_turns,
        )

    async def _do(self, parsed: ParsedAction, seen: Observation) -> tuple[TaskEnd | None, Observation]:
        """Carries the action to the device; ``terminate`` changes nothing there and stays here."""
        if parsed.action.kind is ActionKind.TERMINATE:
            return TaskEnd.TERMINATED, replace(seen, note="")
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

    def _log(self, turn: int, seen: Observation, thinking_tokens: int, **facts: Any) -> None:
        """Notes what the agent saw and did; empty facts are left out."""
        entry = {"turn": turn, "screenshot": seen.screenshot.sha256, "thinking_tokens": thinking_tokens}
        self.log.append(entry | {name: fact for name, fact in facts.items() if fact not in (None, "")})


def _without(entry: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: fact for name, fact in entry.items() if name not in names}


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
