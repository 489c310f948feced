"""Finds the items in the body of a large write, and the instances in that of a start: they are parsed one at a time.

Parsing holds the GIL: with 200 MB at once, for seconds in which the process answers no request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*+"?|[\[\]{}]', re.DOTALL)
_COLON_AND_LIST = re.compile(rb"\s*:\s*\[")
_OPENING, _CLOSING = b"[{", b"]}"
_OPENING_ITEM, _CLOSING_LIST = b"{]"
WINDOW_BYTES = 1024 * 1024
MAX_STRING_BYTES = 64 * 1024 * 1024
MAX_TOKENS = 5_000_000
"""Of one body; beyond them, looking for its items would take longer than parsing it."""


def split_items(content: bytes | bytearray, key: str) -> tuple[bytes, list[bytes | bytearray]] | None:
    """Returns a body without what is in the list ``key`` of objects, and these objects, each as JSON text that is still
    to be parsed; None for a body that does not look like this.

    Whatever is not valid JSON stays so: in what is left of the body, or in one of the items.
    """
    opened = _start_of_list(content, f'"{key}"'.encode())
    if opened < 0:
        return None
    items: list[bytes | bytearray] = []
    depth, at = 0, opened
    for count, (start, end) in enumerate(_tokens(content, opened)):
        first = content[start]
        if depth == 0:
            between = content[at:start].strip()
            if first == _CLOSING_LIST and not between:
                return bytes(content[:opened] + content[start:]), items
            if first != _OPENING_ITEM or between != (b"," if items else b""):
                return None
            at = start
        depth += (first in _OPENING) - (first in _CLOSING)
        if depth == 0:
            items.append(content[at:end])
            at = end
        if count > MAX_TOKENS:
            return None
    return None


def _start_of_list(content: bytes | bytearray, quoted_key: bytes) -> int:
    """Returns where the list of that key of the outermost object begins; -1 for none."""
    depth = 0
    for count, (start, end) in enumerate(_tokens(content, 0)):
        first = content[start]
        depth += (first in _OPENING) - (first in _CLOSING)
        is_key = depth == 1 and content[start : min(end, start + len(quoted_key) + 1)] == quoted_key
        if is_key and (found := _COLON_AND_LIST.match(content, end)):
            return found.end()
        if count > MAX_TOKENS:
            break
    return -1


def _tokens(content: bytes | bytearray, at: int) -> Iterator[tuple[int, int]]:
    """Yields where the brackets and strings of a body begin and end; ends before a string that is too long.

    The regular expression looks at a window, because it blocks all threads of the process.
    """
    window = WINDOW_BYTES
    while at < len(content) and window <= MAX_STRING_BYTES:
        until = at + window
        cut_off = None
        for token in _TOKEN.finditer(content, at, until):
            start, end = token.span()
            if end >= until - 1 and until < len(content):  # perhaps a string that goes on, or an escape
                cut_off = start
                break
            yield start, end
        window = WINDOW_BYTES if cut_off != at else 4 * window
        at = until if cut_off is None else cut_off
