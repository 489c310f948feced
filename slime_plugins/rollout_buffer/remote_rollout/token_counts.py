"""The agent's counts: the prompt that the trainer must have used, and the tokens that entered it since the last turn.

There are two counts. The count by ids takes the held ids (the sequence so far) plus the template's bridge; it is exact
if the trainer continues from its own ids. The count by text renders the whole conversation again and subtracts the
tokens of the last render and reply; it is the formula of the protocol's guide, and exact if the trainer renders again.
The counts differ only if the tokenizer would encode the sampled text to other ids. Then the count by ids is sent first,
unless the ids of the last reply do not decode to its text. A trainer that refuses one count is sent the other count,
once; the prompt ids of its reply show which count it uses. After an edit of the conversation, the count by ids is the
part of the new prompt after its common prefix with the held ids.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime.utils.mask_rows import common_prefix_length
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.recording.messages import Conversation, digest, read_conversation
from slime_plugins.rollout_buffer.recording.prompts import Prompt, build_prompt, prompt_of_ids
from slime_plugins.rollout_buffer.recording.turns import Recording
from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod, Tools, prompt_by_text
from slime_plugins.rollout_buffer.remote_rollout.errors import TrainerReplyError
from slime_plugins.rollout_buffer.remote_rollout.trainer_replies import TrainerReply
from slime_plugins.rollout_buffer.tokenizer_loading import vocabulary_size
from slime_plugins.rollout_buffer.types import Message

_CAUSES = "possibly the trainer uses another tokenizer, another chat template, or another conversation"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedTurn:
    """The next turn: prompt and number of entered tokens, by count method. ``continued`` is the prompt by ids."""

    conversation: Conversation
    continued: Prompt
    prompts: Mapping[CountMethod, list[int]]
    entered: Mapping[CountMethod, int]
    preferred: CountMethod

    def methods(self) -> list[CountMethod]:
        """Returns the preferred count method, and the other one if its count differs."""
        other = CountMethod.TEXT if self.preferred is CountMethod.IDS else CountMethod.IDS
        return [self.preferred] + ([other] if self.entered[other] != self.entered[self.preferred] else [])

    def mask(self, method: CountMethod) -> list[int] | None:
        """Returns one 0 for each entered token; None without any."""
        return [0] * self.entered[method] if self.entered[method] > 0 else None


class TokenCounter:
    """Counts one rollout. ``optional_tools`` are the server's own, which a trainer may show to its model unasked."""

    def __init__(self, tokens: ChatTokens, tools: Tools, optional_tools: Tools) -> None:
        self._tokens = tokens
        self._tools = tools
        self._optional_tools = optional_tools
        self._recording = Recording()
        self._num_rendered = 0
        """Number of tokens of the latest prompt by text."""
        self._held: list[int] = []
        """The ids of the sequence so far, prompt and replies."""
        self._num_sampled = 0
        """Number of tokens of the latest reply."""
        self._trusts_text = False
        """True if the ids of the latest reply do not decode to its text."""
        self._proven: CountMethod | None = None
        """The method that the trainer uses; None until its prompt ids have proven it."""

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of the sequence so far, prompt and replies."""
        return len(self._held)

    async def expect(self, messages: Sequence[Message], turn: int) -> ExpectedTurn:
        """Returns the expected next prompt and its entered tokens. Changes nothing."""
        conversation = read_conversation(list(messages))
        continued = await build_prompt(self._recording, digest(self._tools), conversation, self._tokens, self._tools)
        rendered = await asyncio.to_thread(prompt_by_text, self._tokens, messages, self._tools)
        by_ids = by_text = 0
        if turn > 1:
            by_ids = len(continued.ids) - common_prefix_length(self._held, continued.ids)
            by_text = len(rendered) - self._num_rendered - self._num_sampled
        return ExpectedTurn(
            conversation=conversation,
            continued=continued,
            prompts={CountMethod.IDS: continued.ids, CountMethod.TEXT: rendered},
            entered={CountMethod.IDS: by_ids, CountMethod.TEXT: by_text},
            preferred=self._proven or (CountMethod.TEXT if self._trusts_text and by_text > 0 else CountMethod.IDS),
        )

    def take(self, messages: Sequence[Message], expected: ExpectedTurn, reply: TrainerReply, turn: int) -> None:
        """Records a reply after checking the trainer's prompt against our own.

        Raises:
            TrainerReplyError: the prompts differ; names the turn, both numbers, and possible causes.
        """
        self._check_vocabulary(reply, turn)
        method, ids = self._prompt_of(messages, expected, reply, turn)
        if len(expected.methods()) > 1 and reply.prompt_ids is not None:
            self._proven = method
        prompt = expected.continued
        if ids != prompt.ids:
            prompt = prompt_of_ids(self._recording, ids, expected.conversation)
        sampled = GenerateReply(
            output_ids=reply.token_ids,
            output_log_probs=reply.log_probs or (0.0,) * len(reply.token_ids),
            finish_reason=reply.finish_reason,
        )
        (message,) = read_conversation([reply.message]).messages
        self._recording.add(
            prompt.turn(
                sampled, message, self._tokens, number=turn, key=digest(self._tools), request=b"", created=time.time()
            )
        )
        self._num_rendered = len(expected.prompts[CountMethod.TEXT])
        self._held = [*ids, *reply.token_ids]
        self._num_sampled = len(reply.token_ids)
        self._trusts_text = not _holds_the_message(self._tokens.text(reply.token_ids), reply.message)

    def _check_vocabulary(self, reply: TrainerReply, turn: int) -> None:
        tokenizer = self._tokens.tokenizer
        size = vocabulary_size(getattr(tokenizer, "name_or_path", None), tokenizer)
        largest = max(reply.token_ids)
        if size is not None and largest >= size:
            raise TrainerReplyError(
                f"turn {turn}: the trainer sampled token {largest}, our tokenizer has {size} ids: {_CAUSES}"
            )

    def _prompt_of(
        self, messages: Sequence[Message], expected: ExpectedTurn, reply: TrainerReply, turn: int
    ) -> tuple[CountMethod, list[int]]:
        theirs = None if reply.prompt_ids is None else list(reply.prompt_ids)
        for method in (expected.preferred, *CountMethod):
            if theirs == expected.prompts[method]:
                return method, expected.prompts[method]
        if theirs is None:
            self._check_count(messages, expected, reply, turn)
            return expected.preferred, expected.prompts[expected.preferred]
        if turn == 1 and self._shows_own_tools(messages, theirs):
            return CountMethod.IDS, theirs
        raise TrainerReplyError(_difference(expected.prompts[expected.preferred], theirs, turn))

    def _shows_own_tools(self, messages: Sequence[Message], theirs: list[int]) -> bool:
        """Returns True, and counts with these tools from now on, if the prompt has this server's (``GET /tools``)."""
        if self._tools or not self._optional_tools:
            return False
        if prompt_by_text(self._tokens, messages, self._optional_tools) != theirs:
            return False
        self._tools = self._optional_tools
        return True

    def _check_count(self, messages: Sequence[Message], expected: ExpectedTurn, reply: TrainerReply, turn: int) -> None:
        """Checks the prompt length of a trainer that sends no prompt ids; it may have shown this server's tools."""
        ours = [len(expected.prompts[expected.preferred]), *(len(prompt) for prompt in expected.prompts.values())]
        if reply.prompt_tokens is None or reply.prompt_tokens in ours:
            return
        if turn == 1 and self._optional_tools and not self._tools:
            self._tools = self._optional_tools
            if len(prompt_by_text(self._tokens, messages, self._tools)) == reply.prompt_tokens:
                return
        raise TrainerReplyError(
            f"turn {turn}: the trainer counted {reply.prompt_tokens} prompt tokens, "
            f"our own count is {ours[0]}: {_CAUSES}"
        )


def _holds_the_message(decoded: str, message: Message) -> bool:
    """Returns True if the decoded ids match the message, including its tool calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        return False
    content, decoded = content.strip(), decoded.strip()
    return decoded.startswith(content) and (len(decoded) > len(content)) == bool(message.get("tool_calls"))


def _difference(ours: Sequence[int], theirs: Sequence[int], turn: int) -> str:
    if len(ours) != len(theirs):
        return f"turn {turn}: the trainer's prompt has {len(theirs)} tokens, our own count is {len(ours)}: {_CAUSES}"
    index = common_prefix_length(ours, theirs)
    return (
        f"turn {turn}: the trainer's prompt and our own have {len(ours)} tokens each, but differ first at index "
        f"{index} (the trainer's {theirs[index]}, ours {ours[index]})"
    )
