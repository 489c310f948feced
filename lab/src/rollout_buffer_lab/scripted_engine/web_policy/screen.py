"""Reads a web page from the prompt that describes its elements in words."""

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
        """The text of a field; None for elements that are no field."""
        value = self.facts.get("value")
        return None if value is None else str(value)

    @property
    def checked(self) -> bool | None:
        """True if it is ticked; None for elements that cannot be."""
        checked = self.facts.get("checked")
        return None if checked is None else bool(checked)

    @property
    def center(self) -> tuple[int, int]:
        """The point to tap."""
        left, top, right, bottom = self.box
        return (left + right) // 2, (top + bottom) // 2

    def has_class(self, name: str) -> bool:
        """Returns True if the element has the CSS class ``name``."""
        return name in str(self.facts.get("classes", "")).split()


@dataclass(frozen=True, slots=True)
class Screen:
    """The elements that the prompt describes, in the order of the page."""

    elements: tuple[Element, ...]

    def of_kind(self, *kinds: str) -> list[Element]:
        """Returns the elements of these kinds, in order."""
        return [element for element in self.elements if element.kind in kinds]

    def saying(self, text: str, *kinds: str) -> Element | None:
        """Returns the first element with exactly this text, or if there is none the first with it in another case."""
        wanted = text.strip().casefold()
        candidates = self.of_kind(*kinds) if kinds else self.elements
        exact = [element for element in candidates if element.text == text]
        return next(iter(exact), next((element for element in candidates if element.text.casefold() == wanted), None))

    def classed(self, name: str) -> list[Element]:
        """Returns the elements with the CSS class ``name``."""
        return [element for element in self.elements if element.has_class(name)]

    @property
    def fields(self) -> list[Element]:
        """The elements that text can be entered into."""
        return [e for e in self.elements if e.value is not None and e.kind not in ("input button", "input submit")]


def read_screen(conversation: Conversation) -> Screen | None:
    """Returns the page that the newest user turn describes; None if it describes none."""
    prompt = conversation.user_turns[-1].text if conversation.user_turns else ""
    _, heading, listed = prompt.rpartition(_HEADING)
    if not heading:
        return None
    lines = (_LINE.match(line) for line in listed.splitlines())
    return Screen(tuple(_element(line["about"], line["box"]) for line in lines if line))


def _element(about: str, box: str) -> Element:
    facts = {name: json.loads(value) for name, value in _FACT.findall(f" {about}")}
    words = _FACT.sub("", f" {about}").split()
    kind = " ".join(word for word in words if word not in ("focused", "disabled"))
    return Element(kind=kind, facts=facts, focused="focused" in words, box=tuple(json.loads(box)))
