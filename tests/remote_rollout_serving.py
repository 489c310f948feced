"""Applications on real sockets for the tests of the remote rollout protocol, and small pieces that they share."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from slime_plugins.rollout_buffer.engine.base import Engine
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.remote_rollout.settings import TokenizerSettings, TrainerSettings
from slime_plugins.rollout_buffer.remote_rollout.tokenizer_catalog import TokenizerCatalog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide, one_engine
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trajectories import TrajectorySink
from tests import demo_tokens

QUESTION = [
    {"role": "system", "content": "You are a helpful calculator assistant."},
    {"role": "user", "content": "Calculate 15 * 23"},
]
CALL = 'I\'ll use the calculator tool\n<tool_call>\n{"name": "multiply", "arguments": {"a": 15, "b": 23}}\n</tool_call>'
ANSWER = "The result is 345"


def demo_tokenizer() -> Any:
    return demo_tokens.tokenizer


def served(app: web.Application) -> AbstractAsyncContextManager[str]:
    """Serves an application on a free port; yields its URL."""
    return serving(app, shutdown_timeout_s=0.5)


async def call(method: str, url: str, body: Any = None, **options: Any) -> tuple[int, Any]:
    """One HTTP call: status, and the JSON or text that came."""
    async with aiohttp.ClientSession() as http, http.request(method, url, json=body, **options) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text


def trainer_side(
    engine: Engine,
    tokenizer: Any = None,
    settings: TrainerSettings | None = None,
    *,
    sink: TrajectorySink | None = None,
    **options: Any,
) -> TrainerSide:
    """A trainer side whose default tokenizer is ``tokenizer``, or the demo's."""
    known = TokenizerSettings(default_name="demo" if tokenizer is None else "given", folders={"given": Path("given")})
    catalog = TokenizerCatalog(known) if tokenizer is None else TokenizerCatalog(known, load=lambda _, **__: tokenizer)
    return TrainerSide(one_engine(engine, catalog), settings, sink=sink, **options)


def rollout_body(server_url: str, rollout_id: str = "demo-1234", **changes: Any) -> dict[str, Any]:
    """A request as the guide's trainer sends it."""
    body = {
        "rollout_id": rollout_id,
        "server_url": server_url,
        "messages": QUESTION,
        "sampling_params": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 128, "logprobs": True},
        "tokenizer_name": "demo",
        "tokenizer_revision": "main",
        "max_turns": 10,
        "max_tokens_total": 8192,
        "callback_api_key": "a-secret-of-the-trainer",
    }
    return {**body, **changes}
