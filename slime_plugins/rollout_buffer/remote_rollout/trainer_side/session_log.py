"""Where the trainer's side keeps its sessions for other processes, and for itself after a restart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

LIMIT_REACHED: Final = "{} sessions are open, which is the limit: try again later"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSession:
    """A session as it was kept: how it was opened and, unless it is open, how it ended; and the rows of its turns.

    It expires in ``expires_in_s`` seconds.
    """

    opening: Mapping[str, Any]
    ending: Mapping[str, Any] | None
    expires_in_s: float
    turns: Sequence[Mapping[str, Any]]


class SessionLog(Protocol):
    """Keeps sessions. What it has answered is durable."""

    async def open(self, rollout_id: str, opening: Mapping[str, Any], expires_in_s: float, *, max_open: int) -> bool:
        """Keeps a new session; returns False if there is one of this id.

        Raises:
            UnavailableError: so many sessions are open already, in all processes.
        """

    async def find(self, rollout_id: str, *, after: int) -> StoredSession | None:
        """Returns a session with its turns after a number; None if it is unknown."""

    async def names(self) -> Sequence[str]:
        """Returns the ids of all sessions."""

    async def add_turn(self, rollout_id: str, row: Mapping[str, Any], expires_in_s: float) -> bool:
        """Adds a turn; returns False if the session has one of its number, or has ended."""

    async def end(self, rollout_id: str, ending: Mapping[str, Any]) -> None:
        """Keeps how a session ended."""
