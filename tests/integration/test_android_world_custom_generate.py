"""Both rollout modes as slime's custom generate functions: simulated phones, the scripted engine, slime's arguments."""

from __future__ import annotations

import asyncio
import inspect
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from examples.android_world import rollout, rollout_history
from examples.android_world.env_android_world import build_env
from rollout_buffer_lab.mock_trainer import trainer_args
from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from slime.rollout.agent_rollout import post_process_rewards
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.generator.android_world.custom_generate import close_resources
from tests.android_world_expert import expert_replies
from tests.demo_tokens import tokenizer, trained_text
from tests.episode_requests import use_local_phones

TASKS = ("SystemWifiTurnOn", "SimpleSmsSend")
MODES = {"incremental": rollout.generate, "history": rollout_history.generate}
BOTH_MODES = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def _local_phones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_local_phones(tmp_path, monkeypatch)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[str]:
    """A scripted engine that makes no mistakes; what this loop keeps of devices is closed afterwards."""
    async with running(ScriptedEngineSettings(port=0, skill=1.0)) as url:
        yield url
        await close_resources()


def args_for(url: str, **changes: Any) -> Namespace:
    host, _, port = url.removeprefix("http://").rpartition(":")
    own = {"sglang_router_ip": host, "sglang_router_port": int(port), "hf_checkpoint": str(DEMO_TOKENIZER_PATH)}
    return trainer_args(**own, **changes)


def slimes_sample(task: str = TASKS[0], index: int = 0, group: int = 0) -> Sample:
    """A member of a group as slime's data source makes it."""
    metadata = {"task_name": task, "params_idx": 1, "instance_id": f"{task}-1"}
    return Sample(index=index, group_index=group, prompt="", metadata=metadata, session_id=f"session-{index}")


def slimes_sampling(**changes: Any) -> dict[str, Any]:
    """Sampling parameters as slime's own rollout passes them."""
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1024, "stop": None}
    return {**params, "skip_special_tokens": False, "no_stop_trim": True, "stop_token_ids": None, **changes}


def rows(generated: Sample | list[Sample]) -> list[Sample]:
    return generated if isinstance(generated, list) else [generated]


def trained(sample: Sample) -> str:
    return trained_text(sample.tokens[-sample.response_length :], sample.loss_mask)


@BOTH_MODES
async def test_an_episode_becomes_samples_as_slime_wants_them(mode: str, engine: str) -> None:
    asked = slimes_sample(index=7, group=3)
    sampling = slimes_sampling()
    generated = await MODES[mode](args_for(engine), asked, sampling)
    assert sampling == slimes_sampling()
    assert isinstance(generated, list) == (mode == "history")
    assert len(rows(generated)) == (4 if mode == "history" else 1)
    for number, sample in enumerate(rows(generated)):
        assert (sample.index, sample.group_index, sample.rollout_id, sample.session_id) == (7, 3, 7, "session-7")
        assert sample.status is Sample.Status.COMPLETED
        assert sample.reward == pytest.approx(0.7, abs=0.05)
        assert len(sample.loss_mask or []) == len(sample.rollout_log_probs or []) == sample.response_length
        assert (sample.metadata["task_name"], sample.metadata["rollout_mode"]) == (TASKS[0], mode)
        assert (sample.metadata["row"], sample.metadata["dummy_reason"]) == (number, None)
        assert sample.non_generation_time > 0
        placeholders = sample.tokens.count(tokenizer.convert_tokens_to_ids("<|image_pad|>"))
        pictures = (sample.multimodal_inputs or {})["images"]
        assert len(pictures) == placeholders == (1 if mode == "history" else 4)
        assert pictures[0].size == (540, 1200)


async def test_both_modes_train_the_same_words_for_the_same_reward(engine: str) -> None:
    args = args_for(engine)
    incremental = rows(await rollout.generate(args, slimes_sample(TASKS[1]), slimes_sampling()))
    history = rows(await rollout_history.generate(args, slimes_sample(TASKS[1]), slimes_sampling()))
    assert "".join(map(trained, history)) == trained(incremental[0])
    assert {sample.reward for sample in history} == {incremental[0].reward}


async def test_an_evaluation_is_one_sample_per_episode(engine: str) -> None:
    assert "evaluation" in inspect.signature(rollout_history.generate).parameters
    generated = await rollout_history.generate(args_for(engine), slimes_sample(), slimes_sampling(), evaluation=True)
    assert isinstance(generated, Sample)
    assert generated.metadata["success"] is True


@BOTH_MODES
async def test_groups_of_unequal_length_are_normalised_per_trajectory(mode: str, engine: str) -> None:
    args = args_for(engine)
    members = [slimes_sample(task, index, group=0) for index, task in enumerate(TASKS)]
    played = await asyncio.gather(*(MODES[mode](args, member, slimes_sampling()) for member in members))
    samples = [sample for generated in played for sample in rows(generated)]
    _, rewards = post_process_rewards(args, samples)
    by_trajectory = {sample.rollout_id: reward for sample, reward in zip(samples, rewards, strict=True)}
    assert sum(by_trajectory.values()) == pytest.approx(0.0)
    assert len(by_trajectory) == 2


@BOTH_MODES
async def test_slimes_limits_are_kept(mode: str, engine: str) -> None:
    cut = rows(await MODES[mode](args_for(engine), slimes_sample(), slimes_sampling(max_new_tokens=9)))
    assert [sample.status for sample in cut] == [Sample.Status.TRUNCATED]
    assert (sum(cut[0].loss_mask or []), cut[0].reward) == (9, 0.0)
    few = rows(await MODES[mode](args_for(engine, max_turns=2), slimes_sample(), slimes_sampling()))
    assert few[-1].metadata["turns"] == 2
    both = args_for(engine, max_context_len=1600, rollout_max_context_len=99_999)
    narrow = rows(await MODES[mode](both, slimes_sample(index=1), slimes_sampling()))
    assert narrow[0].status is Sample.Status.TRUNCATED
    assert narrow[0].metadata["stop_reason"] == "max_context"


@BOTH_MODES
async def test_what_breaks_is_never_a_reward_that_is_trained(mode: str, engine: str) -> None:
    args = args_for(engine)
    members = [slimes_sample(index=0), slimes_sample("MakeCoffee", index=1)]
    good, broken = [rows(await MODES[mode](args, member, slimes_sampling())) for member in members]
    (sample,) = broken
    assert (sample.status, sample.remove_sample, sample.reward) == (Sample.Status.ABORTED, True, 0.0)
    assert sample.metadata["error"]["code"] == "environment_setup"
    assert "MakeCoffee" in sample.metadata["error"]["message"]
    assert (sample.loss_mask, sample.rollout_log_probs, sample.rollout_id) == ([0], [0.0], 1)
    raw, rewards = post_process_rewards(args, [*good, sample])
    assert rewards == [0.0] * (len(good) + 1)
    assert raw == pytest.approx([good[0].reward] * (len(good) + 1))


# ---- the environment interface ---------------------------------------------------------------------------------------


async def test_the_environment_plays_a_task_as_an_episode_does(engine: str) -> None:
    replies = expert_replies(TASKS[0], 1)
    env = build_env(slimes_sample(), args_for(engine))
    observation, info = await env.reset()
    assert (info["device_id"], observation["step"]) != ("", 0)
    message = env.format_observation(observation)
    assert [part["type"] for part in message["content"]] == ["text", "image"]
    assert observation["task"] in message["content"][0]["text"]
    assert message["content"][1]["image"].size == (540, 1200)
    over = False
    for number, reply in enumerate(replies, start=2):
        assert not over
        observation, over, done = await env.step(reply)
        assert env.format_observation(observation)["content"][0]["text"] == f"Step {number} of 10: "
    assert over
    assert done["stop_reason"] == "terminated"
    generated = rows(await rollout.generate(args_for(engine), slimes_sample(), slimes_sampling()))
    assert (await env.compute_final_reward()) == pytest.approx(generated[0].reward, abs=0.1)
    env.close()
    env.close()
    await close_resources()
