"""A policy for tests that knows how the simulated phone's tasks are done: its replies are texts, as a model's are."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone
from rollout_buffer_lab.simulated_phone.tasks.base import rng_for
from rollout_buffer_lab.simulated_phone.tasks.registry import TASKS
from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.engine.base import GenerateRequest
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action
from tests.simulated_phone_player import SOLUTIONS, Player

WIDTH, HEIGHT = 1080, 2400


class _RecordingPhone(SimulatedPhone):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[Action] = []

    def step(self, action: Action) -> Observation:
        self.done.append(action)
        return super().step(action)


@cache
def expert_replies(task_name: str, params_idx: int) -> tuple[str, ...]:
    """What an expert says, turn by turn, from the first screen of a task to its end."""
    phone = _RecordingPhone()
    player = Player(phone, phone.reset(task_name, params_idx))
    SOLUTIONS[task_name](player, TASKS[task_name].make_params(rng_for(task_name, params_idx)))
    said = [say(**model_arguments(action)) for action in phone.done]
    return (*said, say(action="terminate", status="success"))


def say(thinking: str = "The next step is clear.", **arguments: Any) -> str:
    """A reply in the form that the prompt asks for."""
    call = json.dumps({"name": "mobile_use", "arguments": arguments}, ensure_ascii=False)
    return (
        f"<thinking>\n{thinking}\n</thinking>\n<tool_call>\n{call}\n</tool_call>\n"
        f"<conclusion>\nDid {arguments.get('action')}.\n</conclusion>"
    )


def turn_of(request: GenerateRequest) -> int:
    """Which turn of its episode a request asks for, from 0: each turn adds one screenshot."""
    return len(request.images) - 1


def model_arguments(action: Action) -> dict[str, Any]:
    """The action as arguments of the tool, points in 0..999."""
    fields = {
        "action": str(action.kind),
        "coordinate": _model_point(action.point),
        "coordinate2": _model_point(action.end_point),
        "text": action.text,
        "button": action.button and str(action.button),
        "time": action.duration_s,
        "status": action.status,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _model_point(point: tuple[int, int] | None) -> list[float] | None:
    return None if point is None else [point[0] / (WIDTH - 1) * 999, point[1] / (HEIGHT - 1) * 999]
