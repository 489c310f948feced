"""Snapshots, emission views and turn boundaries, rebuilt from a stored trajectory.

A trajectory stores its messages, its generations, and one small mark for each deletion. From these:

* the emission view of a turn is the prompt of its generation;
* between two deletions the sequence only grows, so the sequence before a deletion is prompt and output of the turn that
  requested it;
* the full history before a deletion is the list of all messages until then, deleted ones included.

``snapshots_of(trajectory)`` returns the snapshots with the field names that StateLM's agent loop uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime_plugins.rollout_buffer.generator.context_editing.calls import read_calls, text_outside_calls
from slime_plugins.rollout_buffer.generator.context_editing.history import INVOKED_BY, MSG_ID
from slime_plugins.rollout_buffer.types import Generation, Message

MARKS_KEY = "deletions"
"""Key of the marks in a trajectory's ``extra_info``."""


class RecordedEpisode(Protocol):
    """A trajectory of this generator, as played or as delivered to a trainer."""

    @property
    def messages(self) -> Sequence[Message]: ...
    @property
    def generations(self) -> Sequence[Generation]: ...
    @property
    def extra_info(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DeletionMark:
    """One deletion: its turn (from 0), the number of messages before it, and the deleted ids."""

    turn: int
    message_count: int
    deleted_msg_ids: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the mark as it is stored."""
        return {"turn": self.turn, "messages": self.message_count, "deleted_msg_ids": list(self.deleted_msg_ids)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """An episode's state right before a deletion.

    A stretch is the sequence between two deletions. ``prompt_ids`` is the first prompt of the stretch,
    ``response_ids`` the rest of the stretch. The mask is 1 on sampled tokens; log-probs are 0.0 on all others. Before a
    further deletion in the same turn, mask and log-probs are all 0: the turn's first snapshot has the same tokens.
    ``deleted_msg_ids`` are those of earlier deletions. ``emission_views`` and ``assistant_turn_boundaries`` have one
    entry per turn of the whole episode so far; the boundaries (start, end) are positions in the response of the turn's
    stretch.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    full_history: list[Message]
    deleted_msg_ids: set[int]
    emission_views: list[list[int]]
    assistant_turn_boundaries: list[tuple[int, int]]


def snapshots_of(trajectory: RecordedEpisode) -> list[Snapshot]:
    """Returns the snapshot before each deletion, in order."""
    marks = _marks(trajectory)
    history = full_history_of(trajectory)
    return [_snapshot(trajectory.generations, history, marks[:count]) for count in range(1, len(marks) + 1)]


def emission_views_of(trajectory: RecordedEpisode) -> list[list[int]]:
    """Returns the prompt of every turn, exactly as it was sent."""
    return [list(generation.prompt_ids) for generation in trajectory.generations]


def turn_boundaries_of(trajectory: RecordedEpisode) -> list[tuple[int, int]]:
    """Returns the position of each turn in the response of its stretch: (start, end), end exclusive."""
    return _boundaries(trajectory.generations, _marks(trajectory))


def full_history_of(trajectory: RecordedEpisode) -> list[Message]:
    """Returns every message with its id in StateLM's form, deleted ones included."""
    return [_in_statelm_form(message) for message in trajectory.messages]


def _marks(trajectory: RecordedEpisode) -> list[DeletionMark]:
    return [
        DeletionMark(
            turn=int(mark["turn"]), message_count=int(mark["messages"]), deleted_msg_ids=tuple(mark["deleted_msg_ids"])
        )
        for mark in trajectory.extra_info.get(MARKS_KEY, ())
    ]


def _snapshot(generations: Sequence[Generation], history: list[Message], marks: Sequence[DeletionMark]) -> Snapshot:
    """Returns the snapshot before the last of ``marks``."""
    *earlier, last = marks
    so_far = generations[: last.turn + 1]
    first_turn = _first_turns(so_far, earlier)[-1]
    prompt_ids = list(so_far[first_turn].prompt_ids)
    response_ids = [*so_far[-1].prompt_ids, *so_far[-1].output_ids][len(prompt_ids) :]
    mask, log_probs = [0] * len(response_ids), [0.0] * len(response_ids)
    is_first_of_turn = all(mark.turn != last.turn for mark in earlier)
    for generation in so_far[first_turn:] if is_first_of_turn else ():
        start = len(generation.prompt_ids) - len(prompt_ids)
        end = start + len(generation.output_ids)
        mask[start:end] = [1] * (end - start)
        log_probs[start:end] = generation.output_log_probs or [0.0] * (end - start)
    return Snapshot(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=mask,
        response_logprobs=log_probs,
        full_history=history[: last.message_count],
        deleted_msg_ids={msg_id for mark in earlier for msg_id in mark.deleted_msg_ids},
        emission_views=[list(generation.prompt_ids) for generation in so_far],
        assistant_turn_boundaries=_boundaries(so_far, earlier),
    )


def _boundaries(generations: Sequence[Generation], marks: Sequence[DeletionMark]) -> list[tuple[int, int]]:
    boundaries = []
    for generation, first_turn in zip(generations, _first_turns(generations, marks), strict=True):
        start = len(generation.prompt_ids) - len(generations[first_turn].prompt_ids)
        boundaries.append((start, start + len(generation.output_ids)))
    return boundaries


def _first_turns(generations: Sequence[Generation], marks: Sequence[DeletionMark]) -> list[int]:
    """Returns, for each turn, the first turn of its stretch."""
    begins_stretch = {0, *(mark.turn + 1 for mark in marks)}
    first_turns: list[int] = []
    for turn in range(len(generations)):
        first_turns.append(turn if turn in begins_stretch else first_turns[-1])
    return first_turns


def _in_statelm_form(message: Message) -> Message:
    """Returns a message as StateLM's agent loop stores it; the arguments of a malformed call are its raw text."""
    if message["role"] == "tool":
        result = json.loads(message["content"])
        content = {"status": result["status"], "message": result["message"]}
        origin = {"tool_name": message["tool_name"], MSG_ID: message[MSG_ID], INVOKED_BY: message[INVOKED_BY]}
        return {"role": "tool", "content": content, **origin}
    if message["role"] != "assistant":
        return dict(message)
    calls = [
        {
            "id": f"call_{message[MSG_ID]}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.raw if call.problem else json.dumps(call.arguments)},
        }
        for number, call in enumerate(read_calls(message["content"]))
    ]
    reply = {"role": "assistant", "content": [{"text": text_outside_calls(message["content"])}]}
    return {**reply, **({"tool_calls": calls} if calls else {}), MSG_ID: message[MSG_ID]}
