"""The default system message of an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime_plugins.rollout_buffer.types import Message

_TASK = (
    "You answer a question about a long document. You do not see the document: you work on it with tools. "
    "Cut it with buildIndex, find places with searchEngine, read them with readChunk, and write down what matters with "
    "note. When you know the answer, call finish with the answer and nothing else. A turn without a tool call ends the "
    "task."
)
_EDITING = (
    "Your context is short: when it is full, the task is lost; checkBudget tells what is left. Every tool result has a "
    "msg_id. Once you have noted what a message says, delete it with deleteContext, together with the message that "
    "called the tool (msg_id(invoking_assistant)). Deleted messages stay as stubs; notes stay readable with readNote."
)
_TOOLS_IN_TEXT = (
    "# Tools\n\nYou may call functions. They are described here, one JSON object per line:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each call write a JSON object with name and arguments between <tool_call> and </tool_call>:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)


def with_instructions(prompt: Sequence[Message], text: str | None, *, editing: bool) -> list[Message]:
    """Adds a system message to a prompt without one; its text is ``text``, or the shipped one for None.

    With an empty ``text`` nothing is added."""
    if text is None:
        text = f"{_TASK} {_EDITING}" if editing else _TASK
    if not text or prompt[0]["role"] == "system":
        return list(prompt)
    return [{"role": "system", "content": text}, *prompt]


def with_tools_in_text(prompt: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Describes the tools in the system message, for a chat template without a tools section."""
    described = _TOOLS_IN_TEXT.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if prompt[0]["role"] == "system":
        first, rest = prompt[0], prompt[1:]
        return [{**first, "content": f"{first['content']}\n\n{described}"}, *rest]
    return [{"role": "system", "content": described}, *prompt]
