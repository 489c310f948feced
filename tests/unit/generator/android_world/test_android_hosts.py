"""Hosts of Android: the fake one passes the conformance suite, and devices connect again when they say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidEndpoint
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
from slime_plugins.rollout_buffer.generator.android_world.emulator.screen_stability import StabilityTimeouts
from slime_plugins.rollout_buffer.testing.android_host_conformance import AndroidHostContract
from tests.fake_android_host import ENDPOINT, FakeAndroidHost
from tests.unit.generator.android_world.test_android_world_adapter import WrittenPackage


class TestFakeHost(AndroidHostContract):
    @pytest.fixture
    def host(self) -> FakeAndroidHost:
        return FakeAndroidHost()

    def break_down(self, host: FakeAndroidHost) -> None:
        host.broken = "the fake host is broken"


class ConnectingPackage(WrittenPackage):
    """Counts its connections."""

    def connect(self, endpoint: AndroidEndpoint) -> None:
        self.say(f"connect {endpoint.serial}")

    def disconnect(self) -> None:
        pass


@pytest.fixture
def package() -> ConnectingPackage:
    return ConnectingPackage()


def device_on(host: FakeAndroidHost, package: Any) -> AndroidWorldDevice:
    times = StabilityTimeouts(change_s=0.0, still_s=1.0, between_s=0.001)
    return AndroidWorldDevice(AndroidWorldSettings(), 0, host, package=package, times=times)


@pytest.fixture
def host() -> FakeAndroidHost:
    return FakeAndroidHost()


@pytest.fixture
def device(host: FakeAndroidHost, package: Any) -> Iterator[AndroidWorldDevice]:
    made = device_on(host, package)
    yield made
    made.close()
    assert host.calls[-1] == "close"


def test_a_device_is_restored_before_each_task_and_connects_again_after_a_rollback(
    device: AndroidWorldDevice, host: FakeAndroidHost, package: ConnectingPackage
) -> None:
    device.reset("ClockTimerEntry", 0)
    assert host.calls == ["start", "restore org.app"]
    host.moved = True
    device.reset("ClockTimerEntry", 0)
    assert host.calls == ["start", "restore org.app", "restore org.app", "start"]
    assert package.calls.count("connect fake-0") == 2


def test_a_score_of_zero_read_over_a_lost_connection_is_an_error(
    device: AndroidWorldDevice, host: FakeAndroidHost
) -> None:
    device.reset("ClockTimerEntry", 0)
    host.moved = True
    with pytest.raises(DeviceError, match="was away and is connected again"):
        device.score()
    assert device.health()["serial"] == "fake-0"


@pytest.mark.parametrize(
    ("lacks", "refused", "played"),
    [
        ("clock", "ClockTimerEntry", 4),
        ("root", "RetroPlaylistDuration", 3),
        ("clock", "ATaskOfALaterPackage", 4),
        ("sms", "SimpleSmsReply", 112),
        ("accessibility", "BrowserMaze", 102),
    ],
)
def test_a_task_is_refused_before_its_set_up_by_a_device_that_lacks_what_it_needs(
    package: ConnectingPackage, lacks: str, refused: str, played: int
) -> None:
    lacking = replace(ENDPOINT, capabilities=frozenset(Capability) - {Capability(lacks)})
    device = device_on(FakeAndroidHost(lacking), package)
    with pytest.raises(EnvironmentSetupError, match=f"{refused} needs {lacks}, .* it can play {played} of 116 tasks"):
        device.reset(refused, 0)
    assert "initialize_task" not in package.calls
    assert device.reset("BrowserMaze" if lacks != "accessibility" else "CameraTakePhoto", 0).goal
    device.close()
