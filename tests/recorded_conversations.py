"""Conversations of real clients with the gateway, as ``tests.record_gateway_conversations`` recorded them.

Each is a file of requests, what the engine sampled, and the answers, byte for byte. A replay sends the requests to a
new gateway whose names and time are fixed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from slime.utils.mask_utils import Generation
from slime_plugins.rollout_buffer.gateway import service
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import GatewayUnderTest, gateway_on, start_session_job, tokenizer

FOLDER = Path(__file__).parent / "data" / "gateway_conversations"
RECORDED_AT = 1_700_000_000.0
HISTORIES = ("messages", "input")
"""Fields whose first items mostly repeat those of the request before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A conversation. ``requests`` have path, headers and body; ``sampled`` the ids of each turn in order."""

    client: str
    matching: str
    rows: int
    sampled: Sequence[Sequence[int]]
    requests: Sequence[Mapping[str, Any]]
    answers: Sequence[str]

    def write(self, path: Path) -> None:
        """Writes the conversation; of each body, only what differs from the body before."""
        before: Mapping[str, Any] = {}
        exchanges = []
        for request, answer in zip(self.requests, self.answers, strict=True):
            exchanges.append({**request, "body": _changes(before, request["body"]), "answer": answer.split("\n\n")})
            before = request["body"]
        about = {"client": self.client, "matching": self.matching, "rows": self.rows}
        sampled = [" ".join(map(str, ids)) for ids in self.sampled]
        path.write_text(json.dumps({**about, "sampled": sampled, "exchanges": exchanges}, indent=0) + "\n")

    @classmethod
    def read(cls, path: Path) -> Recorded:
        fields = json.loads(path.read_text())
        exchanges = fields.pop("exchanges")
        before: dict[str, Any] = {}
        requests = []
        for exchange in exchanges:
            before = _with_changes(before, exchange["body"])
            requests.append({"path": exchange["path"], "headers": exchange["headers"], "body": before})
        sampled = [[*map(int, ids.split())] for ids in fields.pop("sampled")]
        answers = ["\n\n".join(exchange["answer"]) for exchange in exchanges]
        return cls(**fields, sampled=sampled, requests=requests, answers=answers)


def _changes(before: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {"same": [key for key in body if key in before and before[key] == body[key]]}
    changes |= {key: value for key, value in body.items() if key not in changes["same"]}
    for key in HISTORIES:
        if isinstance(changes.get(key), list) and isinstance(before.get(key), list):
            pairs = zip(before[key], body[key], strict=False)
            kept_count = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            changes[key] = {"kept": kept_count, "more": body[key][kept_count:]}
    return changes


def _with_changes(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    body = {key: before[key] for key in changes["same"]} | {k: v for k, v in changes.items() if k != "same"}
    for key in HISTORIES:
        if isinstance(body.get(key), dict):
            body[key] = [*before[key][: body[key]["kept"]], *body[key]["more"]]
    return body


@asynccontextmanager
async def fixed_gateway(
    folder: Path, sampled: Sequence[Any], matching: str, **settings: Any
) -> AsyncIterator[tuple[GatewayUnderTest, dict[str, Any], FakeEngine]]:
    """A gateway whose engine samples ``sampled``, whose replies have fixed names and times; and an open session."""
    names = map("{:024x}".format, itertools.count(1))
    engine = FakeEngine(list(sampled), tokenizer=tokenizer)
    with mock.patch.object(service, "reply_name", side_effect=names):
        async with gateway_on(folder, engine, clock=lambda: RECORDED_AT, **settings) as gateway:
            job = start_session_job(gateway.buffer, n=1, message_matching=matching)
            yield gateway, await gateway.open(job), engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The answers to a replay, and what is stored of it."""

    answers: Sequence[str]
    rows: int
    generations: Sequence[Generation]
    messages: Sequence[Mapping[str, Any]]
    emission_order: Sequence[int]


async def replayed(recorded: Recorded, folder: Path, *, streamed: bool | None = None) -> Replayed:
    """Sends the requests of a conversation to a new gateway; ``streamed`` replaces the ``stream`` of every request."""
    async with fixed_gateway(folder, recorded.sampled, recorded.matching) as (gateway, opened, _):
        answers = []
        for request in recorded.requests:
            body = request["body"] if streamed is None else {**request["body"], "stream": streamed}
            url = gateway.url + request["path"].replace("KEY", opened["api_key"])
            async with gateway.http.post(url, json=body, headers=request["headers"]) as response:
                answers.append(await response.text())
                assert response.status == 200, answers[-1]
        (job,) = gateway.buffer.unfinished_jobs()
        closed = await gateway.close(opened, reward=1.0)
        item = gateway.item(job, opened["session_id"])
        return Replayed(
            answers=answers,
            rows=closed.body["branches"],
            generations=gateway.generations(job, opened["session_id"]),
            messages=item["messages"],
            emission_order=item["extra_info"]["gateway"]["emission_order"],
        )
