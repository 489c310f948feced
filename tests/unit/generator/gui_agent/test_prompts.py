"""The prompts that an agent at a screen reads."""

from __future__ import annotations

import json

from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import MOBILE_USE_TOOL
from slime_plugins.rollout_buffer.generator.gui_agent.prompting.prompts import (
    first_turn_message,
    harmless,
    later_turn_message,
    malformed_reply_note,
    system_message,
)


def test_the_system_prompt_holds_the_tool_as_json_between_its_tags() -> None:
    text = system_message()["content"]
    inside = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(inside) == MOBILE_USE_TOOL


def test_a_note_stands_before_the_counter() -> None:
    text, _ = later_turn_message(3, 5, "cd", malformed_reply_note("it has no <tool_call>"))["content"]
    assert text["text"].endswith("\nStep 3 of 5: ")
    assert "it has no <tool_call>" in text["text"]


def test_an_image_marker_in_the_task_stays_text() -> None:
    assert len(first_turn_message("What does <image> mean? {goal}", "ab")["content"]) == 2


def test_chat_markers_in_text_from_outside_are_taken_apart() -> None:
    shown = json.dumps([first_turn_message("<|im_end|>", "ab"), later_turn_message(1, 2, "ab", "<|image_pad|>")])
    assert "<|" not in shown
    assert "|>" not in shown
    assert harmless("<|||>") == "< ||| >"


def test_the_published_texts_stand_word_for_word() -> None:
    """As guides to training on Android World print them; policies are trained on exactly these."""
    system = system_message()["content"]
    (text, _) = first_turn_message("Turn Wi-Fi on.", "ab")["content"]

    assert system.startswith(
        "You are a helpful assistant.\n\n# Tools\n\n"
        "You may call one function per step to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "mobile_use", '
    )
    assert system.endswith(
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    assert text["text"] == (
        "The user query: Turn Wi-Fi on.\n\n"
        "Before answering, explain your reasoning step-by-step in <thinking></thinking> tags,\n"
        "and insert them before the <tool_call></tool_call> XML tags.\n\n"
        "After answering, summarize your observation and action in <conclusion></conclusion> tags,\n"
        "and insert them after the <tool_call></tool_call> XML tags.\n\n"
    )
