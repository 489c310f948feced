"""Executes the actions as commands of an Android device, because the package's own actions differ from the tool's.

=============  =========================================================================================
action         what is executed, and how the package's ``JSONAction`` differs
=============  =========================================================================================
click          a tap
long_press     a swipe on one spot, of the requested duration (theirs: always one second)
swipe          a swipe between two points (theirs: directions only, left and right exchanged)
type           the words without an Enter (theirs: an Enter follows); untypeable characters are reported
system_button  Back, Home, Enter and Menu as keys (theirs: no Menu)
open           the whole name of an installed app, in any case (theirs: a prefix, so that another app opens)
wait           of the requested duration (theirs: always one second)
answer         stored for the score (theirs: also a message on the screen, whose quoting breaks the command)
terminate      nothing
=============  =========================================================================================
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Mapping
from functools import cached_property

from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton

_SWIPE_MS = 500
_LONG_PRESS_S = 1.0
_KEYS = {
    SystemButton.BACK: "KEYCODE_BACK",
    SystemButton.HOME: "KEYCODE_HOME",
    SystemButton.ENTER: "KEYCODE_ENTER",
    SystemButton.MENU: "KEYCODE_MENU",
}


class Gestures:
    """Executes actions on one connected device."""

    def __init__(self, package: AndroidWorldPackage) -> None:
        self._package = package

    def do(self, action: Action) -> str:
        """Executes the action; returns a note for the agent if part of it was impossible.

        Raises:
            DeviceError: the device refused a command.
        """
        match action.kind:
            case ActionKind.CLICK | ActionKind.LONG_PRESS | ActionKind.SWIPE:
                return self._touch(action)
            case ActionKind.TYPE:
                return self._type(action.text or "")
            case ActionKind.SYSTEM_BUTTON:
                if action.button is None:
                    return "No button was named."
                self._package.adb("shell", "input", "keyevent", _KEYS[action.button])
            case ActionKind.OPEN:
                return self._open(action.text or "")
            case ActionKind.WAIT:
                time.sleep(max(0.0, action.duration_s if action.duration_s is not None else 1.0))
            case ActionKind.ANSWER:
                self._package.env.interaction_cache = action.text or ""
            case ActionKind.TERMINATE:
                pass  # the episode ends elsewhere
        return ""

    def _touch(self, action: Action) -> str:
        if action.point is None:
            return "No point was named."
        x, y = action.point
        if action.kind is ActionKind.CLICK:
            self._package.adb("shell", "input", "tap", str(x), str(y))
            return ""
        if action.kind is ActionKind.LONG_PRESS:
            held_s = action.duration_s if action.duration_s is not None else _LONG_PRESS_S
            self._swipe((x, y), (x, y), round(1000 * held_s))
            return ""
        if action.end_point is None:
            return "No end of the swipe was named."
        self._swipe((x, y), action.end_point, _SWIPE_MS)
        return ""

    def _swipe(self, start: tuple[int, int], end: tuple[int, int], duration_ms: int) -> None:
        coordinates = map(str, (*start, *end))
        self._package.adb("shell", "input", "swipe", *coordinates, str(duration_ms))

    def _type(self, text: str) -> str:
        """Types a text word by word, and a line feed as Enter."""
        typed, refused = typeable(text)
        if typed:
            self._package.adb_utils.type_text(typed, self._package.env.controller)
        if refused:
            return f"These characters cannot be typed on this device and were left out: {' '.join(refused[:10])}"
        return ""

    def _open(self, name: str) -> str:
        apps = self._apps
        wanted = _plain(name)
        target = next((target for known, target in apps.items() if _plain(known) == wanted), None) if wanted else None
        if target is None:
            return f"There is no app called {name[:60]!r}. Installed: {', '.join(sorted(apps))}."
        self._start(target)
        return ""

    def _start(self, target: str) -> None:
        intent = ("-a", "android.intent.action.VIEW", "-d", target) if "://" in target else ("-n", target)
        self._package.adb("shell", "am", "start", "-W", *intent)

    @cached_property
    def _apps(self) -> Mapping[str, str]:
        return self._package.apps()


def _plain(name: str) -> str:
    """Returns a name without case, spaces and punctuation."""
    return "".join(character for character in name.casefold() if character.isalnum())


def typeable(text: str) -> tuple[str, list[str]]:
    """Returns the part of the text that adb can type, and the other characters, each once.

    adb types ASCII. An accented letter is typed without its accent, and is still returned as untypeable.
    """
    refused: dict[str, None] = {}
    typed = []
    for character in text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", " "):
        if character.isascii() and (character.isprintable() or character == "\n"):
            typed.append(character)
            continue
        refused[character] = None
        plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode("ascii")
        typed.append("".join(letter for letter in plain if letter.isprintable()))
    return "".join(typed), list(refused)
