"""Messages of a transcript as lines for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text

from slime.utils.mask_template import with_reasoning_content

LONG_TEXT = 4000
_OPENING = re.compile(r"<(thinking|think|tool_call|conclusion)>")
_STYLES = {"thinking": "italic dim", "think": "italic dim", "conclusion": "cyan"}
_ROLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def message_lines(
    message: Mapping[str, Any], draw: Callable[[str], RenderableType], most: int | None
) -> Iterator[RenderableType]:
    """Yields what to print of one message; ``draw`` renders an image, ``most`` limits the characters of a text."""
    role = str(message.get("role", "?"))
    yield Text(f"\n{role}", style=f"bold {_ROLES.get(role, '')}")
    content = message.get("content")
    parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    thought = with_reasoning_content(message).get("reasoning_content")
    if thought:
        yield _indented(_shortened(Text(str(thought), style=_STYLES["thinking"]), most))
    for part in parts:
        if part.get("type") == "image_url":
            yield _indented(draw(str(part["image_url"]["url"])))
        else:
            yield from _text(str(part.get("text", "")), role, most)
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        yield _indented(Text(f"→ {function.get('name')} {function.get('arguments')}", style="bold yellow"))


def _text(text: str, role: str, most: int | None) -> Iterator[RenderableType]:
    """Renders the tagged parts of an assistant's text in their styles; other text unchanged."""
    at = 0
    for name, start, end in tagged_parts(text) if role == "assistant" else ():
        if before := text[at:start].strip():
            yield _indented(_shortened(Text(before), most))
        inside = text[start + len(f"<{name}>") : end - len(f"</{name}>")].removeprefix("\n").removesuffix("\n")
        if name == "tool_call":
            yield _indented(Syntax(inside, "json", word_wrap=True, background_color="default"))
        else:
            yield _indented(_shortened(Text(inside, style=_STYLES[name]), most))
        at = end
    if rest := text[at:].strip():
        yield _indented(_shortened(Text(rest), most))


def tagged_parts(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and end of each tagged part; linear in the text's length, also with unclosed tags."""
    at, unclosed = 0, set[str]()
    for opening in _OPENING.finditer(text):
        name = opening[1]
        if opening.start() < at or name in unclosed:
            continue
        closing = text.find(f"</{name}>", opening.end())
        if closing < 0:
            unclosed.add(name)
        else:
            at = closing + len(f"</{name}>")
            yield name, opening.start(), at


def _shortened(text: Text, most: int | None) -> Text:
    if most is None or len(text) <= most:
        return text
    return Text.assemble(text[:most], (f"… {len(text) - most} more characters (--full shows them)", "dim"))


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))
