"""Encodes turns as rows of the store, and rebuilds a session's turns from the rows. Pure.

A row holds the additions of its turn: the ids after its parent's ids, and the messages after those of the turn with the
previous number.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import orjson

from slime.utils.mask_rows import common_prefix_length
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.recording.message_matching import Difference, Thinking
from slime_plugins.rollout_buffer.recording.messages import digest
from slime_plugins.rollout_buffer.recording.turns import Recording, Turn
from slime_plugins.rollout_buffer.types import Message


@dataclass(frozen=True, slots=True)
class View:
    """What the client of the latest turn sees: messages with the turn's reply, tools, why the turn ended, its name."""

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    finish_reason: str = "stop"
    turn: str = ""


@dataclass(slots=True)
class SessionTurns:
    """The turns of a session, and the view of its latest turn."""

    recording: Recording = field(default_factory=Recording)
    view: View = field(default_factory=View)
    by_number: dict[int, Turn] = field(default_factory=dict)

    def add(self, turn: Turn, view: View) -> None:
        """Adds the next turn, with what its client sees."""
        self.recording.add(turn)
        self.by_number[turn.number] = turn
        self.view = view


def encode_turn(turn: Turn, view: View, before: View) -> dict[str, Any]:
    """Returns the columns of a turn; ``before`` is the view of the turn with the previous number."""
    num_shared = common_prefix_length(before.messages, view.messages[:-1])
    rest = replace(turn.sampled, output_ids=(), output_log_probs=None)
    detail = {
        "name": turn.name,
        "key": turn.key.hex(),
        "context": len(turn.context),
        "images": turn.images,
        "generation": wire.encode_generations([rest])[0],
        "tolerated": turn.tolerated,
        "difference": None if turn.difference is None else astuple(turn.difference),
        "message": turn.message,
        "thinking": turn.thinking,
        "from_start": turn.from_start,
        "is_closed": turn.is_closed,
        "is_unusable": turn.is_unusable,
        "kept": num_shared,
        "messages": view.messages[num_shared:-1],
        "tools": None if view.tools == before.tools else view.tools,
    }
    return {
        "number": turn.number,
        "created_at": turn.created,
        "request": turn.request,
        "parent": None if turn.parent is None else turn.parent.number,
        "writer": turn.writer,
        "weight_version": turn.sampled.weight_version,
        "context_ids": turn.context_ids.tobytes(),
        "output_ids": array("i", turn.sampled.output_ids).tobytes(),
        "log_probs": array("d", turn.sampled.output_log_probs or ()).tobytes(),
        "detail": orjson.dumps(detail),
    }


def replay(rows: Sequence[Mapping[str, Any]], before: SessionTurns | None = None) -> SessionTurns:
    """Adds turns from their rows, in the order of their numbers, to the session ``before``; returns the session.

    Rows that an earlier version stored may have no ``name`` and no ``thinking``.
    """
    session = before or SessionTurns()
    for row in rows:
        detail = orjson.loads(row["detail"])
        messages = (*session.view.messages[: detail["kept"]], *detail["messages"])
        context = messages[len(messages) - detail["context"] :]
        (rest,) = wire.decode_generations([detail["generation"]])
        turn = Turn(
            parent=None if row["parent"] is None else session.by_number[row["parent"]],
            name=detail.get("name", str(row["number"])),
            number=row["number"],
            request=row["request"],
            key=bytes.fromhex(detail["key"]),
            context=session.recording.fingerprints(context, [digest(message) for message in context]),
            context_ids=array("i", row["context_ids"]),
            images=tuple(detail["images"]),
            sampled=replace(
                rest, output_ids=array("i", row["output_ids"]), output_log_probs=array("d", row["log_probs"])
            ),
            message=detail["message"],
            thinking=Thinking(detail.get("thinking", Thinking.FROM_START)),
            created=row["created_at"],
            writer=row["writer"],
            from_start=detail["from_start"],
            is_closed=detail["is_closed"],
            is_unusable=detail["is_unusable"],
            tolerated=tuple(detail["tolerated"]),
            difference=None if detail["difference"] is None else _difference(*detail["difference"]),
        )
        view = View(
            (*messages, turn.message),
            session.view.tools if detail["tools"] is None else detail["tools"],
            turn.sampled.finish_reason,
            turn.name,
        )
        session.add(turn, view)
        if (sent := row.get("sent")) is not None:
            session.recording.note_sent(turn, sent=bool(sent))
    return session


def _difference(message: int, role: str | None, differs: list[str]) -> Difference:
    return Difference(message, role, tuple(differs))
