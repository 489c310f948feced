"""Keeps sessions of the remote rollout protocol in the buffer's store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.gateway.service import Gateway
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.session_log import LIMIT_REACHED, StoredSession
from slime_plugins.rollout_buffer.storage.tables import turn_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection

Result = TypeVar("Result")


class RolloutLog:
    """A ``SessionLog`` that all processes of a gateway share. Ended sessions stay for ``keep_ended_s``."""

    def __init__(self, gateway: Gateway, keep_ended_s: float) -> None:
        self._gateway = gateway
        self._clock = gateway.buffer.clock
        self._keep_ended_s = keep_ended_s

    async def open(self, rollout_id: str, opening: Mapping[str, Any], expires_in_s: float, *, max_open: int) -> bool:
        now = self._clock()
        row = {
            "rollout_id": rollout_id,
            "job_id": opening["job_id"],
            "instance_id": opening.get("instance_id"),
            "expires_at": now + expires_in_s,
            "opening": orjson.dumps(opening),
        }

        def insert(connection: Connection) -> bool:
            turn_rows.purge_rollouts(connection, now - self._keep_ended_s)
            is_new = turn_rows.insert_rollout(connection, row)
            if is_new and turn_rows.count_open_rollouts(connection, now) > max_open:
                raise UnavailableError(LIMIT_REACHED.format(max_open))
            return is_new

        return await self._commit(insert)

    async def find(self, rollout_id: str, *, after: int) -> StoredSession | None:
        def read() -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
            with self._gateway.buffer.store.read() as connection:
                turns = turn_rows.turns_of_rollout(connection, rollout_id, after=after)
                return turn_rows.find_rollout(connection, rollout_id), turns

        row, turns = await self._gateway.call_store(read)
        if row is None or row["expires_at"] < self._clock() - self._keep_ended_s:
            return None
        return StoredSession(
            opening=orjson.loads(row["opening"]),
            ending=None if row["ending"] is None else orjson.loads(row["ending"]),
            expires_in_s=row["expires_at"] - self._clock(),
            turns=turns,
        )

    async def names(self) -> Sequence[str]:
        def read() -> list[str]:
            with self._gateway.buffer.store.read() as connection:
                return turn_rows.rollout_ids(connection)

        return await self._gateway.call_store(read)

    async def add_turn(self, rollout_id: str, row: Mapping[str, Any], expires_in_s: float) -> bool:
        expires_at = self._clock() + expires_in_s
        return await self._commit(
            lambda connection: turn_rows.insert_turn_of_rollout(connection, rollout_id, row, expires_at)
        )

    async def end(self, rollout_id: str, ending: Mapping[str, Any]) -> None:
        content, now = orjson.dumps(ending), self._clock()
        await self._commit(lambda connection: turn_rows.end_rollout(connection, rollout_id, content, now))

    async def _commit(self, work: Callable[[Connection], Result]) -> Result:
        """Runs ``work`` in a transaction that the work of other threads may share."""
        return await self._gateway.call_store(self._gateway.buffer.store.commit, work)
