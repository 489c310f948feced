"""Serves aiohttp applications, for the time of a context or until a signal, and reads the bodies of their requests."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from slime_plugins.rollout_buffer import errors
from slime_plugins.rollout_buffer.serve_settings import url_of

if TYPE_CHECKING:
    from aiohttp import web

KEEPALIVE_TIMEOUT_S = 75.0
BACKLOG = 4096


def listen(host: str, port: int) -> list[socket.socket]:
    """Listens on each IP address of a host; processes that inherit the sockets share the connections.

    Raises:
        ConfigError: an address cannot be listened on; the port is taken, for instance.
    """
    sockets: list[socket.socket] = []
    try:
        addresses = socket_addresses(host, port)
        for family, address in addresses:
            try:
                sockets.append(socket.create_server(address, family=family, backlog=BACKLOG))
            except OSError as error:
                # A host without IPv6 may still have a name with an IPv6 address; the other addresses suffice.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or len(addresses) == 1:
                    raise
    except OSError as error:
        for opened in sockets:
            opened.close()
        reason, _, _ = (error.strerror or str(error)).partition(" (while")  # Python adds the address a second time
        advice = "give another port or host (--port, --host, or the option that gave this one)"
        raise errors.ConfigError(f"cannot serve on {host}:{port}: {reason}; {advice}") from error
    return sockets


def socket_addresses(host: str, port: int) -> list[tuple[int, Any]]:
    """Returns the (family, address) of each socket that is needed to listen on a host.

    Raises:
        OSError: the host has no address.
    """
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))


def _is_no_malformed_request(record: logging.LogRecord) -> bool:
    """Filters the log of aiohttp, which would have a traceback for each request that is no HTTP."""
    from aiohttp.http import HttpProcessingError

    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


@asynccontextmanager
async def serving(
    app: web.Application,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    sockets: Sequence[socket.socket] = (),
    handler_cancellation: bool = False,
    shutdown_timeout_s: float = 2.0,
) -> AsyncIterator[str]:
    """Serves on the running event loop for the time of the context; yields the base URL. Port 0 takes a free one.

    ``sockets`` listen already. ``handler_cancellation`` cancels a handler whose client disconnects. At the end,
    handlers have ``shutdown_timeout_s`` to finish.

    Raises:
        ConfigError: the address cannot be served on; the port is taken, for instance.
    """
    from aiohttp import web  # imported late: the supervisor only listens

    logging.getLogger("aiohttp.server").addFilter(_is_no_malformed_request)
    runner = web.AppRunner(
        app,
        handler_cancellation=handler_cancellation,
        access_log=None,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        auto_decompress=False,  # a small body could become a huge one, and broken ones are logged with a traceback
    )
    await runner.setup()
    try:
        for listening in sockets or listen(host, port):
            await web.SockSite(runner, listening, shutdown_timeout=shutdown_timeout_s, backlog=BACKLOG).start()
        yield url_of(host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def read_body(request: web.Request, timeout_s: float = 60.0) -> bytes:
    """Returns the body of a request.

    Raises:
        RequestError: it is compressed or too large, its connection broke, or it did not arrive within ``timeout_s``.
    """
    from aiohttp import ClientPayloadError, http, web

    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise errors.UnsupportedEncodingError(f"the body is encoded as {encoding[:80]}: send it uncompressed")
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise errors.UnreadableBodyError(f"the body did not arrive within {timeout_s:g} s: send it again") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise errors.PayloadTooLargeError(f"the body is larger than {request.client_max_size} bytes") from error
    except (ClientPayloadError, http.HttpProcessingError) as error:
        raise errors.UnreadableBodyError(f"the body is incomplete or not valid HTTP: {error}; send it again") from error


def serve_until_stopped(
    service: AbstractAsyncContextManager[str], on_ready: Callable[[str], None] | None = None
) -> None:
    """Enters ``service``, which yields a base URL, and leaves it at SIGINT or SIGTERM.

    ``on_ready`` gets the base URL once requests are answered. The event loop is uvloop's where it is installed.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_stopped(service, on_ready))


async def _until_stopped(service: AbstractAsyncContextManager[str], on_ready: Callable[[str], None] | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, ValueError, RuntimeError):  # outside the main thread the caller ends it
            loop.add_signal_handler(number, stopped.set)
    async with service as url:
        if on_ready is not None:
            on_ready(url)
        await stopped.wait()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
