"""A process that serves the remote rollout protocol: the agent's side, and with an engine the trainer's side."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.http_serving import serve_until_stopped, serving
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings, RemoteRolloutSettings, TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.tools import CALCULATOR, load_provider
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide, one_engine
from slime_plugins.rollout_buffer.serve_settings import read_token, token_from_environment

logger = logging.getLogger(__name__)


def serve(settings: RemoteRolloutSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. ``on_ready`` gets the base URL once the server accepts requests.

    Raises:
        ConfigError: a setting is invalid, or the port is taken.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no warning that torch is missing: it is not needed
    serve_until_stopped(running(settings), on_ready)


@asynccontextmanager
async def running(settings: RemoteRolloutSettings) -> AsyncIterator[str]:
    """Serves on this event loop during the context; yields the base URL.

    Raises:
        ConfigError: the port is taken, or the tools cannot be loaded.
    """
    provider = load_provider(settings.tools) if settings.tools is not None else CALCULATOR
    key = read_token(settings.token_file) if settings.token_file is not None else None
    catalog = TokenizerCatalog(settings.tokenizer_settings())
    engine = make_engine(settings.engine_url) if settings.engine_url is not None else None
    buffer_url = settings.buffer_url
    sink = None if buffer_url is None else AsyncRolloutBufferClient(buffer_url, token=token_from_environment())
    agent = AgentSide(
        AgentSettings(callback_hosts=settings.callback_hosts, api_key=key), tokenizers=catalog, tools=provider
    )
    allowed = settings.allowed_hosts if key is None else None
    trainer = None
    if engine is not None:
        trainer_settings = TrainerSettings(
            api_key=key,
            open_unknown=not settings.only_opened,
            text_counts=not settings.only_exact_counts,
            idle_s=settings.idle_s,
        )
        trainer = TrainerSide(one_engine(engine, catalog), trainer_settings, sink=sink)
    try:
        app = create_app(agent=agent, trainer=trainer, allowed_hosts=allowed)
        async with serving(app, settings.host, settings.port) as url:
            logger.info("the remote rollout protocol is served on %s", url)
            yield url
    finally:
        for connection in (engine, sink):
            if connection is not None:
                await connection.close()
