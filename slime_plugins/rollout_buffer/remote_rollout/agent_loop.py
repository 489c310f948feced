"""The agent's side of one rollout: turns against a trainer, from the request to the final response."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import aiohttp

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.remote_rollout.bodies import RolloutBody
from slime_plugins.rollout_buffer.remote_rollout.errors import TrainerReplyError
from slime_plugins.rollout_buffer.remote_rollout.openai_tool_calls import NumberedCall, calls_of
from slime_plugins.rollout_buffer.remote_rollout.session import RolloutSession
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings
from slime_plugins.rollout_buffer.remote_rollout.token_counts import ExpectedTurn
from slime_plugins.rollout_buffer.remote_rollout.tools import ContextAware, ToolSession, answer_call
from slime_plugins.rollout_buffer.remote_rollout.trainer_replies import TrainerReply

CAP_KEYS = ("max_tokens", "max_completion_tokens", "max_new_tokens")

logger = logging.getLogger(__name__)


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"  # the model answered without calling a tool
    MAX_TURNS = "max_turns"  # the limit of turns is reached
    MAX_TOKENS = "max_tokens"  # the sequence, or the last reply, reached its limit
    ERROR = "error"  # trainer, tokenizer or server failed; see error_message


@dataclass(kw_only=True, slots=True)
class _Metrics:
    """Counters of a rollout. Token counts are those of the whole sequence, in which each token counts once."""

    total_latency_ms: float = 0.0
    llm_latency_ms: float = 0.0
    tool_latency_ms: float = 0.0
    num_llm_calls: int = 0
    num_tool_calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    max_context_tokens: int = 0


class RolloutLoop:
    """One rollout, against the trainer at ``server_url``, with the connections of ``http``."""

    def __init__(
        self,
        request: RolloutBody,
        server_url: str,
        tokens: ChatTokens,
        tool_session: ToolSession,
        http: aiohttp.ClientSession,
        settings: AgentSettings,
    ) -> None:
        self._request = request
        self._tool_session = tool_session
        self._settings = settings
        self._started = time.monotonic()
        self._metrics = _Metrics()
        self._tools = request.tools or tool_session.schemas
        self._session = RolloutSession(
            request.rollout_id,
            tokens,
            server_url,
            http=http,
            api_key=request.callback_api_key,
            settings=settings,
            tools=request.tools or (),
            optional_tools=() if request.tools else tool_session.schemas,
        )
        self._session.messages = [dict(message) for message in request.messages]

    async def play(self) -> dict[str, Any]:
        """Plays until a turn calls no tool, a limit is reached, or an error occurs; returns the final response."""
        reason, error = FinishReason.ERROR, None
        try:
            async with asyncio.timeout(self._settings.rollout_timeout_s):
                reason = await self._play_turns()
        except TimeoutError:
            limit = self._settings.rollout_timeout_s
            error = f"turn {self._metrics.num_llm_calls + 1}: the rollout did not finish within {limit:g} s"
        except RolloutBufferError as refusal:
            error = refusal.message
        except Exception as defect:
            logger.exception("rollout %s broke", self._request.rollout_id)
            error = f"the rollout server failed: {type(defect).__name__}: {defect}"
        finally:
            await self._close_tools()
        self._metrics.total_latency_ms = _ms_since(self._started)
        return {
            "rollout_id": self._request.rollout_id,
            "status": "ERROR" if reason is FinishReason.ERROR else "COMPLETED",
            "final_messages": list(self._session.messages),
            "finish_reason": reason.value,
            "error_message": error,
            "metrics": asdict(self._metrics),
            "extra_fields": {"metadata": dict(self._request.metadata)} if self._request.metadata else {},
        }

    async def _close_tools(self) -> None:
        try:
            await self._tool_session.close()
        except Exception:  # the rollout is over, whatever its tools do
            logger.exception("the tools of rollout %s cannot be closed", self._request.rollout_id)

    async def _play_turns(self) -> FinishReason:
        for turn in range(1, self._request.max_turns + 1):
            expected = await self._session.expect()
            room = self._request.max_tokens_total - len(expected.prompts[expected.preferred])
            if room <= 0:
                return FinishReason.MAX_TOKENS
            reply = await self._sample(expected, room)
            calls = [] if reply.finish_reason == "length" else calls_of(reply.message, turn, self._tools)
            if not calls:
                return FinishReason.MAX_TOKENS if reply.finish_reason == "length" else FinishReason.STOP
            await self._answer_calls(calls)
        return FinishReason.MAX_TURNS

    async def _sample(self, expected: ExpectedTurn, room: int) -> TrainerReply:
        start = time.monotonic()
        try:
            reply = await self._session.sample(expected, _capped(self._request.sampling_params, room))
        finally:
            self._metrics.llm_latency_ms += _ms_since(start)
        self._check_cap(len(reply.token_ids))
        sequence_tokens = self._session.last_prompt_length
        self._metrics.num_llm_calls += 1
        self._metrics.response_tokens += len(reply.token_ids)
        self._metrics.max_context_tokens = max(self._metrics.max_context_tokens, sequence_tokens)
        self._metrics.prompt_tokens = sequence_tokens - self._metrics.response_tokens
        return reply

    def _check_cap(self, sampled: int) -> None:
        """Checks a turn against the token limit of the request.

        Raises:
            TrainerReplyError: the turn is longer.
        """
        caps = [value for key in CAP_KEYS if type(value := self._request.sampling_params.get(key)) is int]
        if caps and sampled > min(caps):
            turn = self._metrics.num_llm_calls + 1
            raise TrainerReplyError(f"turn {turn}: the trainer sent {sampled} token_ids for a limit of {min(caps)}")

    async def _answer_calls(self, calls: Sequence[NumberedCall]) -> None:
        start = time.monotonic()
        timeout_s = self._settings.tool_timeout_s
        if isinstance(self._tool_session, ContextAware):
            self._tool_session.see_context(self._session.last_prompt_length, self._session.tokens.count)
        results = await asyncio.gather(*(answer_call(self._tool_session, call, timeout_s) for call in calls))
        self._session.append_tool_outputs(results)
        self._metrics.tool_latency_ms += _ms_since(start)
        self._metrics.num_tool_calls += len(calls)


def _ms_since(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 3)


def _capped(sampling_params: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Returns the sampling parameters with token limits of at most ``room``, the tokens left in the sequence."""
    params = dict(sampling_params)
    caps = [key for key in CAP_KEYS if type(params.get(key)) is int]
    for key in caps:
        params[key] = min(params[key], room)
    return params if caps else {**params, "max_tokens": room}
