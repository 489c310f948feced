"""Texts of prompts: the system prompt with its tool, the task, the step counter, and notes.

An observation is one user message with one screenshot, at the place of ``<image>`` in the text. Chat markers in text
from a device or a task are broken up first, so that they do not become special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.generator.gui_agent.mobile_use import MOBILE_USE_TOOL
from slime_plugins.rollout_buffer.types import Message

IMAGE_MARKER = "<image>"

_SYSTEM = """You are a helpful assistant.

# Tools

You may call one function per step to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tool}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def system_prompt(tool: Mapping[str, Any]) -> str:
    """Returns the system prompt with one tool."""
    return _SYSTEM.replace("{tool}", json.dumps(tool, ensure_ascii=False))


SYSTEM_PROMPT = system_prompt(MOBILE_USE_TOOL)

_TASK = "The user query: {task_description}\n\n"

_INSTRUCTIONS = """\
Before answering, explain your reasoning step-by-step in <thinking></thinking> tags,
and insert them before the <tool_call></tool_call> XML tags.

After answering, summarize your observation and action in <conclusion></conclusion> tags,
and insert them after the <tool_call></tool_call> XML tags.

"""

_PROGRESS = (
    "Task progress (You have done the following {step_count} operations on the current device):\n{action_history}\n\n"
)

_HISTORY_STEP = "Step {current_step}: <image>"

FIRST_TURN_TEMPLATE = f"{_TASK}{_INSTRUCTIONS}<image>"
LATER_TURN_TEMPLATE = "Step {current_step} of {max_steps}: <image>"
HISTORY_TURN_TEMPLATE = f"{_TASK}{_PROGRESS}{_INSTRUCTIONS}{_HISTORY_STEP}"
"""The user message in mode history; that of the first turn has no progress, and a note comes before the step."""

_SHOWN_AGAIN = "The screen before step {current_step}: <image>"

_ELEMENTS = "On the screen, each with its box [left, top, right, bottom]:"

_MALFORMED_REPLY = (
    "Nothing was done, because your last reply was not a valid action: {reason}. "
    'Reply with exactly one <tool_call>{{"name": "mobile_use", "arguments": {{"action": ...}}}}</tool_call>.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptObservation:
    """The parts of an observation in a prompt: a screenshot (its sha256), its elements as text, or both."""

    screenshot: str | None = None
    elements: str = ""


def system_message(tool: Mapping[str, Any] = MOBILE_USE_TOOL) -> Message:
    """Returns the system message of every episode."""
    return {"role": "system", "content": system_prompt(tool)}


def first_turn_message(goal: str, observation: PromptObservation | str) -> Message:
    """Returns the user message with the task and the first observation; a string is a screenshot's sha256."""
    return _observation_message(FIRST_TURN_TEMPLATE, observation, task_description=harmless(goal))


def later_turn_message(step: int, max_steps: int, observation: PromptObservation | str, note: str = "") -> Message:
    """Returns the user message of turn ``step`` (from 1): note, counter, screen."""
    fields = {"current_step": str(step), "max_steps": str(max_steps)}
    return _observation_message(LATER_TURN_TEMPLATE, observation, note, **fields)


def history_turn_message(step: int, observation: PromptObservation | str, note: str = "") -> Message:
    """Returns the new part of turn ``step`` (from 1) of a history rollout: note, step, screen."""
    return _observation_message(_HISTORY_STEP, observation, note, current_step=str(step))


def repeated_screenshot(step: int, screenshot: str) -> Message:
    """Returns a message with the screenshot of an earlier step, for a later prompt."""
    return _observation_message(_SHOWN_AGAIN, screenshot, current_step=str(step))


def with_history(goal: str, lines: Sequence[str], earlier: Sequence[Message], message: Message) -> Message:
    """Returns the whole user message of a history turn: task, progress, instructions, earlier screenshots, ``message``.

    ``lines`` describe steps 1, 2, …, one line each; before the first step there is no progress.
    """
    text = _TASK.format(task_description=harmless(goal)) + _progress(lines) + _INSTRUCTIONS
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for screenshot_message in earlier:
        parts += [*screenshot_message["content"], {"type": "text", "text": "\n"}]
    return {"role": "user", "content": _joined([*parts, *message["content"]])}


def malformed_reply_note(reason: str) -> str:
    """Returns the note for the agent after a reply without a valid action."""
    return _MALFORMED_REPLY.format(reason=reason)


def harmless(text: str) -> str:
    """Returns ``text`` with every ``<|`` and ``|>`` broken up, so that no part of it can become a special token."""
    return text.replace("<|", "< |").replace("|>", "| >")


def _progress(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    listed = "\n".join(f"Step {step}: {harmless(line)}" for step, line in enumerate(lines, start=1))
    return _PROGRESS.format(step_count=len(lines), action_history=listed)


def _joined(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges adjacent texts."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def _observation_message(template: str, observation: PromptObservation | str, note: str = "", **fields: str) -> Message:
    """Fills the template and inserts the observation at its image marker; markers inside fields stay plain text."""
    observation = PromptObservation(screenshot=observation) if isinstance(observation, str) else observation
    before, after = template.split(IMAGE_MARKER)
    note_line = f"{harmless(note)}\n" if note else ""
    parts: list[dict[str, Any]] = [{"type": "text", "text": note_line + before.format(**fields)}]
    if observation.screenshot is not None:
        parts.append({"type": "image_url", "image_url": {"url": f"sha256:{observation.screenshot}"}})
    if observation.elements:
        parts.append({"type": "text", "text": f"\n{_ELEMENTS}\n{harmless(observation.elements)}\n"})
    if after:
        parts.append({"type": "text", "text": after.format(**fields)})
    return {"role": "user", "content": _joined(parts)}
