"""The agent's side: one rollout, played turn by turn against a trainer, from its request to its final response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody
from slime_plugins.rollout_buffer.remote_rollout.conversation import ConversationTokens
from slime_plugins.rollout_buffer.remote_rollout.counting import ExpectedTurn, OwnCount
from slime_plugins.rollout_buffer.remote_rollout.refusals import TrainerReplyError
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings
from slime_plugins.rollout_buffer.remote_rollout.tool_calls import ToolCall, calls_of
from slime_plugins.rollout_buffer.remote_rollout.tools import SeesContext, ToolBox, answer_call
from slime_plugins.rollout_buffer.remote_rollout.trainer_calls import MaskRefusedError, TrainerCalls
from slime_plugins.rollout_buffer.remote_rollout.trainer_replies import TrainerReply
from slime_plugins.rollout_buffer.types import Message

__all__ = ["FinishReason", "RolloutLoop", "play_rollout"]

_CAPS = ("max_tokens", "max_completion_tokens", "max_new_tokens")

logger = logging.getLogger(__name__)


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"  # the model answered without calling a tool
    MAX_TURNS = "max_turns"  # every turn that was allowed is sampled
    MAX_TOKENS = "max_tokens"  # the sequence, or the last reply, reached its cap
    ERROR = "error"  # trainer, tokenizer or server broke; error_message says what


@dataclass(kw_only=True, slots=True)
class _Metrics:
    """What a rollout took. Token counts are of the sequence: each prompt token that entered counts once."""

    started: float = field(default_factory=time.monotonic)
    llm_s: float = 0.0
    tool_s: float = 0.0
    llm_calls: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    longest: int = 0

    def told(self) -> dict[str, Any]:
        return {
            "total_latency_ms": round((time.monotonic() - self.started) * 1000, 3),
            "llm_latency_ms": round(self.llm_s * 1000, 3),
            "tool_latency_ms": round(self.tool_s * 1000, 3),
            "num_llm_calls": self.llm_calls,
            "num_tool_calls": self.tool_calls,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "max_context_tokens": self.longest,
        }


class RolloutLoop:
    """One rollout under way."""

    def __init__(
        self,
        request: RolloutBody,
        tokens: ConversationTokens,
        box: ToolBox,
        calls: TrainerCalls,
        settings: AgentSettings,
    ) -> None:
        self._request = request
        self._tokens = tokens
        self._box = box
        self._calls = calls
        self._settings = settings
        self._count = OwnCount(tokens, request.tools or (), () if request.tools else box.schemas)
        self._messages: list[Message] = [dict(message) for message in request.messages]
        self._metrics = _Metrics()

    async def play(self) -> dict[str, Any]:
        """Plays until the model calls no more tools, a limit is reached, or something breaks; returns the response."""
        try:
            async with asyncio.timeout(self._settings.rollout_timeout_s):
                return self._response(await self._turns())
        except TimeoutError:
            limit = self._settings.rollout_timeout_s
            error = f"turn {self._metrics.llm_calls + 1}: the rollout did not end within {limit:g} s"
            return self._response(FinishReason.ERROR, error)
        except RolloutBufferError as error:
            return self._response(FinishReason.ERROR, error.message)

    async def _turns(self) -> FinishReason:
        for turn in range(1, self._request.max_turns + 1):
            expected = await asyncio.to_thread(self._count.expect, self._messages, turn)
            room = self._request.max_tokens_total - len(expected.prompts[expected.preferred])
            if room <= 0:
                return FinishReason.MAX_TOKENS
            reply = await self._sample(expected, turn, room)
            self._messages.append(reply.message)
            calls = [] if reply.finish_reason == "length" else calls_of(reply.message, turn)
            if not calls:
                return FinishReason.MAX_TOKENS if reply.finish_reason == "length" else FinishReason.STOP
            await self._answer(calls)
        return FinishReason.MAX_TURNS

    async def _sample(self, expected: ExpectedTurn, turn: int, room: int) -> TrainerReply:
        start = time.monotonic()
        try:
            reply = await self._sample_either_way(expected, turn, room)
        finally:
            self._metrics.llm_s += time.monotonic() - start
        await asyncio.to_thread(self._count.take, self._messages, expected, reply, turn)
        self._metrics.llm_calls += 1
        self._metrics.response_tokens += len(reply.token_ids)
        self._metrics.longest = max(self._metrics.longest, self._count.sequence_tokens)
        self._metrics.prompt_tokens = self._count.sequence_tokens - self._metrics.response_tokens
        return reply

    async def _sample_either_way(self, expected: ExpectedTurn, turn: int, room: int) -> TrainerReply:
        """Offers the other count where two are possible and the trainer refuses the first; it has sampled nothing."""
        first, *other = expected.ways()
        try:
            return await self._calls.sample(self._body(expected.mask(first), room), turn)
        except MaskRefusedError as refusal:
            if not other:
                raise
            logger.info("rollout %s: %s; counting by %s instead", self._request.rollout_id, refusal, other[0].value)
            return await self._calls.sample(self._body(expected.mask(other[0]), room), turn)

    def _body(self, mask: Sequence[int] | None, room: int) -> dict[str, Any]:
        return {
            **_capped(self._request.sampling_params, room),
            **({"tools": self._request.tools} if self._request.tools else {}),
            "rollout_id": self._request.rollout_id,
            "messages": self._messages,
            "response_mask": mask,
        }

    async def _answer(self, calls: Sequence[ToolCall]) -> None:
        start = time.monotonic()
        timeout_s = self._settings.tool_timeout_s
        if isinstance(self._box, SeesContext):
            self._box.see_context(self._count.sequence_tokens, lambda text: len(self._tokens.encode(text)))
        self._messages += await asyncio.gather(*(answer_call(self._box, call, timeout_s) for call in calls))
        self._metrics.tool_s += time.monotonic() - start
        self._metrics.tool_calls += len(calls)

    def _response(self, reason: FinishReason, error: str | None = None) -> dict[str, Any]:
        return final_response(self._request, self._messages, reason, error, self._metrics.told())


async def play_rollout(
    request: RolloutBody,
    server_url: str,
    tokens: ConversationTokens,
    box: ToolBox,
    session: aiohttp.ClientSession,
    settings: AgentSettings,
) -> dict[str, Any]:
    """Plays one rollout and returns its final response; whatever breaks is in there."""
    calls = TrainerCalls(session, server_url, request.callback_api_key, settings)
    try:
        return await RolloutLoop(request, tokens, box, calls, settings).play()
    except Exception as error:
        logger.exception("rollout %s broke", request.rollout_id)
        broken = TrainerReplyError(f"the rollout server broke: {type(error).__name__}: {error}")
        return final_response(request, list(request.messages), FinishReason.ERROR, broken.message, _Metrics().told())
    finally:
        await box.close()


def final_response(
    request: RolloutBody, messages: Sequence[Message], reason: FinishReason, error: str | None, metrics: dict[str, Any]
) -> dict[str, Any]:
    """Returns the one answer to ``POST /rollout``."""
    return {
        "rollout_id": request.rollout_id,
        "status": "ERROR" if reason is FinishReason.ERROR else "COMPLETED",
        "final_messages": list(messages),
        "finish_reason": reason.value,
        "error_message": error,
        "metrics": metrics,
        "extra_fields": {"metadata": dict(request.metadata)} if request.metadata else {},
    }


def _capped(sampling_params: Mapping[str, Any], room: int) -> dict[str, Any]:
    """The sampling parameters with no cap above what the whole sequence may still take."""
    params = dict(sampling_params)
    given = [key for key in _CAPS if type(params.get(key)) is int]
    for key in given:
        params[key] = min(params[key], room)
    return params if given else {**params, "max_tokens": room}
