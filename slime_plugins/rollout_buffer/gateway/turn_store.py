"""Stores turns before they are answered, in batches with one fsync each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.gateway.slot_claims import SlotClaim
from slime_plugins.rollout_buffer.storage.payload_store import PendingPayload, StoredPayload
from slime_plugins.rollout_buffer.storage.tables import attempt_rows, turn_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.write_batcher import WriteBatcher
from slime_plugins.rollout_buffer.types import AttemptState


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenTurn:
    """A turn to write: its row, and by hash the images and token records that it is the first to name."""

    claim: SlotClaim
    row: Mapping[str, Any]
    came: Mapping[str, bytes]

    def __len__(self) -> int:
        return len(self.row["detail"]) + len(self.row["log_probs"]) + sum(map(len, self.came.values()))


class TurnStore:
    """Writes and reads the turns of open sessions."""

    def __init__(self, buffer: Buffer, executor: Executor) -> None:
        self._buffer = buffer
        self._batcher: WriteBatcher[WrittenTurn, bool | Exception] = WriteBatcher(self._write, executor)

    async def write(self, turn: WrittenTurn) -> bool:
        """Returns True once the turn is durable, False if another process has written a turn of this number.

        Raises:
            StaleAttemptError: the session has ended.
            StorageFullError: the disk is full. Nothing was written.
        """
        result = await self._batcher.write(turn)
        if isinstance(result, Exception):
            raise result
        return result

    def read(self, claim: SlotClaim) -> list[dict[str, Any]]:
        """Returns the rows of a session's turns by number."""
        with self._buffer.store.read() as connection:
            return turn_rows.turns_of(connection, claim.group.key, claim.slot, claim.attempt)

    def _write(self, turns: Sequence[WrittenTurn]) -> list[bool | Exception]:
        showing = [turn for turn in turns if turn.came]
        payloads: dict[int, StoredPayload] = {}
        if showing:
            pending = [
                PendingPayload(b"", list(turn.came), turn.came, f"session {turn.claim.uid}", turn.claim.uid)
                for turn in showing
            ]
            payloads = dict(zip(map(id, showing), self._buffer.contents.store(pending), strict=True))
        return self._buffer.store.commit_each([partial(self._insert, turn, payloads.get(id(turn))) for turn in turns])

    def _insert(self, turn: WrittenTurn, payload: StoredPayload | None, connection: Connection) -> bool:
        claim = turn.claim
        place = claim.group.key, claim.slot, claim.attempt
        if attempt_rows.attempt_state(connection, *place) is not AttemptState.RUNNING:
            raise StaleAttemptError(f"session {claim.uid} ended before its turn was stored")
        is_new = turn_rows.insert_turn(connection, *place, turn.row)
        if is_new and payload is not None:
            payload.record(connection, self._buffer.clock())
        return is_new
