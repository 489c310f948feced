"""Tasks and devices that can play them: a job is refused at its start, and a refusal costs no attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime_plugins.rollout_buffer.devices.capabilities import REFUSED
from slime_plugins.rollout_buffer.devices.fair_share import Purpose
from slime_plugins.rollout_buffer.devices.interface import Device, Observation
from slime_plugins.rollout_buffer.devices.leased_device import LeasedDevice
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.errors import ConfigError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE
from slime_plugins.rollout_buffer.generator.android_world_generator import create_generator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.testing.episodes import episode_request
from slime_plugins.rollout_buffer.testing.fake_device import FakeDevice
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from slime_plugins.rollout_buffer.types import Instance
from tests.android_world_expert import say
from tests.demo_tokens import tokenizer
from tests.waiting import wait_until

ALL = "clock root sms accessibility"


class Phone(FakeDevice):
    """Has what ``capabilities`` says, and refuses the set-up of a text message without ``sms``."""

    capabilities: ClassVar[list[str]] = [ALL, ALL]
    refusals = 0
    reported: ClassVar[set[int]] = set()
    not_restored = ""

    def reset(self, task_name: str, params_idx: int) -> Observation:
        if task_name.startswith("SimpleSms") and "sms" not in self.capabilities[self.index]:
            Phone.refusals += 1
            raise EnvironmentSetupError("there is no sms", {"fault": REFUSED})
        seen = super().reset(task_name, params_idx)
        return replace(seen, details={**seen.details, "not_restored": self.not_restored})

    def health(self) -> Mapping[str, str]:
        self.reported.add(self.index)
        return {**super().health(), "capabilities": self.capabilities[self.index]}


def phone(options: object, index: int) -> Device[Any]:
    del options
    return Phone(index)


@pytest.fixture(autouse=True)
def two_phones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "farm.yaml"
    config.write_text(f"device_pool: local\nnum_workers: 2\ndevice: {__name__}:phone\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    monkeypatch.setattr(Phone, "refusals", 0)
    monkeypatch.setattr(Phone, "reported", set())


def context(*tasks: str) -> GeneratorContext:
    lines = [Instance(instance_id=name, data=line_of(name)) for name in tasks]
    engine = FakeEngine(lambda _: say(action="terminate", status="failure"), tokenizer=tokenizer)
    return GeneratorContext(
        job_id="job", engine=engine, tokenizer=tokenizer, concurrency=4, read_instances=lambda: lines
    )


def line_of(task: str) -> dict[str, Any]:
    return {"metadata": {"task_name": task, "params_idx": 0}}


async def test_a_job_with_tasks_that_no_device_can_play_is_refused_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Phone, "capabilities", ["clock root", "root accessibility"])
    generator = create_generator()
    with pytest.raises(
        ConfigError,
        match=r"no device of the pool can play ClockTimerEntry, SimpleSmsReply: (accessibility, sms|clock, sms) is "
        "missing; add a device that has it, or leave these tasks out of the input",
    ):
        await generator.start(context("CameraTakePhoto", "SimpleSmsReply", "ClockTimerEntry"))
    await generator.close()


async def test_a_device_that_has_lost_a_capability_costs_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = create_generator()
    await generator.start(context("SimpleSmsReply"))
    await asyncio.to_thread(wait_until, lambda: len(Phone.reported) == 2, what="both phones")
    monkeypatch.setattr(Phone, "capabilities", ["clock root", ALL])
    for _ in range(2):  # two at once: each device gets one of the first
        plays = (generator.play(episode_request(line_of("SimpleSmsReply"))) for _ in range(2))
        assert all(played.reward <= 0 for played in await asyncio.gather(*plays))
    assert Phone.refusals == 1
    await generator.close()


async def test_what_a_device_did_not_restore_is_counted_and_stands_in_the_trajectory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Phone, "not_restored", "settings storage")
    generator = create_generator()
    await generator.start(context("CameraTakePhoto"))
    played = await generator.play(episode_request(line_of("CameraTakePhoto")))
    assert played.extra_info["not_restored"] == ["settings", "storage"]
    assert generator._pool is not None
    async with await generator._pool.acquire(), await generator._pool.acquire():  # both are back
        devices = await generator._pool.counters()
    assert sorted(device["failures"].get("not_restored", 0) for device in devices) == [0, 1]
    assert [device["quarantines"] for device in devices] == [0, 0]
    await generator.close()


async def test_an_episode_of_an_evaluation_asks_for_its_device_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Purpose] = []
    acquire = DevicePool.acquire

    async def noted(pool: DevicePool, purpose: Purpose, needs: frozenset[str]) -> LeasedDevice:
        asked.append(purpose)
        return await acquire(pool, purpose, needs)

    monkeypatch.setattr(DevicePool, "acquire", noted)
    generator = create_generator()
    await generator.start(context("CameraTakePhoto"))
    for evaluation in (False, True):
        await generator.play(replace(episode_request(line_of("CameraTakePhoto")), evaluation=evaluation))
    assert asked == [Purpose.TRAINING, Purpose.EVALUATION]
    await generator.close()
