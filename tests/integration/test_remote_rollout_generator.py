"""Jobs whose episodes a rollout server plays: slots go out, trajectories with exact ids come back."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer.errors import EngineError, EnvironmentSetupError, JudgeError
from slime_plugins.rollout_buffer.generator import remote_rollout_generator
from slime_plugins.rollout_buffer.generator.base_generator import Generator, GeneratorContext
from slime_plugins.rollout_buffer.generator.remote_rollout_generator import RemoteRolloutGenerator
from slime_plugins.rollout_buffer.remote_rollout.agent import AgentSide
from slime_plugins.rollout_buffer.remote_rollout.routes import create_app
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.sessions import TrainerSession
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import EpisodeRequest, Outcome, StopReason
from tests.episode_requests import episode_of
from tests.remote_rollout_serving import ANSWER, CALL, demo_tokenizer, served


def episode(attempt: int = 1) -> EpisodeRequest:
    line = {"instance_id": "15x23", "prompt": "Calculate 15 * 23", "label": "345"}
    return episode_of("15x23", line, uid=f"job/0/15x23/0/{attempt}", max_new_tokens=64, temperature=0.8)


@asynccontextmanager
async def playing(script: list[Any], app: web.Application | None = None, **options: Any) -> AsyncIterator[Any]:
    """A started generator in front of a rollout server; ours, where none is given."""
    engine = FakeEngine(script, tokenizer=demo_tokenizer())
    async with served(app or create_app(agent=AgentSide())) as url:
        generator = RemoteRolloutGenerator()
        context = GeneratorContext(
            job_id="job",
            engine=engine,
            tokenizer=demo_tokenizer(),
            concurrency=4,
            options={"remote_rollout_url": url, **options},
        )
        try:
            await generator.start(context)
            yield generator
        finally:
            await generator.close()


async def test_a_slot_is_played_by_a_rollout_server_and_comes_back_with_exact_ids() -> None:
    assert isinstance(RemoteRolloutGenerator(), Generator)
    async with playing([CALL, ANSWER]) as generator:
        trajectory = await generator.play(episode())
    assert (trajectory.reward, trajectory.outcome, trajectory.stop_reason) == (1.0, Outcome.COMPLETED, StopReason.STOP)
    assert (trajectory.uid, trajectory.instance_id) == ("job/0/15x23/0/1", "15x23")
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    (row,) = pack_training_rows(trajectory.generations)
    assert sum(row.loss_mask) == sum(len(one.output_ids) for one in trajectory.generations)
    assert "multiply" in demo_tokenizer().decode(trajectory.generations[0].prompt_ids)  # its tools are shown
    told = trajectory.extra_info["remote_rollout"]
    assert (told["turns"], told["metrics"]["num_tool_calls"]) == (2, 1)


async def test_recordings_of_played_slots_leave_the_memory() -> None:
    async with playing([ANSWER] * 80) as generator:
        left_by_other_tests = count_recordings()
        for attempt in range(80):
            await generator.play(episode(attempt))
        assert count_recordings() - left_by_other_tests < 70


def count_recordings() -> int:
    gc.collect()
    return sum(isinstance(one, TrainerSession) for one in gc.get_objects())


async def test_an_error_of_the_rollout_server_is_no_reward() -> None:
    async with playing([EngineError("gone")] * 9) as generator:
        with pytest.raises(EnvironmentSetupError, match="ended with an error: turn 1: the trainer answered 503"):
            await generator.play(episode())


@pytest.mark.parametrize("final", [{}, {"ok": True}, {"status": None}, {"status": "COMPLETED", "metrics": 5}])
async def test_a_rollout_that_does_not_say_how_it_ended_has_no_reward(final: dict[str, Any]) -> None:
    """A proxy's JSON in place of the final response: the turns were sampled, and nobody knows what became of them."""
    app = create_app(agent=AgentSide())

    @web.middleware
    async def other_ending(request: web.Request, handler: Any) -> web.StreamResponse:
        response: web.StreamResponse = await handler(request)
        return web.json_response(final) if request.path == "/rollout" else response

    app.middlewares.append(other_ending)
    async with playing([ANSWER], app) as generator:
        with pytest.raises(JudgeError, match="final response"):
            await generator.play(episode())


@pytest.mark.parametrize("times", [1, 2])
async def test_a_rollout_server_that_is_busy_is_asked_again_and_its_silence_is_not_the_engines(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(remote_rollout_generator, "TRIES", 2)
    app = create_app(agent=AgentSide())
    refused: list[str] = []

    @web.middleware
    async def busy(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/rollout" and len(refused) < times:
            refused.append(request.path)
            return web.Response(status=503)
        response: web.StreamResponse = await handler(request)
        return response

    app.middlewares.append(busy)
    async with playing([ANSWER], app) as generator:
        if times == 1:
            assert (await generator.play(episode())).reward == 1.0
        else:
            with pytest.raises(EnvironmentSetupError, match="tried 2 times"):
                await generator.play(episode())
    assert len(refused) == times
