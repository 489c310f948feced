"""Sessions of the trainer side: the recorded turns of one ``rollout_id``.

The recording makes the next prompt. If the conversation only grew, that is the recorded ids and a bridge over the new
messages; if it was edited or cut, the prompt continues another recorded path, or is rendered again.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime.utils.mask_rows import Generation, TrainingRow, pack_training_rows
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply
from slime_plugins.rollout_buffer.recording.messages import Conversation, digest, read_conversation
from slime_plugins.rollout_buffer.recording.prompts import Prompt, build_prompt
from slime_plugins.rollout_buffer.recording.turn_encoding import View
from slime_plugins.rollout_buffer.recording.turns import Recording
from slime_plugins.rollout_buffer.recording.turns import Turn as RecordedTurn
from slime_plugins.rollout_buffer.remote_rollout.conversation import Tools, prompt_by_text, reply_key
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
    """What a turn's prompt has of the sequence before it."""

    FIRST = "first"  # there is none
    CONTINUED = "continued"  # all of it
    EDITED = "edited"  # a part: the agent changed the conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A recorded turn in its session. ``kept`` ids of its prompt are those of the previous turn, prompt and output;
    ``entered_ids`` follow them, none at the first turn."""

    recorded: RecordedTurn
    kind: TurnKind
    kept: int
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
class Binding:
    """Job, instance and uid of a session's trajectory; None if not given."""

    job_id: str | None = None
    instance_id: str | None = None
    uid: str | None = None

    def filled_by(self, job_id: str | None, instance_id: str | None, uid: str | None) -> Binding:
        """Returns the binding with missing fields filled in."""
        return Binding(job_id=self.job_id or job_id, instance_id=self.instance_id or instance_id, uid=self.uid or uid)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTurn:
    """The next turn: its prompt, and the tokens added to the sequence before it. ``asked`` are its messages as they
    came, ``conversation`` the same with our own replies as we sent them."""

    prompt: Prompt
    kind: TurnKind
    kept: int
    entered: AddedTokens
    asked: Sequence[Message]
    conversation: Conversation
    tools: Tools


@dataclass(kw_only=True, slots=True)
class TrainerSession:
    """State of one rollout. One turn at a time changes it, on one event loop."""

    rollout_id: str
    engine: Engine
    tokens: ChatTokens
    binding: Binding = field(default_factory=Binding)
    tools: Tools = ()
    api_key: str | None = None
    max_new_tokens: int | None = None
    state: SessionState = SessionState.OPEN
    reason: str = ""
    recording: Recording = field(default_factory=Recording)
    turns: list[Turn] = field(default_factory=list)
    view: View = field(default_factory=View)
    asked: Sequence[Message] = ()
    """The messages of the last turn, as they came."""
    replies: dict[bytes, Message] = field(default_factory=dict)
    """Our replies by the forms in which an agent may send them back: with calls in the text or beside it."""
    in_flight: asyncio.Task[dict[str, Any]] | None = None
    in_flight_fingerprint: bytes = b""
    result: dict[str, Any] | None = None
    result_fingerprint: bytes = b""
    reward: float | None = None
    opened_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)

    def add_turn(self, plan: PlannedTurn, sampled: GenerateReply, counted_by: CountMethod, request: bytes) -> None:
        """Records a sampled turn; ``request`` is the digest of its call."""
        number = len(self.turns) + 1
        text = self.tokens.text(sampled.output_ids)
        with_calls = message_with_calls(text, number, plan.tools)
        plain: Message = {"role": "assistant", "content": text}
        forms = read_conversation([with_calls if plan.tools else plain, with_calls, {**with_calls, "content": text}])
        message = forms.messages[0]
        recorded = plan.prompt.turn(
            sampled, message, self.tokens, number=number, key=digest(plan.tools), request=request, created=time.time()
        )
        self.recording.add(recorded)
        entered: Sequence[int] = ()
        if plan.kind is not TurnKind.FIRST:
            is_new = plan.kept == plan.prompt.held
            entered = recorded.context_ids if is_new else array("i", plan.prompt.ids[plan.kept :])
        self.turns.append(
            Turn(recorded=recorded, kind=plan.kind, kept=plan.kept, entered_ids=entered, counted_by=counted_by)
        )
        self.view = View((*plan.conversation.messages, message), plan.tools, sampled.finish_reason)
        self.asked = plan.asked
        self.replies |= {reply_key(form): message for form in forms.messages}

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
        return [value for turn in self.turns for value in (*([0.0] * len(turn.entered_ids)), *turn.log_probs)]

    @property
    def messages(self) -> list[Message]:
        """The current conversation: the last messages sent, and the reply to them."""
        return list(self.view.messages)

    def rows(self) -> list[TrainingRow]:
        """Returns the training rows of this session."""
        return pack_training_rows(self.generations)


async def plan_turn(
    session: TrainerSession, messages: Sequence[Message], tools: Tools, *, text_counts: bool
) -> PlannedTurn:
    """Computes the next prompt and its added tokens. Changes nothing.

    Raises:
        InvalidPayloadError: the template refuses the messages.
    """
    conversation = _with_our_replies(session, read_conversation(list(messages)))
    prompt = await build_prompt(session.recording, digest(tools), conversation, session.tokens, tools)
    if not session.turns:
        kind, kept, entered = TurnKind.FIRST, 0, AddedTokens(count=0)
    else:
        held = session.held_ids
        kept = common_prefix_length(held, prompt.ids)
        kind = TurnKind.CONTINUED if kept == len(held) else TurnKind.EDITED
        how = "" if kept == len(held) else f" (the context was edited: of {len(held)} tokens held, {kept} are left)"
        others: tuple[tuple[CountMethod, Callable[[], int]], ...] = ()
        if text_counts:
            others = ((CountMethod.TEXT, lambda: _count_by_text(session, messages, tools, held, kind)),)
        entered = AddedTokens(count=len(prompt.ids) - kept, how=how, others=others)
    return PlannedTurn(
        prompt=prompt, kind=kind, kept=kept, entered=entered, asked=messages, conversation=conversation, tools=tools
    )


def _with_our_replies(session: TrainerSession, conversation: Conversation) -> Conversation:
    """Returns the conversation with each of our own replies as we sent it, in whatever form it came back."""
    messages = [
        session.replies.get(reply_key(message), message) if message["role"] == "assistant" else message
        for message in conversation.messages
    ]
    return conversation if messages == list(conversation.messages) else read_conversation(messages)


def _count_by_text(
    session: TrainerSession, messages: Sequence[Message], tools: Tools, held: Sequence[int], kind: TurnKind
) -> int:
    """Returns the count of an agent that renders the whole conversation again.

    If it only grew, by the guide's formula: the length of the conversation now, minus that at the last turn and the
    number of sampled tokens. After an edit, the tokens behind what the new prompt shares with the held ids.
    """
    now = prompt_by_text(session.tokens, messages, tools)
    if kind is TurnKind.EDITED:
        return len(now) - common_prefix_length(held, now)
    before = len(prompt_by_text(session.tokens, session.asked, session.view.tools))
    return len(now) - before - len(session.turns[-1].reply.output_ids)


def counts_of(turns: Sequence[Turn]) -> Mapping[str, int]:
    """Returns the number of turns of each kind, and of turns counted by text."""
    kinds = {kind.value: sum(turn.kind is kind for turn in turns) for kind in TurnKind}
    return {**kinds, "counted_by_text": sum(turn.counted_by is CountMethod.TEXT for turn in turns)}
