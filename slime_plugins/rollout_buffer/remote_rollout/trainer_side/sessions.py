"""Sessions of the trainer side: the prompts and sampled ids of one ``rollout_id``, turn by turn.

A session stores ids. If the conversation only grew, its prompt continues from the stored ids; if it was edited or cut,
it is rendered again and opens a new training row, because its prompt no longer starts with the stored ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.utils.mask_rows import Generation, TrainingRow, pack_training_rows
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply
from slime_plugins.rollout_buffer.remote_rollout.conversation import (
    ConversationTokens,
    Tools,
    is_same_message,
    is_same_reply,
)
from slime_plugins.rollout_buffer.remote_rollout.openai_tool_calls import message_with_calls
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.masks import AddedTokens, CountMethod
from slime_plugins.rollout_buffer.types import Message
from slime_plugins.rollout_buffer.wire import common_prefix_length


class SessionState(StrEnum):
    OPEN = "open"  # accepts turns
    ENDED = "ended"  # has its reward and its trajectory
    FAILED = "failed"  # the rollout server reported a failure: no trajectory, no reward
    EXPIRED = "expired"  # no call came within the idle time: as failed


class TurnKind(StrEnum):
    """How a turn's prompt was made."""

    FIRST = "first"  # the whole prompt, from the template
    CONTINUED = "continued"  # the held ids, and a bridge
    EDITED = "edited"  # the agent changed the conversation: rendered again, a new row


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One sampled turn. Its prompt is the first ``kept`` ids of the previous turn (prompt and output), and
    ``new_ids``."""

    kind: TurnKind
    kept: int
    new_ids: tuple[int, ...]
    reply: GenerateReply
    counted_by: CountMethod
    seconds: float

    @property
    def entered_ids(self) -> tuple[int, ...]:
        """The ids added since the previous turn; empty at the first turn."""
        return () if self.kind is TurnKind.FIRST else self.new_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """Job, instance and uid of a session's trajectory; None if not given."""

    job_id: str | None = None
    instance_id: str | None = None
    uid: str | None = None

    def filled_by(self, job_id: str | None, instance_id: str | None, uid: str | None) -> Binding:
        """Returns the binding with missing fields filled in."""
        return Binding(job_id=self.job_id or job_id, instance_id=self.instance_id or instance_id, uid=self.uid or uid)


@dataclass(kw_only=True, slots=True)
class TrainerSession:
    """State of one rollout. One turn at a time changes it, on one event loop."""

    rollout_id: str
    engine: Engine
    tokens: ConversationTokens
    binding: Binding = field(default_factory=Binding)
    tools: Tools = ()
    api_key: str | None = None
    max_new_tokens: int | None = None
    state: SessionState = SessionState.OPEN
    reason: str = ""
    turns: list[Turn] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    """Prompt and output of the last turn, from which the next one continues."""
    recorded_tokens: int = 0
    asked_messages: list[Message] = field(default_factory=list)
    reply_message: Message | None = None
    last_tools: Tools = ()
    fingerprint: bytes = b""
    last_reply: dict[str, Any] | None = None
    in_flight: asyncio.Task[dict[str, Any]] | None = None
    in_flight_fingerprint: bytes = b""
    result: dict[str, Any] | None = None
    result_fingerprint: bytes = b""
    reward: float | None = None
    opened_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)

    def add_turn(self, turn: Turn) -> None:
        """Appends a sampled turn."""
        self.turns.append(turn)
        self.held_ids = [*self.held_ids[: turn.kept], *turn.new_ids, *turn.reply.output_ids]
        self.recorded_tokens += len(turn.new_ids) + len(turn.reply.output_ids)

    @property
    def generations(self) -> list[Generation]:
        """Every turn as the engine received and returned it."""
        found: list[Generation] = []
        held: list[int] = []
        for turn in self.turns:
            prompt = [*held[: turn.kept], *turn.new_ids]
            found.append(turn.reply.as_generation(prompt))
            held = [*prompt, *turn.reply.output_ids]
        return found

    @property
    def response_ids(self) -> list[int]:
        """All ids after the first prompt, in order: sampled ids, and the ids added in between."""
        return [one for turn in self.turns for one in (*turn.entered_ids, *turn.reply.output_ids)]

    @property
    def response_mask(self) -> list[int]:
        """1 for each sampled token of ``response_ids``, 0 for each added one."""
        return [
            value
            for turn in self.turns
            for value in (*([0] * len(turn.entered_ids)), *([1] * len(turn.reply.output_ids)))
        ]

    @property
    def response_log_probs(self) -> list[float]:
        """The engine's log-prob of each sampled token of ``response_ids``, 0.0 for added ones."""
        return [
            value for turn in self.turns for value in (*([0.0] * len(turn.entered_ids)), *turn.reply.output_log_probs)
        ]

    @property
    def messages(self) -> list[Message]:
        """The current conversation: the last messages sent, and the reply to them."""
        return [*self.asked_messages, *([self.reply_message] if self.reply_message is not None else [])]

    def rows(self) -> list[TrainingRow]:
        """Returns the training rows of this session."""
        return pack_training_rows(self.generations)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTurn:
    """The prompt of the next turn, and the tokens added to it."""

    kind: TurnKind
    kept: int
    new_ids: tuple[int, ...]
    entered: AddedTokens

    def prompt_ids(self, held: Sequence[int]) -> list[int]:
        return [*held[: self.kept], *self.new_ids]


def plan_turn(session: TrainerSession, messages: Sequence[Message], tools: Tools, *, text_counts: bool) -> PlannedTurn:
    """Computes the next prompt and its added tokens. Changes nothing.

    Raises:
        InvalidPayloadError: the template refuses the messages.
    """
    if not session.turns:
        prompt = session.tokens.prompt(messages, tools)
        return PlannedTurn(kind=TurnKind.FIRST, kept=0, new_ids=tuple(prompt), entered=AddedTokens(count=0))
    if _continues(session, messages) and list(tools) == list(session.last_tools):
        return _continued(session, messages, tools, text_counts)
    return _edited(session, messages, tools)


def _continues(session: TrainerSession, messages: Sequence[Message]) -> bool:
    """Returns True if the messages are those of the last turn, our reply, and no later assistant message."""
    asked, reply = session.asked_messages, session.reply_message
    if reply is None or len(messages) <= len(asked) or not _is_our_reply(session, messages[len(asked)]):
        return False
    if any(message.get("role") == "assistant" for message in messages[len(asked) + 1 :]):
        return False
    return all(is_same_message(left, right) for left, right in zip(asked, messages, strict=False))


def _is_our_reply(session: TrainerSession, message: Message) -> bool:
    """Returns True for our reply, with its tool calls in the text or as ``tool_calls``."""
    if session.reply_message is None or message.get("role") != "assistant":
        return False
    text = session.tokens.text(session.turns[-1].reply.output_ids)
    taken_out = message_with_calls(text, len(session.turns), session.last_tools)
    beside = {**taken_out, "content": text}
    return any(is_same_reply(form, message) for form in (session.reply_message, taken_out, beside))


def _continued(session: TrainerSession, messages: Sequence[Message], tools: Tools, text_counts: bool) -> PlannedTurn:
    held = session.held_ids
    added = messages[len(session.asked_messages) + 1 :]
    bridge = session.tokens.bridge(session.asked_messages, added, held, tools)
    others: tuple[tuple[CountMethod, Callable[[], int]], ...] = ()
    if text_counts:
        others = ((CountMethod.TEXT, lambda: _count_by_text(session, messages, tools)),)
    return PlannedTurn(
        kind=TurnKind.CONTINUED,
        kept=len(held),
        new_ids=tuple(bridge),
        entered=AddedTokens(count=len(bridge), others=others),
    )


def _count_by_text(session: TrainerSession, messages: Sequence[Message], tools: Tools) -> int:
    """Returns the count of the guide's formula: the length of the conversation rendered now, minus that of its render
    at the last turn and the number of sampled tokens."""
    before = len(session.tokens.prompt(session.asked_messages, session.last_tools))
    sampled = len(session.turns[-1].reply.output_ids)
    return len(session.tokens.prompt(messages, tools)) - before - sampled


def _edited(session: TrainerSession, messages: Sequence[Message], tools: Tools) -> PlannedTurn:
    held, prompt = session.held_ids, session.tokens.prompt(messages, tools)
    kept = common_prefix_length(held, prompt)
    entered = tuple(prompt[kept:])
    how = "" if kept == len(held) else f" (the context was edited: of {len(held)} tokens held, {kept} are left)"
    return PlannedTurn(
        kind=TurnKind.CONTINUED if kept == len(held) else TurnKind.EDITED,
        kept=kept,
        new_ids=entered,
        entered=AddedTokens(count=len(entered), how=how),
    )


def counts_of(turns: Sequence[Turn]) -> Mapping[str, int]:
    """Returns the number of turns of each kind, and of turns counted by text."""
    kinds = {kind.value: sum(turn.kind is kind for turn in turns) for kind in TurnKind}
    return {**kinds, "counted_by_text": sum(turn.counted_by is CountMethod.TEXT for turn in turns)}
