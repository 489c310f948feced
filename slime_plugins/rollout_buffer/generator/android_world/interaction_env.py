"""slime's multi-turn environment interface over a leased device: reset, step, final reward, format, close.

It is for other rollout loops, which record tokens themselves. Actions, notes and rewards are those of the buffer's
episodes. Calls that wait for a device are coroutines: one event loop plays many environments.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from PIL import Image as PillowImage

from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.devices.leased_device import LeasedDevice
from slime_plugins.rollout_buffer.errors import EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    IMAGE_MARKER,
    first_turn_message,
    later_turn_message,
    system_message,
)
from slime_plugins.rollout_buffer.generator.gui_agent.task_runner import Task, TaskEnd, TaskRunner
from slime_plugins.rollout_buffer.generator.phase_timer import PhaseTimer
from slime_plugins.rollout_buffer.types import Message


class AndroidWorldEnv:
    """One task behind slime's environment interface. It acquires a device at ``reset`` and returns it at ``close``.

    An observation is ``{"task", "note", "step", "max_steps", "seen", "multi_modal_data": {"image": [PIL]}}``.
    """

    def __init__(
        self,
        *,
        task: Task,
        acquire: Callable[[], Awaitable[LeasedDevice]],
        settings: AndroidWorldSettings,
        count_tokens: Callable[[str], int],
    ) -> None:
        self._task = task
        self._acquire = acquire
        self._settings = settings
        self._count_tokens = count_tokens
        self._device: LeasedDevice | None = None
        self._runner: TaskRunner | None = None
        self._turns = 0
        self._ended_by_agent = False

    @property
    def system_message(self) -> Message:
        """The system message: the tool and how to call it."""
        return system_message()

    async def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sets the task up and returns the first observation and facts about the device.

        Raises:
            DeviceError, EnvironmentSetupError: there is no free device, or the task cannot be set up.
        """
        if self._device is None:
            self._device = await self._acquire()
        self._turns, self._ended_by_agent = 0, False
        self._runner = TaskRunner(
            task=self._task,
            device=self._device,
            rewards=self._settings.reward,
            max_turns=self._settings.max_turns,
            count_tokens=self._count_tokens,
            timer=PhaseTimer(),
        )
        first = await self._runner.reset()
        return self._observation(), {"device_id": self._device.device_id, **first.details}

    async def step(self, response_text: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
        """Executes a reply's action; returns the observation, whether the episode is over, and facts about the action.

        A reply without a valid action costs a turn and changes nothing; the note of its observation says why.

        Raises:
            DeviceError: the device failed; this is never a reward.
        """
        runner = self._task_runner()
        self._turns += 1
        end = await runner.act(runner.read(response_text), self._turns)
        self._ended_by_agent = end in (TaskEnd.TERMINATED, TaskEnd.ANSWERED)
        is_over = end is not None or self._turns >= runner.max_turns
        return self._observation(), is_over, {**runner.log[-1], "stop_reason": str(end) if end else None}

    async def compute_final_reward(self) -> float:
        """Returns the reward. Unless ``success_needs_ending`` is set, success counts however the episode ended.

        Raises:
            DeviceError: the device cannot be scored.
        """
        return (await self._task_runner().reward(ended_by_agent=self._ended_by_agent)).reward

    def format_observation(self, observation: Mapping[str, Any], is_initial: bool | None = None) -> Message:
        """Returns an observation as a user message; its image part holds the screenshot as a PIL image.

        By default the image stands at its marker's position in the text. With ``is_initial`` the message has the shape
        of slime's own environments: the image first, then the whole text with ``<image>`` in it.
        """
        seen: Observation = observation["seen"]
        step = int(observation["step"])
        if step == 1:
            message = first_turn_message(seen.goal, seen.screenshot.sha256)
        else:
            message = later_turn_message(step, int(observation["max_steps"]), seen.screenshot.sha256, seen.note)
        (picture,) = observation["multi_modal_data"]["image"]
        if is_initial is not None:
            texts = [part.get("text", IMAGE_MARKER) for part in message["content"]]
            parts = [{"type": "image", "image": picture}, {"type": "text", "text": "".join(texts)}]
            return {"role": "user", "content": parts}
        parts = [
            {"type": "image", "image": picture} if part["type"] == "image_url" else part for part in message["content"]
        ]
        return {"role": "user", "content": parts}

    def close(self) -> None:
        """Returns the device; a second call does nothing. Call it on the event loop that plays the episode."""
        device, self._device, self._runner = self._device, None, None
        if device is not None:
            device.give_back()

    def _task_runner(self) -> TaskRunner:
        if self._runner is None:
            raise EnvironmentSetupError("the environment was not reset")
        return self._runner

    def _observation(self) -> dict[str, Any]:
        runner = self._task_runner()
        newest = runner.observation
        picture = PillowImage.open(io.BytesIO(newest.screenshot.data))
        return {
            "task": newest.goal,
            "note": newest.note,
            "step": self._turns + 1,
            "max_steps": runner.max_turns,
            "seen": newest,
            "multi_modal_data": {"image": [picture]},
        }
