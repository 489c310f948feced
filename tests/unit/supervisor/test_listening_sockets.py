"""Which sockets ``serve`` takes from whoever started it, and what it says of others."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.supervisor import listening_sockets as module
from slime_plugins.rollout_buffer.supervisor.child_processes import free_ports
from slime_plugins.rollout_buffer.supervisor.listening_sockets import listening_sockets

FIRST = 900
"""Beyond what other tests of this process may have left open."""
HERE = "127.0.0.1"

HandOver = Callable[..., None]


@pytest.fixture
def hand_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[HandOver]:
    """Gives this process sockets as systemd would, but from another descriptor on."""
    with ExitStack() as stack:

        def give(*sockets: socket.socket, count: str | None = None, pid: int | None = None) -> None:
            for at, one in enumerate(sockets):
                stack.enter_context(one)
                os.dup2(one.fileno(), FIRST + at)
            monkeypatch.setattr(module, "FIRST_DESCRIPTOR", FIRST)
            monkeypatch.setenv("LISTEN_FDS", str(len(sockets)) if count is None else count)
            monkeypatch.setenv("LISTEN_PID", str(pid or os.getpid()))
            monkeypatch.setenv("LISTEN_FDNAMES", "any:names")

        yield give


def listener(port: int, host: str = HERE) -> socket.socket:
    return socket.create_server((host, port))


def bound(port: int) -> socket.socket:
    one = socket.socket()
    one.bind((HERE, port))
    return one


def test_inherited_sockets_are_told_apart_by_their_addresses_and_no_child_sees_them(hand_over: HandOver) -> None:
    api, gateway = free_ports(2)
    hand_over(listener(gateway), listener(api))
    found = listening_sockets([("localhost", api), ("localhost", gateway)], timeout_s=0)
    assert [[one.getsockname()[1] for one in some] for some in found] == [[api], [gateway]]
    assert not any(one.get_inheritable() for some in found for one in some)
    assert not any(name.startswith("LISTEN_") for name in os.environ)
    for some in found:
        some[0].close()


@pytest.mark.parametrize(
    "given",
    [
        lambda api, _: [listener(api)],
        lambda api, gateway: [listener(api), listener(gateway), listener(0)],
        lambda api, gateway: [listener(api), listener(gateway, "127.0.0.2")],
        lambda api, gateway: [listener(api), bound(gateway)],
    ],
    ids=["one is missing", "one is of no port", "another address", "no listening socket"],
)
def test_sockets_that_do_not_fit_the_options_are_refused_with_both(
    hand_over: HandOver, given: Callable[[int, int], list[socket.socket]]
) -> None:
    api, gateway = free_ports(2)
    sockets = given(api, gateway)
    hand_over(*sockets)
    with pytest.raises(ConfigError, match=rf"are at .*127\.0\.0\.1:{api}.*ask for .*{gateway}.*ListenStream="):
        listening_sockets([(HERE, api), (HERE, gateway)], timeout_s=0)


@pytest.mark.parametrize("count", ["many", "2"])
def test_a_wrong_count_is_refused(hand_over: HandOver, count: str) -> None:
    (port,) = free_ports(1)
    hand_over(listener(port), count=count)
    with pytest.raises(ConfigError, match=f"LISTEN_FDS={count}"):
        listening_sockets([(HERE, port)], timeout_s=0)


def test_sockets_of_another_process_are_left_alone_with_a_warning(
    hand_over: HandOver, caplog: pytest.LogCaptureFixture
) -> None:
    given, wanted = free_ports(2)
    hand_over(listener(given), pid=1)
    ((own,),) = listening_sockets([(HERE, wanted)], timeout_s=0)
    with own:
        assert own.getsockname() == (HERE, wanted)
    assert "LISTEN_PID is 1" in caplog.text


def test_a_taken_port_is_waited_for_and_then_refused() -> None:
    api, gateway = free_ports(2)
    with listener(gateway) as taken:
        with pytest.raises(ConfigError, match=f"cannot serve on {HERE}:{gateway}: .* give another port"):
            listening_sockets([(HERE, api), (HERE, gateway)], timeout_s=0)
        releasing = threading.Timer(0.1, taken.close)
        releasing.start()
        began = time.monotonic()
        found = listening_sockets([(HERE, api), (HERE, gateway)], timeout_s=30)
        assert time.monotonic() - began < 20
        releasing.join()
    for some in found:
        some[0].close()
