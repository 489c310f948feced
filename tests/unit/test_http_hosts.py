"""Which Host a server without a token answers for: names of this machine, and those that it was given."""

from __future__ import annotations

import aiohttp
import pytest

from slime_plugins.rollout_buffer.errors import ForbiddenError
from slime_plugins.rollout_buffer.http_auth import check_host
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings
from tests.remote_rollout_serving import call, served

OURS = [
    *("localhost", "LocalHost:8889", "a.localhost", "buffer.lan:80"),
    *("127.0.0.1", "127.0.0.1:1", "127.8.8.8", "0.0.0.0:8889", "[::]", "[::1]", "[::1]:8889"),
]
THEIRS = [
    *("evil.example", "evil.example:8889", "localhost.evil.example", "127.0.0.1.nip.io"),
    *("10.0.0.1", "[::2]", "", ":80", "[", "x" * 9999),
]


@pytest.mark.parametrize("host", OURS)
def test_names_of_this_machine_and_allowed_names_pass(host: str) -> None:
    check_host(host, ["Buffer.lan"])


@pytest.mark.parametrize("host", THEIRS)
def test_other_names_are_refused_with_a_way_out(host: str) -> None:
    with pytest.raises(ForbiddenError, match="--allowed-host"):
        check_host(host, ["buffer.lan"])


def test_a_request_without_a_host_is_served() -> None:
    check_host(None, [])


async def test_a_remote_rollout_server_answers_for_its_own_names_alone() -> None:
    async with (
        served(create_app(agent=AgentSide(), allowed_hosts=["agents.lan"])) as url,
        aiohttp.ClientSession() as session,
    ):
        for path in ("/health", "/tools", "/nope"):
            async with session.get(f"{url}{path}", headers={"Host": "evil.example"}) as reply:
                assert (reply.status, (await reply.json())["error"]["code"]) == (403, "forbidden")
        async with session.post(f"{url}/rollout", json={}, headers={"Origin": "http://evil.example"}) as reply:
            assert reply.status == 403
        for host in ("agents.lan", "127.0.0.1:80"):
            async with session.get(f"{url}/tools", headers={"Host": host}) as reply:
                assert reply.status == 200


async def test_every_route_of_the_agents_side_wants_its_key() -> None:
    async with served(create_app(agent=AgentSide(AgentSettings(api_key="key")))) as url:
        for method, path in (("POST", "/rollout"), ("GET", "/rollout/r"), ("GET", "/tools")):
            assert (await call(method, f"{url}{path}"))[0] == 401
        assert (await call("GET", f"{url}/tools", headers={"Authorization": "Bearer key"}))[0] == 200
