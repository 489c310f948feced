"""The open sessions that a gateway process knows, and what other processes did to them.

Any process continues any session, and the store decides: before a turn is sampled, the turns that others have stored
are read. The turn is stored with the next number, which only one process can add; once the session has ended, no turn
is stored. All processes store when they use a session, so any process can see that it is idle, and expires it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import GoneError, NotFoundError, RolloutBufferError, StaleAttemptError
from slime_plugins.rollout_buffer.gateway.sessions import Refusal, Session
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.gateway.slot_claims import EndedClaim, SlotClaim, SlotClaims
from slime_plugins.rollout_buffer.gateway.turn_store import StoredTurns, TurnStore
from slime_plugins.rollout_buffer.observability.process_status import process_status
from slime_plugins.rollout_buffer.recording.message_matching import matching_of
from slime_plugins.rollout_buffer.recording.messages import image_hashes_of
from slime_plugins.rollout_buffer.recording.turn_encoding import SessionTurns, replay
from slime_plugins.rollout_buffer.recording.turns import Recording, Turn
from slime_plugins.rollout_buffer.rules.heartbeats import GATEWAY
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.storage.tables.attempt_rows import OpenSession
from slime_plugins.rollout_buffer.types import AttemptState, Image, StopReason

RECONCILE_INTERVAL_S = 1.0
MAX_TOUCH_INTERVAL_S = 5.0
"""Maximum time between two touches of a session in use; there are at least four in its idle timeout."""
EXPIRED, GROUP_CLOSED = "session_expired", "group_closed"
"""Error codes of attempts whose session has expired, or whose group was closed before."""
STORE_THREADS = 4
ENDED_TOGETHER = 64
"""Number of sessions that are ended at once, in common transactions; their transcripts are in memory at that time."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class SessionRegistry:
    """Finds, refreshes, expires and ends sessions. ``worker`` numbers the gateway's processes, from 1."""

    def __init__(self, settings: GatewaySettings, buffer: Buffer, worker: int) -> None:
        self.claims = SlotClaims(buffer)
        self._settings = settings
        self._buffer = buffer
        self._service = GATEWAY.name if worker == 1 else f"{GATEWAY.name} {worker}"
        self.writer = secrets.token_hex(8)
        """Name of this process in the turns that it writes."""
        self._sessions: dict[str, Session] = {}
        self._threads = ThreadPoolExecutor(STORE_THREADS, thread_name_prefix="store")
        self.turns = TurnStore(buffer, self._threads)
        self._notes: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        await asyncio.gather(*self._notes, return_exceptions=True)
        self._threads.shutdown(wait=True)

    async def call_store(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function of the store in a thread and returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*arguments))

    # --- finding ------------------------------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        self._sessions[session.uid] = session

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.uid, None)

    async def find(self, session_id: str) -> Session | EndedClaim:
        """Returns an open session, whichever process opened it, or how it ended.

        Raises:
            NotFoundError: the session never existed.
        """
        if (session := self._sessions.get(session_id)) is not None:
            return session
        claim = await self.call_store(self.claims.find, session_id)
        if claim is None:
            raise NotFoundError(f"there is no session {session_id[:100]!r}: open one with POST /sessions")
        return claim if isinstance(claim, EndedClaim) else self._sessions.setdefault(session_id, Session(claim=claim))

    async def session(self, session_id: str) -> Session:
        """Returns an open session with all its stored turns.

        Raises:
            NotFoundError: the session never existed.
            GoneError: the session was closed, given up or expired.
        """
        session = await self.find(session_id)
        if isinstance(session, EndedClaim):
            raise gone(session)
        session.check_open()
        if session.turns is None or self._settings.workers > 1:  # with one worker no other process writes
            if (ended := await self.refresh(session)) is not None:
                raise gone(ended)
            session.check_open()
        return session

    # --- what other processes did -------------------------------------------------------------------------------------

    async def refresh(self, session: Session) -> EndedClaim | None:
        """Reads what other processes stored of a session; returns how the session ended, None if it is still open."""
        async with session.writing:
            new_turns = await self.read_new(session)
        return None if new_turns.takes_turns else await self.end(session)

    async def read_new(self, session: Session) -> StoredTurns:
        """Adds the turns that others have stored, and returns them; the caller holds ``writing``."""
        turns = session.turns
        after = 0 if turns is None else turns.recording.last_number
        # The notes of this process must be stored first; the shield keeps them if this request's client disconnects.
        await asyncio.shield(asyncio.gather(*self._notes))
        new = await self.call_store(partial(self.turns.read, session.claim, after=after))
        session.refusal = None if new.refusal is None else Refusal.decode(new.refusal)
        if turns is None:  # in a thread: the rows may be thousands
            turns = await self.call_store(self._replayed, session.claim, new.rows)
        else:
            turns = replay(new.rows, turns)
        session.turns = turns
        session.stored_images.update(image_hashes_of(turns.view.messages))
        session.stored_images.update(image for row in new.rows for image in turns.by_number[row["number"]].images)
        return new

    def _replayed(self, claim: SlotClaim, rows: Sequence[Mapping[str, Any]]) -> SessionTurns:
        return replay(rows, SessionTurns(Recording(matching_of(self._buffer.job_settings(claim.job).options))))

    async def end(self, session: Session) -> EndedClaim | None:
        """Ends a session that takes no turns any more; returns how it ended, None if it is open after all."""
        ended = await self.call_store(self.claims.find, session.uid)
        if not isinstance(ended, EndedClaim):
            why = await self.call_store(self.claims.why_group_closed, session.claim)
            if not why:
                return None
            await self.end_without_reward(session, GROUP_CLOSED, f"was ended: {why}", given_up=True)
            ended = await self.call_store(self.claims.find, session.uid)
        if not isinstance(ended, EndedClaim):
            return None
        session.end(str(ended))
        self.remove(session)
        return ended

    async def unsent(self, session: Session, request_digest: bytes) -> Turn | None:
        """Returns another process's answer to a request if the client did not get it, else None.

        That process has stored that the client did not get it, or died before it stored whether the client did. While
        it lives and has stored neither, the request counts as asking for another sample.
        """
        turn = session.recording.latest(request_digest)
        if turn is None or turn.sent is not None or turn.writer == self.writer:
            return None
        sent = (await self.call_store(self.turns.sent_flags, session.claim)).get(turn.number)
        if sent is None and await self.call_store(self.turns.lives, turn.writer):
            return None
        turn.sent = bool(sent)
        return None if turn.sent else turn

    async def learn_sent(self, session: Session) -> None:
        """Reads which answers reached their clients, as all processes have stored it."""
        assert session.turns is not None
        for number, sent in (await self.call_store(self.turns.sent_flags, session.claim)).items():
            if (turn := session.turns.by_number.get(number)) is not None:
                session.recording.note_sent(turn, sent=sent)

    # --- what other processes must know -------------------------------------------------------------------------------

    def note_sent(self, session: Session, turn: Turn, *, sent: bool) -> None:
        """Notes whether an answer reached its client; no effect on a closed session."""
        if session.ended is not None:
            return
        session.recording.note_sent(turn, sent=sent)
        if not turn.sent:
            self._note(self.turns.note_sent, session.claim, turn.number, sent=False)
            logger.info("session %s: turn %d did not reach its client; it is trained only if its request is repeated",
                        session.uid, turn.number, extra=log_fields(session))  # fmt: skip

    async def refuse(
        self,
        session: Session,
        *,
        engine_failure: str | None = None,
        away: bool = False,
        limit: StopReason | None = None,
    ) -> None:
        """Records why a request got no turn; without arguments, that it got its turn."""
        earlier_failure, after = session.engine_failure, session.recording.last_number
        limit = limit or (None if session.refusal is None else session.refusal.limit)
        session.refusal = Refusal(after=after, engine_failure=engine_failure, away=away, limit=limit)
        if engine_failure or earlier_failure or limit:
            await asyncio.shield(self._note(self.turns.refuse, session.claim, session.refusal.encode()))

    def _note(self, function: Callable[..., None], *arguments: Any, **options: Any) -> asyncio.Future[None]:
        """Writes in the background; an error is logged, since only other processes lack the note."""

        def write() -> None:
            try:
                function(*arguments, **options)
            except RolloutBufferError as error:
                logger.warning("the other gateway processes do not learn what became of a turn: %s", error.message)

        noting = asyncio.ensure_future(self.call_store(write))
        self._notes.add(noting)
        noting.add_done_callback(self._notes.discard)
        return noting

    async def beat(self) -> None:
        """Stores that this process lives."""
        status = process_status(os.getpid())
        detail = {"writer": self.writer, "pid": os.getpid(), "started": None if status is None else status.started}
        await self.call_store(self._buffer.beat, self._service, os.getpid(), detail)

    # --- images -------------------------------------------------------------------------------------------------------

    async def load_images(
        self, session: Session, hashes: Iterable[str], images: Mapping[str, Image] | None = None
    ) -> None:
        """Loads images into the session, from the request or the store."""
        for sha256 in hashes:
            if sha256 in session.images:
                continue
            image = (images or {}).get(sha256)
            if image is None:
                image = Image(data=await self.call_store(self._buffer.payloads.image, sha256))
            session.add_image(image, self._settings.max_session_image_bytes)

    # --- maintenance --------------------------------------------------------------------------------------------------

    async def reconcile(self) -> dict[str, OpenSession]:
        """Ends sessions that are idle for too long, or whose group is closed; returns all sessions that were open."""
        await self._touch()
        now = self._buffer.clock()
        open_now = await self.call_store(self.claims.open_sessions)
        for session in tuple(self._sessions.values()):
            if session.uid not in open_now and not session.closing.locked():
                await self.refresh(session)
        due = [one for one in open_now.items() if self._expiry(*one, now)]
        for start in range(0, len(due), ENDED_TOGETHER):
            await asyncio.gather(*(self._end_due(*one, now) for one in due[start : start + ENDED_TOGETHER]))
        return open_now

    async def _end_due(self, session_id: str, stored: OpenSession, now: float) -> None:
        session, expiry = await self.find(session_id), self._expiry(session_id, stored, now)
        if isinstance(session, Session) and expiry and stored.takes_turns:
            await self.end_without_reward(session, EXPIRED, f"has expired: {expiry}")
        elif isinstance(session, Session) and expiry:
            await self.end(session)

    def _expiry(self, session_id: str, stored: OpenSession, now: float) -> str:
        """Returns why a session must end now; empty if it must not, also while it is being closed."""
        session = self._sessions.get(session_id)
        if session is not None and session.closing.locked():
            return ""
        if not stored.takes_turns:
            return "its group is closed"
        if now - stored.started_at > self._settings.session_timeout_s:
            return f"it was open for more than {self._settings.session_timeout_s:g} s"
        # Another process may be about to touch the session.
        grace_s = _touch_interval_s(stored.idle_timeout_s) + 2 * RECONCILE_INTERVAL_S
        idle_s = stored.idle_timeout_s + (grace_s if self._settings.workers > 1 else 0.0)
        is_idle = now - stored.used_at > idle_s and not (session is not None and session.is_in_use)
        return "no request for too long" if is_idle else ""

    async def _touch(self) -> None:
        """Stores that the sessions that this process uses are in use."""
        now = self._buffer.clock()
        due = [
            session
            for session in self._sessions.values()
            if session.is_in_use and now - session.touched_at >= _touch_interval_s(session.claim.idle_timeout_s)
        ]
        if due:
            touched_at = await self.call_store(self.claims.touch, [session.claim for session in due])
            for session in due:
                session.was_used, session.touched_at = False, touched_at

    async def end_without_reward(self, session: Session, code: str, why: str, given_up: bool = False) -> AttemptState:
        """Ends a session without a reward and opens its slot again; returns the state of its attempt.

        With ``given_up`` the buffer has stopped the attempt, which then does not count towards ``max_attempts``. Nor
        does it if its latest turn failed because the engine was away.
        """
        session.end(why)
        self.remove(session)
        logger.info("session %s %s (%s)", session.uid, why, code, extra=log_fields(session))
        if session.turns is None:
            with contextlib.suppress(RolloutBufferError):  # without its turns, only the transcript is missing
                async with session.writing:
                    await self.read_new(session)
        given_up = given_up or (session.refusal is not None and session.refusal.away)
        try:
            transcript = session.view.messages
            failure = AttemptFailure(code=code, message=f"the session {why}", given_up=given_up, transcript=transcript)
            await self.turns.commit(lambda connection: self.claims.fail(connection, session.claim, failure))
        except StaleAttemptError:
            logger.info("session %s was taken over", session.uid, extra=log_fields(session))
        return AttemptState.GIVEN_UP if given_up else AttemptState.FAILED


def gone(ended: EndedClaim) -> GoneError:
    """Returns the error of a request for a session that has ended."""
    return GoneError(f"session {ended.uid} {ended}", {"state": ended.state, "reason": ended.error_code})


def log_fields(session: Session) -> dict[str, str | int]:
    """Returns the fields of a log line about a session."""
    claim = session.claim
    return {"job": claim.job.job_id, "group": claim.group.key, "uid": claim.uid, "attempt": claim.attempt}


def _touch_interval_s(idle_timeout_s: float) -> float:
    return min(MAX_TOUCH_INTERVAL_S, idle_timeout_s / 4)
