"""Waiting for what another process, thread or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "it") -> Any:
    """Returns the condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


async def until(condition: Callable[[], Any], timeout_s: float = 40.0) -> None:
    """Waits on the event loop for the condition to be true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)
