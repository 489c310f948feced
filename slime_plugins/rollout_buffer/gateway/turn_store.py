"""Stores turns before they are answered, in batches with one fsync each, and reads what other processes stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar, cast

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StorageFullError
from slime_plugins.rollout_buffer.gateway.slot_claims import SlotClaim
from slime_plugins.rollout_buffer.observability.process_status import process_status
from slime_plugins.rollout_buffer.rules.heartbeats import GATEWAY
from slime_plugins.rollout_buffer.storage.payload_store import PendingPayload
from slime_plugins.rollout_buffer.storage.tables import attempt_rows, prompt_rows, service_rows, turn_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.write_batcher import WriteBatcher

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SmallWrite:
    """A write that has rows only, such as the claim of a session. Its length, the bytes of payloads, is 0."""

    work: Callable[[Connection], Any]

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenTurn:
    """A turn to write: its row, and by hash the images and token records that no earlier turn names.

    ``is_continued``: the engine's stream broke, and the turn was continued.
    """

    claim: SlotClaim
    row: Mapping[str, Any]
    payloads: Mapping[str, bytes]
    is_continued: bool = False

    def __len__(self) -> int:
        return len(self.row["detail"]) + len(self.row["log_probs"]) + sum(map(len, self.payloads.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTurns:
    """Rows of turns in the order of their numbers, whether their session takes more turns, and the refusal of its
    latest request."""

    rows: list[dict[str, Any]]
    takes_turns: bool
    refusal: str | None


class TurnStore:
    """Writes and reads the turns of open sessions."""

    def __init__(self, buffer: Buffer, executor: Executor) -> None:
        self._buffer = buffer
        self._executor = executor
        self._batcher: WriteBatcher[WrittenTurn | SmallWrite, Any] = WriteBatcher(self._write, executor)

    async def write(self, turn: WrittenTurn) -> bool:
        """Returns True once the turn is durable, False if the session is over or another process has continued it.

        Raises:
            StorageFullError: the disk is full. Nothing was written.
        """
        return bool(await self._written(turn))

    async def commit(self, work: Callable[[Connection], Result]) -> Result:
        """Runs ``work`` in the transaction of the turns that are stored at that time; on a full disk, in its own.

        Raises:
            Exception: any that ``work`` raises; its changes are rolled back, those of the turns are not.
        """
        try:
            return cast(Result, await self._written(SmallWrite(work)))
        except StorageFullError:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._commit_alone, work)

    async def _written(self, write: WrittenTurn | SmallWrite) -> Any:
        result = await self._batcher.write(write)
        if isinstance(result, Exception):
            raise result
        return result

    def _commit_alone(self, work: Callable[[Connection], Result]) -> Result:
        with self._buffer.store.write() as connection:
            return work(connection)

    def read(self, claim: SlotClaim, *, after: int = 0) -> StoredTurns:
        """Returns a session's turns with higher numbers than ``after``."""
        with self._buffer.store.read() as connection:
            takes_turns, refusal = attempt_rows.session_state(connection, claim.attempt_key)
            rows = turn_rows.turns_of(connection, claim.attempt_key, after=after)
        return StoredTurns(rows=rows, takes_turns=takes_turns, refusal=refusal)

    def refuse(self, claim: SlotClaim, refusal: str) -> None:
        """Stores why the latest request of a session got no turn."""
        with self._buffer.store.write() as connection:
            attempt_rows.set_refusal(connection, claim.attempt_key, refusal)

    def note_sent(self, claim: SlotClaim, number: int, *, sent: bool) -> None:
        """Stores whether an answer reached its client, for the other processes; True is never changed back."""
        with self._buffer.store.write() as connection:
            turn_rows.set_sent(connection, claim.attempt_key, number, sent=sent)

    def sent_flags(self, claim: SlotClaim) -> dict[int, bool]:
        """Returns what ``note_sent`` stored, by number of the turn."""
        with self._buffer.store.read_one() as connection:
            return turn_rows.sent_flags(connection, claim.attempt_key)

    def lives(self, writer: str) -> bool:
        """Returns whether the gateway process with this name (``SessionRegistry.writer``) still runs."""
        with self._buffer.store.read_one() as connection:
            beats = [detail for _, detail in service_rows.heartbeats(connection, GATEWAY.name)]
        heartbeat = next((beat for beat in beats if beat.get("writer") == writer), None)
        status = None if heartbeat is None else process_status(heartbeat["pid"])
        # Another process may have got the pid since; it started at another time.
        return heartbeat is not None and status is not None and status.lives and status.started == heartbeat["started"]

    def _write(self, writes: Sequence[WrittenTurn | SmallWrite]) -> list[Any]:
        """Returns the result of each write, or its error."""
        turns = [write for write in writes if isinstance(write, WrittenTurn)]
        others = [write.work for write in writes if isinstance(write, SmallWrite)]
        if not others:
            return self._buffer.store.commit(self._insert_of(turns))
        inserted, *results = self._buffer.store.commit_each([self._insert_of(turns), *others])
        turn_results = iter([inserted] * len(turns) if isinstance(inserted, Exception) else inserted)
        other_results = iter(results)
        return [next(turn_results if isinstance(write, WrittenTurn) else other_results) for write in writes]

    def _insert_of(self, turns: Sequence[WrittenTurn]) -> Callable[[Connection], list[bool]]:
        """Stores the payloads of turns in packs, and returns the function that inserts the turns' rows."""
        pending = [
            PendingPayload(b"", list(turn.payloads), turn.payloads, f"session {turn.claim.uid}", turn.claim.uid)
            for turn in turns
            if turn.payloads
        ]
        payloads = self._buffer.payloads.store(pending) if pending else []

        def insert(connection: Connection) -> list[bool]:
            for payload in payloads:
                payload.record(connection, self._buffer.clock())
            added = turn_rows.insert_turns(connection, [{**turn.claim.attempt_key, **turn.row} for turn in turns])
            for turn in compress(turns, added):
                if turn.is_continued:
                    prompt_rows.add(connection, prompt_rows.CONTINUED, turn.claim.job.key, 1)
            return added

        return insert
