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
"""Reasons for a branch, besides a message part that differs: the request repeats an earlier one, shares no message with
any recorded path, or has other tools."""
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

    ``exact`` covers the whole message, ``said`` the lines of its text in any order, without additions of clients,
    ``loose_calls`` the tool calls without null arguments and with all values as text. ``inline`` covers the thoughts in
    the text, which ``text``, ``said`` and ``is_empty`` leave out. If the text of a reply quotes ``</think>``, it reads
    otherwise in a client's history, where the quote ends a thought: ``as_sent`` has the fingerprints of these
    readings, with the reply's own thoughts and without.
    """

    role: str
    text: bytes = b""
    images: tuple[str, ...] = ()
    tool_calls: bytes = b""
    ids: bytes = b""
    reasoning: bytes = b""
    exact: bytes = b""
    said: int = 0
    loose_calls: bytes = b""
    is_empty: bool = False
    inline: bytes = b""
    as_sent: tuple[Fingerprint, ...] = ()

    def differences(self, other: Fingerprint) -> frozenset[str]:
        """Returns the names of the parts that differ; ``form`` if only something else differs, such as white space."""
        if self.exact == other.exact:
            return frozenset()
        other = other.read_as(self)
        found = frozenset(compress(_NAMED, map(ne, self, other)))
        if "text" in found and self.said == other.said:
            found = (found - {"text"}) | {"additions"}
        return found or frozenset({"form"})

    def read_as(self, held: Fingerprint) -> Fingerprint:
        """Returns this message of a request; if it is one of ``held.as_sent``, with the text read as in ``held``."""
        same = next((each for each in held.as_sent if (each.said, each.inline) == (self.said, self.inline)), None)
        if same is None:
            return self
        text = held.text if self.text == same.text else self.text
        reasoning = same.reasoning if self.reasoning == self.inline else self.reasoning
        return self._replace(text=text, said=held.said, reasoning=reasoning, inline=b"")


_NAMED = Fingerprint._fields[: Fingerprint._fields.index("exact")]


def fingerprint(message: Message, exact: bytes, thinking: Thinking = Thinking.FROM_START) -> Fingerprint:
    """Returns the fingerprint of a normalised message, whose digest is ``exact``."""
    content = message.get("content") or ""
    text = (
        content if isinstance(content, str) else JOINT.join(part["text"] for part in content if part["type"] == "text")
    )
    calls = message.get("tool_calls") or []
    functions = whole_numbers_as_int([call["function"] for call in with_begun_arguments(calls)])
    ids = list(filter(None, (call.get("id") for call in calls))) or message.get("tool_call_id")
    thoughts = (message.get("reasoning_content") or "").strip()
    silent = Fingerprint(
        exact=exact,
        role=message["role"],
        images=tuple(image_hashes_of([message])),
        tool_calls=digest(functions) if calls else b"",
        loose_calls=digest(_loose(functions)) if calls else b"",
        ids=digest(ids) if ids else b"",
        reasoning=digest(thoughts) if thoughts else b"",
    )
    is_reply = message["role"] == ASSISTANT
    said, inline = _without_thoughts(text, thinking) if is_reply else (text, "")
    found = _with_text_digests(silent, said, inline)
    if not is_reply or THINK_END not in (text if thinking is not Thinking.FROM_START else said):
        return found
    forms = (found.reasoning, text), (silent.reasoning, said)
    as_sent = [_with_text_digests(silent, *_without_thoughts(form))._replace(reasoning=kept) for kept, form in forms]
    return found._replace(as_sent=tuple(one for one in as_sent if one.text != found.text))


def _with_text_digests(message: Fingerprint, said: str, inline: str) -> Fingerprint:
    """Returns a fingerprint completed with those of the message's text: ``said``, and the thoughts ``inline``."""
    is_reply, thoughts = message.role == ASSISTANT, digest(inline) if inline else b""
    return message._replace(
        text=digest(said.strip() if is_reply else said),
        said=_sum_of_normalized_lines(said, is_reply=is_reply),
        reasoning=message.reasoning or thoughts,
        inline=thoughts,
        is_empty=is_reply and not message.tool_calls and not said.strip(),
    )


def _without_thoughts(text: str, thinking: Thinking = Thinking.FROM_START) -> tuple[str, str]:
    """Returns a reply's text without thoughts, and its thought. If the text has several thoughts, or does not begin
    with the only one, the second value is the whole text; without any thought it is empty."""
    if thinking is Thinking.APART or THINK_END not in text:
        return text, ""
    is_open = thinking is Thinking.FROM_START and not text.lstrip().startswith(THINK)
    *ended, last = (THINK * is_open + text).split(THINK_END)
    parts = [part.partition(THINK) for part in ended]
    said = [before if mark else before + THINK_END for before, mark, _ in parts]
    thoughts = [thought.strip() for _, mark, thought in parts if mark]
    begins = len(thoughts) == 1 and not said[0].strip()
    return "".join([*said, last]), thoughts[0] if begins else text.strip() if thoughts else ""


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
    at, tolerated = start + len(context), NOTHING
    # Most requests repeat all messages as they were: then the runs need not be compared one by one.
    is_unchanged = sent[start:at] == context and (at >= len(sent) or sent[at].role == ASSISTANT)
    if not is_unchanged:
        at = start
    for run in () if is_unchanged else runs(context):
        end = at + 1 if run[0].role == ASSISTANT else _end_of_run(sent, at)
        theirs = sent[at:end]
        begins_alike = len(theirs) >= len(run) and all(is_same(rule, *pair) for pair in zip(run, theirs, strict=False))
        if not (begins_alike and len(theirs) == len(run)) and _is_same_run(rule, run, theirs):
            at, tolerated = end, tolerated | {"order"}
        elif begins_alike:
            tolerated = tolerated.union(*(held.differences(one) for held, one in zip(run, theirs, strict=False)))
            at += len(run)
        else:
            return Comparison(at, tolerated, _difference(rule, run, sent, at))
    if at < len(sent) and is_same(rule, reply, sent[at]):
        return Comparison(at + 1, tolerated | reply.differences(sent[at]))
    if reply.is_empty and rule is not MessageMatching.STRICT and at < len(sent) and sent[at].role != ASSISTANT:
        return Comparison(at, tolerated | {"empty_reply"})
    return Comparison(at, tolerated, _difference(rule, [reply], sent, at))


def is_same(rule: MessageMatching, held: Fingerprint, sent: Fingerprint) -> bool:
    """Returns True if a message of a request counts as a recorded one."""
    if held.exact == sent.exact:
        return True
    if held.role != sent.role or held.images != sent.images:
        return False
    sent = sent.read_as(held)
    # A client may leave thoughts out, but not change them.
    if sent.reasoning not in (b"", held.reasoning) or sent.inline not in (b"", held.reasoning):
        return False
    if rule is MessageMatching.ROLE_CONTENT_ONLY:
        return held.said == sent.said
    if held.text != sent.text:
        return False
    if rule is MessageMatching.STRICT:
        return held.role == ASSISTANT and (held.tool_calls, held.ids) == (sent.tool_calls, sent.ids)
    return held.loose_calls == sent.loose_calls or held.ids == sent.ids != b""


def _is_same_run(rule: MessageMatching, held: Sequence[Fingerprint], sent: Sequence[Fingerprint]) -> bool:
    """Returns True if a run between two replies counts as the recorded run, reordered or merged."""
    outline = None if held[0].role == ASSISTANT else outline_of(rule, held)
    return outline is not None and outline == outline_of(rule, sent)


def message_key(rule: MessageMatching, message: Fingerprint) -> Hashable:
    """Returns a value that is equal for all messages that count as one: it has the parts that must be equal."""
    if rule is MessageMatching.ROLE_CONTENT_ONLY:
        return message.role, message.images, message.said
    if rule is MessageMatching.LOOSE_TOOL_CALL:
        return message.role, message.images, message.text
    # Under the strict rule; the reasoning of a reply may be left out.
    return message[: _NAMED.index("reasoning")] if message.role == ASSISTANT else message.exact


def outline_of(rule: MessageMatching, run: Sequence[Fingerprint]) -> tuple[Hashable, Hashable] | None:
    """Returns a value that is equal for all orders and mergers of the messages between two replies that count as one;
    None under the rule that allows none."""
    if rule is MessageMatching.STRICT:
        return None
    if rule is MessageMatching.LOOSE_TOOL_CALL:
        others = tuple((one.role, one.text, one.images) for one in run if one.role != TOOL)
        return others, tuple(sorted((one.text, one.images) for one in run if one.role == TOOL))
    said: Counter[str] = Counter()
    for one in run:
        said[one.role] += one.said
    lines = frozenset((role, lines) for role, lines in said.items() if lines)
    return lines, tuple(sorted(image for one in run for image in one.images))


def runs(messages: Sequence[Fingerprint]) -> Iterator[Sequence[Fingerprint]]:
    """Yields the runs of messages: each reply, and all messages between two replies together."""
    at = 0
    while at < len(messages):
        end = at + 1 if messages[at].role == ASSISTANT else _end_of_run(messages, at)
        yield messages[at:end]
        at = end


def _end_of_run(messages: Sequence[Fingerprint], start: int) -> int:
    return next((at for at in range(start, len(messages)) if messages[at].role == ASSISTANT), len(messages))


def _difference(
    rule: MessageMatching, held: Sequence[Fingerprint], sent: Sequence[Fingerprint], start: int
) -> Difference:
    for at, one in enumerate(held, start):
        if at >= len(sent):
            break
        if not is_same(rule, one, sent[at]):
            return Difference(at, sent[at].role, tuple(sorted(one.differences(sent[at]))))
    return Difference(len(sent), None, (ASKED_AGAIN,))


def _sum_of_normalized_lines(text: str, *, is_reply: bool) -> int:
    """Returns the sum of the hashes of a text's lines, without clients' additions. The sums of several texts add up to
    the sum of the joined text."""
    first, *rest = text.split("<system-reminder>")
    parts = (part.partition("</system-reminder>") for part in rest)
    text = "\n".join([first, *(after if closed else inside for inside, closed, after in parts)])
    if is_reply:  # smolagents adds the end of its code and a list of the calls
        said, listed, calls = text.rpartition("Calling tools:\n[{'id': ")
        text = (said if listed and calls.rstrip().endswith("}]") else text).rstrip().removesuffix("</code>")
    return sum(map(hash, filter(None, map(str.strip, text.splitlines()))))


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _loose(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_loose(one) for one in value]
    return value.strip() if isinstance(value, str) else orjson.dumps(value).decode()
