"""The gateway without HTTP: opens, samples, closes and expires sessions.

Sessions are handled on the event loop, the store in threads. A turn is stored before it is answered, and held in memory
too until its session is closed. The next process reads the open sessions of one that died and continues them: a session
is trained as a whole with its reward, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    EngineError,
    GoneError,
    InvalidPayloadError,
    NotFoundError,
    RequestError,
    RolloutBufferError,
    StaleAttemptError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.gateway.backends import JobBackend, JobBackends
from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody, sampling_of
from slime_plugins.rollout_buffer.gateway.parsed_reply import ParsedReply, cut_at_stop, first_stop, parse_reply
from slime_plugins.rollout_buffer.gateway.replies import ChatReply
from slime_plugins.rollout_buffer.gateway.session_bodies import CloseBody, OpenBody
from slime_plugins.rollout_buffer.gateway.sessions import Session
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.gateway.slot_claims import ClaimState, SlotClaims
from slime_plugins.rollout_buffer.gateway.turn_store import TurnStore, WrittenTurn
from slime_plugins.rollout_buffer.recording.messages import (
    Conversation,
    digest,
    image_hashes_of,
    reply_digest,
    with_string_arguments,
)
from slime_plugins.rollout_buffer.recording.prompts import Prompt, build_prompt
from slime_plugins.rollout_buffer.recording.turn_encoding import SessionTurns, View, encode_turn, replay
from slime_plugins.rollout_buffer.recording.turns import Recording, Turn, sampled_in
from slime_plugins.rollout_buffer.rules.heartbeats import GATEWAY
from slime_plugins.rollout_buffer.types import (
    AttemptState,
    Generation,
    Image,
    Message,
    Outcome,
    StopReason,
    Trajectory,
    WriteStatus,
)

RECONCILE_INTERVAL_S = 1.0
CLOSE_FULL_GROUPS_INTERVAL_S = 5.0
MODEL_NAME = "policy"
EXPIRED = "session_expired"
ABANDONED = "session_abandoned"
GROUP_CLOSED = "group_closed"
STORE_THREADS = 4

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A sampled and recorded turn, and the reply to the client."""

    turn: Turn
    reply: ChatReply


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreAsked:
    """The address and body of a scoring callback."""

    url: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The rewards of a session, from its close request or a scoring callback; not yet checked against its turns."""

    reward: float
    turn_rewards: list[Any] | None = None
    token_rewards: list[Any] | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


class Gateway:
    """The sessions of one gateway. Call ``start()`` first and ``stop()`` last."""

    def __init__(self, settings: GatewaySettings, buffer: Buffer, *, backends: JobBackends | None = None) -> None:
        self.settings = settings
        self.buffer = buffer
        self.claims = SlotClaims(buffer)
        self.backends = backends or JobBackends(buffer.job_settings)
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self._store_threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")
        self.turns = TurnStore(buffer, self._store_threads)
        self._reconciler: asyncio.Task[None] | None = None
        self._closed_full_groups_at = -math.inf
        self._beat_at = -math.inf
        self.open_rollouts: Callable[[], list[tuple[str | None, str | None]]] = list
        """Returns job and instance of each open rollout of the remote rollout protocol; None for unknown."""

    async def start(self) -> None:
        """Takes over the open sessions of an earlier process, and starts the expiry loop."""
        for claim in await self.stored(self.claims.open_claims):
            opened_at = time.monotonic() - max(0.0, self.buffer.clock() - claim.claimed_at)
            self._sessions[claim.uid] = Session(claim=claim, opened_at=opened_at)
        if self._sessions:
            logger.info("%d sessions of an earlier gateway stay open", len(self._sessions))
        self._reconciler = asyncio.create_task(self._reconcile_for_ever())

    async def stop(self) -> None:
        """Closes the engines. Sessions stay open for the next process."""
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.gather(self._reconciler, return_exceptions=True)
        await self.backends.keep_only(set())
        self._store_threads.shutdown(wait=True)

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    # --- opening and closing sessions ---------------------------------------------------------------------------------

    async def open(self, body: OpenBody) -> Session:
        """Claims a slot and opens a session.

        Raises:
            BusyError: the limit of sessions is reached, or every slot is taken.
            RequestError: the job takes no sessions; see ``SlotClaims.claim``.
        """
        if len(self._sessions) + self._opening >= self.settings.max_sessions:
            raise BusyError(f"{self.settings.max_sessions} sessions are open, which is the limit: close some")
        self._opening += 1
        try:
            job = await self.stored(self.buffer.job, body.job_id)
            if not job.has_runner:
                await self.backends.open(job)
            idle_timeout_s = body.idle_timeout_s or self.settings.idle_timeout_s
            claim = await self.stored(
                partial(self.claims.claim, body.job_id, body.instance_id, idle_timeout_s=idle_timeout_s)
            )
            session = Session(claim=claim, turns=SessionTurns())
            self._sessions[session.name] = session
            return session
        finally:
            self._opening -= 1

    async def session(self, session_id: str) -> Session:
        """Returns an open session.

        Raises:
            NotFoundError: it never existed.
            GoneError: it was closed, given up or expired.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            session.check_open()
            await self._read_turns(session)
            return session
        state = await self._ended_session(session_id)
        raise GoneError(_end_of_claim(state), {"state": state.state, "reason": state.error_code})

    async def close(
        self, session_id: str, body: CloseBody, score: Callable[[ScoreAsked], Awaitable[Verdict]]
    ) -> dict[str, Any]:
        """Stores a session as the trajectory of its slot; idempotent.

        Raises:
            GoneError: it was given up or has expired, without a reward.
            ConflictError: the engine failed its last turn, and the body names no outcome.
            RequestError: it has no turns, or the scoring callback is not allowed.
            UnavailableError, StorageFullError: it stays open; close it again.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return self._closed_before(await self._ended_session(session_id))
        async with session.closing:
            if session.ended is None:
                await self._end_refused([session])
            if session.name not in self._sessions:
                return self._closed_before(await self._ended_session(session_id))
            await self._read_turns(session)
            if not session.recording.turns:
                raise RequestError(f"session {session_id} has no turn to train: abandon it, which opens its slot again")
            if session.engine_failure is not None and body.outcome is None:
                raise ConflictError(
                    f"the last turn of session {session_id} got no answer: {session.engine_failure}. Its reward would "
                    "not measure the policy: repeat the turn, abandon the session, or close it with an outcome"
                )
            if body.scoring_url is not None:
                verdict = await score(self._score_asked(session, body.scoring_url))
            elif body.reward is not None:
                verdict = Verdict(reward=body.reward, turn_rewards=body.turn_rewards, token_rewards=body.token_rewards)
            else:
                raise InvalidPayloadError("reward is missing")
            return await self._finish(session, body, verdict)

    async def _finish(self, session: Session, body: CloseBody, verdict: Verdict) -> dict[str, Any]:
        session.end("is being closed")
        try:
            async with session.writing:
                trajectory = await asyncio.to_thread(_trajectory, session, body, verdict)
                turns = session.recording.last_number
                status = await self.stored(partial(self.claims.finish, session.claim, trajectory, turns=turns))
        except StaleAttemptError as error:
            self._sessions.pop(session.name, None)
            raise GoneError(f"session {session.name} was given up before it was closed: {error.message}") from error
        except RolloutBufferError:
            session.ended = None  # it can be closed again, and sampled
            session.used_at = time.monotonic()
            raise
        del self._sessions[session.name]
        return {
            "session_id": session.name,
            "status": status,
            "reward": verdict.reward,
            "turns": session.recording.turns,
            "branches": session.recording.branches(),
        }

    async def abandon(self, session_id: str, reason: str) -> dict[str, Any]:
        """Gives a session up without a reward and reopens its slot; idempotent.

        Raises:
            GoneError: it was closed with a reward.
        """
        session = self._sessions.get(session_id)
        if session is None:
            state = await self._ended_session(session_id)
            if state.state is AttemptState.FINISHED:
                raise GoneError(_end_of_claim(state))
            return {"session_id": session_id, "status": state.state}
        async with session.closing:
            if session.name in self._sessions:
                await self._give_up(session, ABANDONED, f"was abandoned: {reason}", given_up=False)
        return {"session_id": session_id, "status": "failed"}

    def describe(self, session: Session) -> dict[str, Any]:
        """Returns the state of an open session."""
        claim, recording = session.claim, session.recording
        return {
            "session_id": session.name,
            "job_id": claim.job.job_id,
            "instance_id": claim.instance.instance_id,
            "instance": dict(claim.instance.data),
            "epoch": claim.group.epoch,
            "slot": claim.slot,
            "attempt": claim.attempt,
            "state": "open",
            "turns": recording.turns,
            "branches": recording.branches(),
            "ids": recording.ids,
            "idle_timeout_s": claim.idle_timeout_s,
        }

    # --- turns --------------------------------------------------------------------------------------------------------

    async def chat(
        self,
        session: Session,
        body: ChatBody,
        conversation: Conversation,
        images: Mapping[str, Image],
        *,
        is_retry: bool = False,
    ) -> Answer:
        """Samples one turn and stores it; a repeated request gets the stored turn, see ``Recording.answered``.

        The caller calls ``note_sent`` once it has delivered the answer, or cannot: a turn that never reached its client
        is not trained.

        Raises:
            RequestError: the request is invalid, or (``GoneError``) the session ended meanwhile.
            EngineError: the engine refused it or is unreachable.
        """
        backend = await self.backends.open(session.claim.job)
        chat = _chat_of(backend, body)
        tools = body.offered_tools
        key = digest([tools, body.chat_template_kwargs or {}])
        asked = body.model_dump(exclude={"tools", "stream", "stream_options"}, exclude_none=True)
        request = digest([key.hex(), asked, [one.hex() for one in conversation.digests]])
        while is_retry and (other := session.answering.get(request)) is not None:
            await asyncio.wait([other])
        await self._read_turns(session)
        recording = session.recording
        turn = recording.answered(request, is_retry=is_retry)
        if turn is None:
            with session.answers(request):
                recording.forget(request)
                self._check_limits(session, backend)
                await self._load_images(session, conversation, images)
                prompt = await build_prompt(recording, key, conversation, chat, tools)
                sampling = GenerateRequest(
                    input_ids=prompt.ids,
                    sampling_params=sampling_of(body, backend.sampling, pinned=backend.is_pinned),
                    session_id=session.name,
                    images=[session.images[sha256] for sha256 in prompt.images],
                )
                sampled = await _sampled(session, backend, sampling)
                turn = self._turn(body, prompt, sampled, chat, key=key, request=request)
                view = View((*conversation.messages, turn.message), tools, sampled.finish_reason)
                await self._store_turn(session, recording, turn, view)
        return Answer(turn=turn, reply=_reply(session, body, turn, chat))

    def _turn(
        self, body: ChatBody, prompt: Prompt, sampled: GenerateReply, chat: ChatTokens, *, key: bytes, request: bytes
    ) -> Turn:
        """Returns a sampled turn, which has no number yet."""
        text = cut_at_stop(chat.text(sampled.output_ids), body.stops)
        message = _message(parse_reply(text, tools=body.offered_tools, separate_reasoning=body.separate_reasoning))
        return Turn(
            parent=prompt.parent,
            number=0,
            request=request,
            key=key,
            context=prompt.context,
            context_ids=array("i", prompt.new_ids),
            images=prompt.new_images,
            sampled=sampled_in(sampled),
            message=message,
            reply=reply_digest(message),
            created=self.buffer.clock(),
            from_start=prompt.from_start,
            is_closed=chat.is_closed(sampled.output_ids),
            is_unusable=not chat.vision_ids.isdisjoint(sampled.output_ids),
        )

    def _check_limits(self, session: Session, backend: JobBackend) -> None:
        recording, settings, too_long = session.recording, self.settings, StopReason.MAX_CONTEXT
        content_bytes = session.image_bytes + recording.record_bytes
        for stop_reason, count, limit, what in (
            (StopReason.MAX_TURNS, recording.turns, backend.max_turns or settings.max_turns, "turns"),
            (too_long, recording.ids, backend.max_tokens_total or settings.max_session_ids, "token ids"),
            (too_long, content_bytes, settings.max_session_image_bytes, "bytes of images and token records"),
        ):
            if count >= limit:
                session.limit_reached = stop_reason
                raise GoneError(
                    f"session {session.name} has {count} {what}, {limit} is the limit: close it",
                    {"stop_reason": stop_reason},
                )

    async def _store_turn(self, session: Session, recording: Recording, turn: Turn, view: View) -> None:
        """Stores and records a turn, also if its client disconnects meanwhile: then as one that was not sent."""
        storing = asyncio.ensure_future(self._write_turn(session, recording, turn, view))
        try:
            await asyncio.shield(storing)
        except asyncio.CancelledError:
            await asyncio.wait([storing])
            if storing.exception() is None:
                self.note_sent(session, turn, sent=False)
            raise

    async def count_tokens(
        self, session: Session, body: ChatBody, conversation: Conversation, images: Mapping[str, Image]
    ) -> int:
        """Returns the number of prompt tokens of a request, which is not sampled.

        Raises:
            RequestError: the request is invalid.
        """
        backend = await self.backends.open(session.claim.job)
        await self._read_turns(session)
        await self._load_images(session, conversation, images)
        key = digest([body.offered_tools, body.chat_template_kwargs or {}])
        prompt = await build_prompt(session.recording, key, conversation, _chat_of(backend, body), body.offered_tools)
        return len(prompt.ids) + sum(backend.tokens_of(session.images[sha256]) - 1 for sha256 in prompt.images)

    async def messages_of(self, session: Session, session_id: str, number: int) -> Sequence[Message]:
        """Returns the messages of a stored turn, its reply last.

        Raises:
            InvalidPayloadError: the session has no such turn.
        """
        await self._read_turns(session)
        if session_id == session.name and 0 < number == session.recording.last_number:
            return session.view.messages
        rows = [] if session_id != session.name else await self.stored(self.turns.read, session.claim)
        until = [row for row in rows if row["number"] <= number]
        if not until or until[-1]["number"] != number:
            raise InvalidPayloadError(
                "previous_response_id names no response of this session", {"param": "previous_response_id"}
            )
        return replay(until).view.messages

    async def _write_turn(self, session: Session, recording: Recording, turn: Turn, view: View) -> None:
        async with session.writing:
            session.check_open()
            if session.turns is None or session.turns.recording is not recording:
                raise UnavailableError(f"session {session.name} was read again meanwhile: ask again")
            turn.number = recording.last_number + 1
            shown = {*image_hashes_of(view.messages), *turn.images} - session.stored_images
            came = {sha256: session.images[sha256].data for sha256 in shown}
            came |= {one.sha256: one.data for one in turn.sampled.records.values() if one.data is not None}
            row = encode_turn(turn, view, session.view)
            if not await self.turns.write(WrittenTurn(claim=session.claim, row=row, came=came)):
                await self._end_refused([session])
                session.check_open()
                session.turns = None  # to be read again
                raise UnavailableError(f"another process has continued session {session.name}: ask again")
            recording.add(turn)
            session.turns.view = view
            session.stored_images |= shown

    async def _read_turns(self, session: Session) -> None:
        """Reads the turns that another process stored, unless that was done."""
        if session.turns is not None:
            return
        async with session.writing:
            if session.turns is None:
                turns = await self.stored(lambda: replay(self.turns.read(session.claim)))
                session.stored_images = {*image_hashes_of(turns.view.messages), *turns.recording.images()}
                for sha256 in session.stored_images:
                    await self._load_image(session, sha256, None)
                session.turns, session.generate_s = turns, turns.recording.engine_s()

    def note_sent(self, session: Session, turn: Turn, *, sent: bool) -> None:
        """Notes whether an answer reached its client; no effect on a closed session."""
        if session.ended is None and session.turns is not None:
            session.recording.note_sent(turn, sent=sent)
            if not sent:
                logger.info("session %s: turn %d did not reach its client and is not recorded",
                            session.name, turn.number, extra=_log_fields(session))  # fmt: skip

    async def _load_images(self, session: Session, conversation: Conversation, images: Mapping[str, Image]) -> None:
        """Loads every image of the messages into the session, from the request or the store."""
        for sha256 in image_hashes_of(conversation.messages):
            await self._load_image(session, sha256, images.get(sha256))

    async def _load_image(self, session: Session, sha256: str, image: Image | None) -> None:
        if sha256 in session.images:
            return
        if image is None:
            image = Image(data=await self.stored(self.buffer.contents.image, sha256))
        session.add_image(image, self.settings.max_session_image_bytes)

    # --- maintenance in the background --------------------------------------------------------------------------------

    async def _reconcile_for_ever(self) -> None:
        while True:
            try:
                await self.reconcile()
            except RolloutBufferError as error:
                logger.error("session maintenance is postponed: %s", error.message)
            except Exception:
                # This loop must survive errors: without it no session would expire.
                logger.exception("session maintenance failed")
            await asyncio.sleep(RECONCILE_INTERVAL_S)

    async def reconcile(self) -> None:
        """Expires sessions, drops those whose attempts were ended by others, and reports engines."""
        now = time.monotonic()
        for session in tuple(self._sessions.values()):
            if not session.closing.locked() and session.is_expired(now, self.settings.session_timeout_s):
                await self._give_up(session, EXPIRED, "has expired: no request for too long", given_up=False)
        await self._end_refused([one for one in self._sessions.values() if not one.closing.locked()])
        rollouts = self.open_rollouts()
        if (self._sessions or rollouts) and now - self._beat_at > GATEWAY.beats_every_s:
            self._beat_at = now
            await self.stored(self.buffer.beat, GATEWAY.name, os.getpid(), {"rollouts": rollouts})
        jobs = {job.key: job for job in await self.stored(self.buffer.unfinished_jobs)}
        for job in jobs.values():
            self.backends.engine_moved(job)
        for job_key, report in self.backends.due_reports().items():
            await self.stored(self.buffer.report_engine, job_key, os.getpid(), report)
        for job_key, findings in self.backends.new_prompt_findings().items():
            await self.stored(self.buffer.keep_prompt_findings, job_key, os.getpid(), findings)
        await self.backends.keep_only(jobs.keys() | {session.claim.job.key for session in self._sessions.values()})
        if now - self._closed_full_groups_at > CLOSE_FULL_GROUPS_INTERVAL_S:
            self._closed_full_groups_at = now
            await self.stored(self.claims.close_all_full_groups)

    async def _end_refused(self, sessions: Sequence[Session]) -> None:
        """Ends sessions whose group or job was closed by others."""
        refusals = await self.stored(self.claims.refusals, [session.claim for session in sessions])
        for session, why in zip(sessions, refusals, strict=True):
            if why and session.ended is None:
                await self._give_up(session, GROUP_CLOSED, f"was ended: {why}", given_up=True)

    async def _give_up(self, session: Session, code: str, why: str, *, given_up: bool) -> None:
        session.end(why)
        self._sessions.pop(session.name, None)
        logger.info("session %s %s (%s)", session.name, why, code, extra=_log_fields(session))
        try:
            await self.stored(
                lambda: self.claims.fail(
                    session.claim, code, f"the session {why}", given_up=given_up, transcript=session.view.messages
                )
            )
        except StaleAttemptError:
            logger.info("session %s was taken over", session.name, extra=_log_fields(session))

    # --- helpers -----------------------------------------------------------------------------------------------------

    async def stored(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function of the store in a thread and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._store_threads, lambda: function(*arguments))

    async def _ended_session(self, session_id: str) -> ClaimState:
        """Returns how a session ended that is not open.

        Raises:
            NotFoundError: it never existed.
        """
        state = await self.stored(self.claims.state_of, session_id)
        if state is None:
            raise NotFoundError(f"there is no session {session_id[:100]!r}: open one with POST /sessions")
        return state

    def _closed_before(self, state: ClaimState) -> dict[str, Any]:
        if state.state is not AttemptState.FINISHED:
            raise GoneError(_end_of_claim(state), {"state": state.state, "reason": state.error_code})
        return {"session_id": state.uid, "status": WriteStatus.DUPLICATE, "reward": state.reward}

    def _score_asked(self, session: Session, url: str) -> ScoreAsked:
        described = self.describe(session)
        return ScoreAsked(url=url, body={**described, "messages": list(session.view.messages)})


async def _sampled(session: Session, backend: JobBackend, request: GenerateRequest) -> GenerateReply:
    """Samples a turn; records in the session whether the engine failed.

    A harness that scores every ended episode would otherwise turn an engine failure into a reward of 0. A refusal of
    the request itself, such as a prompt that is too long, counts as the episode's own.
    """
    began = time.monotonic()
    try:
        sampled = await session.run(backend.engine.generate(request))
    except EngineError as error:
        session.engine_failure = None if "status" in error.detail else error.message
        raise
    except asyncio.CancelledError:
        session.engine_failure = backend.trouble or session.engine_failure
        raise
    session.engine_failure = None
    session.generate_s += time.monotonic() - began
    return sampled


def _log_fields(session: Session) -> dict[str, str | int]:
    claim = session.claim
    return {"job": claim.job.job_id, "group": claim.group.key, "uid": claim.uid, "attempt": claim.attempt}


def _chat_of(backend: JobBackend, body: ChatBody) -> ChatTokens:
    try:
        return backend.chat_for(body.chat_template_kwargs)
    except ConfigError as error:
        raise InvalidPayloadError(error.message, {"param": "chat_template_kwargs"}) from error


def _message(parsed: ParsedReply) -> Message:
    """Returns the turn's message for the trajectory; messages that the client sends back are compared with it."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    return message


def _reply(session: Session, body: ChatBody, turn: Turn, chat: ChatTokens) -> ChatReply:
    message, sampled = turn.message, turn.sampled
    calls = message.get("tool_calls")
    shown = {**message, "content": message["content"] or (None if calls else "")}
    if calls:
        shown["tool_calls"] = with_string_arguments(calls)
    finish_reason = "tool_calls" if calls and sampled.finish_reason == "stop" else sampled.finish_reason
    count = len(sampled.output_ids)
    sent = sum(one.own_length for one in turn.path()) - count
    prompt_tokens = sent if sampled.prompt_tokens is None else sampled.prompt_tokens
    return ChatReply(
        name=f"{session.name}-{turn.number}",
        created=int(turn.created),
        model=body.model or MODEL_NAME,
        message=shown,
        finish_reason=finish_reason,
        usage={
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
            "prompt_tokens_details": {"cached_tokens": sampled.cached_tokens or 0},
        },
        weight_version=sampled.weight_version,
        stop=first_stop(chat.text(sampled.output_ids), body.stops) if body.stops else None,
        log_probs=_log_probs(sampled, chat) if body.logprobs else None,
    )


def _log_probs(sampled: Generation, chat: ChatTokens) -> list[dict[str, Any]]:
    entries = []
    for token_id, log_prob in zip(sampled.output_ids, sampled.output_log_probs or (), strict=True):
        token = chat.token_text(token_id)
        entries.append({"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []})
    return entries


def _trajectory(session: Session, body: CloseBody, verdict: Verdict) -> Trajectory:
    cut = session.limit_reached or (StopReason.MAX_TOKENS if session.view.finish_reason == "length" else None)
    recording, generations = session.recording, session.recording.generations()
    shown = [*image_hashes_of(session.view.messages), *(sha for one in generations for sha in one.images or ())]
    about = {
        "turns": recording.turns,
        "branches": recording.branches(),
        "emission_order": recording.numbers(),
        "tools": list(session.view.tools),
    }
    turn_rewards, token_rewards = _rewards_of_turns(session, generations, verdict, by=body.scoring_url)
    return Trajectory(
        uid=session.name,
        instance_id=session.claim.instance.instance_id,
        messages=list(session.view.messages),
        reward=verdict.reward,
        raw_reward=body.raw_reward,
        turn_rewards=turn_rewards,
        token_rewards=token_rewards,
        outcome=body.outcome or (Outcome.TRUNCATED if cut else Outcome.COMPLETED),
        stop_reason=body.stop_reason or cut or StopReason.STOP,
        generations=generations,
        images=[session.images[sha256] for sha256 in dict.fromkeys(shown)],
        extra_info={**body.extra_info, **verdict.extra_info, "gateway": about},
        timings_s={"generate": session.generate_s, "session": time.monotonic() - session.opened_at},
    )


def _rewards_of_turns(
    session: Session, generations: Sequence[Generation], verdict: Verdict, *, by: str | None
) -> wire.TurnRewards:
    """Reorders the rewards of turns from sampling order, which clients know, to that of generations, branch by branch.

    Raises:
        InvalidPayloadError: the close request's rewards do not fit its turns.
        UnavailableError: the scoring callback's do not, or a turn was sampled meanwhile: close it again.
    """
    numbers = session.recording.numbers()
    place_of = {number: place for place, number in enumerate(sorted(numbers))}

    def in_order_of_generations(named: list[Any] | None) -> list[Any] | None:
        return named if named is None or len(named) != len(numbers) else [named[place_of[one]] for one in numbers]

    rewards = {
        "turn_rewards": in_order_of_generations(verdict.turn_rewards),
        "token_rewards": in_order_of_generations(verdict.token_rewards),
    }
    try:
        return wire.checked_turn_rewards(rewards, session.view.messages, generations)
    except InvalidPayloadError as error:
        if by is None:
            raise
        raise UnavailableError(
            f"the scoring callback's {error.message}; the session stays open, close it again"
        ) from error


def _end_of_claim(state: ClaimState) -> str:
    if state.state is AttemptState.FINISHED:
        return f"session {state.uid} is closed, with the reward {state.reward:g}"
    if state.state is AttemptState.RUNNING:
        return f"session {state.uid} belongs to another gateway"
    why = state.error_message or "its job is over"
    return f"session {state.uid} is over without a reward ({state.error_code or state.state}): {why}"
