"""The real android_world package on the simulated phone by its serial alone: no gRPC interface, console or forwarder.

Needs the package, as ``test_android_world_real`` says.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from rollout_buffer_lab.simulated_phone.interfaces.simulated_sdk import SimulatedSdk, make_simulated_sdk
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_factory import create_device
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.testing.device_conformance import DeviceContract
from tests.android_world_player import SOLUTIONS
from tests.integration.conftest import ANDROID_WORLD_PYTHON as PYTHON
from tests.integration.conftest import needs_android_world
from tests.integration.test_android_world_real import SETTING_UP, settings_of
from tests.simulated_phone_player import Player
from tests.waiting import wait_until

pytestmark = [needs_android_world, pytest.mark.timeout(180)]
SERIAL = "emulator-5666"


@pytest.fixture
def sdk(folder: Path) -> Iterator[SimulatedSdk]:
    """A phone that somebody else runs."""
    sdk = make_simulated_sdk(folder, python=PYTHON)
    words = [str(sdk.emulator_path), "-avd", sdk.avd_name, "-port", SERIAL[-4:], "-grpc", "43666"]
    phone = subprocess.Popen(words, env=os.environ | {"ANDROID_AVD_HOME": str(sdk.avd_home)})
    wait_until(lambda: (sdk.devices / f"{SERIAL}.sock").exists())
    sdk.set_faults(SERIAL, Faults(dead_forwarder=True))
    yield sdk
    phone.terminate()
    phone.wait()


def attached(sdk: SimulatedSdk) -> AndroidWorldSettings:
    options = {"inventory": {"phone": {"serial": SERIAL, "restore": "apps"}}}
    return settings_of(sdk, device="attached", device_options=options)


@pytest.fixture
def device(sdk: SimulatedSdk) -> Iterator[Device[Action]]:
    made = create_device(attached(sdk), 0)
    yield made
    made.close()


def solve_again(device: Device[Action], task: str) -> None:
    SOLUTIONS[task](Player(device, device.reset(task, 0)), {})
    assert device.score() == 1.0


class TestADeviceThatOnlyAdbReaches(DeviceContract):
    task = ("SystemWifiTurnOff", 0)

    def harmless_action(self) -> Action:
        return Action(kind=ActionKind.WAIT, duration_s=0.01)


def test_what_only_an_emulators_ports_give_is_refused_and_all_else_is_played(device: Device[Action]) -> None:
    for task, lacks in {
        "ClockStopWatchRunning": "grpc",
        "ContactsNewContactDraft": "grpc",
        "SimpleSmsReply": "sms",
    }.items():
        with pytest.raises(EnvironmentSetupError, match=f"{task} needs {lacks}, .* it can play 110 of 116 tasks"):
            device.reset(task, 0)
    solve_again(device, "SystemWifiTurnOff")


def test_half_a_screen_is_an_error_with_its_reason_and_the_next_task_is_played(
    device: Device[Action], sdk: SimulatedSdk
) -> None:
    device.reset("SystemWifiTurnOff", 0)
    sdk.set_faults(SERIAL, Faults(half_screens=True))
    for call in (lambda: device.step(Action(kind=ActionKind.CLICK, point=(5, 5))), device.health):
        with pytest.raises(DeviceError, match="screencap -p: image file is truncated"):
            call()
    sdk.set_faults(SERIAL, Faults())
    solve_again(device, "SystemWifiTurnOff")


def test_a_connection_that_drops_in_an_episode_is_an_error_in_adbs_words_and_the_next_task_is_played(
    device: Device[Action], sdk: SimulatedSdk
) -> None:
    device.reset("SystemWifiTurnOff", 0)
    sdk.set_faults(SERIAL, Faults(offline=True))
    with pytest.raises(DeviceError, match="device offline"):
        device.step(Action(kind=ActionKind.CLICK, point=(5, 5)))
    sdk.set_faults(SERIAL, Faults())
    solve_again(device, "SystemWifiTurnOff")


def test_elements_of_an_earlier_screen_are_never_scored(device: Device[Action], sdk: SimulatedSdk) -> None:
    """Looks need no elements, so that a screen that never stands still ends no episode before its score."""
    player = Player(device, device.reset("ClockStopWatchPausedVerify", 0))
    SOLUTIONS["ClockStopWatchPausedVerify"](player, {})
    assert device.score() == 1.0
    sdk.set_faults(SERIAL, Faults(never_idle=True))
    player.tap_button("Timer")
    with pytest.raises(EnvironmentSetupError, match="could not get idle state"):
        device.score()
    solve_again(device, "SystemWifiTurnOff")


def test_the_apps_of_an_attached_phone_are_set_up_by_the_packages_own_set_up(sdk: SimulatedSdk) -> None:
    config = sdk.folder / "farm.json"
    config.write_text(attached(sdk).model_dump_json(exclude_unset=True))
    environment = {**os.environ, "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(config)}
    done = subprocess.run([PYTHON, "-c", SETTING_UP], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == ["setting up 24 apps", "phone is set up, with snapshots of 1 apps."]
