"""A process that serves the remote rollout protocol: the agent's side, and with an engine the trainer's side."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.http_serving import serve_until_stopped, serving
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.settings import AgentSettings, TokenizerSettings, TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.tools import CALCULATOR, load_provider
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide, one_engine
from slime_plugins.rollout_buffer.serve_settings import read_token, why_exposed

DEFAULT_PORT = 8891

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRolloutSettings:
    """Settings of the process.

    ``tools`` is the address (``MODULE:NAME``) of a ``ToolProvider``; None is the calculator. ``engine_url`` enables the
    trainer's side; ``buffer_url`` is the buffer to which it writes trajectories, with ``buffer_token``. ``token_file``
    holds the bearer token for ``POST /rollout`` and the trainer's routes; without one, the server accepts only loopback
    host names and ``allowed_hosts``.

    Raises:
        ConfigError: the server would be reachable from other machines without a token.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    engine_url: str | None = None
    buffer_url: str | None = None
    buffer_token: str | None = None
    callback_hosts: tuple[str, ...] = AgentSettings().callback_hosts
    tokenizers: TokenizerSettings = field(default_factory=TokenizerSettings)
    open_unknown: bool = True
    text_counts: bool = True
    idle_s: float = TrainerSettings().idle_s
    tools: str | None = None

    def __post_init__(self) -> None:
        if why := why_exposed(self.host, self.token_file):
            raise ConfigError(why)
        if self.buffer_url is not None and self.engine_url is None:
            raise ConfigError("--buffer-url is for the trainer's side: give --engine-url too")
        for root in self.tokenizers.roots:
            if not root.is_dir():
                raise ConfigError(f"--tokenizer-root {root} is not a folder")


def named_folders(entries: list[str]) -> Mapping[str, Path]:
    """Returns ``NAME=FOLDER`` entries as a mapping.

    Raises:
        ConfigError: an entry has another form, or its folder does not exist.
    """
    found = {}
    for entry in entries:
        name, equals, folder = entry.partition("=")
        if not name or not equals or not Path(folder).is_dir():
            raise ConfigError(f"--tokenizer {entry}: must be NAME=FOLDER with an existing folder")
        found[name] = Path(folder)
    return found


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
    catalog = TokenizerCatalog(settings.tokenizers)
    engine = make_engine(settings.engine_url) if settings.engine_url is not None else None
    sink = _sink(settings)
    agent = AgentSide(
        AgentSettings(callback_hosts=settings.callback_hosts, api_key=key),
        tokenizers=catalog,
        tools=provider,
    )
    allowed = settings.allowed_hosts if key is None else None
    trainer = None
    if engine is not None:
        rules = TrainerSettings(
            api_key=key,
            open_unknown=settings.open_unknown,
            text_counts=settings.text_counts,
            idle_s=settings.idle_s,
        )
        trainer = TrainerSide(one_engine(engine, catalog), rules, sink=sink)
    try:
        app = create_app(agent=agent, trainer=trainer, allowed_hosts=allowed)
        async with serving(app, settings.host, settings.port) as url:
            logger.info("the remote rollout protocol is served on %s", url)
            yield url
    finally:
        for end in (engine, sink):
            if end is not None:
                await end.close()


def _sink(settings: RemoteRolloutSettings) -> AsyncRolloutBufferClient | None:
    if settings.buffer_url is None:
        return None
    return AsyncRolloutBufferClient(settings.buffer_url, token=settings.buffer_token)
