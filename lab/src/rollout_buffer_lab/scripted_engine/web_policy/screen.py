"""A web page as a prompt describes it: the elements in words, read back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollout_buffer_lab.scripted_engine.conversation import Conversation

_HEADING: Final = "On the screen, each with its box [left, top, right, bottom]:"
_LINE: Final = re.compile(r"^\d+\. (?P<about>.*) (?P<box>\[\d+, \d+, \d+, \d+\])$")
_FACT: Final = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\[(?:"(?:[^"\\]|\\.)*"(?:, )?)*\]|true|false)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One element: kind, attributes, and the box [left, top, right, bottom] from 0 to 999."""

    kind: str
    facts: Mapping[str, Any]
    focused: bool
    box: tuple[int, int, int, int]

    @property
    def text(self) -> str:
        """Its text; empty without one."""
        return str(self.facts.get("text", ""))

    @property
    def value(self) -> str | None:
        """What stands in a field; None where nothing can."""
        value = self.facts.get("value")
        return None if value is None else str(value)

    @property
    def checked(self) -> bool | None:
        """Whether it is ticked; None where it cannot be."""
        checked = self.facts.get("checked")
        return None if checked is None else bool(checked)

    @property
    def center(self) -> tuple[int, int]:
        """Where to touch it."""
        left, top, right, bottom = self.box
        return (left + right) // 2, (top + bottom) // 2

    def has_class(self, name: str) -> bool:
        """Whether it bears a class of the page's."""
        return name in str(self.facts.get("classes", "")).split()


@dataclass(frozen=True, slots=True)
class Screen:
    """What can be seen, in the order of the page."""

    elements: tuple[Element, ...]

    def of_kind(self, *kinds: str) -> list[Element]:
        """Elements of these kinds, in order."""
        return [element for element in self.elements if element.kind in kinds]

    def saying(self, text: str, *kinds: str) -> Element | None:
        """Returns the first element with exactly this text, case-insensitive."""
        wanted = text.strip().casefold()
        among = self.of_kind(*kinds) if kinds else self.elements
        exact = [element for element in among if element.text == text]
        return next(iter(exact), next((element for element in among if element.text.casefold() == wanted), None))

    def classed(self, name: str) -> list[Element]:
        """Elements with a class."""
        return [element for element in self.elements if element.has_class(name)]

    @property
    def fields(self) -> list[Element]:
        """Where text can be entered."""
        return [e for e in self.elements if e.value is not None and e.kind not in ("input button", "input submit")]


def read_screen(conversation: Conversation) -> Screen | None:
    """The page that the newest user turn describes; None if it describes none."""
    prompt = conversation.user_turns[-1].text if conversation.user_turns else ""
    _, found, listed = prompt.rpartition(_HEADING)
    if not found:
        return None
    lines = (_LINE.match(line) for line in listed.splitlines())
    return Screen(tuple(_element(line["about"], line["box"]) for line in lines if line))


def _element(about: str, box: str) -> Element:
    facts = {name: json.loads(value) for name, value in _FACT.findall(f" {about}")}
    left = _FACT.sub("", f" {about}").split()
    states = {"focused", "disabled"}
    kind = " ".join(word for word in left if word not in states)
    left_top_right_bottom = json.loads(box)
    return Element(kind=kind, facts=facts, focused="focused" in left, box=tuple(left_top_right_bottom))
