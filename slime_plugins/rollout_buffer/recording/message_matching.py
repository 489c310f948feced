"""Pure: which messages of a request count as those of a recorded path, by the rule of the job.

Clients rewrite the history that they send back. Messages are compared by fingerprint, run by run: a run is one reply,
or the messages between two replies. The recorded ids stay the truth of what was sampled; a rule only decides whether a
request continues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Reasons for a branch other than a part: the request repeats one, shares no message with any, or has other tools."""
OPTION = "message_matching"
THINK_END = "</think>"

NOTHING: frozenset[str] = frozenset()


def matching_of(options: Mapping[str, Any]) -> MessageMatching:
    """Returns the rule that the options of a job name."""
    return MessageMatching(options.get(OPTION, MessageMatching.LOOSE_TOOL_CALL))


class Fingerprint(NamedTuple):
    """The parts of a message that are compared, those that ``differences`` names first.

    ``exact`` covers all of it, ``said`` the lines of its text in any order, without additions of clients,
    ``loose_calls`` the tool calls without null arguments and with all values as text.
    """

    role: str
    text: bytes
    images: tuple[str, ...]
    tool_calls: bytes
    ids: bytes
    reasoning: bytes
    exact: bytes
    said: int
    loose_calls: bytes
    is_empty: bool

    def differences(self, other: Fingerprint) -> frozenset[str]:
        """Returns the names of the parts that differ; ``form`` if it is none of them, such as white space."""
        if self.exact == other.exact:
            return frozenset()
        found = frozenset(compress(_NAMED, map(ne, self, other)))
        if "text" in found and self.said == other.said:
            found = (found - {"text"}) | {"additions"}
        return found or frozenset({"form"})


_NAMED = Fingerprint._fields[: Fingerprint._fields.index("exact")]


def fingerprint(message: Message, exact: bytes) -> Fingerprint:
    """Returns the fingerprint of a normalised message, whose digest is ``exact``."""
    content = message.get("content") or ""
    text = (
        content if isinstance(content, str) else JOINT.join(part["text"] for part in content if part["type"] == "text")
    )
    calls = message.get("tool_calls") or []
    functions = whole_numbers_as_int([call["function"] for call in with_begun_arguments(calls)])
    ids = list(filter(None, (call.get("id") for call in calls))) or message.get("tool_call_id")
    thoughts, is_reply = message.get("reasoning_content"), message["role"] == ASSISTANT
    if is_reply and THINK_END in text:  # thoughts in the text are thoughts, which clients leave out
        inline, _, text = text.rpartition(THINK_END)
        thoughts = thoughts or inline
    return Fingerprint(
        exact=exact,
        role=message["role"],
        text=digest(text.strip() if is_reply else text),
        said=_said(text, is_reply=is_reply),
        images=tuple(image_hashes_of([message])),
        tool_calls=digest(functions) if calls else b"",
        loose_calls=digest(_loose(functions)) if calls else b"",
        ids=digest(ids) if ids else b"",
        reasoning=digest(thoughts) if thoughts else b"",
        is_empty=is_reply and not calls and not text.strip(),
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a request does not continue a path: the index of its first message that differs, and in what it differs."""

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
    is_usual = sent[start:at] == context and (at >= len(sent) or sent[at].role == ASSISTANT)
    if not is_usual:
        at = start
    for run in () if is_usual else runs(context):
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
    if rule is MessageMatching.ROLE_CONTENT_ONLY:
        return held.said == sent.said
    if held.text != sent.text:
        return False
    if rule is MessageMatching.STRICT:
        return held.role == ASSISTANT and (held.tool_calls, held.ids) == (sent.tool_calls, sent.ids)
    return held.loose_calls == sent.loose_calls or held.ids == sent.ids != b""


def _is_same_run(rule: MessageMatching, held: Sequence[Fingerprint], sent: Sequence[Fingerprint]) -> bool:
    """Returns True if the messages between two replies count as the recorded ones, reordered or merged."""
    outline = None if held[0].role == ASSISTANT else outline_of(rule, held)
    return outline is not None and outline == outline_of(rule, sent)


def message_key(rule: MessageMatching, message: Fingerprint) -> Hashable:
    """Returns a value that is equal for all messages that count as one: it has the parts that may not differ."""
    if rule is MessageMatching.ROLE_CONTENT_ONLY:
        return message.role, message.images, message.said
    if rule is MessageMatching.LOOSE_TOOL_CALL:
        return message.role, message.images, message.text
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


def _said(text: str, *, is_reply: bool) -> int:
    """Returns a sum over the lines of a text without what clients add: that of joined texts is the sum of theirs."""
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
