"""Applications on real sockets: a port that is taken is a sentence, and an address to listen on is one to call."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.http_serving import serving


def app() -> web.Application:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text="here")

    application = web.Application()
    application.router.add_get("/", answer)
    return application


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
async def test_the_yielded_url_answers(host: str) -> None:
    async with serving(app(), host) as url, aiohttp.ClientSession() as http, http.get(url) as response:
        assert await response.text() == "here"
        assert url.startswith("http://[::1]:" if ":" in host else "http://127.0.0.1:")


async def test_a_port_that_is_taken_is_a_configuration_error_with_its_address() -> None:
    async with serving(app()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"cannot serve on 127\.0\.0\.1:{port}: .*in use"):
            async with serving(app(), port=port):
                pass
