"""Converts sampled ids into the message for the client, in pieces as the ids come. Without I/O.

Text that may begin a stop sequence, a thought or a tool call is held back until that is decided. A malformed call stays
text, which is sent when the turn has ended. If arguments of a call were sent before it turned out to be malformed, the
call has the arguments that were sent, without their last brace. The pieces together are the recorded message, however
the ids came.

``<think>`` begins a thought in the reply, or at the end of the prompt. ``<thinking>`` is requested by prompts and stays
text. A call inside of either is not executed. With tools or separate reasoning, white space around texts is left out,
and texts with a call or a thought between them are joined by a line break.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.streamed_calls import StreamedCall, begins_at
from slime_plugins.rollout_buffer.engine.tool_call_parser import CALL, CALL_END, ToolCall, call_at
from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import (
    CONTENT,
    REASONING,
    TOOL_CALLS,
    ChatReply,
    Piece,
)
from slime_plugins.rollout_buffer.recording.message_matching import THINK, THINK_END
from slime_plugins.rollout_buffer.recording.messages import JOINT, call_id, read_arguments
from slime_plugins.rollout_buffer.recording.prompts import opens_thought
from slime_plugins.rollout_buffer.types import Message

Listener = Callable[[ChatReply | Piece], None]

QUOTE, QUOTE_END = "<thinking>", "</thinking>"
HALF_CHARACTER = "\ufffd"
_CALL_MARK = re.compile(f"{CALL}|{CALL_END}")
_THINK_END = re.compile(THINK_END)
_UNDECIDED_IN_QUOTE = re.compile(f"{THINK}|{CALL}")


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Returns the stop sequence that comes first in a text; None if there is none."""
    return min((stop for stop in stops if stop in text), key=text.find, default=None)


class ReplyStream:
    """The message of one turn. ``emit``, if given, gets ``begun`` with the first ids, then the pieces."""

    def __init__(
        self,
        chat: ChatTokens,
        body: ChatBody,
        prompt_ids: Sequence[int],
        begun: ChatReply,
        emit: Listener | None,
        *,
        name: str,
    ) -> None:
        """``name`` is the reply's name; the ids of its tool calls contain it."""
        self._text = _Text(chat)
        self._stop_cutter = _StopCutter(body.stops)
        self._scanner = _Scanner(
            name,
            body.offered_tools,
            streams=emit is not None,
            separates=body.separate_reasoning,
            in_thought=opens_thought(chat, prompt_ids),
        )
        self._begun = begun
        self._pending: list[ChatReply | Piece] = [begun]
        self._emit = emit
        self._message: dict[str, Any] = {}

    def add(self, ids: Sequence[int]) -> None:
        """Emits what the next ids add."""
        self._note(self._scanner.add(self._stop_cutter.add(self._text.add(ids))))
        self.emit_rest()

    def end(self, output_ids: Sequence[int]) -> Message:
        """Returns the message of a turn from all its ``output_ids``, added before or not. Emits nothing."""
        text = self._stop_cutter.add(self._text.end(output_ids)) + self._stop_cutter.end()
        self._note(self._scanner.add(text, is_last=True))
        for call in self._message.get(TOOL_CALLS, ()):
            call["function"]["arguments"] = read_arguments(call["function"]["arguments"])
        return {"role": "assistant", CONTENT: "", **self._message}

    @property
    def has_emitted(self) -> bool:
        """True if the client may have received a part of the reply."""
        return self._begun not in self._pending

    def emit_rest(self) -> None:
        """Emits what was not emitted yet."""
        pending, self._pending = self._pending, []
        if self._emit is not None:
            for part in pending:
                self._emit(part)

    def _note(self, pieces: Sequence[Piece]) -> None:
        self._pending += pieces
        for piece in pieces:
            if piece.call_id:
                function = {"name": piece.name, "arguments": piece.text}
                call = {"id": piece.call_id, "type": "function", "function": function}
                self._message.setdefault(TOOL_CALLS, []).append(call)
            elif piece.key == TOOL_CALLS:
                self._message[TOOL_CALLS][-1]["function"]["arguments"] += piece.text
            else:
                self._message[piece.key] = self._message.get(piece.key, "") + piece.joint + piece.text


class _Text:
    """The text of ids as they come. A character whose bytes are not complete is held back."""

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._start = self._end = 0
        """Bounds of the ids of the last added text, decoded again with the next ids, which may change their text."""
        self._texts: list[str] = []

    def add(self, ids: Sequence[int], *, is_last: bool = False) -> str:
        self._ids += ids
        end = len(self._ids) - self._chat.is_closed(self._ids)
        before = self._chat.decoded(self._ids[self._start : self._end])
        text = self._chat.decoded(self._ids[self._start : end])
        if (text.endswith(HALF_CHARACTER) and not is_last) or len(text) <= len(before):
            return ""
        self._start, self._end = self._end, end
        self._texts.append(text[len(before) :])
        return self._texts[-1]

    def end(self, output_ids: Sequence[int]) -> str:
        whole, sent = self._chat.text(output_ids), "".join(self._texts)
        if whole.startswith(sent):
            return whole[len(sent) :]
        # Some tokenizers decode bytes that are no text by what follows: this continues from the text that was sent.
        return self.add(output_ids[len(self._ids) :], is_last=True)


class _StopCutter:
    """The text before the first stop sequence, as OpenAI's API has it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._is_over = False

    def add(self, text: str) -> str:
        if self._is_over or not self._stops:
            return "" if self._is_over else text
        held = self._held + text
        stop = first_stop(held, self._stops)
        found = len(held) if stop is None else held.find(stop)
        until = min(found, begins_at(held, 0, self._stops))
        self._is_over = stop is not None and found == until
        self._held = held[until:]
        return held[:until]

    def end(self) -> str:
        stop = first_stop(self._held, self._stops)
        return "" if self._is_over else self._held if stop is None else self._held[: self._held.find(stop)]


class _Scanner:
    """The pieces of a text. ``add`` takes text at ``at`` step by step; a step that takes no text waits for more."""

    def __init__(
        self, name: str, tools: Sequence[Mapping[str, Any]], *, streams: bool, separates: bool, in_thought: bool
    ) -> None:
        """``streams``: the arguments of calls are emitted as they come."""
        self._name = name
        self._calls = 0
        self._tools = tools
        self._streams = streams
        self._separates = separates
        self._marks = (THINK, QUOTE, CALL) if tools else (THINK, QUOTE)
        self._pattern = re.compile("|".join(self._marks))
        self._in_thought = in_thought
        self._in_quote = False
        self._held = ""
        self._called = StreamedCall(tools)
        """The held call; next: whether a part of it was emitted, and the position of the first mark in it."""
        self._is_emitted = False
        self._mark: int | None = None
        self._searched = 0
        """Number of characters of the held call that were searched for marks."""
        self._pieces: list[Piece] = []
        self._run = self._space = ""
        """The key of the present text, and white space at its end, emitted only if more of the text follows."""
        self._keys: set[str] = set()

    def add(self, text: str, *, is_last: bool = False) -> list[Piece]:
        if not (self._tools or self._separates):
            return [Piece(key=CONTENT, text=text)] if text else []
        held, at, after = self._held + text, -1, 0
        while at < after:
            at, after = after, self._step(held, after, is_last=is_last)
        self._held = held[at:]
        pieces, self._pieces = self._pieces, []
        return pieces

    def _step(self, held: str, at: int, *, is_last: bool) -> int:
        if self._in_thought:
            return self._thought(held, at, is_last=is_last)
        if self._in_quote:
            return self._quote(held, at, is_last=is_last)
        mark = self._pattern.search(held, at)
        until = self._until(held, at, mark, self._marks, is_last=is_last)
        if until > at or mark is None:
            return self._add_text(CONTENT, held[at:until], until)
        if mark[0] == CALL:
            return self._call(held, at, is_last=is_last)
        self._in_thought, self._in_quote = mark[0] == THINK, mark[0] == QUOTE
        if self._in_thought and self._separates:
            self._run = ""
            return mark.end()
        return self._add_text(CONTENT, mark[0], mark.end())

    def _until(self, held: str, at: int, mark: re.Match[str] | None, marks: Sequence[str], *, is_last: bool) -> int:
        """Returns the end of the text from ``at`` that certainly holds no mark."""
        if mark is not None:
            return mark.start()
        return len(held) if is_last else begins_at(held, at, marks)

    def _thought(self, held: str, at: int, *, is_last: bool) -> int:
        mark = _THINK_END.search(held, at)
        until = self._until(held, at, mark, (THINK_END,), is_last=is_last)
        self._add_text(REASONING if self._separates else CONTENT, held[at:until], until)
        if mark is None:
            return until
        self._in_thought = False
        if self._separates:
            self._run = ""
            return mark.end()
        return self._add_text(CONTENT, THINK_END, mark.end())

    def _quote(self, held: str, at: int, *, is_last: bool) -> int:
        """Continues in ``<thinking>``. Calls in a block that is never closed count: the scan waits at the first."""
        closing = held.find(QUOTE_END, at)
        if closing >= 0 or is_last:
            self._in_quote = False
            end = closing + len(QUOTE_END)
            return self._add_text(CONTENT, held[at:end], end) if closing >= 0 else self._step(held, at, is_last=is_last)
        mark = _UNDECIDED_IN_QUOTE.search(held, at)
        until = self._until(held, at, mark, (THINK, CALL, QUOTE_END), is_last=False)
        return self._add_text(CONTENT, held[at:until], until)

    def _call(self, held: str, at: int, *, is_last: bool) -> int:
        """Continues in a call. Until the call can be read, only arguments before its first mark are emitted."""
        found = _CALL_MARK.search(held, at + max(len(CALL), self._searched - len(CALL_END)))
        self._searched = len(held) - at
        if self._mark is None and found is not None:
            self._mark = found.start() - at
        if self._streams:
            undecided = len(held) if is_last else begins_at(held, at + len(CALL), (CALL, CALL_END))
            self._emit_call(self._called.read(held, at, undecided if self._mark is None else at + self._mark))
        if found is None and not is_last:
            return at
        call, end, is_whole = call_at(held, at, self._tools)
        is_over = is_whole and (is_last or held.endswith(CALL_END, at, end) or held.startswith(CALL, end))
        if is_over and call.problem is None:
            self._emit_rest_of_call(call, held, at, end)
            return self._end_call(end)
        if self._is_emitted and (is_last or self._called.is_broken):
            mark = None if self._mark is None else at + self._mark
            return self._end_call(len(held) if mark is None else mark + len(CALL_END) * held.startswith(CALL_END, mark))
        if is_over and not self._is_emitted:
            return self._add_text(CONTENT, held[at:end], self._end_call(end))
        return self._add_text(CONTENT, CALL, self._end_call(at + len(CALL))) if is_last else at

    def _emit_call(self, arguments: str) -> None:
        """Emits the arguments read so far; the first time with the name of the call."""
        if self._called.name and not self._is_emitted:
            self._pieces.append(self._begun_call(self._called.name, arguments))
            self._is_emitted = True
        elif arguments:
            self._pieces.append(Piece(key=TOOL_CALLS, text=arguments))

    def _emit_rest_of_call(self, call: ToolCall, held: str, at: int, end: int) -> None:
        if self._is_emitted:
            self._pieces.append(Piece(key=TOOL_CALLS, text=self._called.read(held, at, end) + "}"))
        else:
            self._pieces.append(self._begun_call(call.name, orjson.dumps(call.arguments).decode()))

    def _begun_call(self, name: str, arguments: str) -> Piece:
        self._run = ""
        self._calls += 1
        return Piece(key=TOOL_CALLS, call_id=call_id(self._name, self._calls - 1), name=name, text=arguments)

    def _end_call(self, end: int) -> int:
        """Resets the state of the held call; returns ``end``."""
        self._called = StreamedCall(self._tools)
        self._is_emitted = False
        self._mark = None
        self._searched = 0
        return end

    def _add_text(self, key: str, text: str, until: int) -> int:
        """Adds a piece of text, without white space around the text that it is part of; returns ``until``."""
        joint = ""
        if self._run != key:
            text = text.lstrip()
            joint = JOINT if key in self._keys else ""
            self._space = ""
        visible = (self._space + text).rstrip()
        self._space = (self._space + text)[len(visible) :]
        if visible:
            self._run = key
            self._keys.add(key)
            self._pieces.append(Piece(key=key, text=visible, joint=joint))
        return until
