"""Applications on real sockets: a port that is taken is a sentence, and an address to listen on is one to call."""

from __future__ import annotations

from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request

from slime_plugins.rollout_buffer.errors import ConfigError, UnreadableBodyError
from slime_plugins.rollout_buffer.http_serving import read_body, serving


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
        sentence = rf"cannot serve on 127\.0\.0\.1:{port}: Address already in use; give another port .*--port"
        with pytest.raises(ConfigError, match=sentence):
            async with serving(app(), port=port):
                pass


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [(None, "did not arrive within 0 s"), (aiohttp.ClientPayloadError("not enough data"), "incomplete")],
)
async def test_a_body_that_does_not_come_whole_is_the_requests_fault(broken: Exception | None, sentence: str) -> None:
    body = StreamReader(Mock(), limit=100)
    if broken is not None:
        body.set_exception(broken)
    with pytest.raises(UnreadableBodyError, match=sentence):
        await read_body(make_mocked_request("POST", "/", payload=body), timeout_s=0)
