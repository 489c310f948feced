"""Reads the arguments of a tool call while its text is sampled, in the dialects of ``tool_call_parser``. Pure.

The arguments are given out in pieces of compact JSON. Joined, the pieces are at any time the beginning of the object
that ``call_at`` reads of the complete call. The last brace is left out: only a complete call is known to be readable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Protocol

import orjson

from slime_plugins.rollout_buffer.engine.tool_call_parser import (
    MAX_NESTING,
    PARAMETER,
    PARAMETER_END,
    Tools,
    parameter_value,
    read_scalar,
    text_parameters,
)

_HERMES = re.compile(
    r'<tool_call>\s{0,9}\{[ \t\n\r]{0,9}"name"[ \t\n\r]{0,9}:[ \t\n\r]{0,9}"([^"\\]{1,200})"[ \t\n\r]{0,9},'
    r'[ \t\n\r]{0,9}"arguments"[ \t\n\r]{0,9}:[ \t\n\r]{0,9}(?=\{)'
)
_CODER = re.compile(r"<tool_call>\s{0,9}<function=([^>\n]{1,200})>(?=\s{0,9}<parameter=[^>\n]{1,200}>)")
_TOKEN = re.compile(r'[ \t\n\r]+|[{}\[\]:,"]|[^ \t\n\r{}\[\]:,"]+')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_CLOSERS = {"{": "}", "[": "]"}
_SCALAR = "0"
"""Stands for any number or word in a list of expected tokens."""
_VALUE, _KEY = f'{{["{_SCALAR}', '"'
"""The tokens with which a value, and a key, begin."""


def begins_at(text: str, pos: int, marks: Sequence[str]) -> int:
    """Returns the first index from ``pos`` on after which the whole rest of the text is the beginning of a mark; the
    text's length if there is none."""
    longest = max(map(len, marks), default=1)
    starts = range(max(pos, len(text) - longest + 1), len(text))  # a longer rest cannot be the beginning only
    return next((start for start in starts if any(mark.startswith(text[start:]) for mark in marks)), len(text))


class StreamedCall:
    """One call. ``name`` is empty until the name is certain and the arguments have begun.

    It is set before the call's end only in the usual form: first the name, then the arguments, as an object or as
    parameters.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._arguments: _Arguments | None = None
        self._read = 0
        self.name = ""

    @property
    def is_broken(self) -> bool:
        """True once nothing that may follow makes the call readable."""
        return self._arguments is not None and self._arguments.is_broken

    def read(self, text: str, start: int, end: int) -> str:
        """Returns what the text of the call up to ``end`` adds to the arguments; the call's mark is at ``start``."""
        if self._arguments is None:
            opening = _HERMES.match(text, start, end) or _CODER.match(text, start, end)
            if opening is None or not opening[1].strip():
                return ""
            self.name = opening[1] if opening.re is _HERMES else opening[1].strip()
            self._arguments = _Json() if opening.re is _HERMES else _Parameters(text_parameters(self._tools, self.name))
            self._read = opening.end() - start
        added, pos = self._arguments.read(text, start + self._read, end)
        self._read = pos - start
        return added


class _Arguments(Protocol):
    is_broken: bool

    def read(self, text: str, pos: int, end: int) -> tuple[str, int]:
        """Returns what the text from ``pos`` to ``end`` adds to the arguments, and the index to read on from."""
        ...


class _Json:
    """The arguments in the dialect ``hermes``."""

    def __init__(self) -> None:
        self.is_broken = False
        self._expected = "{"
        """The tokens that may come next; empty after the last brace."""
        self._open: list[str] = []
        """The ends of the open objects and lists."""
        self._in_string = False

    def read(self, text: str, pos: int, end: int) -> tuple[str, int]:
        pieces: list[str] = []
        while pos < end and self._expected and not self.is_broken:
            more, after = self._string(text, pos, end) if self._in_string else self._token(text, pos, end)
            if after == pos:
                break
            pieces.append(more)
            pos = after
        return "".join(pieces), pos

    def _token(self, text: str, pos: int, end: int) -> tuple[str, int]:
        match = _TOKEN.match(text, pos, end)
        assert match is not None
        token, after = match[0], match.end()
        if token[0] in " \t\n\r":
            return "", after
        kind = token if token in '{}[]:,"' else _SCALAR
        is_deep = kind in _VALUE and len(self._open) > MAX_NESTING
        self.is_broken = is_deep or kind not in self._expected
        if kind == _SCALAR and not self.is_broken:
            if after == end:
                return "", pos  # more characters of the scalar may come
            scalar = read_scalar(token)
            self.is_broken = scalar is None
            token = scalar or ""
        if self.is_broken:
            return "", after
        self._move_on(kind)
        return (token if self._expected else ""), after

    def _move_on(self, kind: str) -> None:
        """Sets ``_expected`` to the tokens that may follow a token; none may follow the last brace."""
        if kind in _CLOSERS:
            self._open.append(_CLOSERS[kind])
            self._expected = (_KEY if kind == "{" else _VALUE) + self._open[-1]
        elif kind == ":":
            self._expected = _VALUE
        elif kind == ",":
            self._expected = _KEY if self._open[-1] == "}" else _VALUE
        else:
            if kind == '"':
                self._in_string = True
            elif kind != _SCALAR:
                self._open.pop()
            is_key = kind == '"' and _SCALAR not in self._expected
            self._expected = ":" if is_key else f",{self._open[-1]}" if self._open else ""

    def _string(self, text: str, pos: int, end: int) -> tuple[str, int]:
        if text[pos] == '"':
            self._in_string = False
            return '"', pos + 1
        if (plain := _PLAIN.match(text, pos, end)) is not None:
            return _escaped(plain[0]), plain.end()
        if (escape := _ESCAPE.match(text, pos, end)) is not None:
            return _escaped(json.loads(f'"{escape[0]}"')), escape.end()
        self.is_broken = end - pos >= _LONGEST_ESCAPE  # a shorter rest may become an escape
        return "", pos


class _Parameters:
    """The arguments in the dialect ``qwen3_coder``. A value that is no string is given at its end, as a whole."""

    def __init__(self, texts: Collection[str]) -> None:
        self.is_broken = False
        self._texts = texts
        self._before = "{"
        """What stands before the next parameter."""
        self._in_text = self._in_value = False
        self._is_first = False
        """True before the first character of a value, which may be a line break that is no part of the value."""

    def read(self, text: str, pos: int, end: int) -> tuple[str, int]:
        pieces: list[str] = []
        while pos < end:
            if self._in_text:
                more, after = self._text(text, pos, end)
            elif self._in_value:
                more, after = self._value(text, pos, end)
            else:
                more, after = self._parameter(text, pos, end)
            if after == pos:
                break
            pieces.append(more)
            pos = after
        return "".join(pieces), pos

    def _parameter(self, text: str, pos: int, end: int) -> tuple[str, int]:
        opening = PARAMETER.match(text, pos, end)
        if opening is None:
            return "", pos
        key = opening[1].strip()
        self._in_text = self._is_first = key in self._texts
        self._in_value = not self._in_text
        before, self._before = self._before, ","
        return f"{before}{_encoded(key)}:" + ('"' if self._in_text else ""), opening.end()

    def _text(self, text: str, pos: int, end: int) -> tuple[str, int]:
        if self._is_first:
            self._is_first = False
            if text[pos] == "\n":
                return "", pos + 1
        closing = text.find(PARAMETER_END, pos, end)
        if closing >= 0:
            self._in_text = False
            return _escaped(text[pos:closing].removesuffix("\n")) + '"', closing + len(PARAMETER_END)
        decided_length = begins_at(text[pos:end], 0, (PARAMETER_END, f"\n{PARAMETER_END}"))
        return _escaped(text[pos : pos + decided_length]), pos + decided_length

    def _value(self, text: str, pos: int, end: int) -> tuple[str, int]:
        closing = text.find(PARAMETER_END, pos, end)
        if closing < 0:
            return "", pos
        self._in_value = False
        return _encoded(parameter_value(text[pos:closing], is_text=False)), closing + len(PARAMETER_END)


def _encoded(value: object) -> str:
    return orjson.dumps(value).decode()


def _escaped(text: str) -> str:
    """Returns a text as it stands within a JSON string."""
    return _encoded(text)[1:-1]
