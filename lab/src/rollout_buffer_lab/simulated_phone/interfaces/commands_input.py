"""``input``: touches, swipes, text and keys. ``uiautomator``: the screen's elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rollout_buffer_lab.simulated_phone.interfaces.accessibility import hierarchy_of
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import ACTION_S, EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.shell_language import Command, Output, commands_of, failed, printed
from rollout_buffer_lab.simulated_phone.user_interface import UserInterface
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import SystemButton

_LONG_TOUCH_MS = 400
_DEFAULT_SWIPE_MS = 300
_KEYS = {
    "3": "HOME",
    "4": "BACK",
    "29": "A",
    "62": "SPACE",
    "66": "ENTER",
    "67": "DEL",
    "82": "MENU",
    "113": "CTRL_LEFT",
    "187": "APP_SWITCH",
}
_BUTTONS = {
    "HOME": SystemButton.HOME,
    "BACK": SystemButton.BACK,
    "ENTER": SystemButton.ENTER,
    "MENU": SystemButton.MENU,
}


def input_commands(phone: EmulatorState) -> Mapping[str, Command]:
    """Returns the commands of this file by name."""
    return commands_of(phone, {"input": _input, "uiautomator": _uiautomator})


def press_key(ui: UserInterface, name: str) -> None:
    """Presses the key with this name (``KEYCODE_`` may be left out) or number; unknown keys do nothing."""
    name = _KEYS.get(name, name).removeprefix("KEYCODE_")
    if name in _BUTTONS:
        ui.press(_BUTTONS[name])
    elif name == "DEL":
        ui.erase()
    elif name == "SPACE":
        ui.type_text(" ")
    elif len(name) == 1 and name.isalnum():
        ui.type_text(name.lower())


def _input(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    words = [word for word in arguments if word not in ("touchscreen", "keyboard", "")]
    verbs: Mapping[str, Callable[[UserInterface, Sequence[str]], None]] = {
        "tap": _tap,
        "swipe": _swipe,
        "draganddrop": _swipe,
        "text": _text,
        "keyevent": _keyevent,
        "keycombination": _keycombination,
    }
    verb = verbs.get(words[0] if words else "")
    if verb is None:
        return failed(f"Error: Unknown command: {' '.join(words[:1])}", 255)
    try:
        verb(phone.ui, words[1:])
    except (ValueError, IndexError, OverflowError):
        return failed(f"Error: Invalid arguments for command: {words[0]}", 255)
    phone.state.clock.advance(ACTION_S)
    return printed()


def _uiautomator(phone: EmulatorState, arguments: Sequence[str]) -> Output:
    """Writes the screen as XML; refuses while it moves. As on Android the exit code is 0 in any case."""
    if phone.never_idle or phone.ui.is_moving:
        return printed("ERROR: could not get idle state.\n")
    path = arguments[1] if len(arguments) > 1 else "/sdcard/window_dump.xml"
    phone.state.files.write(path, hierarchy_of(phone.ui.screen(), phone.ui.front.package))
    return printed(f"UI hierchary dumped to: {path}\n")  # Android's spelling


def _tap(ui: UserInterface, words: Sequence[str]) -> None:
    x, y = _pixels(words[:2])
    ui.tap(x, y)


def _swipe(ui: UserInterface, words: Sequence[str]) -> None:
    x, y, end_x, end_y = _pixels(words[:4])
    duration_ms = int(words[4]) if len(words) > 4 else _DEFAULT_SWIPE_MS
    if (x, y) == (end_x, end_y) and duration_ms >= _LONG_TOUCH_MS:
        ui.long_press(x, y, duration_ms / 1000)
    else:
        ui.swipe(x, y, end_x, end_y)


def _pixels(words: Sequence[str]) -> list[int]:
    return [int(float(word)) for word in words]


def _text(ui: UserInterface, words: Sequence[str]) -> None:
    """Types a text, in which ``%s`` is a blank."""
    ui.type_text(words[0].replace("%s", " "))


def _keyevent(ui: UserInterface, words: Sequence[str]) -> None:
    for word in words:
        if not word.startswith("--"):
            press_key(ui, word)


def _keycombination(ui: UserInterface, words: Sequence[str]) -> None:
    """Handles Ctrl+A, which selects all; other combinations do nothing."""
    if [_KEYS.get(word, word).removeprefix("KEYCODE_") for word in words] == ["CTRL_LEFT", "A"]:
        ui.select_all()
