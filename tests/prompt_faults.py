"""A proxy before an engine that changes what it is sent, as engines do that run other prompts than they were given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

Change = Callable[[dict[str, Any]], None]
"""Changes the body of a ``POST /generate``, or the answer to it, in place."""


def retokenised(tokenizer: Any) -> Change:
    """Decodes the prompt and tokenises its text again, as slime's SGLang patch does with every prompt with an image."""

    def change(body: dict[str, Any]) -> None:
        text = tokenizer.decode(body["input_ids"], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        body["input_ids"] = tokenizer.encode(text, add_special_tokens=False)

    return change


def unchanged(body: dict[str, Any]) -> None:
    """Changes nothing."""


def without_ids(answer: dict[str, Any]) -> None:
    """Leaves out of an answer which ids were run."""
    answer.pop("prompt_token_ids", None)
    answer["meta_info"].pop("input_token_logprobs", None)


@asynccontextmanager
async def changing(engine_url: str, change: Change, change_answer: Change = unchanged) -> AsyncIterator[str]:
    """Yields the address of a proxy before ``engine_url`` that changes what it is sent, and what it answers."""

    async def forward(request: web.Request) -> web.Response:
        async with aiohttp.ClientSession() as session:
            body = await request.json() if request.can_read_body else None
            if request.path == "/generate" and body is not None:
                await asyncio.to_thread(change, body)
            async with session.request(
                request.method, engine_url + request.path_qs, json=body, headers=_session_of(request)
            ) as response:
                answer = await response.json() if response.status == 200 and request.path == "/generate" else None
                if answer is None:
                    return web.Response(body=await response.read(), status=response.status)
        change_answer(answer)
        return web.json_response(answer)

    application = web.Application(client_max_size=1 << 28)
    application.router.add_route("*", "/{path:.*}", forward)
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/")


def _session_of(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name == "X-SMG-Routing-Key"}
