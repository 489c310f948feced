"""Stores turns before they are answered, in batches with one fsync each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.gateway.slot_claims import SlotClaim
from slime_plugins.rollout_buffer.storage.payload_store import PendingPayload
from slime_plugins.rollout_buffer.storage.tables import turn_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.write_batcher import WriteBatcher


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
        self._batcher: WriteBatcher[WrittenTurn, bool] = WriteBatcher(self._write, executor)

    async def write(self, turn: WrittenTurn) -> bool:
        """Returns True once the turn is durable, False if the session is over or another process has continued it.

        Raises:
            StorageFullError: the disk is full. Nothing was written.
        """
        return await self._batcher.write(turn)

    def read(self, claim: SlotClaim) -> list[dict[str, Any]]:
        """Returns the rows of a session's turns by number."""
        with self._buffer.store.read() as connection:
            return turn_rows.turns_of(connection, **_place(claim))

    def _write(self, turns: Sequence[WrittenTurn]) -> list[bool]:
        showing = [turn for turn in turns if turn.came]
        pending = [
            PendingPayload(b"", list(turn.came), turn.came, f"session {turn.claim.uid}", turn.claim.uid)
            for turn in showing
        ]
        payloads = self._buffer.contents.store(pending) if pending else []

        def insert(connection: Connection) -> list[bool]:
            for payload in payloads:
                payload.record(connection, self._buffer.clock())
            return turn_rows.insert_turns(connection, [{**_place(turn.claim), **turn.row} for turn in turns])

        return self._buffer.store.commit(insert)


def _place(claim: SlotClaim) -> dict[str, int]:
    return {"group_key": claim.group.key, "slot": claim.slot, "attempt": claim.attempt}
