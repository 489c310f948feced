"""The gateway without HTTP: opens sessions, samples and stores their turns, closes them.

Sessions live on the event loop; calls of the store run in threads. A turn is stored before it is answered. Any process
of the gateway continues a session from its stored turns (see ``session_registry``). A session is trained as a whole
with its reward, or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.errors import (
    ConfigError,
    ConflictError,
    EngineAwayError,
    EngineError,
    GoneError,
    InvalidPayloadError,
    RequestError,
    RolloutBufferError,
    StaleAttemptError,
    UnavailableError,
)
from slime_plugins.rollout_buffer.gateway.backends import JobBackend, JobBackends
from slime_plugins.rollout_buffer.gateway.chat_requests import ChatBody, sampling_of
from slime_plugins.rollout_buffer.gateway.closing import Rewards, ScoringRequest, shown_images, trajectory_of
from slime_plugins.rollout_buffer.gateway.dialects.chat_completions import ChatReply, pieces_of
from slime_plugins.rollout_buffer.gateway.reply_pieces import Listener, ReplyStream, first_stop
from slime_plugins.rollout_buffer.gateway.session_bodies import CloseBody, OpenBody
from slime_plugins.rollout_buffer.gateway.session_registry import RECONCILE_INTERVAL_S, SessionRegistry, gone
from slime_plugins.rollout_buffer.gateway.sessions import Session
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.gateway.slot_claims import EndedClaim
from slime_plugins.rollout_buffer.gateway.turn_store import WrittenTurn
from slime_plugins.rollout_buffer.recording.messages import (
    Conversation,
    digest,
    image_hashes_of,
    reply_name,
    wrong_field,
)
from slime_plugins.rollout_buffer.recording.prompts import Prompt, build_prompt
from slime_plugins.rollout_buffer.recording.turn_encoding import SessionTurns, View, encode_turn, replay
from slime_plugins.rollout_buffer.recording.turns import Recording, Turn
from slime_plugins.rollout_buffer.rules.heartbeats import GATEWAY
from slime_plugins.rollout_buffer.state.item_writes import check_reward
from slime_plugins.rollout_buffer.storage.tables.attempt_rows import OpenSession
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import (
    AttemptState,
    Generation,
    Image,
    Message,
    StopReason,
    WriteStatus,
)

LOAD_TIMEOUT_S = 30.0
"""How long a start waits for the tokenizers of open sessions."""
MODEL_NAME = "policy"
"""Name of the model in replies to requests that name none."""
ABANDONED = "session_abandoned"
"""Error code of the attempt of an abandoned session."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A sampled and recorded turn, and the reply to the client."""

    turn: Turn
    reply: ChatReply


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A validated request for a turn."""

    session: Session
    body: ChatBody
    conversation: Conversation
    images: Mapping[str, Image]
    is_retry: bool = False
    """True if the client's library sends the request again after an error."""

    @property
    def key(self) -> bytes:
        """A digest of the inputs of the prompt other than messages."""
        return digest([self.body.offered_tools, self.body.chat_template_kwargs or {}])

    def request_digest(self) -> bytes:
        """Returns a digest that a repetition of the request shares."""
        fields = self.body.model_dump(exclude={"tools", "stream", "stream_options"}, exclude_none=True)
        return digest([self.key.hex(), fields, [each.hex() for each in self.conversation.digests]])


class Gateway:
    """One process of the gateway. Call ``start()`` first and ``stop()`` last."""

    def __init__(
        self, settings: GatewaySettings, buffer: Buffer, *, backends: JobBackends | None = None, worker: int = 1
    ) -> None:
        self.settings = settings
        self.buffer = buffer
        self.registry = SessionRegistry(settings, buffer, worker)
        self.call_store = self.registry.call_store
        self.claims, self.turns = self.registry.claims, self.registry.turns
        self.backends = backends or JobBackends(buffer.job_settings)
        self._reconciler: asyncio.Task[None] | None = None
        self._beat_at = -math.inf

    async def start(self) -> None:
        """Stores a heartbeat, loads the tokenizers of open sessions, and starts the background loop, which expires
        sessions.

        The port is served only after this call. Until then other processes take the connections, or they wait.
        """
        with contextlib.suppress(RolloutBufferError):  # the background loop does the same
            await self.registry.beat()
            sessions = await self.call_store(self.claims.open_sessions)
            jobs = await self.call_store(self.buffer.unfinished_jobs)
            await self._open_backends(jobs, _job_keys(sessions), LOAD_TIMEOUT_S)
        self._reconciler = asyncio.create_task(self._reconcile_for_ever())

    async def _open_backends(self, jobs: Iterable[JobRecord], job_keys: Set[int], timeout_s: float) -> None:
        """Opens the backends of those jobs whose key is in ``job_keys``, before a turn needs them.

        Any process may have to sample the next turn of a session. A tokenizer that takes longer than ``timeout_s``
        continues to load.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.backends.open_ahead(job for job in jobs if job.key in job_keys)

    async def stop(self) -> None:
        """Closes the engines. Sessions stay open for the next process."""
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.gather(self._reconciler, return_exceptions=True)
        await self.backends.keep_only(set())
        await self.registry.close()

    # --- opening and closing sessions ---------------------------------------------------------------------------------

    async def open(self, body: OpenBody) -> Session:
        """Claims a slot and opens a session.

        Raises:
            BusyError: the limit of sessions is reached, or every slot is taken.
            RequestError: the job takes no sessions; see ``JobBackends.open`` and ``SlotClaims.claim``.
        """
        backend = await self.backends.open(await self.call_store(self.buffer.job, body.job_id))
        claim = await self.turns.commit(
            lambda connection: self.claims.claim(
                connection,
                body.job_id,
                body.instance_id,
                idle_timeout_s=body.idle_timeout_s or self.settings.idle_timeout_s,
                max_sessions=self.settings.max_sessions,
            )
        )
        session = Session(claim=claim, turns=SessionTurns(Recording(backend.matching)))
        self.registry.add(session)
        return session

    async def close(
        self, session_id: str, body: CloseBody, score: Callable[[ScoringRequest], Awaitable[Rewards]]
    ) -> dict[str, Any]:
        """Stores a session as the trajectory of its slot; idempotent.

        Raises:
            GoneError: the session was given up or has expired, without a reward.
            ConflictError: the engine failed at its last turn, and the body names no outcome.
            RequestError: the session has no turns, the scoring callback is not allowed, or the reward is outside of the
                job's ``reward_range``.
            UnavailableError, StorageFullError: the session stays open; close it again.
        """
        session = await self.registry.find(session_id)
        if isinstance(session, EndedClaim):
            return _closed_before(session)
        async with session.closing:
            if (ended := await self.registry.refresh(session)) is not None:
                return _closed_before(ended)
            await self.registry.learn_sent(session)
            if session.recording.num_turns == 0:
                raise RequestError(f"session {session_id} has no turn to train: abandon it, which opens its slot again")
            if session.engine_failure is not None and body.outcome is None:
                raise ConflictError(
                    f"the last turn of session {session_id} got no answer: {session.engine_failure}. Its reward would "
                    "not measure the policy: repeat the turn, abandon the session, or close it with an outcome"
                )
            scored_turns = session.recording.last_number
            if body.scoring_url is not None:
                content = {**self.describe(session), "messages": list(session.view.messages)}
                rewards = await score(ScoringRequest(url=body.scoring_url, body=content))
            else:
                assert body.reward is not None  # ``CloseBody`` has either a reward or a scoring_url
                rewards = Rewards(reward=body.reward, turn_rewards=body.turn_rewards, token_rewards=body.token_rewards)
            job = await self.call_store(self.buffer.job_by_key, session.claim.job.key)
            check_reward(job, session.uid, rewards.reward)
            return await self._finish(session, body, rewards, scored_turns)

    async def _finish(self, session: Session, body: CloseBody, rewards: Rewards, scored_turns: int) -> dict[str, Any]:
        """Ends the session and stores its trajectory; returns the reply. After an error the session is open again."""
        session.end("is being closed")
        try:
            async with session.writing:
                if body.scoring_url is not None and session.recording.last_number != scored_turns:
                    raise UnavailableError("a turn was sampled while the session was scored: close it again")
                status = await self._store_trajectory(session, body, rewards)
        except StaleAttemptError as error:
            self.registry.remove(session)
            raise GoneError(f"session {session.uid} was given up before it was closed: {error.message}") from error
        except BaseException:  # also when the client disconnects
            session.ended = None
            session.was_used = True  # its idle timeout begins again
            raise
        self.registry.remove(session)
        return {
            "session_id": session.uid,
            "status": status,
            "reward": rewards.reward,
            "turns": session.recording.num_turns,
            "branches": session.recording.branches(),
        }

    async def _store_trajectory(self, session: Session, body: CloseBody, rewards: Rewards) -> WriteStatus:
        """Stores the trajectory with all turns of the session, also those that other processes have stored."""
        while True:
            await self.registry.load_images(session, shown_images(session))
            closed_at = self.buffer.clock()
            trajectory = await asyncio.to_thread(trajectory_of, session, body, rewards, closed_at=closed_at)
            turns = session.recording.last_number
            try:
                return await self.call_store(partial(self.claims.finish, session.claim, trajectory, turns=turns))
            except UnavailableError:
                # If another process has added turns, the trajectory is made again with them; a score cannot cover them.
                if body.scoring_url is not None or not (await self.registry.read_new(session)).rows:
                    raise

    async def abandon(self, session_id: str, reason: str) -> dict[str, Any]:
        """Gives a session up without a reward and reopens its slot; idempotent.

        Raises:
            GoneError: the session was closed with a reward.
        """
        session = await self.registry.find(session_id)
        if isinstance(session, EndedClaim):
            return _abandoned_before(session)
        async with session.closing:
            if (ended := await self.registry.refresh(session)) is not None:
                return _abandoned_before(ended)
            state = await self.registry.end_without_reward(session, ABANDONED, f"was abandoned: {reason}")
        return {"session_id": session_id, "status": state}

    def describe(self, session: Session) -> dict[str, Any]:
        """Returns the state of an open session."""
        claim, recording = session.claim, session.recording
        return {
            "session_id": session.uid,
            "job_id": claim.job.job_id,
            "instance_id": claim.instance.instance_id,
            "instance": dict(claim.instance.data),
            "epoch": claim.group.epoch,
            "slot": claim.slot,
            "attempt": claim.attempt,
            "state": "open",
            "ids": recording.num_ids,
            **recording.describe(),
            "idle_timeout_s": claim.idle_timeout_s,
        }

    # --- turns --------------------------------------------------------------------------------------------------------

    async def chat(self, request: TurnRequest, emit: Listener | None = None) -> Answer:
        """Samples one turn and stores it. A retry, or a repeated request whose answer did not reach its client, gets
        the stored turn.

        ``emit`` gets the beginning of the reply and then its pieces: while they are sampled if the engine streams,
        otherwise once the turn is stored.

        The caller calls the registry's ``note_sent`` once it has delivered the answer, or failed to: a turn that never
        reached its client is not trained.

        Raises:
            RequestError: the request is invalid, or (``GoneError``) the session has ended or reached a limit.
            EngineError: the engine refused the request or is unreachable.
            UnavailableError, StorageFullError: the turn cannot be stored.
        """
        session, body, is_retry = request.session, request.body, request.is_retry
        backend = await self.backends.open(session.claim.job)
        chat, request_digest = _chat_of(backend, body), request.request_digest()
        while is_retry and (first_answer := session.answering.get(request_digest)) is not None:
            await asyncio.wait([first_answer])  # the retry gets the turn that is being sampled for its request
        turn = session.recording.answered(request_digest, is_retry=is_retry)
        turn = turn or await self.registry.unsent(session, request_digest)
        is_emitted = False
        if turn is None:
            with session.mark_answering(request_digest):
                session.recording.forget(request_digest)
                await self._check_limits(session, backend)
                turn, is_emitted = await self._sample_turn(request, backend, chat, request_digest, emit)
        if turn.sent is False or turn.writer != self.registry.writer:
            # An earlier turn is answered again: before its reply can reach the client, all processes must know it.
            await self.call_store(partial(self.turns.note_sent, session.claim, turn.number, sent=True))
        if emit is not None and not is_emitted:
            # The prompt of an earlier turn is not counted again: the end of the reply has the number of its tokens.
            emit(self._begun(session, body, turn.name, 0))
            for piece in pieces_of(turn.message):
                emit(piece)
        return Answer(turn=turn, reply=_reply(session, body, turn, chat))

    async def _check_limits(self, session: Session, backend: JobBackend) -> None:
        recording, settings, too_long = session.recording, self.settings, StopReason.MAX_CONTEXT
        content_bytes = session.image_bytes + recording.record_bytes
        for stop_reason, count, limit, what in (
            (StopReason.MAX_TURNS, recording.num_turns, backend.max_turns or settings.max_turns, "turns"),
            (too_long, recording.num_ids, backend.max_tokens_total or settings.max_session_ids, "token ids"),
            (too_long, content_bytes, settings.max_session_image_bytes, "bytes of images and token records"),
        ):
            if count >= limit:
                await self.registry.refuse(session, engine_failure=session.engine_failure, limit=stop_reason)
                raise GoneError(
                    f"session {session.uid} has {count} {what}, {limit} is the limit: close it",
                    {"stop_reason": stop_reason},
                )

    async def _sample_turn(
        self, request: TurnRequest, backend: JobBackend, chat: ChatTokens, request_digest: bytes, emit: Listener | None
    ) -> tuple[Turn, bool]:
        """Samples, stores and emits a turn; returns it and True.

        If another process has answered the request meanwhile, returns that process's turn, which is not emitted, and
        False.
        """
        session, body, name = request.session, request.body, reply_name()
        prompt = await self._prompt(request, chat)
        begun = self._begun(session, body, name, _prompt_tokens(session, backend, prompt))
        stream = ReplyStream(chat, body, prompt.ids, begun, emit, name=name)
        sampling = GenerateRequest(
            input_ids=prompt.ids,
            sampling_params=sampling_of(body, backend.sampling, pinned=backend.is_pinned),
            session_id=session.uid,
            images=[session.images[sha256] for sha256 in prompt.images],
            on_tokens=None if emit is None else stream.add,
        )
        sampled = await self._sampled(session, backend, sampling)
        message = stream.end(sampled.output_ids)
        own = prompt.turn(
            sampled,
            message,
            chat,
            key=request.key,
            request=request_digest,
            created=begun.created,
            name=name,
            thinks_apart=body.separate_reasoning,
        )
        own.writer = self.registry.writer
        view = View((*request.conversation.messages, message), body.offered_tools, sampled.finish_reason, name)
        turn = await self._store_turn(request, own, view, is_continued=sampled.breaks > 0)
        if turn is own:
            stream.emit_rest()
        elif stream.has_emitted:
            raise UnavailableError("another process has answered this request meanwhile: ask again")
        return turn, turn is own

    async def _prompt(self, request: TurnRequest, chat: ChatTokens) -> Prompt:
        session = request.session
        await self.registry.load_images(session, image_hashes_of(request.conversation.messages), request.images)
        tools = request.body.offered_tools
        prompt = await build_prompt(session.recording, request.key, request.conversation, chat, tools)
        await self.registry.load_images(session, prompt.images)
        return prompt

    def _begun(self, session: Session, body: ChatBody, name: str, prompt_tokens: int) -> ChatReply:
        """Returns a reply as it begins, without a message."""
        return ChatReply(
            name=f"{session.uid}-{name}",
            created=int(self.buffer.clock()),
            model=body.model or MODEL_NAME,
            message={},
            finish_reason="",
            usage=_usage(prompt_tokens, 0, 0),
            weight_version=None,
        )

    async def _sampled(self, session: Session, backend: JobBackend, request: GenerateRequest) -> GenerateReply:
        """Samples a turn; records in the session whether the engine failed.

        A harness that scores every ended episode would otherwise turn an engine failure into a reward of 0. If the
        engine refused the request itself, whose prompt may be too long, the error has its HTTP status: this counts as a
        failure of the episode.
        """
        try:
            sampled = await session.run(backend.engine.generate(request))
        except EngineError as error:
            failure = None if "status" in error.detail else error.message
            await self.registry.refuse(session, engine_failure=failure, away=isinstance(error, EngineAwayError))
            raise
        except asyncio.CancelledError:  # the client may have left because the engine did not answer
            if backend.trouble is not None:
                await self.registry.refuse(session, engine_failure=backend.trouble, away=True)
            raise
        await self.registry.refuse(session)
        return sampled

    async def _store_turn(self, request: TurnRequest, turn: Turn, view: View, *, is_continued: bool) -> Turn:
        """Stores a turn, as ``_write_turn``. If the client disconnects meanwhile, notes that the turn was not sent."""
        storing = asyncio.create_task(self._write_turn(request, turn, view, is_continued=is_continued))
        try:
            return await asyncio.shield(storing)
        except asyncio.CancelledError:
            await asyncio.wait([storing])
            if storing.exception() is None and storing.result() is turn:
                self.registry.note_sent(request.session, turn, sent=False)
            raise

    async def _write_turn(self, request: TurnRequest, turn: Turn, view: View, *, is_continued: bool) -> Turn:
        """Stores and records a turn with the next number; returns it.

        If another process has stored turns meanwhile, the turn gets the number after theirs. But if this is a retry of
        a request that one of those turns answers, that turn is returned and nothing is stored.

        Raises:
            GoneError: the session has ended.
            UnavailableError, StorageFullError: the turn cannot be stored.
        """
        session = request.session
        async with session.writing:
            while True:
                session.check_open()
                assert session.turns is not None
                turn.number = session.recording.last_number + 1
                new_images = {*image_hashes_of(view.messages), *turn.images} - session.stored_images
                await self.registry.load_images(session, new_images)
                payloads = {sha256: session.images[sha256].data for sha256 in new_images}
                records = turn.sampled.records.values()
                payloads |= {record.sha256: record.data for record in records if record.data is not None}
                row = encode_turn(turn, view, session.view)
                written = WrittenTurn(claim=session.claim, row=row, payloads=payloads, is_continued=is_continued)
                if await self.turns.write(written):
                    session.turns.add(turn, view)
                    session.stored_images |= new_images
                    return turn
                if not (await self.registry.read_new(session)).rows:
                    await self.registry.end(session)
                    session.check_open()
                    raise UnavailableError(f"the turn of session {session.uid} cannot be stored: ask again")
                if request.is_retry and (stored := session.recording.latest(turn.request)) is not None:
                    return stored

    async def count_tokens(self, request: TurnRequest) -> int:
        """Returns the number of prompt tokens of a request, which is not sampled.

        Raises:
            RequestError: the request is invalid.
        """
        backend = await self.backends.open(request.session.claim.job)
        prompt = await self._prompt(request, _chat_of(backend, request.body))
        return _prompt_tokens(request.session, backend, prompt)

    async def messages_of_previous_turn(self, session: Session, session_id: str, turn_name: str) -> Sequence[Message]:
        """Returns the messages of a stored turn, its reply last.

        Raises:
            InvalidPayloadError: ``session_id`` names another session, or the session has no such turn.
        """
        if (session_id, turn_name) == (session.uid, session.view.turn):
            return session.view.messages
        rows = [] if session_id != session.uid else (await self.call_store(self.turns.read, session.claim)).rows
        replayed = SessionTurns()
        for row in rows:
            if replay([row], replayed).view.turn == turn_name:
                return replayed.view.messages
        raise wrong_field("previous_response_id", "names no response of this session")

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
        """Stores that this process lives, and the state of the engines; ends expired sessions and those of closed
        groups; opens the backends of jobs with sessions, closes unused ones."""
        now = time.monotonic()
        if now - self._beat_at > GATEWAY.beats_every_s:
            await self.registry.beat()
            self._beat_at = now
        sessions = await self.registry.reconcile()
        jobs = {job.key: job for job in await self.call_store(self.buffer.unfinished_jobs)}
        for job in jobs.values():
            self.backends.engine_moved(job)
        for job_key, backend in self.backends.opened().items():
            await self._store_engine_state(job_key, backend)
        job_keys = _job_keys(sessions)
        await self.backends.keep_only(jobs.keys() | job_keys)
        # Heartbeats and idle timeouts must not wait for a tokenizer.
        await self._open_backends(jobs.values(), job_keys, RECONCILE_INTERVAL_S)

    async def _store_engine_state(self, job_key: int, backend: JobBackend) -> None:
        if (report := backend.due_report()) is not None:
            await self.call_store(self.buffer.report_engine, job_key, os.getpid(), report)
            backend.reports.mark_stored(report)  # only now: a failed write is repeated
        if (findings := backend.new_prompt_findings()) is not None:
            await self.call_store(self.buffer.keep_prompt_findings, job_key, os.getpid(), findings)
            backend.stored_prompt_findings = findings


def _job_keys(sessions: Mapping[str, OpenSession]) -> set[int]:
    return {session.uid.job_key for session in sessions.values()}


def _closed_before(ended: EndedClaim) -> dict[str, Any]:
    """Returns the reply to a request to close a session that has ended."""
    if ended.state is not AttemptState.FINISHED:
        raise gone(ended)
    return {"session_id": ended.uid, "status": WriteStatus.DUPLICATE, "reward": ended.reward}


def _abandoned_before(ended: EndedClaim) -> dict[str, Any]:
    """Returns the reply to a request to abandon a session that has ended."""
    if ended.state is AttemptState.FINISHED:
        raise gone(ended)
    return {"session_id": ended.uid, "status": ended.state}


def _chat_of(backend: JobBackend, body: ChatBody) -> ChatTokens:
    try:
        return backend.chat_for(body.chat_template_kwargs)
    except ConfigError as error:
        raise InvalidPayloadError(error.message, {"param": "chat_template_kwargs"}) from error


def _prompt_tokens(session: Session, backend: JobBackend, prompt: Prompt) -> int:
    """Returns the number of prompt tokens after each image's placeholder was replaced by the tokens of the image."""
    return len(prompt.ids) + sum(backend.tokens_of_image(session.images[sha256]) - 1 for sha256 in prompt.images)


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _reply(session: Session, body: ChatBody, turn: Turn, chat: ChatTokens) -> ChatReply:
    sampled = turn.sampled
    calls = turn.message.get("tool_calls") or ()
    stop = first_stop(chat.text(sampled.output_ids), body.stops) if body.stops else None
    # Arguments that are still a string are no JSON object: the stop sequence was inside the call.
    is_cut = stop is not None and any(isinstance(call["function"]["arguments"], str) for call in calls)
    is_calling = bool(calls) and not is_cut and sampled.finish_reason == "stop"
    num_sampled = len(sampled.output_ids)
    num_prompt_ids = sum(each.own_length for each in turn.path()) - num_sampled
    prompt_tokens = num_prompt_ids if sampled.prompt_tokens is None else sampled.prompt_tokens
    return ChatReply(
        name=f"{session.uid}-{turn.name}",
        created=int(turn.created),
        model=body.model or MODEL_NAME,
        message=turn.message,
        finish_reason="tool_calls" if is_calling else sampled.finish_reason,
        usage=_usage(prompt_tokens, num_sampled, sampled.cached_tokens or 0),
        weight_version=sampled.weight_version,
        stop=stop,
        log_probs=_log_probs(sampled, chat) if body.logprobs else None,
    )


def _log_probs(sampled: Generation, chat: ChatTokens) -> list[dict[str, Any]]:
    entries = []
    for token_id, log_prob in zip(sampled.output_ids, sampled.output_log_probs or (), strict=True):
        token = chat.decoded([token_id])
        entries.append({"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []})
    return entries
