"""Open sessions, with their slot, turns, screenshots and expiry; and the keys that authenticate them.

A key is the session's id with an HMAC by a secret of the data directory: keys are not stored, and stay valid after a
restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from slime_plugins.rollout_buffer.errors import GoneError, PayloadTooLargeError, UnauthorizedError
from slime_plugins.rollout_buffer.gateway.slot_claims import SlotClaim
from slime_plugins.rollout_buffer.recording.turn_encoding import SessionTurns, View
from slime_plugins.rollout_buffer.recording.turns import Recording
from slime_plugins.rollout_buffer.storage.data_dir import open_lock_file
from slime_plugins.rollout_buffer.types import Image, StopReason

KEY_PREFIX = "sk-rollout-"
MAC_CHARACTERS = 32
"""Hexadecimal digits of the HMAC that a key holds."""

Result = TypeVar("Result")


class SessionKeys:
    """Creates and verifies session keys."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def load(cls, data_dir: Path) -> SessionKeys:
        """Reads the secret of a data directory; creates it on first use."""
        with os.fdopen(open_lock_file(data_dir / "gateway_secret"), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed: processes that start at once share one secret
            secret = file.read()
            if not secret:
                secret = secrets.token_hex(32).encode()
                file.write(secret)
        return cls(secret)

    def key_of(self, session_id: str) -> str:
        return f"{KEY_PREFIX}{session_id}-{self._mac(session_id)}"

    def verify(self, key: str) -> str:
        """Returns the session id of a key.

        Raises:
            UnauthorizedError: the key is invalid.
        """
        session_id, _, mac = key.removeprefix(KEY_PREFIX).rpartition("-")
        if not key.startswith(KEY_PREFIX) or not hmac.compare_digest(mac.encode(), self._mac(session_id).encode()):
            raise UnauthorizedError(
                "send the api_key that POST /sessions gave as bearer token or x-api-key, or use its base_url"
            )
        return session_id

    def _mac(self, session_id: str) -> str:
        content = session_id.encode("utf-8", "replace")
        return hmac.new(self._secret, content, hashlib.sha256).hexdigest()[:MAC_CHARACTERS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a request got no turn: the failure of the engine, or the limit that the session has reached.

    ``engine_failure`` is void once a turn with a number above ``after`` is stored. ``away``: the engine answered no
    request of any session.
    """

    after: int
    engine_failure: str | None = None
    away: bool = False
    limit: StopReason | None = None

    def encode(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Refusal:
        fields = orjson.loads(text)
        return cls(**{**fields, "limit": fields["limit"] and StopReason(fields["limit"])})


@dataclass(slots=True, eq=False)
class Session:
    """An open session as this process knows it; used on the event loop only."""

    claim: SlotClaim
    turns: SessionTurns | None = None
    """None until the turns are read from the store."""
    images: dict[str, Image] = field(default_factory=dict)
    image_bytes: int = 0
    stored_images: set[str] = field(default_factory=set)
    """Hashes of the images that are stored."""
    was_used: bool = False
    """True if the session was used since ``touched_at``."""
    touched_at: float = 0.0
    """When this process last stored that the session is in use."""
    ended: str | None = None
    """Why the session accepts no more requests; None while it is open."""
    refusal: Refusal | None = None
    """Why the latest request got no turn. If it got its turn: None, or a refusal without ``engine_failure``, with a
    ``limit`` that was reached before."""
    closing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the session is being closed or abandoned."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a turn is stored, or the stored turns are read."""
    under_way: set[asyncio.Task[Any]] = field(default_factory=set)
    """Parts of turns, cancelled when the session ends."""
    answering: dict[bytes, asyncio.Future[None]] = field(default_factory=dict)
    """By request digest, the turns that this process samples now."""
    uid: str = field(init=False)
    """The session's id, which is also the id of its attempt and trajectory."""

    def __post_init__(self) -> None:
        self.uid = self.claim.uid

    @property
    def recording(self) -> Recording:
        """The session's turns; they must have been read from the store."""
        assert self.turns is not None
        return self.turns.recording

    @property
    def is_in_use(self) -> bool:
        """True while a turn is sampled or the session is being closed, and after a turn until its use is stored."""
        return self.was_used or bool(self.under_way) or self.closing.locked()

    @property
    def engine_failure(self) -> str | None:
        """Why the engine failed at the latest turn; None if it did not."""
        refusal = self.refusal
        return None if refusal is None or refusal.after != self.recording.last_number else refusal.engine_failure

    @property
    def view(self) -> View:
        """What the client of the latest turn sees; empty if nothing was read yet."""
        return View() if self.turns is None else self.turns.view

    def check_open(self) -> None:
        """Checks that the session has not ended.

        Raises:
            GoneError: the session has ended.
        """
        if self.ended is not None:
            raise GoneError(f"session {self.uid} {self.ended}")

    def add_image(self, image: Image, max_bytes: int) -> None:
        """Adds a screenshot, unless the session has it already.

        Raises:
            PayloadTooLargeError: the session's limit of image bytes is reached.
        """
        if image.sha256 in self.images:
            return
        if self.image_bytes + len(image.data) > max_bytes:
            raise PayloadTooLargeError(f"the images of session {self.uid} are more than {max_bytes} bytes")
        self.images[image.sha256] = image
        self.image_bytes += len(image.data)

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs a part of a turn, cancelled when the session ends.

        Raises:
            GoneError: the session ended meanwhile.
        """
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        try:
            result = await task
        except asyncio.CancelledError:
            task.cancel()
            self.check_open()  # cancelled by the session's end, or else by a disconnection
            raise
        finally:
            self.under_way.discard(task)
            self.was_used = True
        self.check_open()
        return result

    @contextlib.contextmanager
    def mark_answering(self, request: bytes) -> Iterator[None]:
        """Marks the request with this digest as being sampled, for the time of the context."""
        sampled = self.answering[request] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            sampled.set_result(None)
            if self.answering.get(request) is sampled:
                del self.answering[request]

    def end(self, why: str) -> None:
        """Ends the session and cancels its running requests."""
        self.ended = why
        for task in tuple(self.under_way):
            task.cancel()
