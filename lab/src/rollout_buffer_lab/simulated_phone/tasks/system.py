"""Tasks about settings, opening apps, the clock and the clipboard."""

from __future__ import annotations

import random

from rollout_buffer_lab.simulated_phone.apps.clock import STOPWATCH_PAUSED, STOPWATCH_RUNNING, timer_digits
from rollout_buffer_lab.simulated_phone.device_state.packages import app_named
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Success, Task, all_hold, same_text
from rollout_buffer_lab.simulated_phone.tasks.words import address, sentence

_CLOCK_PACKAGE = "com.google.android.deskclock"
_APPS_TO_OPEN = ("Camera", "Clock", "Contacts", "Settings", "Phone")


def _global_setting_is(key: str, value: str) -> Success:
    return lambda state, params, answer: all_hold(state.settings.get("global", key) == value)


def _toggle(name: str, thing: str, key: str, wanted: str) -> Task:
    """Returns a task to switch one thing on or off; at the start it is the other way round."""

    def set_up(state: DeviceState, params: Params, rng: random.Random) -> None:
        state.settings.put("global", key, "0" if wanted == "1" else "1")

    word = "on" if wanted == "1" else "off"
    return Task(
        name=name,
        step_budget=10,
        goal=f"Switch {thing} {word}.",
        make_params=lambda rng: {"on_or_off": word},
        set_up=set_up,
        success=_global_setting_is(key, wanted),
    )


def _brightness(name: str, word: str, value: str) -> Task:
    def set_up(state: DeviceState, params: Params, rng: random.Random) -> None:
        state.settings.put("system", "screen_brightness", str(rng.randint(40, 200)))

    return Task(
        name=name,
        step_budget=10,
        goal=f"Set the screen brightness to its {word} value.",
        make_params=lambda rng: {"max_or_min": word[:3]},
        set_up=set_up,
        success=lambda state, params, answer: all_hold(state.settings.get("system", "screen_brightness") == value),
    )


def _wifi_on_bluetooth_off(state: DeviceState, params: Params, rng: random.Random) -> None:
    state.settings.put("global", "wifi_on", "1")
    state.settings.put("global", "bluetooth_on", "0")


def _wifi_off(state: DeviceState, params: Params, rng: random.Random) -> None:
    state.settings.put("global", "wifi_on", "0")


def _in_front(state: DeviceState, app_name: str) -> bool:
    app = app_named(app_name)
    return app is not None and state.focused_component == app.component


def _draw_app(rng: random.Random) -> Params:
    return {"app_name": rng.choice(_APPS_TO_OPEN)}


def _draw_timer(rng: random.Random) -> Params:
    return {"hours": rng.randint(0, 23), "minutes": rng.randint(0, 59), "seconds": rng.randint(1, 59)}


def _timer_entered(state: DeviceState, params: Params, answer: str | None) -> float:
    preferences = state.preferences_of(_CLOCK_PACKAGE)
    wanted = f"{params['hours']:02}{params['minutes']:02}{params['seconds']:02}"
    return all_hold(
        _in_front(state, "Clock"),
        preferences.get("tab") == "Timer",
        preferences.get("timer_running") != "1",
        timer_digits(preferences) == wanted,
    )


def _stopwatch_is(wanted: str) -> Success:
    def success(state: DeviceState, params: Params, answer: str | None) -> float:
        preferences = state.preferences_of(_CLOCK_PACKAGE)
        shown = _in_front(state, "Clock") and preferences.get("tab") == "Stopwatch"
        return all_hold(shown, preferences.get("stopwatch_state") == wanted)

    return success


def _run_stopwatch(state: DeviceState, params: Params, rng: random.Random) -> None:
    state.preferences_of(_CLOCK_PACKAGE).update(
        stopwatch_state=STOPWATCH_RUNNING, stopwatch_since_s="0.0", stopwatch_elapsed_s=f"{rng.uniform(3, 300):.2f}"
    )


SYSTEM_TASKS = (
    _toggle("SystemWifiTurnOn", "Wi-Fi", "wifi_on", "1"),
    _toggle("SystemWifiTurnOff", "Wi-Fi", "wifi_on", "0"),
    _toggle("SystemBluetoothTurnOn", "Bluetooth", "bluetooth_on", "1"),
    _toggle("SystemBluetoothTurnOff", "Bluetooth", "bluetooth_on", "0"),
    _brightness("SystemBrightnessMax", "maximum", "255"),
    _brightness("SystemBrightnessMin", "minimum", "1"),
    Task(
        name="TurnOffWifiAndTurnOnBluetooth",
        step_budget=20,
        goal="Switch Wi-Fi off, then switch Bluetooth on.",
        set_up=_wifi_on_bluetooth_off,
        success=lambda state, params, answer: all_hold(
            not state.settings.is_on("global", "wifi_on"), state.settings.is_on("global", "bluetooth_on")
        ),
    ),
    Task(
        name="TurnOnWifiAndOpenApp",
        step_budget=20,
        goal="Switch Wi-Fi on, then open the app {app_name}.",
        make_params=_draw_app,
        set_up=_wifi_off,
        success=lambda state, params, answer: all_hold(
            state.settings.is_on("global", "wifi_on"), _in_front(state, params["app_name"])
        ),
    ),
    Task(
        name="OpenAppTaskEval",
        step_budget=10,
        goal="Open the app {app_name}. Clear any pop-ups that may appear.",
        make_params=_draw_app,
        success=lambda state, params, answer: all_hold(_in_front(state, params["app_name"])),
    ),
    Task(
        name="SystemCopyToClipboard",
        step_budget=10,
        goal="With the app Clipper, put this text on the clipboard: {clipboard_content}",
        make_params=lambda rng: {"clipboard_content": rng.choice((sentence, address))(rng)},
        success=lambda state, params, answer: all_hold(same_text(state.clipboard, params["clipboard_content"])),
    ),
    Task(
        name="ClockTimerEntry",
        step_budget=10,
        goal=(
            "Set up a timer of {hours} hours, {minutes} minutes and {seconds} seconds in the Clock app, "
            "but do not start it."
        ),
        make_params=_draw_timer,
        success=_timer_entered,
    ),
    Task(
        name="ClockStopWatchRunning",
        step_budget=10,
        goal="Start the stopwatch.",
        success=_stopwatch_is(STOPWATCH_RUNNING),
    ),
    Task(
        name="ClockStopWatchPausedVerify",
        step_budget=10,
        goal="Pause the stopwatch.",
        set_up=_run_stopwatch,
        success=_stopwatch_is(STOPWATCH_PAUSED),
    ),
)
