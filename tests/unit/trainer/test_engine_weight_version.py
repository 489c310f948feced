"""The weight version that engines sample with, asked of an engine, of routers of two kinds, and of nobody."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_plugins.rollout_buffer.credentials import KEY_URL_VARIABLE, KEY_VARIABLE
from slime_plugins.rollout_buffer.trainer import engine_weight_version
from slime_plugins.rollout_buffer.trainer.engine_weight_version import weight_version_of


@asynccontextmanager
async def serving(**replies: Any) -> AsyncIterator[str]:
    """A server that answers ``GET /NAME`` with what is said for NAME, and 404 for all else."""
    app = web.Application()
    for name, reply in replies.items():

        async def answer(request: web.Request, reply: Any = reply) -> web.Response:
            return web.json_response(reply)

        app.router.add_get(f"/{name}", answer)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def test_an_engine_says_its_own_version() -> None:
    async with serving(model_info={"weight_version": "17"}) as url:
        assert await weight_version_of(url) == 17


async def test_of_the_engines_behind_a_router_the_newest_counts() -> None:
    async with (
        serving(model_info={"weight_version": "3"}) as old,
        serving(model_info={"weight_version": "4"}) as new,
        serving(workers={"workers": [{"url": old}, {"url": new}]}) as router,
        serving(list_workers={"urls": [new, old]}) as older_router,
    ):
        assert await weight_version_of(router) == 4
        assert await weight_version_of(older_router) == 4


async def test_an_engine_that_is_gone_or_hangs_does_not_hide_the_versions_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_weight_version, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        gone, hangs = "http://127.0.0.1:1", f"http://127.0.0.1:{hanging.getsockname()[1]}"
        async with (
            serving(model_info={"weight_version": "4"}) as alive,
            serving(workers={"workers": [{"url": url} for url in (gone, hangs, alive)]}) as router,
        ):
            assert await weight_version_of(router) == 4


@pytest.mark.parametrize(
    "said", [{}, [], *({"weight_version": odd} for odd in (None, "main", "²", "9" * 30, 2**53 + 1))]
)
async def test_what_is_no_number_that_a_poll_may_say_is_none(said: Any) -> None:
    async with serving(model_info=said) as url:
        assert await weight_version_of(url) is None


async def test_an_engine_with_a_key_is_asked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        is_allowed = request.headers.get("Authorization") == "Bearer secret"
        return web.json_response({"weight_version": "5"}, status=200 if is_allowed else 401)

    app = web.Application()
    app.router.add_get("/model_info", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        assert await weight_version_of(url) is None
        monkeypatch.setenv(KEY_URL_VARIABLE, url)
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        assert await weight_version_of(url) == 5
