"""What tests of the gateway share: a gateway in the test's process, on a real port, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from slime.utils.mask_utils import Generation, pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.gateway.app import create_app
from slime_plugins.rollout_buffer.gateway.backends import JobBackends
from slime_plugins.rollout_buffer.gateway.service import Gateway
from slime_plugins.rollout_buffer.gateway.sessions import SessionKeys
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import Instance
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from tests import demo_tokens
from tests.support import PNG

if TYPE_CHECKING:
    import anthropic
    import openai

tokenizer = demo_tokens.tokenizer
USER: Any = {"role": "user", "content": "What is 2 + 2?"}
LOOK: Any = {
    "role": "user",
    "content": [
        {"type": "text", "text": "And here?"},
        {"type": "image_url", "image_url": {"url": wire.encode_data_uri(PNG)}},
    ],
}
RETRY = {"x-stainless-retry-count": "1"}
"""The header with which OpenAI's client repeats a request."""


def start_session_job(buffer: Buffer, n: int = 2, ids: Sequence[str] = ("a",), **changes: Any) -> JobRecord:
    body = {
        "task_type": "external",
        "num_repeat_per_sample": n,
        "remote_engine_url": "http://127.0.0.1:9",
        "tokenizer_path": str(DEMO_TOKENIZER_PATH),
        "max_tokens": 256,
        **changes,
    }
    lines = [{"instance_id": name, "question": f"of {name}", "answer": "5"} for name in ids]
    instances = [Instance(instance_id=line["instance_id"], data=line) for line in lines]
    if ids:
        body["instances"] = lines
    return buffer.start_job(parse(StartPayload, body), instances).job


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: Any
    retry_after: str | None = None


def message_of(reply: Reply) -> dict[str, Any]:
    """The assistant's message in a chat reply, which must be a 200."""
    assert reply.status == 200, reply.body
    message: dict[str, Any] = reply.body["choices"][0]["message"]
    return message


def counting_engine() -> FakeEngine:
    """An engine that replies "Answer 1.", then "Answer 2.", and so on."""
    engine = FakeEngine(lambda request: f"Answer {len(engine.requests)}.", tokenizer=tokenizer)
    return engine


class HeldEngine(FakeEngine):
    """Replies as ``counting_engine`` once ``may_answer`` is set; ``given_up`` counts requests that were cancelled."""

    def __init__(self) -> None:
        super().__init__(lambda request: f"Answer {len(self.requests)}.", tokenizer=tokenizer)
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.given_up = 0

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.asked.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return await super().generate(request)


class GatewayUnderTest:
    """A running gateway, its buffer, and how tests talk to it."""

    def __init__(self, url: str, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.gateway = gateway
        self.buffer = gateway.buffer
        self.http = http
        self.clients: list[openai.AsyncOpenAI | anthropic.AsyncAnthropic] = []

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        bearer: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Sends one request: ``body`` as JSON, or unchanged where it is bytes."""
        headers = {**(headers or {}), **({"Authorization": f"Bearer {bearer}"} if bearer else {})}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.request(method, self.url + path, data=content, headers=headers) as response:
            text = await response.text()
            body = json.loads(text) if text.startswith(("{", "[")) else text
            return Reply(response.status, body, response.headers.get("Retry-After"))

    async def open(self, job: JobRecord, **options: Any) -> dict[str, Any]:
        reply = await self.call("POST", "/sessions", {"job_id": job.job_id, **options})
        assert reply.status == 200, reply.body
        opened: dict[str, Any] = reply.body
        return opened

    async def chat(
        self,
        opened: Mapping[str, Any],
        messages: Sequence[Any],
        *,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Reply:
        path = f"/sessions/{opened['api_key']}/v1/chat/completions"
        return await self.call("POST", path, {"messages": list(messages), **options}, headers=headers)

    async def close(self, opened: Mapping[str, Any], **body: Any) -> Reply:
        return await self.call("POST", f"/sessions/{opened['session_id']}/close", body)

    async def abandon(self, opened: Mapping[str, Any]) -> Reply:
        return await self.call("POST", f"/sessions/{opened['session_id']}/abandon", {})

    def client(self, opened: Mapping[str, Any], **options: Any) -> openai.AsyncOpenAI:
        import openai

        client = openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0, **options)
        self.clients.append(client)
        return client

    def anthropic_client(self, opened: Mapping[str, Any]) -> anthropic.AsyncAnthropic:
        import anthropic

        client = anthropic.AsyncAnthropic(
            base_url=opened["anthropic_base_url"], api_key=opened["api_key"], max_retries=0
        )
        self.clients.append(client)
        return client

    def item(self, job: JobRecord, uid: str) -> dict[str, Any]:
        item: dict[str, Any] = json.loads(Inspection(self.buffer.store).trajectory(uid, job.job_id).body)
        return item

    def generations(self, job: JobRecord, uid: str) -> tuple[Generation, ...]:
        """The generations of a stored trajectory, as a trainer reads them."""
        return wire.decode_generations(self.item(job, uid)["generations"])

    def trained_text(self, job: JobRecord, uid: str) -> str:
        """The text that the only training row of a stored trajectory trains."""
        (row,) = pack_training_rows(self.generations(job, uid))
        return demo_tokens.trained_text(row.token_ids, row.loss_mask)


def age_sessions(gateway: GatewayUnderTest, seconds: float) -> None:
    """Makes the last use of every session ``seconds`` earlier."""
    with gateway.buffer.store.write() as connection:
        connection.execute("UPDATE attempts SET used_at = coalesce(used_at, started_at) - ?", (seconds,))
    for session in gateway.gateway.registry._sessions.values():
        session.was_used = False


@asynccontextmanager
async def gateway_on(
    folder: Path,
    engine: Engine | Callable[[str], Engine],
    *,
    load: Callable[[str], Any] = lambda path: tokenizer,
    worker: int = 1,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayUnderTest]:
    """Serves one process of a gateway over the data directory ``folder`` while the block runs.

    ``engine`` is the engine of all jobs, or makes one from a URL. ``load`` stands for the loading of a tokenizer.
    """
    parsed = GatewaySettings.model_validate({"data_dir": folder, "port": 0, **settings})
    store = Store(folder)

    def connect(url: str, **_: Any) -> Engine:
        return engine(url) if callable(engine) else engine

    buffer = Buffer(store)
    buffer.clock = clock or buffer.clock
    gateway = Gateway(parsed, buffer, backends=JobBackends(buffer.job_settings, connect, load), worker=worker)
    app = create_app(gateway, SessionKeys.load(folder))
    served = serving(app, parsed.host, parsed.port, handler_cancellation=True)
    async with served as url, aiohttp.ClientSession() as http:
        under_test = GatewayUnderTest(url, gateway, http)
        yield under_test
        for client in under_test.clients:
            await client.close()
    store.close()
