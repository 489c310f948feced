"""The gateway's process, started by the supervisor or by ``rollout-buffer gateway``.

A lock allows one gateway per data directory: sessions are held in its memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

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

logger = logging.getLogger(__name__)


def serve(
    settings: GatewaySettings,
    *,
    on_ready: Callable[[str], None] | None = None,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT; calls ``on_ready`` with the base URL, and sends heartbeats on ``heartbeat``.

    Raises:
        ConfigError: another gateway has the data directory, or the port is taken.
    """
    store = Store(settings.data_dir, max_bytes=settings.max_data_bytes)
    lock = _lock(settings.data_dir)
    try:
        serve_until_stopped(_running(settings, Buffer(store), heartbeat), on_ready)
    finally:
        store.close()
        lock.close()


@asynccontextmanager
async def _running(settings: GatewaySettings, buffer: Buffer, heartbeat: Heartbeat | None) -> AsyncIterator[str]:
    beats = None if heartbeat is None else asyncio.create_task(send_heartbeats(heartbeat))
    app = create_app(Gateway(settings, buffer), SessionKeys.load(settings.data_dir))
    async with serving(app, settings.host, settings.port, handler_cancellation=True) as url:
        logger.info("the gateway serves on %s", url)
        yield url
    if beats is not None:
        beats.cancel()
    logger.info("the gateway stopped")


def _lock(data_dir: Path) -> IO[str]:
    lock = (data_dir / "gateway.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another gateway serves {data_dir}: stop it, or leave out --gateway-port") from error
    return lock


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the gateway with settings as JSON and a heartbeat descriptor; returns the exit code."""
    settings, heartbeat = sys.argv[1:] if arguments is None else arguments
    set_up_logging()
    try:
        serve(GatewaySettings.model_validate_json(settings), heartbeat=Heartbeat(int(heartbeat)))
    except ConfigError as error:
        logger.error("%s", error.message)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
