"""The actions of the ``mobile_use`` tool, in device pixels, for all screen agents.

A new action also needs a description in ``mobile_use``, a reader in ``reply_parser``, and an implementation in each
kind of device (``emulator/gestures``, ``miniwob/device``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    CLICK = "click"
    LONG_PRESS = "long_press"
    SWIPE = "swipe"
    TYPE = "type"
    ANSWER = "answer"
    SYSTEM_BUTTON = "system_button"
    OPEN = "open"
    WAIT = "wait"
    TERMINATE = "terminate"


class SystemButton(StrEnum):
    BACK = "Back"
    HOME = "Home"
    MENU = "Menu"
    ENTER = "Enter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One validated action in device pixels. Fields that the kind does not use are None."""

    kind: ActionKind
    point: tuple[int, int] | None = None
    end_point: tuple[int, int] | None = None
    text: str | None = None
    button: SystemButton | None = None
    duration_s: float | None = None
    status: str | None = None
