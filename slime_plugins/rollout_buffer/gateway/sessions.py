"""A live session: its slot, its recording, its screenshots, its clock; and the keys that open it.

A key is the session's id and its HMAC with a secret of the data directory: keys need not be stored, and one from before
a restart still verifies.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.errors import GoneError, PayloadTooLargeError, UnauthorizedError
from slime_plugins.rollout_buffer.gateway.recording import Recording
from slime_plugins.rollout_buffer.gateway.slot_claims import SlotClaim
from slime_plugins.rollout_buffer.types import Image, Message

KEY_PREFIX = "sk-rollout-"
MAC_CHARACTERS = 32

Result = TypeVar("Result")


class SessionKeys:
    """Makes and checks the keys of sessions."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def load(cls, data_dir: Path) -> SessionKeys:
        """Reads the secret of a data directory, and makes one on first use."""
        path = data_dir / "gateway_secret"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        except FileExistsError:
            pass
        return cls(path.read_bytes())

    def key_of(self, session_id: str) -> str:
        """Returns the key of a session."""
        return f"{KEY_PREFIX}{session_id}-{self._mac(session_id)}"

    def verify(self, key: str) -> str:
        """Returns the id of the session that a key opens.

        Raises:
            UnauthorizedError: the key is invalid.
        """
        session_id, _, mac = key.removeprefix(KEY_PREFIX).rpartition("-")
        if not key.startswith(KEY_PREFIX) or not hmac.compare_digest(mac.encode(), self._mac(session_id).encode()):
            raise UnauthorizedError(
                "send the api_key that POST /sessions gave as Authorization: Bearer KEY, or use the base_url it gave"
            )
        return session_id

    def _mac(self, session_id: str) -> str:
        content = session_id.encode("utf-8", "replace")
        return hmac.new(self._secret, content, hashlib.sha256).hexdigest()[:MAC_CHARACTERS]


@dataclass(slots=True, eq=False)
class Session:
    """A live session. Only the event loop may change it."""

    claim: SlotClaim
    idle_timeout_s: float
    recording: Recording = field(default_factory=Recording)
    images: dict[str, Image] = field(default_factory=dict)
    image_bytes: int = 0
    messages: Sequence[Message] = ()
    """Of the latest turn, with its reply."""
    tools: Sequence[dict[str, Any]] = ()
    last_finish_reason: str = "stop"
    opened_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    generate_s: float = 0.0
    ended: str | None = None
    """Why it takes no more requests; None while it does."""
    engine_failure: str | None = None
    """Why the engine did not answer its last turn; None when it did, or no turn was asked for."""
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The session's id: that of its attempt and of its trajectory."""
        return self.claim.uid

    def check_open(self) -> None:
        """Raises ``GoneError`` when it takes no more requests."""
        if self.ended is not None:
            raise GoneError(f"session {self.name} {self.ended}")

    def add_image(self, image: Image, max_bytes: int) -> None:
        """Keeps a screenshot; equal ones once.

        Raises:
            PayloadTooLargeError: the session's screenshots are more than it may hold.
        """
        if image.sha256 in self.images:
            return
        if self.image_bytes + len(image.data) > max_bytes:
            raise PayloadTooLargeError(f"the images of session {self.name} are more than {max_bytes} bytes")
        self.images[image.sha256] = image
        self.image_bytes += len(image.data)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a part of a turn; cancelled when the session ends.

        Raises:
            GoneError: the session ended in the meantime.
        """
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        try:
            result = await task
        except asyncio.CancelledError:
            task.cancel()
            self.check_open()  # cancelled by the session's end, or else by the client's going away
            raise
        finally:
            self.under_way.discard(task)
            self.used_at = time.monotonic()
        self.check_open()
        return result

    def end(self, why: str) -> None:
        """Takes no more requests, and ends those under way."""
        self.ended = why
        for task in tuple(self.under_way):
            task.cancel()

    def is_expired(self, now: float, max_lifetime_s: float) -> bool:
        """Returns True if it was idle or open for too long."""
        idle = not self.under_way and now - self.used_at > self.idle_timeout_s
        return idle or now - self.opened_at > max_lifetime_s
