"""Bodies of requests: received piece by piece, in time, and no more of them at once than there is memory for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from werkzeug.exceptions import RequestEntityTooLarge

from slime_plugins.rollout_buffer.errors import UnavailableError, UnreadableBodyError

Receive = Callable[[], Awaitable[Any]]

SMALL_BODY = 64 * 1024
"""What anybody may send; a larger body needs the token in its head."""
LARGE_BODY = 8 * 1024 * 1024
"""Not put together on the event loop."""
BODY_LIMIT_S = 15.0
"""How far a body may be behind ``SLOWEST_BYTES_PER_S``."""
SLOWEST_BYTES_PER_S = 100_000
FREE_BYTES = 1024 * 1024
"""What each request may hold; only what is beyond comes out of the budget."""


class ClientGoneError(Exception):
    """There is nobody left to answer."""


class BodyBudget:
    """Bytes that the large bodies of one process may hold together."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, size: int) -> None:
        """Counts bytes that are held from now on.

        Raises:
            UnavailableError: there are not so many left.
        """
        if size > self._left:
            raise UnavailableError("too many large bodies are arriving at once: send it again later")
        self._left -= size

    def give_back(self, size: int) -> None:
        """Counts bytes that are held no more."""
        self._left += size


class HeldBody:
    """What one request holds of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._taken = 0

    def grow_to(self, size: int) -> None:
        """Counts a body's bytes so far; raises ``UnavailableError`` when that is too much for the process."""
        wanted = max(0, size - FREE_BYTES) - self._taken
        if wanted > 0:
            self._budget.take(wanted)
            self._taken += wanted

    def release(self) -> None:
        """Says that the body is needed no more."""
        self._budget.give_back(self._taken)
        self._taken = 0


async def read_body(receive: Receive, most: int, held: HeldBody) -> bytes:
    """Returns a body of up to ``most`` bytes.

    Raises:
        RequestEntityTooLarge: it is larger.
        UnreadableBodyError: it comes too slowly.
        UnavailableError: there is no memory for it now.
        ClientGoneError: the client went away in the middle.
    """
    pieces: list[bytes] = []
    size, started = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(BODY_LIMIT_S) as limit:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGoneError
                pieces.append(message["body"])
                size += len(message["body"])
                if size > most:
                    raise RequestEntityTooLarge
                if not message.get("more_body", False):
                    break
                held.grow_to(size)
                limit.reschedule(started + BODY_LIMIT_S + size / SLOWEST_BYTES_PER_S)
    except TimeoutError as error:
        raise UnreadableBodyError("the body did not come whole and in time; send it again") from error
    except (UnavailableError, RequestEntityTooLarge):
        pieces.clear()
        held.release()  # at once, not when its sender has read the reply: others are refused for what it holds
        raise
    if size > LARGE_BODY:  # the copy lets go of the interpreter
        return await asyncio.get_running_loop().run_in_executor(None, b"".join, pieces)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def drain(receive: Receive, limit_s: float) -> bool:
    """Receives the rest of a body and drops it; returns whether that was all of it."""
    until = time.monotonic() + limit_s
    try:
        async with asyncio.timeout(limit_s):
            while time.monotonic() < until:
                message = await receive()
                if message["type"] != "http.request":
                    return False
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        pass
    return False
