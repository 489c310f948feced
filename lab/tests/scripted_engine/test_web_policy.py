"""The scripted policy on pages in words, without a browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rollout_buffer_lab.scripted_engine.conversation import Conversation, Turn
from rollout_buffer_lab.scripted_engine.policy import reply_to
from rollout_buffer_lab.scripted_engine.rng import SessionRng
from rollout_buffer_lab.scripted_engine.web_policy.screen import read_screen
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import PromptObservation, first_turn_message

FIELD = '1. input text id="tt" value="{value}"{state} [100, 300, 900, 400]\n2. button text="Submit" [99, 500, 701, 640]'


def conversation(goal: str, elements: str) -> Conversation:
    content = first_turn_message(goal, PromptObservation(elements=elements))["content"]
    return Conversation(turns=(Turn(role="user", text="".join(part["text"] for part in content)),))


def call(goal: str, elements: str, skill: float = 1.0, session: str = "s") -> dict[str, Any]:
    said = reply_to(conversation(goal, elements), skill=skill, rng=SessionRng(0, session))
    found = re.search(r"<tool_call>\s*(\{.*\})\s*</tool_call>", said, re.DOTALL)
    assert found is not None
    arguments: dict[str, Any] = json.loads(found[1])["arguments"]
    return arguments


@pytest.mark.parametrize(
    ("value", "state", "expected"),
    [
        ("", "", {"action": "click", "coordinate": [500, 350]}),
        ("", " focused", {"action": "type", "text": "Ignacio"}),
        ("Ignacio", " focused", {"action": "click", "coordinate": [400, 570]}),
    ],
)
def test_a_field_is_tapped_filled_and_sent(value: str, state: str, expected: dict[str, Any]) -> None:
    goal = 'Enter "Ignacio" into the text field and press Submit.'
    assert call(goal, FIELD.format(value=value, state=state)) == expected


def test_a_dialog_is_closed_by_its_x_which_has_no_text() -> None:
    page = '1. button classes="ui-dialog-titlebar-close" [100, 300, 140, 340]\n2. button text="OK" [99, 500, 701, 640]'
    goal = 'Click the button in the dialog box labeled "x".'
    assert call(goal, page) == {"action": "click", "coordinate": [120, 320]}


def test_what_nobody_taught_it_is_given_up() -> None:
    assert call("Prove the theorem.", FIELD.format(value="", state=""))["action"] == "terminate"


def test_a_careless_session_taps_something() -> None:
    actions = {json.dumps(call("Click the button.", FIELD.format(value="", state=""), 0.0, str(n))) for n in range(9)}
    assert len(actions) == 2


def test_what_a_page_says_is_read_back_whatever_it_is() -> None:
    line = '1. button text="a [1, 2, 3, 4] \\"b\\" focused" disabled [10, 20, 30, 40]'
    screen = read_screen(conversation("x", line))
    assert screen is not None
    (element,) = screen.elements
    assert (element.kind, element.text, element.focused) == ("button", 'a [1, 2, 3, 4] "b" focused', False)
    assert element.box == (10, 20, 30, 40)
