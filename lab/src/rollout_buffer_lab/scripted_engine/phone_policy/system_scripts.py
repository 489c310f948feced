"""Scripts for settings, apps, clipboard and clock."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from rollout_buffer_lab.scripted_engine.phone_policy.actions import (
    app_opened,
    button_tapped,
    field_filled,
    stepped_back,
    tapped_row,
)
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, open_app, tap
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import TaskScript
from rollout_buffer_lab.simulated_phone.screen_records import TextRole

SETTINGS_PAGES: Final = {"Wi-Fi": "Network & internet", "Bluetooth": "Connected devices"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches(TaskScript):
    """Turns switches on or off, in order. Their states are read from the status bar."""

    wanted: tuple[tuple[str, bool], ...]

    def next_move(self, observation: PolicyObservation) -> Move | None:
        screen = observation.screen
        is_on_now = {"Wi-Fi": screen.wifi_shown, "Bluetooth": screen.bluetooth_shown}
        pending = next(((name, is_on) for name, is_on in self.wanted if is_on_now[name] is not is_on), None)
        if pending is None:
            return None
        name, is_on = pending
        return app_opened(observation, "Settings") or self._flip(observation, name, "on" if is_on else "off")

    def _flip(self, observation: PolicyObservation, name: str, state: str) -> Move:
        switch = observation.screen.find_switch(name)
        if switch is not None:
            thought = f"The switch {name} is not {state} yet. I tap it."
            return tap(switch.center, thought, f"Switched {name} {state}.", decisive=True)
        if observation.screen.title == "Settings":
            return tapped_row(observation, SETTINGS_PAGES[name])
        return stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetBrightness(TaskScript):
    """Moves the slider to one of its ends."""

    to_maximum: bool

    def next_move(self, observation: PolicyObservation) -> Move | None:
        slider = observation.screen.find_slider("Brightness level")
        if slider is None:
            return app_opened(observation, "Settings") or self._towards_display(observation)
        is_at_end = slider.value > 0.98 if self.to_maximum else slider.value < 0.02
        if is_at_end:
            return None
        end, name = (slider.right_end, "right") if self.to_maximum else (slider.left_end, "left")
        thought = f"The brightness slider has to be at its {name} end. I tap there."
        return tap(end, thought, f"Moved the brightness slider to its {name} end.", decisive=True)

    def _towards_display(self, observation: PolicyObservation) -> Move:
        if observation.screen.title == "Settings":
            return tapped_row(observation, "Display")
        return stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenApp(TaskScript):
    """Brings an app to the front."""

    name: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        if app_opened(observation, self.name) is None:
            return None
        thought = f"The app {self.name} has to be in front. I open it."
        return open_app(self.name, thought, f"Opened the app {self.name}.", decisive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyText(TaskScript):
    """Puts a text on the clipboard."""

    words: ClassVar[tuple[str, ...]] = ("text",)
    text: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        done = "Copied the text to the clipboard."
        if observation.did(done):
            return None
        return (
            app_opened(observation, "Clipper")
            or field_filled(observation, "Text", self.text)
            or button_tapped(observation, "Copy", done, decisive=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer(TaskScript):
    """Enters a time of hours, minutes and seconds, key by key."""

    hours: int
    minutes: int
    seconds: int

    def next_move(self, observation: PolicyObservation) -> Move | None:
        if (opened := app_opened(observation, "Clock")) is not None:
            return opened
        entered = self._entered(observation)
        if observation.screen.title != "Timer" or entered is None:
            return button_tapped(observation, "Timer")
        wanted = f"{self.hours:02}{self.minutes:02}{self.seconds:02}".lstrip("0")
        if entered == wanted:
            return None
        if not wanted.startswith(entered):
            return button_tapped(observation, "Del")
        rest = wanted[len(entered) :]
        key = "00" if rest.startswith("00") else rest[0]
        return button_tapped(observation, key, decisive=key == rest)

    def _entered(self, observation: PolicyObservation) -> str | None:
        """Returns the digits on the display without leading zeros; None if it shows no time."""
        shown = (line.text for line in observation.screen.texts if line.role is TextRole.DISPLAY)
        match = re.search(r"(\d\d)h\s*(\d\d)m\s*(\d\d)s", " ".join(shown))
        return None if match is None else "".join(match.groups()).lstrip("0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopwatch(TaskScript):
    """Starts or pauses the stopwatch: taps ``button``; on success the page shows ``button_after``."""

    button: str
    button_after: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        if (opened := app_opened(observation, "Clock")) is not None:
            return opened
        if observation.screen.title != "Stopwatch":
            return button_tapped(observation, "Stopwatch")
        if observation.screen.find_button(self.button_after) is not None:
            return None
        return button_tapped(observation, self.button, decisive=True)
