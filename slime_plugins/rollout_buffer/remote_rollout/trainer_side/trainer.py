"""The trainer's side of the remote rollout protocol: samples turns and stores them as sessions.

A rollout server calls ``/v1/chat/completions`` with a ``rollout_id``. Each call is one turn of that session: its mask
is checked, the prompt is sampled through our engine with exact ids, and the session stores the turn. A refused call
changes nothing, so a corrected call may follow. A repeated call returns the same answer and samples nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import (
    EngineError,
    InvalidPayloadError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
    network_reason,
)
from slime_plugins.rollout_buffer.http_auth import bearer_of, check_bearer
from slime_plugins.rollout_buffer.recording.turn_encoding import encode_turn
from slime_plugins.rollout_buffer.remote_rollout.bodies import CompletionBody, EndBody, OpenBody, check_text_only
from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod, Tools
from slime_plugins.rollout_buffer.remote_rollout.errors import RolloutConflictError, SessionEndedError
from slime_plugins.rollout_buffer.remote_rollout.settings import TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.masks import check_entered_mask
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.session_log import LIMIT_REACHED, SessionLog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.sessions import (
    PlannedTurn,
    SessionState,
    TrainerSession,
    plan_turn,
)
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trajectories import TrajectorySink, item_of, trajectory_of
from slime_plugins.rollout_buffer.types import DEFAULT_TEMPERATURE, SamplingParams, Trajectory
from slime_plugins.rollout_buffer.wire.request_fields import parse

_ENGINE_OPTIONS: Final = (
    "stop", "stop_token_ids", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "ignore_eos", "min_new_tokens",
)  # fmt: skip
"""Sampling parameters of a turn with the same name in the engine."""
IN_MEMORY_S = 120.0
"""How long a session without a call stays in memory if a log has it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What a session samples with: an engine, and the tokenizer of its model."""

    engine: Engine
    tokens: ChatTokens


PolicyOf = Callable[[OpenBody], Awaitable[Policy]]
"""Returns the policy of a new session, or raises a ``RolloutBufferError``."""


def one_engine(engine: Engine, tokenizers: TokenizerCatalog) -> PolicyOf:
    """Returns a policy of one engine for all sessions, with the tokenizer that each names, or the catalog's default."""

    async def policy_of(session: OpenBody) -> Policy:
        tokens = await tokenizers.get(session.tokenizer_name, session.tokenizer_revision)
        return Policy(engine=engine, tokens=tokens)

    return policy_of


class TrainerSide:
    """The sessions of one event loop. Finished trajectories of a job are written to ``sink``.

    With a ``log``, other processes continue sessions of this process, and this process continues theirs.
    """

    def __init__(
        self,
        policy_of: PolicyOf,
        settings: TrainerSettings | None = None,
        *,
        sink: TrajectorySink | None = None,
        log: SessionLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or TrainerSettings()
        self._policy_of = policy_of
        self._sink = sink
        self._log = log
        self._clock = clock
        self._open: OrderedDict[str, TrainerSession] = OrderedDict()
        self._closed: OrderedDict[str, TrainerSession] = OrderedDict()
        self._opening: dict[str, asyncio.Lock] = {}

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def open(self, body: Mapping[str, Any]) -> TrainerSession:
        """Opens a session, or returns the open one with this id and the same binding.

        Raises:
            RequestError: a field is invalid, the id is used or has ended, or the tokenizer is unknown.
            UnavailableError: too many sessions are open.
        """
        opening = parse(OpenBody, body)
        if opening.api_key is not None:
            opening = opening.model_copy(update={"api_key": _key_digest(opening.api_key)})
        await self.refresh(opening.rollout_id)
        async with self._opening.setdefault(opening.rollout_id, asyncio.Lock()):
            try:
                return await self._open_once(opening)
            finally:
                self._opening.pop(opening.rollout_id, None)

    async def refresh(self, rollout_id: str) -> None:
        """Reads from the log what other processes did to a session.

        Raises:
            RolloutBufferError: the policy of its job is not available.
        """
        self.expire()
        if self._log is None:
            return
        known = self._open.get(rollout_id) or self._closed.get(rollout_id)
        if known is not None:
            self._touch(known)
        stored = await self._log.find(rollout_id, after=len(known.turns) if known else 0)
        if stored is None or (known is not None and known.state is not SessionState.OPEN):
            return
        if known is None:
            session = await self._new_session(OpenBody.model_validate(stored.opening))
            session.opened_at = stored.opening["opened_at"]
            known = self._open.setdefault(rollout_id, session)
        known.replay(stored.turns)
        if known.state is not SessionState.OPEN:
            return
        if stored.ending is not None:
            known.restore_ending(stored.ending)
            self._close(known, known.state, known.reason)
        elif stored.expires_in_s <= 0:
            self._close(known, SessionState.EXPIRED, self._expired())

    async def rollout_ids(self) -> Sequence[str]:
        """Returns the ids of all sessions, open ones first; with a log, those of all processes as they were opened."""
        self.expire()
        return [*self._open, *self._closed] if self._log is None else await self._log.names()

    def get_session(self, rollout_id: str) -> TrainerSession:
        """Returns a session, open or ended.

        Raises:
            NotFoundError: the session is unknown, or ended and was removed.
        """
        session = self._open.get(rollout_id) or self._closed.get(rollout_id)
        if session is None:
            raise NotFoundError(f"there is no rollout {rollout_id!r}")
        return session

    def authorize(self, rollout_id: str | None, authorization: str | None) -> None:
        """Checks that a call has the key of the session or of this server; any call passes if there is neither.

        Raises:
            UnauthorizedError: the key is missing or wrong.
        """
        session = None if rollout_id is None else self._open.get(rollout_id) or self._closed.get(rollout_id)
        digest = session.opened.api_key if session else None
        if digest is not None and hmac.compare_digest(_key_digest(bearer_of(authorization)), digest):
            return
        if digest is not None and self.settings.api_key is None:
            raise UnauthorizedError("send the api_key with which the rollout was opened: Authorization: Bearer KEY")
        check_bearer(authorization, self.settings.api_key)

    def authorize_end(self, rollout_id: str, authorization: str | None) -> None:
        """Checks that a call may give a reward: by this server's key, or by the session's if the server has none.

        Raises:
            UnauthorizedError: the key is missing or wrong.
        """
        self.authorize(None if self.settings.api_key else rollout_id, authorization)

    def expire(self) -> None:
        """Closes sessions without a call for ``idle_s``, and removes old ended ones (``keep_ended_s``, ``max_ended``).

        With a log, sessions without a call for ``IN_MEMORY_S`` are only removed from this process, and read again when
        they are needed.
        """
        now = self._clock()
        memory_s = math.inf if self._log is None else IN_MEMORY_S
        for session in list(self._open.values()):
            if now - session.used_at <= min(self.settings.idle_s, memory_s):
                break
            if session.in_flight is None and self._log is not None:
                del self._open[session.rollout_id]  # another process may have used it meanwhile
            elif session.in_flight is None:
                self._close(session, SessionState.EXPIRED, self._expired())
            else:
                self._touch(session)
        while self._closed:
            oldest = next(iter(self._closed.values()))
            is_old = now - oldest.used_at > min(self.settings.keep_ended_s, memory_s)
            if len(self._closed) <= self.settings.max_ended and not is_old:
                break
            del self._closed[oldest.rollout_id]

    async def close(self) -> None:
        """Cancels turns that are being sampled."""
        running = [session.in_flight for session in self._open.values() if session.in_flight is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # --- turns -------------------------------------------------------------------------------------------------------

    async def complete(
        self, body: Mapping[str, Any], *, authorization: str | None = None, named_turn: int | None = None
    ) -> dict[str, Any]:
        """Samples one turn and returns the completion. A repeated call returns the same completion.

        ``named_turn`` is the turn's number in the header ``X-Rollout-Turn``, None without it.

        Raises:
            RequestError: the call is refused, with a message that names the turn; nothing was changed.
            UnavailableError: the engine could not sample, or too many sessions are open; nothing was changed.
        """
        call = parse(CompletionBody, body)
        await self.refresh(call.rollout_id)
        self.authorize(call.rollout_id, authorization)
        session = self._open.get(call.rollout_id) or await self._open_by_first_turn(call)
        self._touch(session)
        fingerprint = _fingerprint(call.messages, call.response_mask, call.tools)
        repeated = await self._repeated(session, fingerprint, named_turn)
        if repeated is not None:
            return repeated
        task = asyncio.create_task(self._sample(session, call, fingerprint))
        session.in_flight, session.in_flight_fingerprint = task, fingerprint
        task.add_done_callback(lambda finished: _no_longer_in_flight(session, finished))
        return await asyncio.shield(task)  # a caller that disconnects may repeat the call for the answer

    async def _repeated(
        self, session: TrainerSession, fingerprint: bytes, named_turn: int | None
    ) -> dict[str, Any] | None:
        """Returns the answer if this call was made before, else None.

        Raises:
            RolloutConflictError: another turn is being sampled, or the call names another turn than the next.
        """
        latest = len(session.turns)
        if session.in_flight is not None:
            if fingerprint == session.in_flight_fingerprint and named_turn in (None, latest + 1):
                return await asyncio.shield(session.in_flight)
            raise RolloutConflictError(f"turn {latest + 1} of this rollout is being sampled; one turn at a time")
        is_answered = bool(latest) and session.turns[-1].recorded.request == fingerprint
        if named_turn is not None and named_turn != latest + 1 and not (named_turn == latest and is_answered):
            raise RolloutConflictError(
                f"this call names turn {named_turn}, but turn {latest + 1} is next"
                + (f", and turn {latest} had another body" if named_turn == latest else ""),
                {"next_turn": latest + 1},
            )
        return _completion(session, self.settings.model) if is_answered and named_turn in (None, latest) else None

    async def _open_by_first_turn(self, call: CompletionBody) -> TrainerSession:
        ended = self._closed.get(call.rollout_id)
        if ended is not None:
            raise SessionEndedError(
                f"rollout {call.rollout_id!r} is {ended.state.value}{_because(ended)}: it takes no more turns"
            )
        if not self.settings.open_unknown:
            raise NotFoundError(f"there is no rollout {call.rollout_id!r}: open it with POST /rollouts")
        return await self.open({"rollout_id": call.rollout_id})

    async def _sample(self, session: TrainerSession, call: CompletionBody, fingerprint: bytes) -> dict[str, Any]:
        number = len(session.turns) + 1
        tools = list(call.tools if call.tools is not None else session.opened.tools)
        plan, counted_by = await self._checked_plan(session, call, number, tools)
        prompt = plan.prompt.ids
        reply = await self._generate(session, prompt, self._sampling(session, call, number, len(prompt)), number)
        turn, view = session.turn_of(plan, reply, fingerprint)
        if self._log is not None:
            row = {**encode_turn(turn, view, session.view), "counted_by": counted_by.value}
            if not await self._log.add_turn(session.rollout_id, row, self.settings.idle_s):
                await self.refresh(session.rollout_id)  # another process has stored this turn, or ended the session
        if session.state is not SessionState.OPEN:
            raise SessionEndedError(
                f"turn {number} is dropped: the rollout is {session.state.value}{_because(session)}"
            )
        if len(session.turns) < number:
            session.add_turn(turn, view, counted_by)
        if session.turns[number - 1].recorded.request != fingerprint:
            raise RolloutConflictError(f"turn {number} of this rollout was sampled for another call meanwhile")
        self._touch(session)
        return _completion(session, self.settings.model)

    async def _checked_plan(
        self, session: TrainerSession, call: CompletionBody, number: int, tools: Tools
    ) -> tuple[PlannedTurn, CountMethod]:
        if number > self.settings.max_turns:
            raise InvalidPayloadError(f"turn {number}: a rollout has {self.settings.max_turns} turns at most")
        if session.recording.num_ids > self.settings.max_session_tokens:
            raise InvalidPayloadError(
                f"turn {number}: the rollout holds {session.recording.num_ids} tokens; "
                f"{self.settings.max_session_tokens} is the limit"
            )
        try:
            check_text_only(call.messages)
            plan = await plan_turn(session, call.messages, tools, text_counts=self.settings.text_counts)
        except InvalidPayloadError as error:
            raise InvalidPayloadError(f"turn {number}: {error.message}", error.detail) from error
        return plan, await asyncio.to_thread(check_entered_mask, call.response_mask, number, plan.entered)

    def _sampling(
        self, session: TrainerSession, call: CompletionBody, number: int, prompt_tokens: int
    ) -> SamplingParams:
        room = self.settings.max_context_tokens - prompt_tokens
        if room <= 0:
            raise InvalidPayloadError(
                f"turn {number}: the prompt has {prompt_tokens} tokens; "
                f"a sequence has {self.settings.max_context_tokens} at most"
            )
        caps = [room, self.settings.max_new_tokens, session.opened.max_new_tokens]
        caps += [call.max_new_tokens, call.max_completion_tokens, call.max_tokens]
        options = call.model_extra or {}
        return SamplingParams(
            max_new_tokens=min(cap for cap in caps if cap is not None),
            temperature=DEFAULT_TEMPERATURE if call.temperature is None else call.temperature,
            top_p=1.0 if call.top_p is None else call.top_p,
            extra={key: options[key] for key in _ENGINE_OPTIONS if options.get(key) is not None},
        )

    async def _generate(
        self, session: TrainerSession, prompt: list[int], sampling: SamplingParams, number: int
    ) -> GenerateReply:
        request = GenerateRequest(
            input_ids=prompt, sampling_params=sampling, session_id=session.opened.uid or session.rollout_id
        )
        try:
            reply = await session.engine.generate(request)
        except EngineError as error:
            # The error has a status if the engine refused the request: it would refuse it again.
            kind = InvalidPayloadError if "status" in error.detail else UnavailableError
            raise kind(f"turn {number} was not sampled: {error.message}", error.detail) from error
        if not reply.output_ids or reply.finish_reason == "abort":
            raise UnavailableError(
                f"turn {number} was not sampled: the engine ended it with {reply.finish_reason!r} "
                f"after {len(reply.output_ids)} tokens"
            )
        return reply

    # --- the end -----------------------------------------------------------------------------------------------------

    async def end(self, rollout_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ends a session and writes its trajectory to its job, if it has one. A repeated call changes nothing.

        Raises:
            RequestError: the session is unknown, has no turns or was ended in another way before; the reward is
                missing; or the job refuses the trajectory.
            UnavailableError: the job cannot accept it now; the session stays open, and the call may be repeated.
        """
        end = parse(EndBody, body)
        await self.refresh(rollout_id)
        session = self.get_session(rollout_id)
        fingerprint = _fingerprint(dict(body))
        if session.result is not None:
            if session.result_fingerprint != fingerprint:
                raise RolloutConflictError(f"rollout {rollout_id!r} was ended before, with another body")
            return session.result
        if session.state is not SessionState.OPEN:
            raise SessionEndedError(f"rollout {rollout_id!r} is {session.state.value}{_because(session)}")
        if session.in_flight is not None:
            raise RolloutConflictError(f"turn {len(session.turns) + 1} of rollout {rollout_id!r} is being sampled")
        result = self._fail(session, end) if end.failed else await self._end_with_trajectory(session, end)
        session.result, session.result_fingerprint = result, fingerprint
        if self._log is not None:
            await self._log.end(rollout_id, session.ending())
        return result

    def finish(self, session: TrainerSession, end: EndBody) -> Trajectory:
        """Ends a session and returns its trajectory without writing it.

        Raises:
            InvalidPayloadError: it has no turns or no reward.
        """
        trajectory = self._trajectory(session, end)
        self._close(session, SessionState.ENDED, "")
        session.reward = trajectory.reward
        return trajectory

    def drop(self, session: TrainerSession, reason: str) -> None:
        """Ends a session without a trajectory; later turns are refused."""
        if session.state is SessionState.OPEN:
            self._close(session, SessionState.FAILED, reason)

    async def _end_with_trajectory(self, session: TrainerSession, end: EndBody) -> dict[str, Any]:
        trajectory = self._trajectory(session, end)
        opened = session.opened.filled_by(end)
        written = None if opened.job_id is None else await self._write(opened, trajectory)
        ids = {"instance_id": trajectory.instance_id, "uid": trajectory.uid}
        session.opened = opened.model_copy(update=ids)
        session.reward = trajectory.reward
        if session.state is SessionState.OPEN:
            self._close(session, SessionState.ENDED, "")
        rows = session.rows()
        return {
            "rollout_id": session.rollout_id,
            "state": SessionState.ENDED.value,
            **ids,
            "job_id": opened.job_id,
            "reward": trajectory.reward,
            "turns": len(session.turns),
            "rows": len(rows),
            "trained_tokens": sum(sum(row.loss_mask) for row in rows),
            "written": written,
        }

    async def _write(self, opened: OpenBody, trajectory: Trajectory) -> dict[str, Any]:
        if self._sink is None:
            raise InvalidPayloadError("this server has no buffer: leave job_id out, or start it with --buffer-url")
        if opened.instance_id is None:
            raise InvalidPayloadError("instance_id is missing: the instance whose group gets the trajectory")
        try:
            return await self._sink.write([item_of(trajectory)], job_id=opened.job_id)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise UnavailableError(f"the buffer cannot be reached ({network_reason(error)})") from error

    def _trajectory(self, session: TrainerSession, end: EndBody) -> Trajectory:
        if not session.turns:
            raise InvalidPayloadError(f"rollout {session.rollout_id!r} has no sampled turn: there is nothing to train")
        if end.reward is None:
            raise InvalidPayloadError("reward is missing")
        return trajectory_of(session, end, reward=end.reward)

    def _fail(self, session: TrainerSession, end: EndBody) -> dict[str, Any]:
        reason = end.error_message or "the rollout server reported an error"
        self._close(session, SessionState.FAILED, reason)
        return {
            "rollout_id": session.rollout_id,
            "state": SessionState.FAILED.value,
            "reason": reason,
            "turns": len(session.turns),
            "written": None,
        }

    # --- housekeeping ------------------------------------------------------------------------------------------------

    async def _open_once(self, opening: OpenBody) -> TrainerSession:
        known = self._open.get(opening.rollout_id)
        if known is not None:
            if known.opened.binding != opening.binding:
                raise RolloutConflictError(f"rollout {known.rollout_id!r} is open already, with another binding or key")
            return known
        if opening.rollout_id in self._closed:
            raise SessionEndedError(f"rollout {opening.rollout_id!r} existed before; open it under a new id")
        limit = self.settings.max_sessions
        if self._log is None and len(self._open) >= limit:
            raise UnavailableError(LIMIT_REACHED.format(limit))
        session = await self._new_session(opening)
        if self._log is not None:
            row = {**opening.model_dump(exclude_none=True), "opened_at": session.opened_at}
            if not await self._log.open(session.rollout_id, row, self.settings.idle_s, max_open=limit):
                await self.refresh(session.rollout_id)
                return await self._open_once(opening)
        self._open[session.rollout_id] = session
        return session

    async def _new_session(self, opened: OpenBody) -> TrainerSession:
        policy = await self._policy_of(opened)
        return TrainerSession(opened=opened, engine=policy.engine, tokens=policy.tokens, used_at=self._clock())

    def _expired(self) -> str:
        return f"no call came for {self.settings.idle_s:g} s"

    def _touch(self, session: TrainerSession) -> None:
        session.used_at = self._clock()
        for sessions in (self._open, self._closed):
            if session.rollout_id in sessions:
                sessions.move_to_end(session.rollout_id)

    def _close(self, session: TrainerSession, state: SessionState, reason: str) -> None:
        session.state, session.reason, session.used_at = state, reason, self._clock()
        if self._open.pop(session.rollout_id, None) is not None:
            self._closed[session.rollout_id] = session
        if reason:
            logger.info("rollout %s is %s: %s", session.rollout_id, state.value, reason)


def _no_longer_in_flight(session: TrainerSession, task: asyncio.Task[dict[str, Any]]) -> None:
    if session.in_flight is task:
        session.in_flight = None
    if not task.cancelled():
        task.exception()  # asyncio logs an exception that nobody retrieves, and perhaps no caller waits for this one


def _because(session: TrainerSession) -> str:
    return f" ({session.reason})" if session.reason else ""


def _key_digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def _fingerprint(*parts: Any) -> bytes:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("ascii")).digest()


def _completion(session: TrainerSession, model: str) -> dict[str, Any]:
    """Returns the reply to the session's last turn."""
    turn, number = session.turns[-1], len(session.turns)
    message = session.reply_message(turn.reply.output_ids, number, session.view.tools)
    sampled = len(turn.reply.output_ids)
    prompt = session.held_ids[:-sampled]
    end_of_turn = "tool_calls" if message.get("tool_calls") else "stop"
    reason = "length" if turn.reply.finish_reason == "length" else end_of_turn
    return {
        "id": f"chatcmpl-{session.rollout_id}-{number}",
        "object": "chat.completion",
        "created": int(turn.recorded.created),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled},
        "token_ids": list(turn.reply.output_ids),
        "logprobs": list(turn.log_probs),
        "prompt_token_ids": prompt,
        "rollout_id": session.rollout_id,
        "turn": number,
        "entered_tokens": len(turn.entered_ids),
        "weight_version": turn.reply.weight_version,
    }
