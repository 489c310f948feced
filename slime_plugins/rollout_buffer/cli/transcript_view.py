"""Messages of a transcript as lines for the terminal."""

from __future__ import annotations

import json
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
    message: Mapping[str, Any], draw: Callable[[str], RenderableType], max_characters: int | None
) -> Iterator[RenderableType]:
    """Yields what to print of one message; ``draw`` renders an image, each text has at most ``max_characters``.

    Messages come from third-party programs: what is neither text nor image is printed as JSON.
    """
    role = str(message.get("role", "?"))
    yield Text(f"\n{role}", style=f"bold {_ROLES.get(role, '')}")
    thought = with_reasoning_content(message).get("reasoning_content")
    yield from _text(str(thought or ""), max_characters, _STYLES["thinking"])
    content = message.get("content") or ""
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            url = part.get("image_url")
            yield _indented(draw(str(url.get("url") if isinstance(url, Mapping) else url)))
        else:
            yield from (_tagged_text if role == "assistant" else _text)(_text_of(part), max_characters)
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else call
        call_text = f"{function.get('name')} {function.get('arguments')}" if isinstance(function, Mapping) else function
        yield from _text(f"→ {call_text}", max_characters, "bold yellow")


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else json.dumps(part, ensure_ascii=False)


def _tagged_text(text: str, max_characters: int | None) -> Iterator[RenderableType]:
    """Renders the tagged parts of an assistant's text in their styles."""
    position = 0
    for name, start, end in tagged_parts(text):
        yield from _text(text[position:start], max_characters)
        inside = text[start + len(f"<{name}>") : end - len(f"</{name}>")].strip()
        if name == "tool_call" and (max_characters is None or len(inside) <= max_characters):
            yield _indented(Syntax(inside, "json", word_wrap=True, background_color="default"))
        else:
            yield from _text(inside, max_characters, _STYLES.get(name, ""))
        position = end
    yield from _text(text[position:], max_characters)


def tagged_parts(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and end of each tagged part; linear in the text's length, also with unclosed tags."""
    position, unclosed = 0, set[str]()
    for opening in _OPENING.finditer(text):
        name = opening[1]
        if opening.start() < position or name in unclosed:
            continue
        closing = text.find(f"</{name}>", opening.end())
        if closing < 0:
            unclosed.add(name)
        else:
            position = closing + len(f"</{name}>")
            yield name, opening.start(), position


def _text(text: str, max_characters: int | None, style: str = "") -> Iterator[RenderableType]:
    text = text.strip()
    hidden = 0 if max_characters is None else len(text) - max_characters
    if hidden > 0:
        rest = f"… {hidden} more characters (--json shows them)"
        yield _indented(Text.assemble((text[:max_characters], style), (rest, "dim")))
    elif text:
        yield _indented(Text(text, style=style))


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))
