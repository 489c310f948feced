"""HTTP server of the embedded engine: SGLang's routes over a transformers model. For laptops and tests only."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import torch
from aiohttp import web

from rollout_buffer_lab.embedded_engine.language_model import LanguageModel, WeightsError, load_language_model
from rollout_buffer_lab.embedded_engine.service import EmbeddedEngine
from rollout_buffer_lab.embedded_engine.settings import EmbeddedEngineSettings
from rollout_buffer_lab.sglang_routes.app import json_answer, read_body, sglang_app
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError
from slime_plugins.rollout_buffer.http_serving import serve_until_stopped, serving

logger = logging.getLogger(__name__)


def serve(settings: EmbeddedEngineSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Loads the model and serves it until SIGINT or SIGTERM. ``on_ready`` gets the base URL.

    Raises:
        ConfigError: the folder holds no supported model.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    serve_until_stopped(running(settings, load_language_model(settings)), on_ready)


@asynccontextmanager
async def running(settings: EmbeddedEngineSettings, model: LanguageModel | None = None) -> AsyncIterator[str]:
    """Serves on this event loop for the duration of the context; yields the base URL."""
    engine = EmbeddedEngine(model or load_language_model(settings), settings)
    app = sglang_app(engine, settings.token_file)

    async def update_weights(request: web.Request) -> web.Response:
        return await _update_weights(request, engine)

    app.router.add_post("/update_weights_from_disk", update_weights)
    async with serving(app, settings.host, settings.port, handler_cancellation=True) as url:
        logger.info("%s serves %s by the embedded engine: for laptops and tests", url, settings.model_path)
        yield url


async def _update_weights(request: web.Request, engine: EmbeddedEngine) -> web.Response:
    body = await read_body(request)
    path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(path, str) or not path:
        raise BadRequestError({"message": "model_path must be a folder with a model."})
    if body.get("abort_all_requests"):
        await engine.abort(None)
    try:
        await engine.update_weights(Path(path), None if version is None else str(version))
    except WeightsError as error:
        return json_answer({"success": False, "message": str(error)}, HTTPStatus.BAD_REQUEST)
    return json_answer({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
