"""The log of the trainer's sessions, from which other processes, or the next one after a restart, continue them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

LIMIT_REACHED: Final = "{} sessions are open, which is the limit: try again later"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSession:
    """A session in the log: how it was opened, how it ended (None while it is open), and the rows of its turns.

    It expires in ``expires_in_s`` seconds.
    """

    opening: Mapping[str, Any]
    ending: Mapping[str, Any] | None
    expires_in_s: float
    turns: Sequence[Mapping[str, Any]]


class SessionLog(Protocol):
    """Stores sessions. A change is durable once its call has returned."""

    async def open(self, rollout_id: str, opening: Mapping[str, Any], expires_in_s: float, *, max_open: int) -> bool:
        """Stores a new session; returns False if the log has a session of this id.

        Raises:
            UnavailableError: ``max_open`` sessions are open already, in all processes together.
        """

    async def find(self, rollout_id: str, *, after: int) -> StoredSession | None:
        """Returns a session with its turns after number ``after``; None if the session is unknown."""

    async def names(self) -> Sequence[str]:
        """Returns the ids of all sessions."""

    async def add_turn(self, rollout_id: str, row: Mapping[str, Any], expires_in_s: float) -> bool:
        """Adds a turn; returns False if the session has a turn of that number, or has ended."""

    async def end(self, rollout_id: str, ending: Mapping[str, Any]) -> None:
        """Stores how a session ended."""
