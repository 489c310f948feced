"""Three checks that an installation for Android World is complete; each needs more than the one before it.

1. Imports: every module that a launch script names. Needs nothing.
2. Pool and device: lend, play, give back. On simulated phones, or on the devices of the host's own settings
   (``ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG``).
3. Episodes with a model: ``SLIME_TEST_MODEL`` names the folder of a Qwen3-VL model, ``SLIME_TEST_SGLANG_PORT`` the port
   of an SGLang server of it on this host (``SLIME_TEST_SGLANG_HOST`` another). Same devices as above.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.pool_factory import create_device_pool
from slime_plugins.rollout_buffer.devices.settings import PoolKind
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE, load_settings
from slime_plugins.rollout_buffer.generator.android_world.custom_generate import close_resources
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from tests.episode_requests import use_local_phones

pytestmark = pytest.mark.large

MODEL = os.environ.get("SLIME_TEST_MODEL", "")
PORT = os.environ.get("SLIME_TEST_SGLANG_PORT", "")
HOST = os.environ.get("SLIME_TEST_SGLANG_HOST", "127.0.0.1")
NAMED = (
    "examples.android_world.rollout:generate",
    "examples.android_world.rollout_history:generate",
    "examples.android_world.env_android_world:build_env",
    "slime.rollout.agent_rollout:generate_rollout",
    "slime.rollout.agent_rollout:post_process_rewards",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator",
    "slime_plugins.rollout_buffer.cli.app:main",
    "slime_plugins.rollout_buffer.generator.android_world_generator:create_generator",
    "slime_plugins.rollout_buffer.devices.pool_factory:create_device_pool",
    "slime_plugins.rollout_buffer.devices.device_process:main",
)
TASK = "SystemWifiTurnOff"
NEW_TOKENS = 48


@pytest.fixture(autouse=True)
def _devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own settings where it has some; else two simulated phones, with screenshots that cost little."""
    if not os.environ.get(CONFIG_VARIABLE):
        use_local_phones(tmp_path, monkeypatch, num_workers=2, screenshot_max_pixels=100_000)


# ---- 1. imports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_what_launch_scripts_name_can_be_imported(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


# ---- 2. pool and device ----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[DevicePool]:
    settings = load_settings({})
    address = "auto" if settings.device_pool is PoolKind.RAY else None
    made = create_device_pool(settings.for_devices(), job_id="verification", ray_address=address)
    await made.start()
    yield made
    await made.close()


@pytest.mark.timeout(900)
async def test_devices_are_lent_given_back_and_lent_again(pool: DevicePool) -> None:
    count = load_settings({}).num_workers
    held = [await pool.acquire() for _ in range(count)]
    assert len({lease.device_id for lease in held}) == count
    waiting = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    held[0].give_back()
    held[0] = await asyncio.wait_for(waiting, 60)
    for lease in held:
        lease.give_back()


@pytest.mark.timeout(900)
async def test_a_device_sets_a_task_up_acts_and_scores(pool: DevicePool) -> None:
    async with await pool.acquire() as device:
        first = await device.reset(TASK, 0)
        assert "wifi" in first.goal.lower().replace("-", "")
        assert first.screenshot.data[:4] in (b"\x89PNG", b"\xff\xd8\xff\xe0")
        opened = await device.step(Action(kind=ActionKind.OPEN, text="Settings"))
        assert opened.screenshot.sha256 != first.screenshot.sha256
        home = await device.step(Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.HOME))
        assert (home.screen_width, home.screen_height) == (first.screen_width, first.screen_height)
        assert await device.score() == 0.0


# ---- 3. episodes with a model ----------------------------------------------------------------------------------------

needs_engine = pytest.mark.skipif(
    not (MODEL and PORT), reason="SLIME_TEST_MODEL and SLIME_TEST_SGLANG_PORT are not both set"
)


@pytest_asyncio.fixture
async def _loop_resources() -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{HOST}:{PORT}/model_info") as reply:
        reply.raise_for_status()
    yield
    await close_resources()


@needs_engine
@pytest.mark.real_engine
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_loop_resources")
@pytest.mark.parametrize("mode", ["rollout", "rollout_history"])
async def test_episodes_with_the_model_become_samples(mode: str) -> None:
    generate = importlib.import_module(f"examples.android_world.{mode}").generate
    args = trainer_args(
        sglang_router_ip=HOST,
        sglang_router_port=int(PORT),
        hf_checkpoint=MODEL,
        max_turns=2,
        n_samples_per_prompt=2,
    )
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": NEW_TOKENS, "stop": None}
    made = await asyncio.gather(*(generate(args, a_sample(number), dict(sampling)) for number in range(2)))
    for generated in made:
        rows = generated if isinstance(generated, list) else [generated]
        assert 1 <= len(rows) <= 2
        for sample in rows:
            check(sample)


def a_sample(number: int) -> Sample:
    """A member of a group as slime's data source makes it."""
    metadata = {"task_name": TASK, "params_idx": 0, "instance_id": f"{TASK}-0"}
    return Sample(index=number, group_index=0, prompt="", metadata=metadata, session_id=f"verification-{number}")


def check(sample: Sample) -> None:
    """What a loss can be computed on: tokens, a mask, finite log-probs of what was sampled, a reward, screenshots."""
    shown: Any = sample.metadata
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED), shown
    assert not sample.remove_sample, shown
    assert 0 < sample.response_length < len(sample.tokens)
    mask, log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
    assert len(mask) == len(log_probs) == sample.response_length
    assert 0 < sum(mask) <= 2 * NEW_TOKENS
    assert all(math.isfinite(value) for value in log_probs)
    assert any(value < 0 for value in log_probs)
    assert isinstance(sample.reward, float)
    assert math.isfinite(sample.reward)
    assert (sample.multimodal_inputs or {})["images"]
