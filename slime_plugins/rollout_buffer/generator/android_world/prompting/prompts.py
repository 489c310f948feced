"""What the agent reads: the system prompt with its one tool, the task, the step counter, and what went wrong.

An observation is one user message with one screenshot, which stands where ``<image>`` stands in the text. Text that
comes from a device or a task is made harmless first: a chat marker inside it would otherwise become a real one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime_plugins.rollout_buffer.types import Message

__all__ = [
    "COORDINATE_MAX",
    "IMAGE_MARKER",
    "MOBILE_USE_TOOL",
    "SYSTEM_PROMPT",
    "TOOL_NAME",
    "first_turn_message",
    "harmless",
    "history_turn_message",
    "later_turn_message",
    "malformed_reply_note",
    "shown_again",
    "system_message",
    "with_history",
]

COORDINATE_MAX = 999
"""The agent points at a screen of 999x999, whatever the device has: the corners are (0, 0) and (999, 999)."""

TOOL_NAME = "mobile_use"
IMAGE_MARKER = "<image>"

_ACTION_HELP = """What to do on the phone, one of:
* `click`: tap the point `coordinate`.
* `long_press`: hold the point `coordinate` down for `time` seconds.
* `swipe`: drag a finger from `coordinate` to `coordinate2`.
* `type`: enter `text` into the input field that has the focus.
* `answer`: give `text` as the answer to the user's question. This ends the task.
* `system_button`: press `button`.
* `open`: start the app whose name is `text`.
* `wait`: do nothing for `time` seconds, so that the screen can change.
* `terminate`: end the task and report its `status`."""

_POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}

MOBILE_USE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": (
            "Operates an Android phone by touch and shows its screen as screenshots.\n"
            f"* The screen is {COORDINATE_MAX}x{COORDINATE_MAX}: x grows from left to right, y from top to bottom.\n"
            "* Apps need a moment to open and to react. If a screenshot shows no change yet, wait and look again.\n"
            "* Aim at the middle of a button, link or icon, not at its edge."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "action": {
                    "type": "string",
                    "description": _ACTION_HELP,
                    "enum": [
                        "click",
                        "long_press",
                        "swipe",
                        "type",
                        "answer",
                        "system_button",
                        "open",
                        "wait",
                        "terminate",
                    ],
                },
                "coordinate": {
                    **_POINT,
                    "description": "[x, y] of the point. Needed by `click`, `long_press` and `swipe` (its start).",
                },
                "coordinate2": {**_POINT, "description": "[x, y] where a `swipe` ends. Needed by `swipe`."},
                "text": {"type": "string", "description": "Needed by `type`, `answer` and `open`."},
                "time": {"type": "number", "description": "Seconds. Needed by `long_press`; `wait` may have it."},
                "button": {
                    "type": "string",
                    "description": "Needed by `system_button`.",
                    "enum": ["Back", "Home", "Menu", "Enter"],
                },
                "status": {
                    "type": "string",
                    "description": "Needed by `terminate`.",
                    "enum": ["success", "failure"],
                },
            },
            "required": ["action"],
        },
    },
}

SYSTEM_PROMPT = f"""You are a helpful assistant.

# Tools

You may call one function per step to help the user.

The functions are described within <tools></tools> XML tags:
<tools>
{json.dumps(MOBILE_USE_TOOL, ensure_ascii=False)}
</tools>

To call a function, write a json object with its name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_TASK = "The user query: {goal}\n\n"

_INSTRUCTIONS = """\
First think step by step within <thinking></thinking> tags, placed before the <tool_call></tool_call> XML tags.

Then, after the <tool_call></tool_call> XML tags, sum up what you saw and did within <conclusion></conclusion> tags.

"""

_FIRST_TURN = f"{_TASK}{_INSTRUCTIONS}<image>"

_LATER_TURN = "{note}Step {step} of {max_steps}: <image>"

# Without a count of the steps: each prompt shares all finished lines with the one before it, and an engine its cache.
_PROGRESS = "Task progress (what you have done on the phone so far, step by step):\n{lines}\n\n"

_HISTORY_TURN = "{note}Step {step}: <image>"

_SHOWN_AGAIN = "The screen before step {step}: <image>"

_MALFORMED_REPLY = (
    "Nothing was done, because your last reply was not a valid action: {reason}. "
    'Reply with exactly one <tool_call>{{"name": "mobile_use", "arguments": {{"action": ...}}}}</tool_call>.'
)


def system_message() -> Message:
    """Returns the message every episode begins with."""
    return {"role": "system", "content": SYSTEM_PROMPT}


def first_turn_message(goal: str, screenshot: str) -> Message:
    """Returns the user message with the task and the first screenshot, named by its sha256."""
    return _observation_message(_FIRST_TURN, screenshot, goal=harmless(goal))


def later_turn_message(step: int, max_steps: int, screenshot: str, note: str = "") -> Message:
    """Returns the user message of turn ``step`` (from 1): a counter, the screenshot, before them what went wrong."""
    shown_note = f"{harmless(note)}\n" if note else ""
    return _observation_message(_LATER_TURN, screenshot, note=shown_note, step=str(step), max_steps=str(max_steps))


def history_turn_message(step: int, screenshot: str, note: str = "") -> Message:
    """Returns what is new in turn ``step`` (from 1) of a history rollout: what went wrong, the step, the screenshot."""
    shown_note = f"{harmless(note)}\n" if note else ""
    return _observation_message(_HISTORY_TURN, screenshot, note=shown_note, step=str(step))


def shown_again(step: int, screenshot: str) -> Message:
    """Returns a screenshot of an earlier step, to stand in a later prompt."""
    return _observation_message(_SHOWN_AGAIN, screenshot, step=str(step))


def with_history(goal: str, lines: Sequence[str], earlier: Sequence[Message], message: Message) -> Message:
    """Returns the whole user message of a history turn: task, progress, instructions, earlier screenshots, ``message``.

    ``lines`` say what was done in steps 1, 2, …, one line each; before the first step there is no progress.
    """
    text = _TASK.format(goal=harmless(goal)) + _progress(lines) + _INSTRUCTIONS
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for shown in earlier:
        parts += [*shown["content"], {"type": "text", "text": "\n"}]
    return {"role": "user", "content": _joined([*parts, *message["content"]])}


def malformed_reply_note(reason: str) -> str:
    """Returns what the agent is told when its reply held no action that could be carried out."""
    return _MALFORMED_REPLY.format(reason=reason)


def harmless(text: str) -> str:
    """Returns ``text`` with every ``<|`` and ``|>`` taken apart, so that no part of it can become a special token."""
    return text.replace("<|", "< |").replace("|>", "| >")


def _progress(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    listed = "\n".join(f"Step {step}: {harmless(line)}" for step, line in enumerate(lines, start=1))
    return _PROGRESS.format(lines=listed)


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts texts that follow each other into one part."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _observation_message(template: str, screenshot: str, **fields: str) -> Message:
    """Fills the template's text around its image marker; a marker inside a field stays plain text."""
    before, after = template.split(IMAGE_MARKER)
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": before.format(**fields)},
        {"type": "image_url", "image_url": {"url": f"sha256:{screenshot}"}},
    ]
    if after:
        parts.append({"type": "text", "text": after.format(**fields)})
    return {"role": "user", "content": parts}
