"""The real ``android_world`` package, through the device adapter, on the simulated phone's adb and gRPC.

Needs the package: set ROLLOUT_BUFFER_TEST_ANDROID_WORLD to the python of an environment that has it and this project.
The device runs in a process of that python, as it does in production with ``android_world_python``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from rollout_buffer_lab.simulated_phone.interfaces.simulated_sdk import SimulatedSdk, make_simulated_sdk
from slime_plugins.rollout_buffer.devices.device_process import DeviceProcess
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_factory import create_device
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from tests.integration.conftest import ANDROID_WORLD_PYTHON as PYTHON
from tests.integration.conftest import needs_android_world
from tests.simulated_phone_player import SOLUTIONS, Player
from tests.waiting import wait_until

pytestmark = [needs_android_world, pytest.mark.timeout(180)]


@pytest.fixture
def sdk(folder: Path) -> SimulatedSdk:
    return make_simulated_sdk(folder, python=PYTHON)


def settings_of(sdk: SimulatedSdk, **changes: object) -> AndroidWorldSettings:
    values = {
        "device": "android_world",
        "android_world_python": PYTHON,
        "avd_name": sdk.avd_name,
        "android_avd_home": str(sdk.avd_home),
        "android_sdk_root": str(sdk.folder),
        "emulator_path": str(sdk.emulator_path),
        "adb_path": str(sdk.adb_path),
        "boot_timeout_s": 60,
        "base_console_port": 5640,
        "base_grpc_port": 43100,
        "base_adb_server_port": 43400,
        **changes,
    }
    return AndroidWorldSettings.model_validate(values)


@pytest.fixture
def device(sdk: SimulatedSdk) -> Iterator[DeviceProcess]:
    made = create_device(settings_of(sdk), 0)
    assert isinstance(made, DeviceProcess)
    yield made
    made.close()
    assert emulators(sdk) == []


def emulators(sdk: SimulatedSdk) -> list[int]:
    """Processes that were started for this SDK and still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if str(sdk.devices) in words:
            found.append(int(path.parent.name))
    return found


def test_episodes_follow_one_another_and_are_scored_by_the_package(device: DeviceProcess) -> None:
    first = device.reset("SystemWifiTurnOff", 0)
    assert (first.goal, first.step_budget) == ("Turn wifi off.", 10)
    assert (first.screen_width, first.screen_height) == (1080, 2400)
    assert device.score() == 0.0
    SOLUTIONS["SystemWifiTurnOff"](Player(device, first), {})
    assert device.score() == 1.0

    second = device.reset("ContactsAddContact", 3)
    named = re.fullmatch(r"Create a new contact for (.+)\. Their number is (.+)\.", second.goal)
    assert named is not None
    SOLUTIONS["ContactsAddContact"](Player(device, second), {"name": named[1], "number": named[2]})
    assert device.score() == 1.0
    assert device.reset("ContactsAddContact", 3).goal == second.goal


def test_the_coverage_page_names_the_packages_own_budgets_of_tasks_that_exceed_them() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "android_world_coverage.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (SimpleCalendar[\w, ]+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    rows = [(name, budget, actions) for names, budget, actions in listed for name in names.split(", ")]
    assert len(rows) == 11
    assert all(int(actions) > int(budget) for _, budget, actions in rows)
    program = (
        "import sys; from android_world import registry, suite_utils\n"
        "tasks = registry.TaskRegistry().get_registry('android_world')\n"
        "for name in sys.argv[1:]:\n"
        "    print(int(10 * suite_utils._instantiate_task(tasks[name], seed=30).complexity))\n"
    )
    named = [name for name, _, _ in rows]
    done = subprocess.run([PYTHON, "-c", program, *named], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [budget for _, budget, _ in rows]


def test_a_device_whose_emulator_died_says_so_without_being_called(device: DeviceProcess, sdk: SimulatedSdk) -> None:
    device.reset("SystemWifiTurnOff", 0)
    assert device.lost() == ""
    os.kill(int((sdk.avd_home / "slime_aw_0.avd" / "hardware-qemu.ini.lock").read_text()), signal.SIGKILL)
    wait_until(lambda: device.lost() == "the emulator's process has ended", 20)


def test_a_devices_process_that_died_is_noticed_without_a_call(device: DeviceProcess, sdk: SimulatedSdk) -> None:
    assert device.lost() == ""
    os.kill(device._child.pid, signal.SIGKILL)
    wait_until(lambda: device.lost() == "the device's process is gone (exit code -9)", 20)
    wait_until(lambda: emulators(sdk) == [])


def test_an_emulator_that_somebody_else_runs_is_attached_restored_and_left_running(sdk: SimulatedSdk) -> None:
    words = [str(sdk.emulator_path), "-avd", sdk.avd_name, "-port", "5658", "-grpc", "43190"]
    emulator = subprocess.Popen(words, env=os.environ | {"ANDROID_AVD_HOME": str(sdk.avd_home)})
    wait_until(lambda: (sdk.devices / "emulator-5658.sock").exists())
    entry = {"serial": "emulator-5658", "restore": "apps", "console_port": 5658, "grpc_port": 43190}
    options = {"inventory": {"bench": entry}}
    device = create_device(settings_of(sdk, device="attached", device_options=options), 0)
    try:
        for _ in range(2):
            first = device.reset("SystemWifiTurnOff", 0)
            assert device.score() == 0.0
            SOLUTIONS["SystemWifiTurnOff"](Player(device, first), {})
            assert device.score() == 1.0
        device.reset("MarkorCreateFolder", 0)
        assert device.health()["serial"] == "emulator-5658"
        device.close()
        assert emulator.poll() is None
        assert not (sdk.devices / "adb_servers.log").exists()
    finally:
        device.close()
        emulator.terminate()
        emulator.wait()


def test_an_episodes_traces_are_found_before_the_next_and_where_they_are_refused_the_clone_is_made_again(
    sdk: SimulatedSdk,
) -> None:
    markor = "net.gsantner.markor"

    def shell(script: str) -> None:
        subprocess.run([str(sdk.adb_path), "-s", "emulator-5640", "shell", script], check=True, capture_output=True)

    for required in ([], ["storage", "apps"]):
        settings = settings_of(sdk, device_options={"check_restored": required})
        device = create_device(settings, 0)
        for folder in (f"/data/data/{markor}", f"/data/data/android_world/snapshots/{markor}"):
            shell(f"mkdir -p {folder}/files; echo a note > {folder}/files/notes.db")
        assert device.reset("MarkorCreateFolder", 0).details["not_restored"] == ""
        shell(f"echo more > /data/data/{markor}/files/notes.db; settings put system screen_brightness 7")
        assert device.reset("CameraTakePhoto", 0).details["not_restored"] == ""  # the package restored the app
        shell("touch /sdcard/DCIM/photo.jpg")
        clone = sdk.avd_home / "slime_aw_0.avd"
        if required:
            with pytest.raises(DeviceError, match=r"storage \(.*/sdcard/DCIM/photo.jpg\)") as caught:
                device.reset("SystemWifiTurnOff", 0)
            assert caught.value.detail["fault"] == "not_restored"
            with pytest.raises(DeviceError, match="slime_aw_0 was not restored: the next boot clones it again"):
                device.health()
            assert (clone / "rollout_buffer_clone_of").read_text() == ""
        else:
            assert device.reset("SystemWifiTurnOff", 0).details["not_restored"] == "storage"
        device.close()
        (clone / "rollout_buffer_state.json").unlink()  # the phone of a new process has forgotten everything
    device = create_device(settings, 0)
    assert (clone / "rollout_buffer_clone_of").read_text() != ""
    device.close()


def test_tasks_that_cannot_be_played_are_refused_before_the_first_step(device: DeviceProcess) -> None:
    assert device.reset("SystemBrightnessMaxVerify", 0).details["solved_at_start"] == "true"
    assert device.score() == 1.0
    with pytest.raises(EnvironmentSetupError, match="no task called"):
        device.reset("NoSuchTask", 0)
    assert device.reset("SystemBrightnessMax", 0).goal
    assert device.health()["kind"] == "android_world"


def test_every_action_arrives_as_it_was_meant(device: DeviceProcess) -> None:
    player = Player(device, device.reset("MarkorCreateFolder", 0))
    unknown = device.step(Action(kind=ActionKind.OPEN, text="Screen Recorder"))
    assert "no app called 'Screen Recorder'" in unknown.note
    player.open("Markor")
    player.tap_icon("add")
    refused = device.step(Action(kind=ActionKind.TYPE, text="a & b; $(x) é"))
    assert refused.note.endswith("left out: é")
    player.observation = refused
    field = player.screen.find_field("Name")
    assert field is not None
    assert " ".join(field.lines) == "a & b; $(x) e"
    player.tap_button("Folder")
    player.hold(player.row("a & b; $(x) e"))
    assert "1 selected" in [line.text for line in player.screen.texts]
    for button in (SystemButton.BACK, SystemButton.HOME, SystemButton.MENU):
        player.act(ActionKind.SYSTEM_BUTTON, button=button)
    player.act(ActionKind.SWIPE, point=(540, 1900), end_point=(540, 400))
    assert "Apps" in [line.text for line in player.screen.texts]
    start = time.monotonic()
    player.act(ActionKind.WAIT, duration_s=1.5)
    assert time.monotonic() - start >= 1.5
    player.act(ActionKind.TERMINATE, status="success")


def test_a_screen_that_reacts_late_is_waited_for(device: DeviceProcess, sdk: SimulatedSdk) -> None:
    player = Player(device, device.reset("SystemWifiTurnOff", 0))
    sdk.set_faults(device.health()["serial"], Faults(slow_screen_s=1.2))
    player.open("Settings")
    player.tap_row("Network & internet")
    assert player.screen.find_switch("Wi-Fi") is not None
    assert player.observation.details["settled"] == "settled"


@pytest.mark.parametrize("faults", [Faults(crash_after_inputs=1), Faults(offline=True)], ids=["crash", "offline"])
def test_a_device_that_breaks_in_an_episode_is_an_error_and_never_a_score(
    device: DeviceProcess, sdk: SimulatedSdk, faults: Faults
) -> None:
    device.reset("SystemWifiTurnOff", 0)
    sdk.set_faults(device.health()["serial"], faults)
    with pytest.raises(DeviceError):
        device.step(Action(kind=ActionKind.CLICK, point=(5, 5)))
    with pytest.raises(DeviceError):
        device.score()
    with pytest.raises(DeviceError):
        device.health()


def test_a_forwarder_that_died_is_an_error_not_an_old_screen(device: DeviceProcess, sdk: SimulatedSdk) -> None:
    device.reset("SystemWifiTurnOff", 0)
    sdk.set_faults(device.health()["serial"], Faults(dead_forwarder=True))
    with pytest.raises(DeviceError, match="forwarder"):
        device.step(Action(kind=ActionKind.OPEN, text="Settings"))
    with pytest.raises(DeviceError, match="forwarder"):
        device.health()
    with pytest.raises(DeviceError, match="forwarder"):  # and not a fault of the next task's set-up
        device.reset("ClockTimerEntry", 0)


@pytest.mark.parametrize("faults", [Faults(exit_at_start=True), Faults(never_boots=True)], ids=["exit", "never"])
def test_an_emulator_that_does_not_come_up_is_given_up_and_leaves_nothing(sdk: SimulatedSdk, faults: Faults) -> None:
    sdk.fault_plan.set_boot_faults(faults)
    with pytest.raises(DeviceError, match="emulator"):
        create_device(settings_of(sdk, boot_timeout_s=8), 0)
    wait_until(lambda: emulators(sdk) == [])


def test_two_devices_stand_side_by_side_with_an_adb_server_each(sdk: SimulatedSdk) -> None:
    settings = settings_of(sdk)
    first, second = create_device(settings, 0), create_device(settings, 1)
    try:
        assert first.health()["serial"] != second.health()["serial"]
        Player(first, first.reset("SystemWifiTurnOff", 0)).open("Settings")
        second.reset("SystemBluetoothTurnOff", 0)
        first.close()
        assert second.step(Action(kind=ActionKind.OPEN, text="Settings")).note == ""
        log = sdk.devices / "adb_servers.log"
        assert "5037" not in log.read_text()
    finally:
        first.close()
        second.close()
    wait_until(lambda: emulators(sdk) == [])


def test_the_base_device_is_set_up_by_the_packages_own_set_up_and_then_cloned(sdk: SimulatedSdk) -> None:
    """Only what would be downloaded is replaced: the forwarder's APK and the set-up of each app."""
    config = sdk.folder / "farm.json"
    config.write_text(settings_of(sdk).model_dump_json())
    environment = {**os.environ, "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(config)}
    program = [PYTHON, "-c", SETTING_UP]
    done = subprocess.run(program, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert said[-1] == f"{sdk.avd_name} is set up, with snapshots of 1 apps. Workers can clone it now."
    assert "setting up 24 apps" in said
    assert emulators(sdk) == []
    made = create_device(settings_of(sdk), 0)
    made.close()


SETTING_UP = """
import sys
from android_env.wrappers import a11y_grpc_wrapper
a11y_grpc_wrapper._get_accessibility_forwarder_apk = lambda: b"not an APK"
from android_world.env import adb_utils
from android_world.env.setup_device import setup
def set_up(env, app_list=None):
    print("setting up", len(app_list or setup._APPS), "apps")
    adb_utils.issue_generic_request(
        ["shell", "mkdir", "-p", "/data/data/android_world/snapshots/com.google.android.deskclock"], env.controller
    )
setup.setup_apps = set_up
from slime_plugins.rollout_buffer.generator.android_world.emulator import base_setup
sys.exit(base_setup.main([]))
"""


def test_the_packages_own_launcher_connects_unmodified(sdk: SimulatedSdk) -> None:
    """Only the download of the forwarder's APK is replaced: there is no network in a test."""
    environment = {**os.environ, "ANDROID_AVD_HOME": str(sdk.avd_home)}
    command = [str(sdk.emulator_path), "-avd", sdk.avd_name, "-port", "5660", "-grpc", "43660"]
    emulator = subprocess.Popen(command, env=environment)
    try:
        wait_until(lambda: (sdk.devices / "emulator-5660.sock").exists())
        program = [PYTHON, "-c", _LAUNCHER, str(sdk.adb_path)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.splitlines()[-1:] == ["(2400, 1080, 3) 1"], done.stderr[-2000:]
    finally:
        emulator.terminate()
        emulator.wait()


_LAUNCHER = """
import sys
from android_env.wrappers import a11y_grpc_wrapper
a11y_grpc_wrapper._get_accessibility_forwarder_apk = lambda: b"not an APK"
from android_world.env import env_launcher
env = env_launcher.load_and_setup_env(console_port=5660, grpc_port=43660, adb_path=sys.argv[1])
state = env.get_state(wait_to_stabilize=True)
texts = {element.text for element in state.ui_elements}
print(state.pixels.shape, len(texts & {"Clock"}))
env.close()
"""
