"""SGLang's routes, requests and replies, in front of a backend that samples (``records.SglangBackend``).

They support token ids in and out, streams, aborts, pauses and weight versions, and answer with SGLang's errors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import orjson
import pybase64
from aiohttp import web

from rollout_buffer_lab.sglang_routes.images import read_images
from rollout_buffer_lab.sglang_routes.openai_chat import chat_call, chat_reply
from rollout_buffer_lab.sglang_routes.records import EngineBreakError, GenerateCall, PauseMode, Sampled, SglangBackend
from rollout_buffer_lab.sglang_routes.sampling import (
    MAX_IDS,
    BadRequestError,
    Sampling,
    is_id_list,
    read_sampling_params,
)
from slime_plugins.rollout_buffer.errors import ForbiddenError, RolloutBufferError, UnsupportedEncodingError
from slime_plugins.rollout_buffer.http_auth import check_bearer, check_page
from slime_plugins.rollout_buffer.serve_settings import read_token

logger = logging.getLogger(__name__)

SESSION_HEADER: Final = "X-SMG-Routing-Key"
MAX_BODY: Final = 1 << 30  # a prompt carries all its screenshots
MAX_CONTROL_BODY: Final = 1 << 20  # of the routes that sample nothing
MAX_ASKED_LOG_PROBS: Final = 1_000_000  # per request: larger replies would delay other requests
HEALTH_ROUTES: Final = ("/health", "/health_generate")
BACKEND: Final = web.AppKey("backend", SglangBackend)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sglang_app(backend: SglangBackend, token_file: Path | None = None) -> web.Application:
    """Returns the application, which closes ``backend`` when it is cleaned up.

    With ``token_file`` every request except health checks must send the token. Without one only requests from this
    machine are accepted, and none from web pages of other sites.

    Raises:
        ConfigError: no token can be read from the file.
    """
    token = None if token_file is None else read_token(token_file)

    @web.middleware
    async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _answer_errors(request, handler, token)

    app = web.Application(client_max_size=MAX_BODY, middlewares=[answer_errors])
    app[BACKEND] = backend
    app.router.add_post("/generate", _generate)
    app.router.add_post("/v1/chat/completions", _chat)
    for path in HEALTH_ROUTES:
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


async def read_body(request: web.Request, max_bytes: int = MAX_CONTROL_BODY) -> dict[str, Any]:
    """Returns the request's JSON object; without a body it is empty.

    Raises:
        BadRequestError: the body is not a JSON object.
    """
    raw = await request.clone(client_max_size=max_bytes).read()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequestError({"message": f"JSON decode error: {error}"}) from error
    if not isinstance(body, dict):
        raise BadRequestError({"message": "the body must be a JSON object."})
    return body


def json_answer(body: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    """Returns a response with ``body`` as JSON."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def _close(app: web.Application) -> None:
    await app[BACKEND].close()


async def _answer_errors(request: web.Request, handler: Handler, token: str | None) -> web.StreamResponse:
    """Handles a request; errors become the responses that SGLang gives."""
    try:
        _check_caller(request, token)
        return await handler(request)
    except RolloutBufferError as error:
        return json_answer({"error": {"message": error.message}}, HTTPStatus(error.http_status))
    except BadRequestError as error:
        return json_answer({"error": error.error}, HTTPStatus.BAD_REQUEST)
    except EngineBreakError as error:
        logger.error("a request that crashes SGLang: %s", error)
        return web.Response(text="Internal Server Error", status=HTTPStatus.INTERNAL_SERVER_ERROR)


def _check_caller(request: web.Request, token: str | None) -> None:
    """Refuses compressed bodies; then requests without the token or, where none is set, requests of web pages."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedEncodingError(f"the body is encoded as {encoding[:80]}: send it uncompressed")
    if token is not None:
        if request.path not in HEALTH_ROUTES:
            check_bearer(request.headers.get("Authorization"), token)
        return
    check_page(request.headers, ())
    if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        raise ForbiddenError("a page of another site sent this: only programs may")


async def _generate(request: web.Request) -> web.StreamResponse:
    body = await read_body(request, MAX_BODY)
    call = GenerateCall(
        prompt=_prompt(body),
        images=read_images(body.get("image_data")),
        sampling=_sampling(body),
        rid=str(body.get("rid") or ""),
        session=request.headers.get(SESSION_HEADER, ""),
    )
    if body.get("stream"):
        return await _streamed(request, call, body)
    sampled = await request.app[BACKEND].generate(call)
    # In a thread, because a reply with log-probs of requested tokens may hold a million numbers.
    return await asyncio.to_thread(lambda: json_answer(_generate_reply(sampled, body)))


async def _streamed(request: web.Request, call: GenerateCall, body: dict[str, Any]) -> web.StreamResponse:
    """Sends the reply so far after each token, as SGLang does; a request that the backend refuses gets an error event.

    Each event repeats the whole reply, so a client that reads slowly gets only the newest one when it is ready.
    """
    newest: list[Sampled] = []
    changed = asyncio.Event()

    def keep_newest(so_far: Sampled) -> None:
        newest[:] = [so_far]
        changed.set()

    sampling = asyncio.ensure_future(request.app[BACKEND].generate(replace(call, on_token=keep_newest)))
    sampling.add_done_callback(lambda _: changed.set())
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    try:
        await changed.wait()
        while not sampling.done():
            await response.prepare(request)
            changed.clear()
            await response.write(_event(_generate_reply(newest.pop(), body)))
            await changed.wait()
        last = _event(_generate_reply(sampling.result(), body))
    except BadRequestError as error:
        refusal = error.error if isinstance(error.error, dict) else {"message": error.error}
        last = _event({"error": {**refusal, "type": "invalid_request_error", "code": 400, "retryable": False}})
    finally:
        sampling.cancel()
    await response.prepare(request)
    await response.write(last + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _chat(request: web.Request) -> web.Response:
    body, backend = await read_body(request, MAX_BODY), request.app[BACKEND]
    session = request.headers.get(SESSION_HEADER, "")
    call = await asyncio.to_thread(chat_call, body, backend.tokenizer, session=session)
    sampled = await backend.generate(call)
    name = backend.model_info()["served_model_name"]
    return json_answer(chat_reply(sampled, body, created=int(time.time()), model=name))


async def _health(request: web.Request) -> web.Response:
    """Answers 200, or 503 while paused. SGLang also answers 503 then, but only after trying for 20 s."""
    return web.Response(status=HTTPStatus.SERVICE_UNAVAILABLE if request.app[BACKEND].paused else HTTPStatus.OK)


async def _model_info(request: web.Request) -> web.Response:
    return json_answer(request.app[BACKEND].model_info())


async def _server_info(request: web.Request) -> web.Response:
    return json_answer(request.app[BACKEND].server_info())


async def _models(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    name, limit = backend.model_info()["served_model_name"], backend.server_info()["context_length"]
    card = {"id": name, "object": "model", "created": 0, "owned_by": name, "max_model_len": limit}
    return json_answer({"object": "list", "data": [card]})


async def _loads(request: web.Request) -> web.Response:
    running, waiting = request.app[BACKEND].loads()
    load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": waiting}
    return json_answer({"loads": [load]})


async def _abort(request: web.Request) -> web.Response:
    body = await read_body(request)
    if body.get("abort_all"):
        await request.app[BACKEND].abort(None)
    elif body.get("rid"):
        await request.app[BACKEND].abort(str(body["rid"]))
    return web.Response()


async def _pause(request: web.Request) -> web.Response:
    mode = str((await read_body(request)).get("mode", PauseMode.ABORT))
    if mode not in set(PauseMode):
        raise BadRequestError({"message": f"mode must be one of {', '.join(PauseMode)}, got {mode}."})
    await request.app[BACKEND].pause(PauseMode(mode))
    return json_answer({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(request: web.Request) -> web.Response:
    await request.app[BACKEND].resume()
    return json_answer({"message": "Generation continued successfully.", "status": "ok"})


async def _update_weight_version(request: web.Request) -> web.Response:
    body, backend = await read_body(request), request.app[BACKEND]
    if "new_version" not in body:
        raise BadRequestError({"message": "new_version is missing."})
    version = str(body["new_version"])
    if body.get("abort_all_requests"):
        await backend.abort(None)
    await backend.update_weight_version(version)
    return json_answer({"success": True, "message": f"Weight version updated to {version}", "new_version": version})


async def _flush_cache(request: web.Request) -> web.Response:
    if await request.app[BACKEND].flush_cache():
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Flush cache failed.\n", status=HTTPStatus.BAD_REQUEST)


def _prompt(body: dict[str, Any]) -> str | list[int]:
    """Returns the prompt of a ``/generate`` body; if it has both ids and text, the ids, as in SGLang."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is not None and not isinstance(ids, list):
        raise BadRequestError({"message": f"input_ids must be list or null; got {type(ids).__name__}"})
    if ids == []:
        raise BadRequestError({"message": "input_ids cannot be empty."})
    if ids is None and not isinstance(text, str):
        raise BadRequestError({"message": "Either text, input_ids or input_embeds should be provided."})
    return str(text) if ids is None else ids


def _sampling(body: dict[str, Any]) -> Sampling:
    sampling = read_sampling_params(body.get("sampling_params"))
    asked = body.get("token_ids_logprob") or []
    if not is_id_list(asked):
        raise BadRequestError({"message": f"token_ids_logprob must be a list of token ids, at most {MAX_IDS} of them."})
    if len(asked) * sampling.max_new_tokens > MAX_ASKED_LOG_PROBS:
        sentence = (
            f"token_ids_logprob asks for {len(asked)} log-probs for each of {sampling.max_new_tokens} tokens: "
            f"at most {MAX_ASKED_LOG_PROBS} are computed for one request."
        )
        raise BadRequestError({"message": sentence})
    return replace(sampling, asked_ids=tuple(asked))


def _records(sampled: Sampled, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the token records that the request asks for and the engine makes."""
    records: dict[str, Any] = {}
    if body.get("return_routed_experts") and sampled.experts is not None:
        start = body.get("routed_experts_start_len") or 0
        if type(start) is not int or not 0 <= start <= len(sampled.prompt_ids):
            raise BadRequestError({"message": "routed_experts_start_len must be in [0, prompt_tokens]."})
        records["routed_experts"] = _int32(itertools.chain.from_iterable(sampled.experts[start:]))
        records["routed_experts_start_len"] = start
    custom = (body.get("sampling_params") or {}).get("custom_params") or {}
    if custom.get("return_top_p_token_ids") and sampled.kept_ids is not None:
        records["top_p_token_ids"] = _int32(itertools.chain.from_iterable(sampled.kept_ids))
        records["top_p_token_offsets"] = _int32(itertools.accumulate(map(len, sampled.kept_ids), initial=0))
    return records


def _int32(numbers: Iterable[int]) -> str:
    return pybase64.b64encode(array("i", numbers).tobytes()).decode("ascii")


def _generate_reply(sampled: Sampled, body: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": sampled.rid,
        "finish_reason": sampled.finish_reason or None,
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
    if body.get("return_logprob") and sampled.asked_log_probs is not None:
        asked = body["token_ids_logprob"]
        meta["output_token_ids_logprobs"] = [
            [[log_prob, token_id, None] for log_prob, token_id in zip(log_probs, asked, strict=True)]
            for log_probs in sampled.asked_log_probs
        ]
    meta |= _records(sampled, body)
    reply: dict[str, Any] = {"text": sampled.text, "output_ids": sampled.output_ids, "meta_info": meta}
    if body.get("return_prompt_token_ids"):
        reply["prompt_token_ids"] = sampled.prompt_ids
    return reply
