"""The stand-in engine on HTTP: SGLang's routes, request and reply shapes, with a scripted policy behind them.

It is a stand-in and no model: it plays the simulated phone and simple sums from what the prompt shows, makes up its
log-probs, and samples nothing. It says so at ``/model_info`` and when it starts. What an SGLang client meets is the
same: token ids in and out, images, aborts, pauses, weight versions, and the errors for wrong requests.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.simulation.engine.engine_state import (
    EngineState,
    GenerateCall,
    ImageCountError,
    PauseMode,
    Sampled,
)
from slime_plugins.rollout_buffer.simulation.engine.images import read_images
from slime_plugins.rollout_buffer.simulation.engine.openai_chat import chat_call, chat_reply
from slime_plugins.rollout_buffer.simulation.engine.policy import Policy, reply_to
from slime_plugins.rollout_buffer.simulation.engine.sampling import BadRequestError, read_sampling_params
from slime_plugins.rollout_buffer.simulation.engine.settings import StandInSettings

__all__ = ["MODEL_NAME", "create_app", "running", "serve", "start_message"]

logger = logging.getLogger(__name__)

MODEL_NAME: Final = "stand-in (a scripted policy, not a model)"
SESSION_HEADER: Final = "X-SMG-Routing-Key"
LARGEST_BODY: Final = 1 << 30  # a prompt carries all its screenshots
STATE: Final = web.AppKey("state", EngineState)
TOKENIZER: Final = web.AppKey("tokenizer", object)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(settings: StandInSettings, *, on_ready: Callable[[str], None] | None = None) -> None:
    """Serves until SIGINT or SIGTERM. ``on_ready`` gets the base URL once requests are answered."""
    asyncio.run(_serve(settings, on_ready))


@asynccontextmanager
async def running(settings: StandInSettings, *, policy: Policy = reply_to) -> AsyncIterator[str]:
    """A server on this event loop for the time of the context; yields its base URL."""
    runner = web.AppRunner(create_app(settings, policy=policy), handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.port, shutdown_timeout=1.0)
    try:
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        logger.info("%s", start_message(settings, url))
        yield url
    finally:
        await runner.cleanup()


def start_message(settings: StandInSettings, url: str) -> str:
    """What a person should know who starts it."""
    return f"{url} plays a scripted policy with skill {settings.skill:g}: it is a stand-in for SGLang, not a model"


def create_app(settings: StandInSettings, tokenizer: Any = None, *, policy: Policy = reply_to) -> web.Application:
    """The application; ``tokenizer`` is loaded from the settings' path if none is given."""
    app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_answer_errors])
    app[TOKENIZER] = tokenizer or AutoTokenizer.from_pretrained(settings.tokenizer_path, local_files_only=True)
    app[STATE] = EngineState(settings, app[TOKENIZER], policy)
    app.router.add_post("/generate", _generate)
    app.router.add_post("/v1/chat/completions", _chat)
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, _health)
    for path in ("/model_info", "/get_model_info"):
        app.router.add_get(path, _model_info)
    for path in ("/server_info", "/get_server_info"):
        app.router.add_get(path, _server_info)
    app.router.add_get("/v1/models", _models)
    app.router.add_get("/v1/loads", _loads)
    app.router.add_post("/abort_request", _abort)
    app.router.add_post("/pause_generation", _pause)
    app.router.add_post("/continue_generation", _continue)
    app.router.add_post("/update_weight_version", _update_weight_version)
    for method in ("GET", "POST"):
        app.router.add_route(method, "/flush_cache", _flush_cache)
    app.on_cleanup.append(_close)
    return app


async def _serve(settings: StandInSettings, on_ready: Callable[[str], None] | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, ValueError, RuntimeError):  # not in the main thread: the caller ends it
            loop.add_signal_handler(name, stopped.set)
    async with running(settings) as url:
        if on_ready is not None:
            on_ready(url)
        await stopped.wait()


async def _close(app: web.Application) -> None:
    app[STATE].abort_all()
    app[STATE].close()


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns wrong requests into the answers that SGLang gives."""
    try:
        return await handler(request)
    except BadRequestError as error:
        return _json({"error": error.error}, HTTPStatus.BAD_REQUEST)
    except ImageCountError as error:
        logger.error("a request that SGLang breaks on: %s", error)
        return web.Response(text="Internal Server Error", status=HTTPStatus.INTERNAL_SERVER_ERROR)


async def _generate(request: web.Request) -> web.Response:
    body = await _body(request)
    call = GenerateCall(
        prompt=_prompt(body),
        images=read_images(body.get("image_data")),
        sampling=read_sampling_params(body.get("sampling_params")),
        rid=str(body.get("rid") or ""),
        session=request.headers.get(SESSION_HEADER, ""),
    )
    if body.get("stream"):
        raise BadRequestError({"message": "the stand-in engine does not stream: leave stream out."})
    sampled = await request.app[STATE].generate(call)
    return _json(_generate_reply(sampled, body))


async def _chat(request: web.Request) -> web.Response:
    body = await _body(request)
    call = chat_call(body, request.app[TOKENIZER], session=request.headers.get(SESSION_HEADER, ""))
    sampled = await request.app[STATE].generate(call)
    return _json(chat_reply(sampled, body, created=int(time.time())))


async def _health(request: web.Request) -> web.Response:
    """200; 503 while paused. SGLang gives that answer too, but only after 20 s of trying."""
    return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE if request.app[STATE].paused else HTTPStatus.OK)


async def _model_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return _json(
        {
            "model_path": MODEL_NAME,
            "served_model_name": "stand-in",
            "tokenizer_path": str(state.settings.tokenizer_path),
            "is_generation": True,
            "has_image_understanding": True,
            "weight_version": state.weight_version,
            "stand_in": True,
            "skill": state.settings.skill,
            "seed": state.settings.seed,
        }
    )


async def _server_info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return _json(
        {
            "model_path": MODEL_NAME,
            "version": "stand-in",
            "context_length": state.settings.context_length,
            "max_total_num_tokens": state.settings.context_length,
            "internal_states": [],
        }
    )


async def _models(request: web.Request) -> web.Response:
    limit = request.app[STATE].settings.context_length
    card = {"id": "stand-in", "object": "model", "created": 0, "owned_by": "stand-in", "max_model_len": limit}
    return _json({"object": "list", "data": [card]})


async def _loads(request: web.Request) -> web.Response:
    state = request.app[STATE]
    waiting = state.running if state.paused else 0
    load = {"dp_rank": 0, "num_running_reqs": state.running - waiting, "num_waiting_reqs": waiting}
    return _json({"loads": [load]})


async def _abort(request: web.Request) -> web.Response:
    body = await _body(request)
    if body.get("abort_all"):
        request.app[STATE].abort_all()
    elif body.get("rid"):
        request.app[STATE].abort(str(body["rid"]))
    return web.Response()


async def _pause(request: web.Request) -> web.Response:
    mode = str((await _body(request)).get("mode", PauseMode.ABORT))
    if mode not in set(PauseMode):
        raise BadRequestError({"message": f"mode must be one of {', '.join(PauseMode)}, got {mode}."})
    request.app[STATE].pause(PauseMode(mode))
    return _json({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(request: web.Request) -> web.Response:
    request.app[STATE].resume()
    return _json({"message": "Generation continued successfully.", "status": "ok"})


async def _update_weight_version(request: web.Request) -> web.Response:
    body = await _body(request)
    if "new_version" not in body:
        raise BadRequestError({"message": "new_version is missing."})
    state, version = request.app[STATE], str(body["new_version"])
    if body.get("abort_all_requests"):
        state.abort_all()
    state.update_weight_version(version)
    return _json({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


async def _flush_cache(request: web.Request) -> web.Response:
    if request.app[STATE].flush_cache():
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Flush cache failed.\n", status=HTTPStatus.BAD_REQUEST)


async def _body(request: web.Request) -> dict[str, Any]:
    """The request's JSON object; no body counts as an empty one.

    Raises:
        BadRequestError: not a JSON object.
    """
    raw = await request.read()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequestError({"message": f"JSON decode error: {error}"}) from error
    if not isinstance(body, dict):
        raise BadRequestError({"message": "the body must be a JSON object."})
    return body


def _prompt(body: dict[str, Any]) -> str | list[int]:
    """The prompt of a ``/generate`` body; ids win over text, as in SGLang."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is not None and not isinstance(ids, list):
        raise BadRequestError({"message": f"input_ids must be list or null; got {type(ids).__name__}"})
    if ids == []:
        raise BadRequestError({"message": "input_ids cannot be empty."})
    if ids is None and not isinstance(text, str):
        raise BadRequestError({"message": "Either text, input_ids or input_embeds should be provided."})
    return str(text) if ids is None else ids


def _generate_reply(sampled: Sampled, body: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": sampled.rid,
        "finish_reason": sampled.finish_reason,
        "prompt_tokens": len(sampled.prompt_ids),
        "completion_tokens": len(sampled.output_ids),
        "cached_tokens": sampled.cached_tokens,
        "weight_version": sampled.weight_version,
        "weight_versions": [
            {"version": version, "start": start, "end": end} for version, start, end in sampled.version_spans
        ],
        "num_retractions": 0,
    }
    if sampled.image_tokens:
        meta["image_tokens"] = sampled.image_tokens
    if body.get("return_logprob"):
        pairs = zip(sampled.log_probs, sampled.output_ids, strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[log_prob, token_id, None] for log_prob, token_id in pairs]
    reply: dict[str, Any] = {"text": sampled.text, "output_ids": sampled.output_ids, "meta_info": meta}
    if body.get("return_prompt_token_ids"):
        reply["prompt_token_ids"] = sampled.prompt_ids
    return reply


def _json(body: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
