"""Moves of the phone policy: an action with its thought and conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Point = tuple[int, int]

BELIEF: Final = "That should do it."
"""Ends the conclusion of a decisive move. A policy with a flaw believes it, and considers the task done."""

LONG_PRESS_S: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One call of the ``mobile_use`` tool with its ``arguments``, the thought before it and the conclusion after it.

    Conclusions of earlier turns are the policy's only memory, so they hold all facts that it needs later.
    ``decisive`` marks a move that makes the task, or a part of it, succeed.
    """

    arguments: Mapping[str, Any]
    thought: str
    conclusion: str
    decisive: bool = field(default=False)

    @property
    def target(self) -> Point | None:
        """The point at which the move touches the screen; None if it does not."""
        point = self.arguments.get("coordinate")
        return None if point is None else (point[0], point[1])


def tap(point: Point, thought: str, conclusion: str, *, decisive: bool = False) -> Move:
    """Returns a short touch."""
    arguments = {"action": "click", "coordinate": list(point)}
    return Move(arguments=arguments, thought=thought, conclusion=_closed(conclusion, decisive), decisive=decisive)


def long_press(point: Point, thought: str, conclusion: str) -> Move:
    """Returns a long touch."""
    arguments = {"action": "long_press", "coordinate": list(point), "time": LONG_PRESS_S}
    return Move(arguments=arguments, thought=thought, conclusion=conclusion)


def swipe(start: Point, end: Point, thought: str, conclusion: str) -> Move:
    """Returns a swipe from ``start`` to ``end``."""
    arguments = {"action": "swipe", "coordinate": list(start), "coordinate2": list(end)}
    return Move(arguments=arguments, thought=thought, conclusion=conclusion)


def type_text(text: str, thought: str, conclusion: str) -> Move:
    """Returns the typing of a text into the field that has the focus."""
    return Move(arguments={"action": "type", "text": text}, thought=thought, conclusion=conclusion)


def press(button: str, thought: str, conclusion: str) -> Move:
    """Returns the press of a system button: Back, Home, Menu or Enter."""
    arguments = {"action": "system_button", "button": button}
    return Move(arguments=arguments, thought=thought, conclusion=conclusion)


def open_app(name: str, thought: str, conclusion: str, *, decisive: bool = False) -> Move:
    """Returns the start of an app."""
    arguments = {"action": "open", "text": name}
    return Move(arguments=arguments, thought=thought, conclusion=_closed(conclusion, decisive), decisive=decisive)


def answer(text: str, thought: str) -> Move:
    """Returns the answer to the user's question, which ends the task."""
    arguments = {"action": "answer", "text": text}
    return Move(arguments=arguments, thought=thought, conclusion="Answered the question.", decisive=True)


def terminate(thought: str) -> Move:
    """Returns the end of the task as done."""
    arguments = {"action": "terminate", "status": "success"}
    return Move(arguments=arguments, thought=thought, conclusion="The task is done.")


def give_up(thought: str) -> Move:
    """Returns the end of the task as failed."""
    arguments = {"action": "terminate", "status": "failure"}
    return Move(arguments=arguments, thought=thought, conclusion="Gave the task up.")


def _closed(conclusion: str, decisive: bool) -> str:
    return f"{conclusion} {BELIEF}" if decisive else conclusion
