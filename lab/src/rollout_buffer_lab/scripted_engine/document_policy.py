"""Answers questions over long documents with the tools of the context-editing generator.

It measures the document, cuts it into chunks and searches them; then it reads the hits one by one, writes a note on
each, and deletes the messages with the noted hit. Its input is that of a model: its own turns, tool results, and stubs
of deleted messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any, Final

from rollout_buffer_lab.scripted_engine.conversation import Conversation
from rollout_buffer_lab.scripted_engine.rng import SessionRng

CHUNK_WORDS: Final = 150
OVERLAP_WORDS: Final = 30
MAX_HITS: Final = 12
EMPTY_NOTE: Final = "nothing"

_CALL = re.compile(r"<tool_call>\n(.{0,4000}?)\n</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_NEEDLE = re.compile(r"access code of the (?P<place>[\w ]+) archive\?")
_SUM = re.compile(r"How many crates of (?P<good>\w+) did the (?P<ship>[\w ]+) unload")
_LIST = re.compile(r"Which ships unloaded crates of (?P<good>\w+)\?")

_THOUGHTS = ("Let me see.", "One step at a time.", "I go on.", "This is what I need next.", "")


class Failure(StrEnum):
    """The mistake of an episode; all but NONE and SLIP can make the answer wrong."""

    NONE = "none"
    SLIP = "slip"  # its first call is no JSON, and is repeated correctly
    FORGETS = "forgets"  # never deletes messages, and may run out of context
    HASTY = "hasty"  # reads one hit and answers
    MISCOUNTS = "miscounts"  # its answer is not what its notes say


@dataclass(frozen=True, kw_only=True, slots=True)
class _DocumentTask:
    """A parsed question: the query to search for, and the pattern of sentences that answer it."""

    kind: str
    query: str
    fact: re.Pattern[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Progress:
    """What the conversation shows so far: calls and results in order, and the results of the last turn."""

    calls: tuple[Mapping[str, Any], ...]
    results: tuple[Mapping[str, Any], ...]
    last_results: tuple[Mapping[str, Any], ...]

    def last_message_with(self, key: str) -> Mapping[str, Any] | None:
        """Returns the newest result's message that has ``key``."""
        messages = (result.get("message") for result in reversed(self.results))
        return next((message for message in messages if isinstance(message, dict) and key in message), None)

    @property
    def notes(self) -> dict[str, str]:
        """The notes by their keys, ``chunk ID``."""
        noted = [call["arguments"] for call in self.calls if call.get("name") == "note"]
        return {str(note.get("key")): str(note.get("content")) for note in noted}

    @property
    def chunk_just_read(self) -> Mapping[str, Any] | None:
        """The result of the last turn that has a chunk's text; None without one."""
        read = [result for result in self.last_results if isinstance(result.get("message"), dict)]
        return next((result for result in read if "text" in result["message"]), None)


def is_document_task(conversation: Conversation) -> bool:
    """Returns True if the conversation offers the document tools and has a known kind of question."""
    system = conversation.turns[0].text if conversation.turns else ""
    return '"readChunk"' in system and _task_of(conversation) is not None


def work_on_document(conversation: Conversation, *, skill: float, rng: SessionRng) -> str:
    """Returns the reply to the latest tool results: a thought and one or two calls.

    With probability 1 - ``skill`` the conversation has a failure that can make its answer wrong.
    """
    task = _task_of(conversation)
    assert task is not None, "call is_document_task first"
    progress = _read(conversation)
    question = conversation.user_turns[0].text
    failure = _drawn_failure(rng.about("document", question), skill)
    words = rng.about("words", question, len(conversation.turns))
    if failure is Failure.SLIP and not progress.results:
        return '<tool_call>\n{"name": "analyzeText", "arguments": {\n</tool_call>'
    calls = _next_calls(progress, task, failure)
    thought = words.choice(_THOUGHTS)
    return "\n".join([*([thought] if thought else []), *map(_written, calls)])


def _next_calls(progress: _Progress, task: _DocumentTask, failure: Failure) -> list[dict[str, Any]]:
    if progress.last_message_with("tokens") is None:
        return [_call("analyzeText")]
    if progress.last_message_with("chunks") is None:
        return [_call("buildIndex", chunk_size=CHUNK_WORDS, overlap=OVERLAP_WORDS)]
    search = progress.last_message_with("hits")
    if search is None:
        return [_call("searchEngine", query=task.query, top_k=MAX_HITS)]
    if progress.chunk_just_read is not None:
        return _note_and_delete(progress.chunk_just_read, task, failure)
    unread = _unread(progress, search["hits"], task, failure)
    if unread:
        return [_call("readChunk", chunk_id=unread[0])]
    if not _just_read_notes(progress):
        return [_call("readNote")]
    return [_call("finish", answer=_answer(progress, task, failure))]


def _unread(progress: _Progress, hits: Sequence[Mapping[str, Any]], task: _DocumentTask, failure: Failure) -> list[int]:
    """Returns the ids of the hits to read: those without a note. None are left once a needle's answer is noted."""
    notes = progress.notes
    has_fact = any(text != EMPTY_NOTE for text in notes.values())
    if (has_fact and task.kind == "needle") or (notes and failure is Failure.HASTY):
        return []
    return [hit["chunk_id"] for hit in hits if f"chunk {hit['chunk_id']}" not in notes]


def _just_read_notes(progress: _Progress) -> bool:
    return any(
        isinstance(result.get("message"), dict) and isinstance(result["message"].get("notes"), dict)
        for result in progress.last_results
    )


def _note_and_delete(result: Mapping[str, Any], task: _DocumentTask, failure: Failure) -> list[dict[str, Any]]:
    message = result["message"]
    facts = [match.group() for match in task.fact.finditer(message["text"])]
    note = _call("note", key=f"chunk {message['chunk_id']}", content=" ".join(facts) or EMPTY_NOTE)
    if failure is Failure.FORGETS:
        return [note]
    ids = [result["msg_id(invoking_assistant)"], result["msg_id"]]
    return [note, _call("deleteContext", message_ids=ids)]


def _answer(progress: _Progress, task: _DocumentTask, failure: Failure) -> str:
    listed = (progress.last_message_with("notes") or {}).get("notes")
    notes = "\n".join(listed.values()) if isinstance(listed, dict) else "\n".join(progress.notes.values())
    facts = {match.group(): match for match in task.fact.finditer(notes)}.values()  # overlapping chunks repeat facts
    if not facts:
        return "unknown"
    if task.kind == "sum":
        return str(sum(int(fact["crates"]) for fact in facts) + (1 if failure is Failure.MISCOUNTS else 0))
    if task.kind == "list":
        ships = sorted({fact["ship"] for fact in facts})
        if failure is Failure.MISCOUNTS:
            ships = ships[1:] or ["none"]
        return ", ".join(ships)
    code = next(iter(facts))["code"]
    return code[::-1] if failure is Failure.MISCOUNTS else code


def _task_of(conversation: Conversation) -> _DocumentTask | None:
    question = conversation.user_turns[0].text if conversation.user_turns else ""
    if match := _NEEDLE.search(question):
        fact = rf"The access code of the {match['place']} archive is (?P<code>[\w-]+)\."
        return _DocumentTask(kind="needle", query=f"access code {match['place']} archive", fact=re.compile(fact))
    if match := _SUM.search(question):
        fact = rf"Entry \d+: the {match['ship']} unloaded (?P<crates>\d+) crates of {match['good']}\."
        query = f"Entry {match['ship']} unloaded crates {match['good']}"
        return _DocumentTask(kind="sum", query=query, fact=re.compile(fact))
    if match := _LIST.search(question):
        fact = rf"Entry \d+: the (?P<ship>[\w ]+) unloaded \d+ crates of {match['good']}\."
        return _DocumentTask(kind="list", query=f"Entry unloaded crates {match['good']}", fact=re.compile(fact))
    return None


def _read(conversation: Conversation) -> _Progress:
    """Returns calls and results of the conversation; calls and results that are no JSON objects are ignored."""
    calls: list[Mapping[str, Any]] = []
    results: list[Mapping[str, Any]] = []
    last: list[Mapping[str, Any]] = []
    for turn in conversation.turns:
        if turn.role == "assistant":
            calls += [call for call in _objects(_CALL, turn.text) if isinstance(call.get("arguments"), dict)]
        elif turn.role in ("user", "tool"):
            last = _objects(_RESULT, turn.text)
            results += last
    return _Progress(calls=tuple(calls), results=tuple(results), last_results=tuple(last))


def _objects(pattern: re.Pattern[str], text: str) -> list[Mapping[str, Any]]:
    values: list[Mapping[str, Any]] = []
    for match in pattern.finditer(text):
        try:
            value = json.loads(match.group(1))
        except ValueError:
            continue
        values += [value] if isinstance(value, dict) else []
    return values


def _drawn_failure(randomness: Random, skill: float) -> Failure:
    if randomness.random() >= skill:
        return randomness.choice([Failure.FORGETS, Failure.HASTY, Failure.MISCOUNTS])
    return Failure.SLIP if randomness.random() < 0.2 else Failure.NONE


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def _written(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
