"""Finds the items in the body of a large write, and the instances in that of a start: they are parsed one at a time.

Parsing holds the interpreter until it is done: of 200 MB in one go, for seconds in which the process answers nobody.
"""

from __future__ import annotations

import re

__all__ = ["split_items"]

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*+"?|[\[\]{}]', re.DOTALL)
_COLON_AND_LIST = re.compile(rb"\s*:\s*\[")
_OPENING, _CLOSING = b"[{", b"]}"
_OPENING_ITEM, _CLOSING_LIST = b"{]"
MOST_TOKENS = 5_000_000
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
    for count, token in enumerate(_TOKEN.finditer(content, opened)):
        first, start, end = content[token.start()], token.start(), token.end()
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
        if count > MOST_TOKENS:
            return None
    return None


def _start_of_list(content: bytes | bytearray, quoted_key: bytes) -> int:
    """Returns where the list of that key of the outermost object begins; -1 for none."""
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(content)):
        first = content[token.start()]
        depth += (first in _OPENING) - (first in _CLOSING)
        if depth == 1 and token.group() == quoted_key and (found := _COLON_AND_LIST.match(content, token.end())):
            return found.end()
        if count > MOST_TOKENS:
            break
    return -1
