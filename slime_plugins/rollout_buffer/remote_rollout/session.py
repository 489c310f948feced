"""The agent's side of one conversation with a trainer: requests turns and computes their masks.

``RolloutSession`` is used by this project's rollout server, and can be used by other rollout servers:

    session = RolloutSession(rollout_id, tokenizer, server_url)
    session.messages = [{"role": "user", "content": "Calculate 15 * 23"}]
    response = await session.call_llm({"temperature": 0.7, "max_tokens": 512})
    session.append_tool_outputs([{"role": "tool", "tool_call_id": "call_1_0", "content": "345"}])
    response = await session.call_llm({"temperature": 0.7, "max_tokens": 512})
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod, Tools, is_same_reply
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings
from slime_plugins.rollout_buffer.remote_rollout.token_counts import ExpectedTurn, TokenCounter
from slime_plugins.rollout_buffer.remote_rollout.trainer_calls import MaskRefusedError, TrainerCalls, open_connections
from slime_plugins.rollout_buffer.remote_rollout.trainer_replies import TrainerReply
from slime_plugins.rollout_buffer.types import Message

logger = logging.getLogger(__name__)
mask_logger = logging.getLogger("rollout_server")
"""Logs at DEBUG how each mask was computed, under the logger name that the guides give."""


class RolloutSession:
    """One rollout: ``messages`` for the model, and their token ids.

    Set ``messages`` to the first messages. ``call_llm`` appends each reply; if its caller appends the reply again, it
    counts once. Messages appended after a reply are sent with the next call, as zeros of its ``response_mask``.
    """

    def __init__(
        self,
        rollout_id: str,
        tokenizer: Any,
        server_url: str,
        *,
        http: aiohttp.ClientSession | None = None,
        api_key: str | None = None,
        settings: AgentSettings | None = None,
        tools: Tools = (),
        optional_tools: Tools = (),
    ) -> None:
        """``tokenizer`` is the trainer's, with its chat template; ``server_url`` the trainer's base URL.

        ``tools`` are sent with every turn. ``optional_tools`` are not sent, but the trainer may show them to its model.

        Raises:
            ConfigError: the tokenizer has no chat template that ends turns with a special token.
        """
        self.rollout_id = rollout_id
        self.server_url = server_url.rstrip("/")
        self.tokens = tokenizer if isinstance(tokenizer, ChatTokens) else ChatTokens(tokenizer)
        self.messages: list[Message] = []
        self.turns = 0
        """Number of turns so far."""
        self._tools = tuple(tools)
        self._counter = TokenCounter(self.tokens, self._tools, optional_tools)
        self._http = http
        self._api_key = api_key
        self._settings = settings or AgentSettings()
        self._calls: TrainerCalls | None = None
        self._num_sent = 0
        """Number of messages in the latest request."""
        self._reply: Message | None = None

    @property
    def last_prompt_length(self) -> int:
        """Number of tokens of the last prompt and its reply; 0 before the first turn."""
        return self._counter.sequence_tokens

    async def call_llm(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """Requests the next turn from the trainer and returns its answer, with ``token_ids`` and ``prompt_token_ids``.

        Raises:
            TrainerReplyError: the trainer failed or refused the turn, or its count differs from ours; names the turn.
            InvalidPayloadError: the chat template refuses the messages.
        """
        reply = await self.sample(await self.expect(), sampling_params)
        ids = {"token_ids": list(reply.token_ids)}
        if reply.prompt_ids is not None:
            ids["prompt_token_ids"] = list(reply.prompt_ids)
        return {**reply.body, **ids}

    def append_tool_outputs(self, tool_results: Sequence[Message]) -> None:
        """Appends tool messages for the next call."""
        self.messages.extend(dict(result) for result in tool_results)

    async def expect(self) -> ExpectedTurn:
        """Returns the next prompt and its entered tokens, without a request.

        Raises:
            InvalidPayloadError: the chat template refuses the messages.
        """
        self._drop_repeated_reply()
        return await self._counter.expect(self.messages, self.turns + 1)

    async def sample(self, expected: ExpectedTurn, sampling_params: Mapping[str, Any]) -> TrainerReply:
        """Requests the expected turn, checks the answer, and appends the reply.

        Raises:
            TrainerReplyError: as ``call_llm``.
        """
        turn = self.turns + 1
        async with self._trainer() as calls:
            reply = await self._sample_either_way(calls, expected, sampling_params, turn)
        await asyncio.to_thread(self._counter.take, self.messages, expected, reply, turn)
        self._num_sent, self._reply, self.turns = len(self.messages), reply.message, turn
        self.messages.append(reply.message)
        return reply

    async def _sample_either_way(
        self, calls: TrainerCalls, expected: ExpectedTurn, sampling_params: Mapping[str, Any], turn: int
    ) -> TrainerReply:
        """Requests the turn; if two counts are possible and the trainer refuses the first, which samples nothing,
        requests it with the second."""
        first, *other = expected.methods()
        try:
            return await calls.sample(self._body(expected, first, sampling_params, turn), turn)
        except MaskRefusedError as refusal:
            if not other:
                raise
            logger.info("rollout %s: %s; counting by %s instead", self.rollout_id, refusal, other[0].value)
            return await calls.sample(self._body(expected, other[0], sampling_params, turn), turn)

    def _body(
        self, expected: ExpectedTurn, method: CountMethod, sampling_params: Mapping[str, Any], turn: int
    ) -> dict[str, Any]:
        mask = expected.mask(method)
        self._log_mask(expected.prompts[method], mask, turn)
        return {
            **sampling_params,
            **({"tools": list(self._tools)} if self._tools else {}),
            "rollout_id": self.rollout_id,
            "messages": self.messages,
            "response_mask": mask,
        }

    def _log_mask(self, prompt: Sequence[int], mask: Sequence[int] | None, turn: int) -> None:
        if not mask_logger.isEnabledFor(logging.DEBUG):
            return
        entered = len(mask or ())
        fields = {"turn": turn, "rollout_id": self.rollout_id}
        mask_logger.debug("Turn %d: response_mask=%s, length=%d", turn, mask, entered, extra=fields)
        mask_logger.debug("Tool output tokens: %s", list(prompt[len(prompt) - entered :]), extra=fields)
        before, after = self.last_prompt_length, len(prompt)
        mask_logger.debug("Prompt length before: %d, after: %d", before, after, extra=fields)

    def _drop_repeated_reply(self) -> None:
        """Removes a reply that the caller appended a second time."""
        first, second = self._num_sent, self._num_sent + 1  # places of the reply and of its repetition
        if self._reply is None or len(self.messages) <= second:
            return
        if all(is_same_reply(self.messages[place], self._reply) for place in (first, second)):
            del self.messages[second]

    @asynccontextmanager
    async def _trainer(self) -> AsyncIterator[TrainerCalls]:
        """Yields the calls to the trainer: over the given connections, or over one for this turn."""
        if self._http is not None:
            if self._calls is None:
                self._calls = TrainerCalls(self._http, self.server_url, self._api_key, self._settings)
            yield self._calls
            return
        async with open_connections() as http:
            yield TrainerCalls(http, self.server_url, self._api_key, self._settings)
