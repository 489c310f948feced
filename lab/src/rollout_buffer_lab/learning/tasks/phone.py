"""A task for a tiny policy that takes screenshots: it opens the clock, whose place on the home screen varies.

    user: Open the app Clock. [home screen]   assistant: click [500, 183]   user: [the app]   assistant: terminate

It is played by the Android World generator on simulated phones with a small screen, in either rollout mode. The prompt
is the generator's own; its fixed parts are single tokens of the policy, which makes it short. Only the screenshot
says where the app stands: without it one tap in six is right.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from rollout_buffer_lab.simulated_phone.apps.launcher import arrange_home
from rollout_buffer_lab.simulated_phone.device_state.packages import app_named
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone, SimulatedPhoneConfig
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Task, all_hold, rng_for
from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolKind
from slime_plugins.rollout_buffer.generator.android_world_generator import AndroidWorldGenerator
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    FIRST_TURN_TEMPLATE,
    HISTORY_TURN_TEMPLATE,
    IMAGE_MARKER,
    SYSTEM_PROMPT,
)

TASK_TYPE = "phone"
REWARD_RANGE = (0.0, 1.0)
MAX_NEW_TOKENS = 12
"""Longest reply: a tap is ten tokens."""
PATCH_SIZE = 8
"""Side of a vision patch in pixels; four patches are one image token."""
SCREEN_PIXELS = 54 * 120
"""A screenshot is a twentieth of the phone's screen in width and height: 24 image tokens."""
APPS = ("Settings", "Contacts", "Simple SMS Messenger", "Phone", "Clock", "Markor")
"""The apps on the home screen, each with another colour."""
WANTED = "Clock"
CELLS = tuple((x, y) for y in (183, 350) for x in (167, 500, 833))
"""The middles of the six apps on the home screen, in the agent's coordinates."""
RIGHT_AT_FIRST = 0.7
"""How often the scripted player taps the app that was asked for."""
WARM_UP = {"episodes": 400, "updates": 500, "batch": 24, "learning_rate": 1e-3, "rising": 20}
"""At a rate of 3e-3 some seeds never begin to look at the picture."""
PHONES = 32

_TASK_NAME = "OpenAppOnArrangedHome"
_OWN_REWARD = {"step_decay": 0.0, "thinking_bonus": 0.0, "premature_penalty": 0.0, "success_needs_ending": True}
"""1 for a successful episode that ends with success, else 0."""


def _job(mode: str) -> dict[str, Any]:
    settings = {"max_turns": 2, "image_pixels_per_token": (2 * PATCH_SIZE) ** 2, "reward": _OWN_REWARD}
    return {"android_world": {"rollout_mode": mode, **settings}}


MODES = {mode: _job(mode) for mode in ("incremental", "history")}

_CLICK = '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": ['
_CLICK_END = "]}}\n</tool_call>"
_TERMINATE = (
    '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "terminate", "status": "success"}}\n</tool_call>'
)


def _fixed_parts(template: str) -> list[str]:
    """Returns the texts of a template around its placeholders, which are the same in every prompt."""
    return [part for part in re.split(r"\{\w+\}|" + IMAGE_MARKER, template) if len(part) > 1]


PHRASES = tuple(
    dict.fromkeys(
        [
            SYSTEM_PROMPT,
            *_fixed_parts(FIRST_TURN_TEMPLATE),
            *_fixed_parts(HISTORY_TURN_TEMPLATE),
            _CLICK,
            _CLICK_END,
            _TERMINATE,
        ]
    )
)
"""Texts that are one token each."""


def _make_params(rng: random.Random) -> Params:
    return {"apps": rng.sample(APPS, len(APPS)), "app_name": WANTED}


def _set_up(state: DeviceState, params: Params, _rng: random.Random) -> None:
    arrange_home(state, params["apps"])


def _in_front(state: DeviceState, params: Params, _answer: str | None) -> float:
    app = app_named(params["app_name"])
    return all_hold(app is not None and state.focused_component == app.component)


OPEN_APP = Task(
    name=_TASK_NAME,
    step_budget=2,
    goal="Open the app {app_name}.",
    make_params=_make_params,
    set_up=_set_up,
    success=_in_front,
)


def make_phone(_options: Mapping[str, Any], _index: int) -> SimulatedPhone:
    """Returns a phone with a small screen and the task."""
    return SimulatedPhone(SimulatedPhoneConfig(screenshot_max_pixels=SCREEN_PIXELS, tasks={_TASK_NAME: OPEN_APP}))


def create_generator() -> AndroidWorldGenerator:
    """Returns the Android World generator on phones of its own, in threads of its process."""
    kind = f"rollout_buffer_lab.learning.tasks.phone:{make_phone.__name__}"
    settings = DevicePoolSettings(kind=kind, device_pool=PoolKind.LOCAL, num_workers=PHONES, boots_at_once=PHONES)
    return AndroidWorldGenerator(LocalDevicePool(settings))


def instances(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Returns that many input lines: home screens, and which app is asked for."""
    return [{"metadata": {"task_name": _TASK_NAME, "params_idx": rng.randrange(2**31)}} for _ in range(count)]


def scripted_reply(prompt: str, instance: Mapping[str, Any], rng: random.Random) -> str:
    """Returns the reply of a policy that taps the right app in seven of ten episodes and then terminates."""
    if _CLICK in prompt or "click [" in prompt:
        return _TERMINATE
    params = _make_params(rng_for(_TASK_NAME, instance["metadata"]["params_idx"]))
    right = params["apps"].index(params["app_name"])
    wrong = [cell for cell in range(len(CELLS)) if cell != right]
    x, y = CELLS[right if rng.random() < RIGHT_AT_FIRST else rng.choice(wrong)]
    return f"{_CLICK}{x}, {y}{_CLICK_END}"
