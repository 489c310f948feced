"""A process of the gateway: a child of ``supervisor.gateway_processes``, which gives it the sockets to serve on."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.gateway.app import create_app
from slime_plugins.rollout_buffer.gateway.service import Gateway
from slime_plugins.rollout_buffer.gateway.sessions import SessionKeys
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.http_serving import serve_until_stopped, serving
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat, send_heartbeats
from slime_plugins.rollout_buffer.observability.logs import set_up_logging
from slime_plugins.rollout_buffer.storage.store import Store

SHUTDOWN_TIMEOUT_S = 10.0
"""aiohttp waits twice as long for turns in flight; the parent kills the process after ``STOP_TIMEOUT_S``, 25 s."""
GC_THRESHOLD = 10_000
"""Threshold of the garbage collector. Python's default is less than the allocations that requests in flight hold."""

logger = logging.getLogger(__name__)


@asynccontextmanager
async def _running(gateway: Gateway, sockets: Sequence[socket.socket], heartbeat: Heartbeat) -> AsyncIterator[str]:
    settings = gateway.settings
    app = create_app(gateway, SessionKeys.load(settings.data_dir))
    async with serving(
        app, settings.host, sockets=sockets, handler_cancellation=True, shutdown_timeout_s=SHUTDOWN_TIMEOUT_S
    ) as url:
        logger.info("the gateway serves on %s", url)
        beats = asyncio.create_task(send_heartbeats(heartbeat))
        yield url
    beats.cancel()
    logger.info("the gateway stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a gateway process until SIGTERM or SIGINT; returns the exit code.

    The arguments are the settings as JSON, the number of the process, the descriptor of its heartbeat, and the
    descriptors of its listening sockets.
    """
    settings_json, worker, heartbeat, *descriptors = sys.argv[1:] if arguments is None else arguments
    set_up_logging()
    try:
        settings = GatewaySettings.model_validate_json(settings_json)
        store = Store(settings.data_dir, max_bytes=settings.max_data_bytes)
    except ConfigError as error:
        logger.error("%s", error.message)
        return 2
    gateway = Gateway(settings, Buffer(store), worker=int(worker))
    sockets = [socket.socket(fileno=int(descriptor)) for descriptor in descriptors]
    # A collection of all objects takes 0.1 s, in which no request is answered: it leaves out the objects of imports.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    try:
        serve_until_stopped(_running(gateway, sockets, Heartbeat(int(heartbeat))))
    finally:
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
