"""HTTP routes of both sides, for any aiohttp application.

    add_agent_routes(app, agent)      POST /rollout, GET /rollout/<id>, GET /tools
    add_trainer_routes(app, trainer)  POST /v1/chat/completions, POST and GET /rollouts, GET /rollouts/<id>,
                                      POST /rollouts/<id>/end

An application with its own ``/v1/chat/completions`` adds the trainer's routes with ``with_completions=False`` and
passes bodies with a ``rollout_id`` to ``answer_turn``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InvalidPayloadError, RolloutBufferError
from slime_plugins.rollout_buffer.http_auth import check_bearer, check_page
from slime_plugins.rollout_buffer.http_serving import read_body
from slime_plugins.rollout_buffer.json_bodies import json_object
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.trainer_calls import TURN_HEADER
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.session_views import details_of, summary_of
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide
from slime_plugins.rollout_buffer.serve_settings import MAX_TURN_BYTES
from slime_plugins.rollout_buffer.wire.request_fields import MAX_NESTING

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


def create_app(
    *, agent: AgentSide | None = None, trainer: TrainerSide | None = None, allowed_hosts: Collection[str] | None = None
) -> web.Application:
    """Returns an application with one side or both, and ``GET /health``.

    ``allowed_hosts`` are accepted Host names in addition to loopback; None accepts any, for servers with a token.
    """
    guards = [] if allowed_hosts is None else [_host_guard(allowed_hosts)]
    app = web.Application(client_max_size=MAX_TURN_BYTES, middlewares=guards)
    app.router.add_get("/health", _health)
    if agent is not None:
        add_agent_routes(app, agent)
    if trainer is not None:
        add_trainer_routes(app, trainer)
    return app


def _host_guard(allowed: Collection[str]) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_page(request.headers, allowed)
        except RolloutBufferError as error:
            return error_response(error)
        return await handler(request)

    return guard


def add_agent_routes(app: web.Application, agent: AgentSide) -> None:
    """Adds the agent's side; it is closed with the application."""

    async def rollout(request: web.Request) -> web.Response:
        check_bearer(request.headers.get("Authorization"), agent.settings.api_key)
        return _json(await agent.rollout(await _body(request)))

    async def state(request: web.Request) -> web.Response:
        check_bearer(request.headers.get("Authorization"), agent.settings.api_key)
        return _json(agent.state_of(request.match_info["rollout_id"]))

    async def tools(request: web.Request) -> web.Response:
        check_bearer(request.headers.get("Authorization"), agent.settings.api_key)
        return _json({"tools": [dict(schema) for schema in agent.tools.schemas]})

    app.router.add_post("/rollout", _answered(rollout))
    app.router.add_get("/rollout/{rollout_id:.+}", _answered(state))
    app.router.add_get("/tools", _answered(tools))
    app.on_cleanup.append(lambda _: agent.close())


def add_trainer_routes(app: web.Application, trainer: TrainerSide, *, with_completions: bool = True) -> None:
    """Adds the trainer's side; it is closed with the application."""

    async def turn(request: web.Request) -> web.Response:
        return await answer_turn(trainer, request, await _body(request))

    async def open_session(request: web.Request) -> web.Response:
        trainer.authorize(None, request.headers.get("Authorization"))
        return _json(summary_of(await trainer.open(await _body(request))))

    async def list_sessions(request: web.Request) -> web.Response:
        trainer.authorize(None, request.headers.get("Authorization"))
        summaries = []
        for rollout_id in await trainer.rollout_ids():
            with suppress(RolloutBufferError):  # the engine of its job is not known any more
                await trainer.refresh(rollout_id)
                summaries.append(summary_of(trainer.get_session(rollout_id)))
        return _json({"rollouts": summaries})

    async def show(request: web.Request) -> web.Response:
        rollout_id = request.match_info["rollout_id"]
        await trainer.refresh(rollout_id)
        trainer.authorize(rollout_id, request.headers.get("Authorization"))
        return _json(details_of(trainer.get_session(rollout_id)))

    async def end(request: web.Request) -> web.Response:
        rollout_id = request.match_info["rollout_id"]
        await trainer.refresh(rollout_id)
        trainer.authorize_end(rollout_id, request.headers.get("Authorization"))
        return _json(await trainer.end(rollout_id, await _body(request)))

    if with_completions:
        app.router.add_post("/v1/chat/completions", _answered(turn))
    app.router.add_post("/rollouts", _answered(open_session))
    app.router.add_get("/rollouts", _answered(list_sessions))
    app.router.add_post("/rollouts/{rollout_id:.+}/end", _answered(end))
    app.router.add_get("/rollouts/{rollout_id:.+}", _answered(show))
    app.on_cleanup.append(lambda _: trainer.close())


async def answer_turn(trainer: TrainerSide, request: web.Request, body: Mapping[str, Any]) -> web.Response:
    """Answers a ``/v1/chat/completions`` request whose body has a ``rollout_id``.

    Raises:
        RolloutBufferError: the request is refused; ``error_response`` makes the reply.
    """
    header = request.headers.get(TURN_HEADER)
    if header is not None and not (header.isascii() and header.isdigit() and len(header) < 10 and int(header)):
        raise InvalidPayloadError(f"the header {TURN_HEADER} must be the number of the turn, from 1")
    completion = await trainer.complete(
        body, authorization=request.headers.get("Authorization"), named_turn=None if header is None else int(header)
    )
    return _json(completion, headers={} if header is None else {TURN_HEADER: header})


def error_response(error: RolloutBufferError) -> web.Response:
    """Returns the project's error reply."""
    return _json(wire.encode_error(error.code, error.message, error.detail), status=error.http_status)


def _answered(handler: Handler) -> Handler:
    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except RolloutBufferError as error:
            return error_response(error)
        except (web.HTTPException, ConnectionError):
            raise
        except Exception:
            # A defect fails one request and is logged.
            logger.exception("%s %s failed", request.method, request.path)
            return error_response(RolloutBufferError("this server has a defect; its log has the traceback"))

    return answered


async def _body(request: web.Request) -> dict[str, Any]:
    return json_object(await read_body(request), max_nesting=MAX_NESTING)


def _json(body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json", headers=dict(headers or {})
    )


async def _health(request: web.Request) -> web.Response:
    return _json({"status": "ok"})
