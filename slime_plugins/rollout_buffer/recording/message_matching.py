"""Which messages of a request count as the messages of a recorded path, by the rule of the job. Pure functions.

Clients rewrite the history that they send back. Messages are compared by fingerprint, run by run: a run is one reply,
or the messages between two replies. Recorded ids are never changed; a rule only decides whether a request
continues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import compress
from operator import ne
from typing import Any, NamedTuple

import orjson

from slime_plugins.rollout_buffer.recording.messages import (
    JOINT,
    digest,
    image_hashes_of,
    whole_numbers_as_int,
    with_begun_arguments,
)
from slime_plugins.rollout_buffer.types import Message, MessageMatching

ASSISTANT, TOOL = "assistant", "tool"
ASKED_AGAIN, OTHER_CONVERSATION, OTHER_TOOLS = "asked_again", "other_conversation", "tools"
"""Reasons for a branch, besides a message part that differs: the request repeats an earlier one, shares neither its
first nor its second message with a recorded path, or has other tools."""
OPTION = "message_matching"
"""Name of the job's option with the rule."""
THINK, THINK_END = "<think>", "</think>"

NOTHING: frozenset[str] = frozenset()


class Thinking(StrEnum):
    """Where the text of a reply holds thoughts, which clients may leave out."""

    APART = "apart"
    """Nowhere: thoughts are in a field of their own."""
    IN_BLOCKS = "in_blocks"
    """In ``<think>`` blocks."""
    FROM_START = "from_start"
    """In blocks, the first of which the prompt has opened; replies in a client's history are read in this way."""


def matching_of(options: Mapping[str, Any]) -> MessageMatching:
    """Returns the rule that the options of a job name."""
    return MessageMatching(options.get(OPTION, MessageMatching.LOOSE_TOOL_CALL))


class Fingerprint(NamedTuple):
    """The parts of a message that are compared. The fields before ``exact`` are those that ``differences`` names.

    ``exact`` is a digest of the whole message. ``line_sum`` is the sum of the hashes of the text's lines, in any order
    and without what clients add. ``loose_calls`` is a digest of the tool calls, without null arguments and with all
    values as text. ``inline_thoughts`` is a digest of the thoughts in the text; ``text``, ``line_sum`` and
    ``is_empty`` leave them out.

    In a client's history, a ``</think>`` that a reply only quotes is read as the end of a thought. ``as_sent`` has the
    fingerprints of such a reply as it is read there: sent with its own thoughts, and without them.
    """

    role: str
    text: bytes = b""
    images: tuple[str, ...] = ()
    tool_calls: bytes = b""
    ids: bytes = b""
    reasoning: bytes = b""
    exact: bytes = b""
    line_sum: int = 0
    loose_calls: bytes = b""
    is_empty: bool = False
    inline_thoughts: bytes = b""
    as_sent: tuple[Fingerprint, ...] = ()

    def differences(self, other: Fingerprint) -> frozenset[str]:
        """Returns the names of the parts that differ; ``form`` if only something else differs, such as white space.

        If only the order of the text's lines differs, or what clients add, ``additions`` stands for ``text``.
        """
        if self.exact == other.exact:
            return frozenset()
        other = other.read_as(self)
        names = frozenset(compress(_NAMED_FIELDS, map(ne, self, other)))
        if "text" in names and self.line_sum == other.line_sum:
            names = (names - {"text"}) | {"additions"}
        return names or frozenset({"form"})

    def read_as(self, held: Fingerprint) -> Fingerprint:
        """Returns this message of a request. If it is a form of ``held`` in which a quote was read as the end of a
        thought (``as_sent``), its text is replaced by that of ``held``."""
        sent_text = self.line_sum, self.inline_thoughts
        form = next((one for one in held.as_sent if (one.line_sum, one.inline_thoughts) == sent_text), None)
        if form is None:
            return self
        text = held.text if self.text == form.text else self.text
        reasoning = form.reasoning if self.reasoning == self.inline_thoughts else self.reasoning
        return self._replace(text=text, line_sum=held.line_sum, reasoning=reasoning, inline_thoughts=b"")


_NAMED_FIELDS = Fingerprint._fields[: Fingerprint._fields.index("exact")]


def fingerprint(message: Message, exact: bytes, thinking: Thinking = Thinking.FROM_START) -> Fingerprint:
    """Returns the fingerprint of a normalised message, whose digest is ``exact``."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    text = JOINT.join(texts)
    calls = message.get("tool_calls") or []
    functions = whole_numbers_as_int([call["function"] for call in with_begun_arguments(calls)])
    ids = list(filter(None, (call.get("id") for call in calls))) or message.get("tool_call_id")
    thoughts = (message.get("reasoning_content") or "").strip()
    without_text = Fingerprint(
        exact=exact,
        role=message["role"],
        images=tuple(image_hashes_of([message])),
        tool_calls=digest(functions) if calls else b"",
        loose_calls=digest(_loose(functions)) if calls else b"",
        ids=digest(ids) if ids else b"",
        reasoning=digest(thoughts) if thoughts else b"",
    )
    if message["role"] != ASSISTANT:
        return _with_text_digests(without_text, text, "")
    visible, inline = _split_thoughts(text, thinking)
    completed = _with_text_digests(without_text, visible, inline)
    # A client's history is read as FROM_START. A reply that was itself read as FROM_START is read differently there
    # only if the client sends its visible text alone, and this text quotes ``</think>``.
    if THINK_END not in (visible if thinking is Thinking.FROM_START else text):
        return completed
    as_sent = [
        _with_text_digests(without_text, *_split_thoughts(sent_text))._replace(reasoning=reasoning)
        for sent_text, reasoning in ((text, completed.reasoning), (visible, without_text.reasoning))
    ]
    return completed._replace(as_sent=tuple(one for one in as_sent if one.text != completed.text))


def _with_text_digests(message: Fingerprint, visible: str, inline: str) -> Fingerprint:
    """Returns a fingerprint completed with the digests of the message's text: the visible text and inline thoughts."""
    is_reply, thoughts = message.role == ASSISTANT, digest(inline) if inline else b""
    return message._replace(
        text=digest(visible.strip() if is_reply else visible),
        line_sum=_sum_of_normalized_lines(visible, is_reply=is_reply),
        reasoning=message.reasoning or thoughts,
        inline_thoughts=thoughts,
        is_empty=is_reply and not message.tool_calls and not visible.strip(),
    )


def _split_thoughts(text: str, thinking: Thinking = Thinking.FROM_START) -> tuple[str, str]:
    """Returns the visible text of a reply, and its thought; without any thought the second value is empty.

    If the text has several thoughts, or other text before its only thought, the second value is the whole text.
    """
    if thinking is Thinking.APART or THINK_END not in text:
        return text, ""
    begins_in_thought = thinking is Thinking.FROM_START and not text.lstrip().startswith(THINK)
    *ended, rest = (THINK + text if begins_in_thought else text).split(THINK_END)
    parts = [part.partition(THINK) for part in ended]
    # A part in which no thought began ends with a quote, which is visible.
    visible = [before if begun else before + THINK_END for before, begun, _ in parts]
    thoughts = [thought.strip() for _, begun, thought in parts if begun]
    if len(thoughts) != 1 or visible[0].strip():
        return "".join([*visible, rest]), text.strip() if thoughts else ""
    return "".join([*visible, rest]), thoughts[0]


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a request does not continue a path: the index of the first message that differs, and its parts that do."""

    message: int
    role: str | None
    differs: tuple[str, ...]


class Comparison(NamedTuple):
    """How far a request follows a turn: through its first ``end`` messages, with tolerated differences, or up to the
    ``difference``."""

    end: int
    tolerated: frozenset[str]
    difference: Difference | None = None


def compare(
    rule: MessageMatching,
    context: tuple[Fingerprint, ...],
    reply: Fingerprint,
    sent: tuple[Fingerprint, ...],
    start: int,
) -> Comparison:
    """Compares the messages of a turn, and its reply, with those of a request from ``start``."""
    compared = _compare_context(rule, context, sent, start)
    end, tolerated, difference = compared
    if difference is not None:
        return compared
    if end < len(sent) and is_same(rule, reply, sent[end]):
        return Comparison(end + 1, tolerated | reply.differences(sent[end]))
    # Clients may leave out an empty reply: then the messages after it follow.
    if reply.is_empty and rule is not MessageMatching.STRICT and end < len(sent) and sent[end].role != ASSISTANT:
        return Comparison(end, tolerated | {"empty_reply"})
    return Comparison(end, tolerated, _difference(rule, [reply], sent, end))


def _compare_context(
    rule: MessageMatching, context: tuple[Fingerprint, ...], sent: tuple[Fingerprint, ...], start: int
) -> Comparison:
    """Compares the messages of a turn before its reply with those of a request, run by run."""
    end = start + len(context)
    # Most requests repeat all messages as they were: then the runs need not be compared one by one.
    if sent[start:end] == context and (end >= len(sent) or sent[end].role == ASSISTANT):
        return Comparison(end, NOTHING)
    tolerated = NOTHING
    for held in runs(context):
        end = start + 1 if held[0].role == ASSISTANT else _end_of_run(sent, start)
        pairs = list(zip(held, sent[start:end], strict=False))
        begins_alike = len(pairs) == len(held) and all(is_same(rule, *pair) for pair in pairs)
        # A run of another length may be the same messages, merged.
        is_alike = begins_alike and end == start + len(held)
        if not is_alike and _is_same_run(rule, held, sent[start:end]):
            start, tolerated = end, tolerated | {"order"}
        elif begins_alike:
            start, tolerated = start + len(held), tolerated.union(*(one.differences(other) for one, other in pairs))
        else:
            return Comparison(start, tolerated, _difference(rule, held, sent, start))
    return Comparison(start, tolerated)


def is_same(rule: MessageMatching, held: Fingerprint, sent: Fingerprint) -> bool:
    """Returns True if a message of a request counts as a recorded one."""
    if held.exact == sent.exact:
        return True
    if held.role != sent.role or held.images != sent.images:
        return False
    sent = sent.read_as(held)
    # A client may leave thoughts out, but not change them.
    if not {sent.reasoning, sent.inline_thoughts} <= {b"", held.reasoning}:
        return False
    if rule is MessageMatching.ROLE_CONTENT_ONLY:
        return held.line_sum == sent.line_sum
    if held.text != sent.text:
        return False
    if rule is MessageMatching.STRICT:
        return held.role == ASSISTANT and (held.tool_calls, held.ids) == (sent.tool_calls, sent.ids)
    return held.loose_calls == sent.loose_calls or (held.ids != b"" and held.ids == sent.ids)


def _is_same_run(rule: MessageMatching, held: Sequence[Fingerprint], sent: Sequence[Fingerprint]) -> bool:
    """Returns True if a run between two replies counts as the recorded run, reordered or merged."""
    outline = None if held[0].role == ASSISTANT else outline_of(rule, held)
    return outline is not None and outline == outline_of(rule, sent)


def message_key(rule: MessageMatching, message: Fingerprint) -> Hashable:
    """Returns a value that is equal for all messages that count as one: the parts that must be equal under the rule."""
    if rule is MessageMatching.ROLE_CONTENT_ONLY:
        return message.role, message.images, message.line_sum
    if rule is MessageMatching.LOOSE_TOOL_CALL:
        return message.role, message.images, message.text
    # Under the strict rule; the reasoning of a reply may be left out.
    return message[: _NAMED_FIELDS.index("reasoning")] if message.role == ASSISTANT else message.exact


def outline_of(rule: MessageMatching, run: Sequence[Fingerprint]) -> tuple[Hashable, Hashable] | None:
    """Returns a value that is equal for two runs between replies if one counts as a reordering or a merger of the
    other; None under the strict rule, which allows neither."""
    if rule is MessageMatching.STRICT:
        return None
    if rule is MessageMatching.LOOSE_TOOL_CALL:
        others = tuple((one.role, one.text, one.images) for one in run if one.role != TOOL)
        return others, tuple(sorted((one.text, one.images) for one in run if one.role == TOOL))
    line_sums: Counter[str] = Counter()
    for one in run:
        line_sums[one.role] += one.line_sum
    lines = frozenset((role, line_sum) for role, line_sum in line_sums.items() if line_sum)
    return lines, tuple(sorted(image for one in run for image in one.images))


def runs(messages: Sequence[Fingerprint]) -> Iterator[Sequence[Fingerprint]]:
    """Yields the runs of messages: each reply, and all messages between two replies together."""
    start = 0
    while start < len(messages):
        end = start + 1 if messages[start].role == ASSISTANT else _end_of_run(messages, start)
        yield messages[start:end]
        start = end


def _end_of_run(messages: Sequence[Fingerprint], start: int) -> int:
    return next((index for index in range(start, len(messages)) if messages[index].role == ASSISTANT), len(messages))


def _difference(
    rule: MessageMatching, held: Sequence[Fingerprint], sent: Sequence[Fingerprint], start: int
) -> Difference:
    for index, message in enumerate(held, start):
        if index >= len(sent):
            break
        if not is_same(rule, message, sent[index]):
            return Difference(index, sent[index].role, tuple(sorted(message.differences(sent[index]))))
    # The request ends within these messages: the recorded request was sent again.
    return Difference(len(sent), None, (ASKED_AGAIN,))


def _sum_of_normalized_lines(text: str, *, is_reply: bool) -> int:
    """Returns the sum of the hashes of a text's lines, without what clients add. The sums of several texts add up to
    the sum of the joined text."""
    first, *rest = text.split("<system-reminder>")
    parts = (part.partition("</system-reminder>") for part in rest)
    text = "\n".join([first, *(after if closed else inside for inside, closed, after in parts)])
    if is_reply:  # smolagents adds the end of its code and a list of the calls
        before, listed, calls = text.rpartition("Calling tools:\n[{'id': ")
        text = (before if listed and calls.rstrip().endswith("}]") else text).rstrip().removesuffix("</code>")
    return sum(map(hash, filter(None, map(str.strip, text.splitlines()))))


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _loose(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_loose(one) for one in value]
    return value.strip() if isinstance(value, str) else orjson.dumps(value).decode()
