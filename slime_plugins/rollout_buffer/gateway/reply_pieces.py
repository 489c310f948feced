"""Converts sampled ids into the message for the client, in pieces as the ids come. Without I/O.

Text that may begin a stop sequence, a thought or a tool call is held back until that is decided. A malformed call stays
text, which is sent when the turn has ended. If arguments of a call were sent before it turned out to be malformed, the
call has the arguments that were sent, without their last brace. The pieces together are the recorded message, in
whatever portions the ids came.

``<think>``, in the reply or at the end of the prompt, begins a thought. ``<thinking>``, which some prompts request,
stays text. A call inside of either is not executed. With tools or separate reasoning, white space around texts is left
out, and texts with a call or a thought between them are joined by a line break.
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

THINKING_TAG, THINKING_TAG_END = "<thinking>", "</thinking>"
HALF_CHARACTER = "\ufffd"
"""What ids decode to that end within the bytes of a character."""
_CALL_MARK = re.compile(f"{CALL}|{CALL_END}")
_THINK_END = re.compile(THINK_END)
_UNDECIDED_IN_TAG = re.compile(f"{THINK}|{CALL}")


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Returns the stop sequence that comes first in a text; None if there is none."""
    return min((stop for stop in stops if stop in text), key=text.find, default=None)


class ReplyStream:
    """The message of one turn. ``emit``, if given, gets ``begun`` when the first ids come, and then the pieces."""

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
        """Emits the pieces that the next ids add."""
        self._note(self._scanner.add(self._stop_cutter.add(self._text.add(ids))))
        self.emit_rest()

    def end(self, output_ids: Sequence[int]) -> Message:
        """Returns the message of the turn with these ``output_ids``, all or some of which were added. Emits nothing."""
        text = self._stop_cutter.add(self._text.end(output_ids), is_last=True)
        self._note(self._scanner.add(text, is_last=True))
        for call in self._message.get(TOOL_CALLS, ()):
            call["function"]["arguments"] = read_arguments(call["function"]["arguments"])
        return {"role": "assistant", CONTENT: "", **self._message}

    @property
    def has_emitted(self) -> bool:
        """True if the client may have received a part of the reply."""
        return self._begun not in self._pending

    def emit_rest(self) -> None:
        """Emits the pieces that were not emitted yet."""
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
    """Decodes ids as they come. A character whose bytes are not complete is held back."""

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._start = self._end = 0
        """Bounds of the ids of the latest text; decoded again with the next ids, which may change their text."""
        self._texts: list[str] = []

    def add(self, ids: Sequence[int], *, is_last: bool = False) -> str:
        self._ids += ids
        end = len(self._ids)
        if self._chat.is_closed(self._ids):
            end -= 1  # the end-of-turn token is no text
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
        # Some tokenizers decode invalid bytes otherwise once further ids follow: the text that was sent is kept.
        return self.add(output_ids[len(self._ids) :], is_last=True)


class _StopCutter:
    """Cuts a text before its first stop sequence, as OpenAI's API does."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._is_over = False

    def add(self, text: str, *, is_last: bool = False) -> str:
        if self._is_over:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        stop = first_stop(held, self._stops)
        stop_at = len(held) if stop is None else held.find(stop)
        # An earlier beginning of another stop sequence must be decided first, if more text can follow.
        until = stop_at if is_last else min(stop_at, begins_at(held, 0, self._stops))
        self._is_over = stop is not None and stop_at == until
        self._held = held[until:]
        return held[:until]


class _Scanner:
    """Divides a text, as it comes, into the pieces of a message.

    Text is held until it is decided what it belongs to. Each step takes held text from position ``pos`` on and returns
    the position after it; a step that takes nothing waits for more text.
    """

    def __init__(
        self, name: str, tools: Sequence[Mapping[str, Any]], *, streams: bool, separates: bool, in_thought: bool
    ) -> None:
        """``name`` is the reply's name. ``streams``: the arguments of calls are emitted as they come. ``separates``:
        thoughts are text of a field of their own. ``in_thought``: the prompt has begun a thought."""
        self._name = name
        self._tools = tools
        self._streams = streams
        self._separates = separates
        self._marks = (THINK, THINKING_TAG, CALL) if tools else (THINK, THINKING_TAG)
        self._pattern = re.compile("|".join(self._marks))
        self._in_thought = in_thought
        self._in_thinking_tag = False
        self._held = ""
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._call = StreamedCall(tools)
        """The held call."""
        self._is_emitted = False
        """True once a part of the held call was emitted."""
        self._mark: int | None = None
        """Position in the held call of the first mark inside of it; None while there is none."""
        self._num_searched = 0
        """Number of characters of the held call that were searched for marks."""
        self._key = ""
        """The field of the present text; empty between two texts."""
        self._space = ""
        """White space at the end of the present text, emitted only if more of the text follows."""
        self._keys: set[str] = set()
        """The fields that have text."""

    def add(self, text: str, *, is_last: bool = False) -> list[Piece]:
        if not (self._tools or self._separates):
            return [Piece(key=CONTENT, text=text)] if text else []
        held, pos = self._held + text, 0
        while (after := self._step(held, pos, is_last=is_last)) > pos:
            pos = after
        self._held = held[pos:]
        pieces, self._pieces = self._pieces, []
        return pieces

    def _step(self, held: str, pos: int, *, is_last: bool) -> int:
        if self._in_thought:
            return self._step_in_thought(held, pos, is_last=is_last)
        if self._in_thinking_tag:
            return self._step_in_thinking_tag(held, pos, is_last=is_last)
        mark = self._pattern.search(held, pos)
        until = self._text_end(held, pos, mark, self._marks, is_last=is_last)
        if until > pos or mark is None:
            return self._add_text(CONTENT, held[pos:until], until)
        if mark[0] == CALL:
            return self._step_in_call(held, pos, is_last=is_last)
        self._in_thought, self._in_thinking_tag = mark[0] == THINK, mark[0] == THINKING_TAG
        if self._in_thought and self._separates:
            self._key = ""
            return mark.end()
        return self._add_text(CONTENT, mark[0], mark.end())

    def _text_end(self, held: str, pos: int, mark: re.Match[str] | None, marks: Sequence[str], *, is_last: bool) -> int:
        """Returns the end of the text from ``pos`` that certainly holds none of the marks; ``mark`` is the first."""
        if mark is not None:
            return mark.start()
        return len(held) if is_last else begins_at(held, pos, marks)

    def _step_in_thought(self, held: str, pos: int, *, is_last: bool) -> int:
        mark = _THINK_END.search(held, pos)
        until = self._text_end(held, pos, mark, (THINK_END,), is_last=is_last)
        self._add_text(REASONING if self._separates else CONTENT, held[pos:until], until)
        if mark is None:
            return until
        self._in_thought = False
        if self._separates:
            self._key = ""
            return mark.end()
        return self._add_text(CONTENT, THINK_END, mark.end())

    def _step_in_thinking_tag(self, held: str, pos: int, *, is_last: bool) -> int:
        """Continues in ``<thinking>``. It waits at the first call: calls count if the tag is never closed."""
        closing = held.find(THINKING_TAG_END, pos)
        if closing >= 0:
            self._in_thinking_tag = False
            end = closing + len(THINKING_TAG_END)
            return self._add_text(CONTENT, held[pos:end], end)
        if is_last:
            self._in_thinking_tag = False
            return self._step(held, pos, is_last=True)
        mark = _UNDECIDED_IN_TAG.search(held, pos)
        until = self._text_end(held, pos, mark, (THINK, CALL, THINKING_TAG_END), is_last=False)
        return self._add_text(CONTENT, held[pos:until], until)

    def _step_in_call(self, held: str, pos: int, *, is_last: bool) -> int:
        """Continues in the call that begins at ``pos``.

        Until the call can be read, only arguments before the first mark inside of it are emitted.
        """
        # A mark may begin in the last characters that were searched before.
        mark = _CALL_MARK.search(held, pos + max(len(CALL), self._num_searched - len(CALL_END)))
        self._num_searched = len(held) - pos
        if self._mark is None and mark is not None:
            self._mark = mark.start() - pos
        if self._streams:
            decided_end = len(held) if is_last else begins_at(held, pos + len(CALL), (CALL, CALL_END))
            self._emit_call(self._call.read(held, pos, decided_end if self._mark is None else pos + self._mark))
        if mark is None and not is_last:
            return pos
        call, end, is_whole = call_at(held, pos, self._tools)
        is_over = is_whole and (is_last or held.endswith(CALL_END, pos, end) or held.startswith(CALL, end))
        if is_over and call.problem is None:
            self._emit_rest_of_call(call, held, pos, end)
        elif self._is_emitted and (is_last or self._call.is_broken):
            end = self._end_of_malformed_call(held, pos)
        elif is_over and not self._is_emitted:
            self._add_text(CONTENT, held[pos:end], end)
        elif is_last:
            end = self._add_text(CONTENT, CALL, pos + len(CALL))
        else:
            return pos
        self._call = StreamedCall(self._tools)
        self._is_emitted = False
        self._mark = None
        self._num_searched = 0
        return end

    def _emit_call(self, arguments: str) -> None:
        """Emits the arguments read so far; the first time with the name of the call."""
        if self._call.name and not self._is_emitted:
            self._begin_call(self._call.name, arguments)
            self._is_emitted = True
        elif arguments:
            self._pieces.append(Piece(key=TOOL_CALLS, text=arguments))

    def _emit_rest_of_call(self, call: ToolCall, held: str, pos: int, end: int) -> None:
        if self._is_emitted:  # all but the last brace, which only a valid call gets
            self._pieces.append(Piece(key=TOOL_CALLS, text=self._call.read(held, pos, end) + "}"))
        else:
            self._begin_call(call.name, orjson.dumps(call.arguments).decode())

    def _begin_call(self, name: str, arguments: str) -> None:
        self._key = ""
        begun_id = call_id(self._name, self._num_calls)
        self._num_calls += 1
        self._pieces.append(Piece(key=TOOL_CALLS, call_id=begun_id, name=name, text=arguments))

    def _end_of_malformed_call(self, held: str, pos: int) -> int:
        if self._mark is None:
            return len(held)
        mark = pos + self._mark
        return mark + len(CALL_END) if held.startswith(CALL_END, mark) else mark

    def _add_text(self, key: str, text: str, until: int) -> int:
        """Adds text to a field, without white space around the text that it is part of; returns ``until``."""
        joint = ""
        if self._key != key:
            text = text.lstrip()
            joint = JOINT if key in self._keys else ""
            self._space = ""
        spaced = self._space + text
        visible = spaced.rstrip()
        self._space = spaced[len(visible) :]
        if visible:
            self._key = key
            self._keys.add(key)
            self._pieces.append(Piece(key=key, text=visible, joint=joint))
        return until
