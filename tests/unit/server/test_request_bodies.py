"""How much of large bodies is held, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from werkzeug.exceptions import RequestEntityTooLarge

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.server.request_bodies import FREE_BYTES, BodyBudget, HeldBody, read_body

MB = 1024 * 1024


def pieces(*sizes: int) -> Any:
    """A client that sends these many bytes and then more later."""
    waiting = [{"type": "http.request", "body": b" " * size, "more_body": True} for size in sizes]

    async def receive() -> Any:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    return receive


@pytest.mark.parametrize(("most", "error"), [(100 * MB, UnavailableError), (3 * MB, RequestEntityTooLarge)])
async def test_what_a_refused_body_held_is_free_at_once(most: int, error: type[Exception]) -> None:
    """Its sender may take its time with the reply; meanwhile its place is another's."""
    budget = BodyBudget(3 * MB)
    refused, other = HeldBody(budget), HeldBody(budget)
    with pytest.raises(error):
        await read_body(pieces(2 * MB, 2 * MB, 2 * MB), most, refused)
    other.grow_to(3 * MB + FREE_BYTES)
