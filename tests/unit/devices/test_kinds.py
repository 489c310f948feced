"""Kinds of devices: each keeps the contract, and a new one needs nothing but a function under an address."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slime_plugins.rollout_buffer.cli.doctor import Examination, examine
from slime_plugins.rollout_buffer.cli.host_checks import State
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.devices.kinds import create_device
from slime_plugins.rollout_buffer.devices.local_pool import LocalDevicePool
from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolKind
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.android_world.config import DEVICE_KIND, AndroidWorldSettings, read_settings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import AndroidKind, DeviceCheck
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.testing.device_conformance import DeviceContract
from slime_plugins.rollout_buffer.testing.fake_device import ADDRESS, FakeDevice

PAGE = f"{__name__}:browser_page"


class Page(FakeDevice):
    """A device of another kind, with an option of its own."""

    def __init__(self, index: int, *, url: str) -> None:
        super().__init__(index)
        self._url = url

    def health(self) -> Mapping[str, str]:
        return {**super().health(), "url": f"{self._url}/{self.index}"}


def browser_page(options: Mapping[str, Any], index: int) -> Device[Any]:
    return Page(index, url=options["url"])


def _read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if set(options) != {"room"}:
        raise ConfigError("this kind needs room, and nothing else")
    return dict(options)


KIND_OF_A_PACKAGE = AndroidKind(
    create=lambda settings, index: Page(index, url=settings.device_options["room"]),
    read_options=_read_options,
    defaults=lambda values: {"num_workers": 3 if values["device_options"]["room"] == "attic" else 1},
    examine=lambda settings: [DeviceCheck(name="room", passed=False, detail=settings.device_options["room"])],
)


WITH_THE_PACKAGE = replace(KIND_OF_A_PACKAGE, uses_package=True, read_options=dict, examine=lambda _: [])


class TestTheFakeDevice(DeviceContract):
    task: ClassVar[tuple[str, int]] = ("Failed", 0)
    unknown_task: ClassVar[str] = "NoSuch"

    @pytest.fixture
    def device(self) -> Iterator[Device[Any]]:
        made = create_device(ADDRESS, {}, 0)
        yield made
        made.close()

    def harmless_action(self) -> Action:
        return Action(kind=ActionKind.WAIT, duration_s=0.0)


class TestTheSimulatedPhone(TestTheFakeDevice):
    task: ClassVar[tuple[str, int]] = ("SystemWifiTurnOff", 0)
    unknown_task: ClassVar[str] = DeviceContract.unknown_task

    @pytest.fixture
    def device(self) -> Iterator[Device[Any]]:
        farm = AndroidWorldSettings().for_devices()
        made = create_device(farm.kind, farm.device_options, 0)
        yield made
        made.close()


async def test_a_new_kind_needs_nothing_but_its_address() -> None:
    settings = DevicePoolSettings(
        kind=PAGE, device_options={"url": "http://page"}, device_pool=PoolKind.LOCAL, num_workers=1
    )
    pool = LocalDevicePool(settings)
    await pool.start()
    try:
        async with await pool.acquire() as device:
            assert (await device.reset("Solved", 1)).goal == "Play Solved number 1."
            assert (await device.step(Action(kind=ActionKind.WAIT))).screen_width == 1080
            assert await device.score() == 1.0
    finally:
        await pool.close()


def test_options_reach_the_kind() -> None:
    assert create_device(PAGE, {"url": "http://page"}, 3).health()["url"] == "http://page/3"


@pytest.mark.parametrize("address", ["no_such_module:create", f"{__name__}:no_such_function"])
def test_a_kind_that_cannot_be_loaded_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"{address} cannot be loaded"):
        create_device(address, {}, 0)


def test_what_a_device_is_made_from_is_apart_from_how_many_there_are() -> None:
    one, many = (AndroidWorldSettings(num_workers=count).for_devices() for count in (1, 64))
    assert one.device_options == many.device_options
    assert (one.num_workers, many.num_workers) == (1, 64)


def test_a_kind_of_a_package_brings_options_defaults_and_checks_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "farm.yaml"
    config.write_text(f"device: {__name__}:KIND_OF_A_PACKAGE\ndevice_options: {{room: attic}}\n")
    settings = read_settings(config)
    assert settings.num_workers == 3
    assert [one.detail for one in examine(Examination(settings=settings, data_dir=tmp_path)) if one.name == "room"] == [
        "attic"
    ]
    farm = settings.for_devices()
    assert create_device(farm.kind, farm.device_options, 2).health()["url"] == "attic/2"
    config.write_text(config.read_text().replace("device_options: {", "num_workers: 1\ndevice_options: {bed: 1, "))
    with pytest.raises(ConfigError, match=r"farm.yaml: line 3: device_options: this kind needs room"):
        read_settings(config)


def test_a_kind_that_the_device_workers_python_lacks_is_missing_for_the_doctor_and_given_up_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # not beside this module
    settings = AndroidWorldSettings(device=f"{__name__}:WITH_THE_PACKAGE", android_world_python=sys.executable)
    findings = {one.name: one for one in examine(Examination(settings=settings, data_dir=tmp_path))}
    mine = findings[f"package of the device kind {settings.device}"]
    assert (mine.state, mine.remedy.partition(";")[0]) == (State.MISSING, "install it there, too")
    assert f"cannot import {__name__}" in mine.detail
    options = settings.for_devices().device_options | {"device": "bench"}
    with pytest.raises(ConfigError, match=rf"no package of {sys.executable} has 'bench' among its entry points"):
        create_device(DEVICE_KIND, options, 0)
