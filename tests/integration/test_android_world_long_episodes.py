"""Fifty steps, many episodes at once, both modes: everything accounted for, and nothing grows quadratically."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest

from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.engine.base import Engine, GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.engine.sglang_protocol import generate_body
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire.written_items import WrittenItem, decode_written_item, encode_body
from tests.demo_tokens import tokenizer
from tests.episode_requests import phone_episode, use_local_phones
from tests.recorded_phone import ADDRESS, UNIQUE
from tests.support import start_external

pytestmark = pytest.mark.large

AT_ONCE = 64
SHORT, LONG = 10, 50
BOTH_MODES = pytest.mark.parametrize("mode", ["incremental", "history"])


class CountingEngine:
    """Hands requests on and counts their bytes, by session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sent_bytes: dict[str, int] = {}

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        body = generate_body(
            input_ids=request.input_ids,
            sampling_params=request.sampling_params,
            max_new_tokens=request.sampling_params.max_new_tokens,
            images=request.images,
            rid="",
        )
        self.sent_bytes[request.session_id] = self.sent_bytes.get(request.session_id, 0) + len(body)
        return await self._engine.generate(request)

    async def close(self) -> None:
        await self._engine.close()


@pytest.fixture(autouse=True)
def _recorded_phones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_phones(tmp_path, monkeypatch, num_workers=AT_ONCE, device=ADDRESS)


@asynccontextmanager
async def generator_on(engine: Engine, mode: str, turns: int) -> AsyncIterator[Generator]:
    options = {"android_world": {"rollout_mode": mode, "max_turns": turns, "max_context_len": 65_536}}
    generator = create_generator()
    context = GeneratorContext(job_id="j", engine=engine, tokenizer=tokenizer, concurrency=AT_ONCE, options=options)
    try:
        await generator.start(context)
        yield generator
    finally:
        await generator.close()


@asynccontextmanager
async def stand_in() -> AsyncIterator[Engine]:
    settings = EngineSettings(retry_timeout_s=60.0, deadline_s=250.0)
    async with running(ScriptedEngineSettings(port=0, skill=1.0)) as url:
        engine = SglangEngine(url, settings)
        try:
            yield engine
        finally:
            await engine.close()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one step of an episode costs on average, in bytes."""

    memory: float  # of the record without screenshots, each object once
    payload: float  # of the record on the way to a trainer, without screenshots
    stored: float  # in the data directory, screenshots included
    sent: float  # to the engine


async def cost_of(mode: str, steps: int, folder: Path) -> Cost:
    """Plays four episodes of that many steps, each screen a new one, and stores them."""
    async with stand_in() as behind:
        engine = CountingEngine(behind)
        async with generator_on(engine, mode, steps) as generator:
            played = await asyncio.gather(
                *(generator.play(phone_episode(UNIQUE, 0, f"episode-{number}")) for number in range(4))
            )
    total = 4 * steps
    bare = [replace(trajectory, images=()) for trajectory in played]
    return Cost(
        memory=sum(len(pickle.dumps(trajectory)) for trajectory in bare) / total,
        payload=sum(len(orjson.dumps(encode_body(trajectory))) for trajectory in bare) / total,
        stored=stored_bytes(played, folder) / total,
        sent=sum(engine.sent_bytes.values()) / total,
    )


def stored_bytes(played: Sequence[Trajectory], folder: Path) -> int:
    """How much the data directory grows by these trajectories."""
    buffer = Buffer(Store(folder))
    job = start_external(buffer, n=len(played), ids=("i",))
    buffer.store.close()
    before = size_of(folder)
    buffer = Buffer(Store(folder))
    items = [written(trajectory) for trajectory in played]
    _, results = buffer.write_items(job.job_id, items)
    assert {result.status for result in results} == {"stored"}
    buffer.store.close()
    return size_of(folder) - before


def written(trajectory: Trajectory) -> WrittenItem:
    body = {**encode_body(trajectory), "uid": trajectory.uid, "instance_id": "i", "reward": trajectory.reward}
    return decode_written_item(body, images={image.sha256: image for image in trajectory.images})


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.timeout(120)
@BOTH_MODES
async def test_memory_disk_and_wire_grow_with_the_steps_and_not_with_their_square(mode: str, tmp_path: Path) -> None:
    short = await cost_of(mode, SHORT, tmp_path / "short")
    long = await cost_of(mode, LONG, tmp_path / "long")
    for what in ("memory", "payload", "stored"):
        assert getattr(long, what) < 1.2 * getattr(short, what), what
        assert getattr(long, what) > 0.5 * getattr(short, what), what
    if mode == "history":
        assert long.sent == pytest.approx(short.sent, rel=0.2)
    else:  # SGLang wants every screenshot of a prompt in every request
        assert long.sent > 3 * short.sent
