"""The scripted engine on HTTP: SGLang's routes with a scripted policy behind them.

It is no model: it plays the simulated phone, web pages, documents and simple sums from what the prompt shows, makes up
its log-probs, and samples nothing; ``/model_info`` and its start message say so.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rollout_buffer_lab.scripted_engine.policy import Policy, reply_to
from rollout_buffer_lab.scripted_engine.scripted_backend import ScriptedBackend
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.sglang_routes.app import sglang_app
from slime_plugins.rollout_buffer.http_serving import serve_until_stopped, serving
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer

logger = logging.getLogger(__name__)


def serve(
    settings: ScriptedEngineSettings, policy: Policy = reply_to, *, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serves until SIGINT or SIGTERM. ``on_ready`` gets the base URL once requests are answered."""
    serve_until_stopped(running(settings, policy=policy), on_ready)


@asynccontextmanager
async def running(settings: ScriptedEngineSettings, *, policy: Policy = reply_to) -> AsyncIterator[str]:
    """Serves on this event loop for the duration of the context; yields the base URL."""
    app = create_app(settings, policy=policy)
    async with serving(app, settings.host, settings.port, handler_cancellation=True) as url:
        logger.info("%s", start_message(settings, url))
        yield url


def start_message(settings: ScriptedEngineSettings, url: str) -> str:
    """Returns the message printed at the start."""
    return (
        f"{url} plays a scripted policy with skill {settings.skill:g}: it is a stand-in for SGLang, not a model. "
        f"Its jobs want tokenizer_path: {settings.tokenizer_path}"
    )


def create_app(
    settings: ScriptedEngineSettings, tokenizer: Any = None, *, policy: Policy = reply_to
) -> web.Application:
    """Returns the application; ``tokenizer`` is loaded from the settings' path if none is given."""
    tokenizer = tokenizer or load_tokenizer(settings.tokenizer_path, download=False)
    return sglang_app(ScriptedBackend(settings, tokenizer, policy), settings.token_file)
