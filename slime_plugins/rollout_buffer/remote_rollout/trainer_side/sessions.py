"""Sessions of the trainer side: the recorded turns of one ``rollout_id``.

The next prompt is made from the recording. If the conversation only grew, the prompt is the recorded ids and a bridge
over the new messages. If it was edited or cut, the prompt continues another recorded path, or is rendered again.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.utils.mask_rows import Generation, TrainingRow, common_prefix_length, pack_training_rows
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply
from slime_plugins.rollout_buffer.recording.messages import Conversation, digest, read_conversation
from slime_plugins.rollout_buffer.recording.prompts import Prompt, build_prompt
from slime_plugins.rollout_buffer.recording.turn_encoding import SessionTurns, View, replay
from slime_plugins.rollout_buffer.recording.turns import Recording
from slime_plugins.rollout_buffer.recording.turns import Turn as RecordedTurn
from slime_plugins.rollout_buffer.remote_rollout.bodies import OpenBody
from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod, Tools, prompt_by_text, reply_key
from slime_plugins.rollout_buffer.remote_rollout.openai_tool_calls import message_with_calls
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.masks import EnteredTokens
from slime_plugins.rollout_buffer.types import Message


class SessionState(StrEnum):
    OPEN = "open"  # accepts turns
    ENDED = "ended"  # has its reward and its trajectory
    FAILED = "failed"  # the rollout server reported a failure: no trajectory, no reward
    EXPIRED = "expired"  # no call came within the idle time: no trajectory, no reward


class TurnKind(StrEnum):
    """How much of the sequence before a turn its prompt repeats."""

    FIRST = "first"  # no sequence comes before the first turn
    CONTINUED = "continued"  # the whole sequence
    EDITED = "edited"  # the beginning of the sequence: the agent changed the conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A recorded turn in its session.

    The first ``kept_tokens`` ids of its prompt repeat the previous turn, prompt and output; ``entered_ids`` are the ids
    of the prompt after them, empty at the first turn.
    """

    recorded: RecordedTurn
    kind: TurnKind
    kept_tokens: int
    entered_ids: Sequence[int]
    counted_by: CountMethod

    @property
    def reply(self) -> Generation:
        """What was sampled."""
        return self.recorded.sampled

    @property
    def log_probs(self) -> Sequence[float]:
        """The engine's log-probs of what was sampled."""
        return self.reply.output_log_probs or ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTurn:
    """The next turn: its prompt, and the tokens that enter the sequence before it.

    ``conversation`` has the messages of the prompt, with our own replies as we sent them.
    """

    prompt: Prompt
    entered: EnteredTokens
    conversation: Conversation
    tools: Tools


@dataclass(kw_only=True, slots=True)
class TrainerSession:
    """State of one rollout. One turn at a time changes it, on one event loop."""

    opened: OpenBody
    """How the session was opened, with the digest of the key that its turns must send."""
    engine: Engine
    tokens: ChatTokens
    state: SessionState = SessionState.OPEN
    reason: str = ""
    recorded: SessionTurns = field(default_factory=SessionTurns)
    turns: list[Turn] = field(default_factory=list)
    replies: dict[bytes, Message] = field(default_factory=dict)
    """Our replies by the forms in which an agent may send them back: with calls in the text or as fields."""
    in_flight: asyncio.Task[dict[str, Any]] | None = None
    in_flight_fingerprint: bytes = b""
    result: dict[str, Any] | None = None
    result_fingerprint: bytes = b""
    reward: float | None = None
    opened_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)

    @property
    def rollout_id(self) -> str:
        return self.opened.rollout_id

    def turn_of(self, plan: PlannedTurn, sampled: GenerateReply, request: bytes) -> tuple[RecordedTurn, View]:
        """Returns a sampled turn, which is not added yet, and what its agent sees; ``request`` is the call's digest."""
        number = len(self.turns) + 1
        (message,) = read_conversation([self.reply_message(sampled.output_ids, number, plan.tools)]).messages
        recorded = plan.prompt.turn(
            sampled, message, self.tokens, number=number, key=digest(plan.tools), request=request, created=time.time()
        )
        return recorded, View((*plan.conversation.messages, message), plan.tools, sampled.finish_reason)

    def add_turn(self, recorded: RecordedTurn, view: View, counted_by: CountMethod) -> None:
        """Adds the next turn."""
        self.recorded.add(recorded, view)
        self._append(recorded, counted_by)

    def replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds stored turns that are not here yet."""
        for row in rows:
            if row["number"] == len(self.turns) + 1:
                replay([row], self.recorded)
                self._append(self.recorded.by_number[row["number"]], CountMethod(row["counted_by"]))

    def _append(self, recorded: RecordedTurn, counted_by: CountMethod) -> None:
        """Adds a recorded turn to ``turns``, and the forms of its reply to ``replies``."""
        sampled, tools = recorded.sampled.output_ids, self.view.tools
        kind, kept_tokens, entered = TurnKind.FIRST, 0, array("i")
        if self.turns:
            held = self.held_ids
            if recorded.parent is self.turns[-1].recorded:
                kept_tokens, entered = len(held), recorded.context_ids
            else:
                prompt = recorded.held_ids()[: -len(sampled)]
                kept_tokens = common_prefix_length(held, prompt)
                entered = array("i", prompt[kept_tokens:])
            kind = TurnKind.CONTINUED if kept_tokens == len(held) else TurnKind.EDITED
        self.turns.append(
            Turn(recorded=recorded, kind=kind, kept_tokens=kept_tokens, entered_ids=entered, counted_by=counted_by)
        )
        text = self.tokens.text(sampled)
        with_calls = message_with_calls(text, recorded.number, tools)
        forms = read_conversation([with_calls, {**with_calls, "content": text}, {"role": "assistant", "content": text}])
        self.replies |= {reply_key(form): recorded.message for form in forms.messages}

    def reply_message(self, output_ids: Sequence[int], number: int, tools: Tools) -> Message:
        """Returns the reply of a turn as it is sent: with its calls as fields, if there are tools."""
        text = self.tokens.text(output_ids)
        return message_with_calls(text, number, tools) if tools else {"role": "assistant", "content": text}

    @property
    def recording(self) -> Recording:
        return self.recorded.recording

    @property
    def view(self) -> View:
        """What the agent of the latest turn sees."""
        return self.recorded.view

    @property
    def held_ids(self) -> list[int]:
        """Prompt and output of the last turn."""
        return self.turns[-1].recorded.held_ids() if self.turns else []

    @property
    def generations(self) -> list[Generation]:
        """Every turn as the engine received and returned it, branch after branch."""
        return self.recording.generations()

    @property
    def response_ids(self) -> list[int]:
        """All ids after the first prompt, in order: sampled ids, and the ids that entered in between."""
        return [token_id for turn in self.turns for token_id in (*turn.entered_ids, *turn.reply.output_ids)]

    @property
    def response_mask(self) -> list[int]:
        """1 for each sampled token of ``response_ids``, 0 for each entered one."""
        return [
            value
            for turn in self.turns
            for value in (*([0] * len(turn.entered_ids)), *([1] * len(turn.reply.output_ids)))
        ]

    @property
    def response_log_probs(self) -> list[float]:
        """The engine's log-prob of each sampled token of ``response_ids``, 0.0 for entered ones."""
        return [value for turn in self.turns for value in (*([0.0] * len(turn.entered_ids)), *turn.log_probs)]

    @property
    def messages(self) -> list[Message]:
        """The current conversation: the last messages sent, and the reply to them."""
        return list(self.view.messages)

    def ending(self) -> dict[str, Any]:
        """Returns how the session ended, for the log."""
        return {
            "state": self.state.value,
            "reason": self.reason,
            "result": self.result,
            "fingerprint": self.result_fingerprint.hex(),
            "reward": self.reward,
            "opened": self.opened.model_dump(exclude_none=True),
        }

    def restore_ending(self, ending: Mapping[str, Any]) -> None:
        """Ends the session as the log states."""
        self.state, self.reason = SessionState(ending["state"]), ending["reason"]
        self.result, self.result_fingerprint = ending["result"], bytes.fromhex(ending["fingerprint"])
        self.reward, self.opened = ending["reward"], OpenBody.model_validate(ending["opened"])

    def rows(self) -> list[TrainingRow]:
        """Returns the training rows of this session."""
        return pack_training_rows(self.generations)


async def plan_turn(
    session: TrainerSession, messages: Sequence[Message], tools: Tools, *, text_counts: bool
) -> PlannedTurn:
    """Computes the next prompt and its entered tokens. Changes nothing.

    Raises:
        InvalidPayloadError: the template refuses the messages.
    """
    conversation = _with_our_replies(session, read_conversation(list(messages)))
    prompt = await build_prompt(session.recording, digest(tools), conversation, session.tokens, tools)
    entered = EnteredTokens(count=0)
    if session.turns:
        held = session.held_ids
        kept_tokens = common_prefix_length(held, prompt.ids)
        is_edited = kept_tokens < len(held)
        note = f" (the context was edited: of {len(held)} tokens held, {kept_tokens} are left)" if is_edited else ""
        others: tuple[tuple[CountMethod, Callable[[], int]], ...] = ()
        if text_counts:
            others = ((CountMethod.TEXT, lambda: _count_by_text(session, messages, tools, is_edited=is_edited)),)
        entered = EnteredTokens(count=len(prompt.ids) - kept_tokens, note=note, others=others)
    return PlannedTurn(prompt=prompt, entered=entered, conversation=conversation, tools=tools)


def _with_our_replies(session: TrainerSession, conversation: Conversation) -> Conversation:
    """Returns the conversation with each of our own replies as we sent it, in whatever form it came back.

    A reply that came back exactly as sent is not looked up, because another reply of ours may have the same key: keys
    ignore the spaces around a reply.
    """
    sent = [turn.recorded.message for turn in session.turns]
    messages = [
        message
        if message["role"] != "assistant" or message in sent
        else session.replies.get(reply_key(message), message)
        for message in conversation.messages
    ]
    return conversation if messages == list(conversation.messages) else read_conversation(messages)


def _count_by_text(session: TrainerSession, messages: Sequence[Message], tools: Tools, *, is_edited: bool) -> int:
    """Returns the count of an agent that renders the whole conversation again.

    If the conversation only grew, the formula of the protocol's guide gives the count: its tokens now, minus its tokens
    at the last turn, minus the sampled tokens. After an edit, the tokens after the common prefix with the held ids
    count.
    """
    now = prompt_by_text(session.tokens, messages, tools)
    if is_edited:
        return len(now) - common_prefix_length(session.held_ids, now)
    before = len(prompt_by_text(session.tokens, session.view.messages[:-1], session.view.tools))
    return len(now) - before - len(session.turns[-1].reply.output_ids)


def counts_of(turns: Sequence[Turn]) -> Mapping[str, int]:
    """Returns the number of turns of each kind, and of turns counted by text."""
    kinds = {kind.value: sum(turn.kind is kind for turn in turns) for kind in TurnKind}
    return {**kinds, "counted_by_text": sum(turn.counted_by is CountMethod.TEXT for turn in turns)}
