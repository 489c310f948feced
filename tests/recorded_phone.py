"""A phone that shows recorded screens of the simulated one, whatever is done to it: episodes as long as one wants.

``create_device`` takes the place of the simulated phone through the setting ``device``. Its task never ends: a policy
that looks for something to switch on looks for it until its turns are used up. In the task named ``UNIQUE`` no two
screens are the same, as on a real phone with a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone, SimulatedPhoneConfig
from slime_plugins.rollout_buffer.devices.interface import Device, Observation
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.types import Image

ADDRESS = f"{__name__}:create_device"
REPEATED, UNIQUE = "Repeated", "Unique"
_ONE_AT_A_TIME = threading.Lock()
"""Without it every one of many phones that begin at once would draw the screens for itself."""
_APPS = ("Contacts", "Markor", "Clock", "Camera", "Files")


@cache
def _recorded() -> tuple[Observation, ...]:
    """One screen per app, made once per process."""
    # Small screens: what long episodes show does not depend on the size, and what they take of memory does.
    phone = SimulatedPhone(SimulatedPhoneConfig(screenshot_max_pixels=160_000))
    first = phone.reset("SystemWifiTurnOn", 1)
    return (first, *(phone.step(Action(kind=ActionKind.OPEN, text=app)) for app in _APPS))


class RecordedPhone:
    """A ``Device`` without a state: step k shows the k-th recorded screen."""

    def __init__(self) -> None:
        self._steps = 0
        self._stamp = ""

    def reset(self, task_name: str, params_idx: int) -> Observation:
        self._steps, self._stamp = 0, str(params_idx) if task_name == UNIQUE else ""
        return self._observe()

    def step(self, action: Action) -> Observation:
        self._steps += 1
        return self._observe()

    def score(self) -> float:
        return 0.0

    def health(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        """As ``Device.close``."""

    def _observe(self) -> Observation:
        with _ONE_AT_A_TIME:
            screens = _recorded()
        screen = screens[self._steps % len(screens)]
        if not self._stamp:
            return screen
        # Bytes after the end of a PNG change its hash and nothing that anybody sees.
        stamped = screen.screenshot.data + f"{self._stamp}/{self._steps}".encode()
        return replace(screen, screenshot=Image(data=stamped, media_type=screen.screenshot.media_type))


def create_device(settings: AndroidWorldSettings, index: int) -> Device[Action]:
    del settings, index
    return RecordedPhone()
