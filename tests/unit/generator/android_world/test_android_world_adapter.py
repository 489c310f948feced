"""The order that an episode keeps to, how the package is connected, how an emulator is started. Without any of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_plugins.rollout_buffer.devices.kinds import is_misconfigured
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator import base_setup
from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess
from slime_plugins.rollout_buffer.generator.android_world.emulator.gestures import Gestures
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import AndroidWorldPackage
from slime_plugins.rollout_buffer.generator.android_world.emulator.screen_stability import StabilityTimeouts
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.generator.gui_agent.screenshots import encode_screenshot
from slime_plugins.rollout_buffer.testing.android_host_conformance import AndroidHostContract
from tests.fake_android_host import ENDPOINT
from tests.watchdog_device import make_sdk, recorded

# ---- the order of an episode -----------------------------------------------------------------------------------------


class WrittenTask:
    """A task that writes down what is done to it. ``faults`` are raised by its set-ups, one each."""

    app_names = ("settings",)
    complexity = 1.2
    start_on_home_screen = True

    def __init__(self, package: WrittenPackage, name: str) -> None:
        self._package, self._name, self._says = package, name, package.say
        self._is_set_up = False

    def initialize_task(self, _env: Any) -> None:
        self._says("initialize_task")
        if self._package.faults:
            raise self._package.faults.pop()
        self._is_set_up = True

    @property
    def goal(self) -> str:
        assert self._is_set_up, "set-up rewords the goal of some tasks"
        return f"Play {self._name}."

    def is_successful(self, _env: Any) -> float:
        self._says("is_successful")
        if self._package.unreadable:
            raise OSError(self._package.unreadable)
        return self._package.success

    def tear_down(self, _env: Any) -> None:
        self._says("tear_down")


class WrittenPackage:
    """Stands for package, environment and gestures at once; ``calls`` is all that was asked, in order."""

    def __init__(self, *faults: Exception, success: float = 0.0, broken: str = "", unreadable: str = "") -> None:
        self.faults = list(reversed(faults))
        self.success = success
        self.broken = broken
        self.unreadable = unreadable
        self.calls: list[str] = []
        self.made: list[tuple[str, int, int]] = []
        self.env = self

    def say(self, what: str) -> None:
        self.calls.append(what)

    def new_task(self, name: str, params_idx: int, suite_seed: int) -> WrittenTask:
        self.made.append((name, params_idx, suite_seed))
        self.say("new_task")
        return WrittenTask(self, name)

    def reset(self, *, go_home: bool) -> None:
        assert go_home
        self.say("reset")

    def hide_automation_ui(self) -> None:
        self.say("hide_automation_ui")

    def adb(self, *words: str) -> str:
        self.say(words[-1])
        return ""

    def do(self, action: Action) -> str:
        self.say(str(action.kind))
        return ""

    def look(self) -> tuple[Any, Any]:
        return np.zeros((40, 20, 3), np.uint8), []

    def await_fresh_tree(self) -> None:
        pass

    def drop_accessibility_trees(self) -> None:
        pass

    def check_alive(self) -> bool:
        if self.broken:
            raise DeviceError(self.broken)
        return True

    def restore(self, packages: list[str]) -> bool:
        assert packages == ["org.app"]
        return True

    def app_packages(self, task: Any) -> list[str]:
        del task
        return ["org.app"]

    def check_connection(self) -> None:
        pass


def device_on(package: Any, *, change_s: float = 0.0) -> AndroidWorldDevice:
    device = object.__new__(AndroidWorldDevice)
    device._closed, device._package, device._gestures, device._host = False, package, package, package
    device._settings = AndroidWorldSettings(suite_seed=7)
    device._times = StabilityTimeouts(change_s=change_s, still_s=1.0, between_s=0.001)
    device._task, device._solved_at_start, device._endpoint = None, False, ENDPOINT
    return device


def test_an_episode_keeps_to_the_order_that_the_package_wants() -> None:
    package = WrittenPackage()
    device = device_on(package)
    first = device.reset("SystemWifiTurnOff", 3)
    assert (first.goal, first.step_budget) == ("Play SystemWifiTurnOff.", 12)
    device.step(Action(kind=ActionKind.CLICK, point=(1, 1)))
    package.success = 1.0
    assert device.score() == 1.0
    package.success = 0.0
    device.reset("SystemWifiTurnOff", 3)
    setting_up = ["new_task", "reset", "hide_automation_ui", "initialize_task", "is_successful", "KEYCODE_HOME"]
    assert package.calls == [*setting_up, "click", "is_successful", "tear_down", *setting_up]
    assert package.made == [("SystemWifiTurnOff", 3, 7)] * 2


def test_a_set_up_that_fails_is_torn_down_and_tried_once_more_with_a_new_task() -> None:
    package = WrittenPackage(RuntimeError("no snapshot"))
    assert device_on(package).reset("ClockTimerEntry", 0).goal == "Play ClockTimerEntry."
    assert package.calls.count("new_task") == 2
    assert package.calls[4] == "tear_down"
    package = WrittenPackage(RuntimeError("once"), RuntimeError("twice"))
    with pytest.raises(EnvironmentSetupError, match=r"ClockTimerEntry 0 cannot be set up: RuntimeError: twice"):
        device_on(package).reset("ClockTimerEntry", 0)
    assert package.calls.count("tear_down") == 2


def test_a_task_without_parameters_is_no_fault_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impossible:
        def generate_random_params(self) -> dict[str, Any]:
            raise ValueError("no such month")

    package = OpeningPackage({})
    monkeypatch.setattr(package, "_tasks", {"Impossible": Impossible()}, raising=False)
    with pytest.raises(EnvironmentSetupError, match="Impossible 7 has no parameters: ValueError: no such month"):
        package.new_task("Impossible", 7, 30)


def test_a_task_that_is_solved_already_is_played_and_scored_by_how_it_ends() -> None:
    package = WrittenPackage(success=1.0)
    device = device_on(package)
    assert device.reset("SystemBrightnessMaxVerify", 0).details["solved_at_start"] == "true"
    assert device.score() == 1.0
    package.success = 0.0  # the agent has undone it
    assert device.step(Action(kind=ActionKind.CLICK, point=(1, 1))).details["solved_at_start"] == "true"
    assert device.score() == 0.0
    assert device.reset("SystemBrightnessMax", 0).details["solved_at_start"] == "false"


@pytest.mark.parametrize("name", ["Tasks", " tasks.org ", "Tasks App", "TASKS.ORG:"])
def test_an_app_is_opened_by_any_of_its_names_however_it_is_written(name: str) -> None:
    package = OpeningPackage(
        {"tasks": "org.tasks/.Main", "tasks app": "org.tasks/.Main", "tasks.org": "org.tasks/.Main"}
    )
    assert Gestures(package).do(Action(kind=ActionKind.OPEN, text=name)) == ""
    assert package.started == [("-n", "org.tasks/.Main")]


class OpeningPackage(AndroidWorldPackage):
    """A package with these apps, which writes down what it starts."""

    def __init__(self, apps: dict[str, str]) -> None:
        self._apps = apps
        self.started: list[tuple[str, ...]] = []

    def apps(self) -> dict[str, str]:
        return self._apps

    def adb(self, *words: str) -> str:
        assert words[:4] == ("shell", "am", "start", "-W")
        self.started.append(words[4:])
        return ""


class RetroPlayingQueue(WrittenTask):
    """Under this name the package has the task whose database is not there before something was played."""


def test_a_task_whose_app_has_written_nothing_yet_is_played_and_scored_unless_the_device_is_to_blame() -> None:
    class QueuePackage(WrittenPackage):
        def new_task(self, name: str, params_idx: int, suite_seed: int) -> WrittenTask:
            del params_idx, suite_seed
            return RetroPlayingQueue(self, name)

    package = QueuePackage(unreadable="no such table: playing_queue")
    device = device_on(package)
    assert device.reset("RetroPlayingQueue", 0).details["solved_at_start"] == "false"
    assert device.score() == 0.0
    package.unreadable, package.success = "", 1.0
    assert device.score() == 1.0
    package.unreadable, package.broken = "device offline", "the emulator's process is gone"
    with pytest.raises(DeviceError, match="the emulator's process is gone"):
        device.score()


TOAST, HOME, EFFECT = 10, 90, 200


class ToastPackage(WrittenPackage):
    """Its screen shows a message that goes away, and the effect of a tap three looks late."""

    screen, looks_until_effect = TOAST, 0

    def look(self) -> tuple[Any, Any]:
        self.looks_until_effect -= 1
        if self.looks_until_effect == 0:
            self.screen = EFFECT
        return pixels_of(self.screen), [self.screen]

    def await_fresh_tree(self) -> None:
        self.say("await_fresh_tree")

    def do(self, action: Action) -> str:
        self.looks_until_effect = 4
        return super().do(action)


def pixels_of(screen: int) -> Any:
    return np.full((40, 20, 3), screen, np.uint8)


def test_what_the_screen_did_while_the_agent_thought_is_not_taken_for_the_effect_of_its_action() -> None:
    package = ToastPackage()
    device = device_on(package, change_s=5.0)
    device.reset("SystemWifiTurnOff", 3)
    package.screen = HOME
    seen = device.step(Action(kind=ActionKind.CLICK, point=(1, 1)))
    settings = AndroidWorldSettings()
    expected = encode_screenshot(pixels_of(EFFECT), settings.screenshot_max_pixels, settings.image_format.value)
    assert seen.screenshot.sha256 == expected.sha256


def test_a_score_is_read_after_a_tree_that_is_newer_than_the_last_action() -> None:
    package = ToastPackage(success=1.0)
    device = device_on(package)
    device.reset("SystemWifiTurnOff", 3)
    device.step(Action(kind=ActionKind.CLICK, point=(1, 1)))
    assert device.score() == 1.0
    assert package.calls[-3:] == ["click", "await_fresh_tree", "is_successful"]


# ---- connecting ------------------------------------------------------------------------------------------------------

STUBS = {
    "android_env/__init__.py": "",
    "android_env/loader.py": "def load(config): return config",
    "android_env/components/__init__.py": "",
    "android_env/components/config_classes.py": (
        "from types import SimpleNamespace\n"
        "AndroidEnvConfig = FilesystemTaskConfig = EmulatorConfig = SimpleNamespace\n"
        "EmulatorLauncherConfig = AdbControllerConfig = SimpleNamespace\n"
    ),
    "android_env/proto/__init__.py": "",
    "android_env/proto/adb_pb2.py": "",
    "android_world/__init__.py": "import tempfile\nFOLDER = tempfile.gettempdir()\n",
    "android_world/registry.py": "class TaskRegistry:\n    def get_registry(self, suite): return {}\n",
    "android_world/task_evals/__init__.py": "",
    "android_world/task_evals/task_eval.py": "",
    "android_world/env/__init__.py": "",
    "android_world/env/adb_utils.py": "APPS = []\ndef get_all_package_names(env): return APPS\n",
    "android_world/env/android_world_controller.py": (
        "class AndroidWorldController:\n"
        "    def __init__(self, env, **options): self.env, self.options = env, options\n"
        "def get_controller(*_): raise OSError('this one downloads')\n"
    ),
    "android_world/env/env_launcher.py": "def setup_env(env, **options): env.options = options\n",
    "android_world/env/interface.py": (
        "class AsyncAndroidEnv:\n    def __init__(self, controller): self.controller = controller\n"
    ),
}
CONNECT = """
import json, os, sys, tempfile
tempfile.gettempdir()  # remembered from here on, unless told otherwise
from pathlib import Path
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidEndpoint
from slime_plugins.rollout_buffer.generator.android_world.emulator import package as room
package = room.AndroidWorldPackage(Path(sys.argv[1]))
import android_world
from android_world.env import adb_utils, android_world_controller
endpoint = AndroidEndpoint(
    serial="emulator-5570", adb_path="/sdk/adb", adb_server_port=5050, console_port=5570, grpc_port=8600
)
try:
    package.connect(endpoint)
except DeviceError as error:
    refused = error.message
adb_utils.APPS.append(room.FORWARDER_PACKAGE)
package.connect(endpoint)
simulator = package.env.controller.env.simulator
again = android_world_controller.get_controller(5554, "adb", 8554)
print(json.dumps({
    "refused": refused,
    "temporary": [android_world.FOLDER, os.environ["TMPDIR"]],
    "set up": package.env.options,
    "controllers": [package.env.controller.options, again.options],
    "launcher": vars(simulator.emulator_launcher),
    "adb": vars(simulator.adb_controller),
}))
"""


@pytest.fixture
def connected(tmp_path: Path) -> dict[str, Any]:
    """What connecting did, with the packages replaced by such as write it down; in a process of its own."""
    for name, text in STUBS.items():
        path = tmp_path / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = Path(__file__).resolve().parents[4]
    program = [sys.executable, "-c", CONNECT, str(tmp_path / "own")]
    environment = {"PYTHONPATH": f"{tmp_path / 'stubs'}:{root}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_connecting_downloads_nothing_and_shares_neither_ports_nor_folder(
    connected: dict[str, Any], tmp_path: Path
) -> None:
    assert connected["temporary"] == [str(tmp_path / "own")] * 2, "the package was imported before its folder was set"
    assert connected["set up"] == {"emulator_setup": False, "freeze_datetime": True}
    # The second one is what the package itself makes when it reconnects.
    assert connected["controllers"] == [{"install_a11y_forwarding_app": False}] * 2
    assert connected["launcher"] == {"emulator_console_port": 5570, "adb_port": 5571, "grpc_port": 8600}
    assert connected["adb"] == {"adb_path": "/sdk/adb", "adb_server_port": 5050}
    assert "lacks the app com.google.androidenv.accessibilityforwarder" in connected["refused"]


# ---- the emulator ----------------------------------------------------------------------------------------------------

NOTING = """#!/bin/sh
echo "$@" >> {folder}/starts
env > {folder}/environment
touch {folder}/written
exec sleep 600
"""
KEPT = ("ANDROID_ADB_SERVER_PORT", "ANDROID_AVD_HOME", "no_proxy", "ROLLOUT_BUFFER_DEVICE")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AndroidWorldSettings]:
    """An emulator that writes down how it was started, and lives."""
    records = tmp_path / "records"
    monkeypatch.setenv("ROLLOUT_BUFFER_DEVICE_RECORDS", str(records))
    monkeypatch.setenv("ROLLOUT_BUFFER_PORT_LOCKS", str(tmp_path / "locks"))
    values = make_sdk(tmp_path / "sdk")
    Path(values["emulator_path"]).write_text(NOTING.format(folder=tmp_path))
    yield AndroidWorldSettings.model_validate({**values, "boot_timeout_s": 3})
    assert recorded(records) == recorded(records, "watchdog") == []


def test_an_emulator_starts_headless_and_cold_on_ports_and_an_adb_server_of_its_own(
    settings: AndroidWorldSettings, tmp_path: Path
) -> None:
    flagged = settings.model_copy(update={"emulator_flags": "-no-window -no-audio -gpu host -memory 4096"})
    with closing(EmulatorProcess(flagged, 4)) as host:
        endpoint = host.start()
        words, environment = how_it_was_started(tmp_path)
    said = {words[place]: words[place + 1] for place in range(len(words) - 1)}
    assert (said["-avd"], said["-port"], said["-grpc"]) == (
        "orphan_test_4",
        str(endpoint.console_port),
        str(endpoint.grpc_port),
    )
    assert {"-no-window", "-no-snapshot", "-no-audio"} <= set(words)
    assert (said["-gpu"], said["-memory"], "-no-metrics" in words) == ("host", "4096", False)
    assert {name: value for name, value in environment.items() if name in KEPT} == {
        "ANDROID_ADB_SERVER_PORT": str(endpoint.adb_server_port),
        "ANDROID_AVD_HOME": settings.android_avd_home,
        "no_proxy": "localhost,127.0.0.1,10.0.2.2",
        "ROLLOUT_BUFFER_DEVICE": "orphan_test_4",
    }


OLDER = """#!/bin/sh
case "$*" in *-no-metrics*) echo "unknown option: -no-metrics" >&2; exit 1 ;; esac
"""


def test_an_emulator_that_does_not_know_the_metrics_flag_is_started_without_it(
    settings: AndroidWorldSettings, tmp_path: Path
) -> None:
    emulator = Path(settings.emulator_path)
    emulator.write_text(OLDER + emulator.read_text())
    adb = Path(settings.adb_path)
    adb.write_text(f"#!/bin/sh\n[ -e {tmp_path}/written ] || exit 1\n{adb.read_text()}")
    with closing(EmulatorProcess(settings.model_copy(update={"boot_timeout_s": 60}), 4)) as host:
        host.start()
        words, _ = how_it_was_started(tmp_path)
    assert ("-no-boot-anim" in words, "-no-metrics" in words) == (True, False)


def log_adb(folder: Path, settings: AndroidWorldSettings, answers: str = "") -> None:
    """Lets the adb of a booted device write down what it is asked, and answer some of it otherwise."""
    adb = Path(settings.adb_path)
    case = 'case "$*" in\n'
    adb.write_text(adb.read_text().replace(case, f'echo "$@" >> {folder}/adb_log\n{case}{answers}'))


class TestEmulatorHost(AndroidHostContract):
    @pytest.fixture
    def host(self, settings: AndroidWorldSettings, tmp_path: Path) -> Iterator[EmulatorProcess]:
        log_adb(tmp_path, settings)
        with closing(EmulatorProcess(settings, 4)) as made:
            yield made

    def break_down(self, host: EmulatorProcess) -> None:
        deadline = time.monotonic() + 20
        while not host.lost():  # adb calls it booted before its process is on record
            assert time.monotonic() < deadline
            for pid in recorded(Path(os.environ["ROLLOUT_BUFFER_DEVICE_RECORDS"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ("Physical size: 1080x2400\\n", ""),
        ("Physical size: 1440x3120\\nOverride size: 1080x2400\\n", ""),
        ("Physical size: 320x640\\n", "the screen is 320x640, but config.ini of orphan_test_4 has 1080x2400"),
        ("Physical size: 1080x2400\\nOverride size: 720x1280\\n", "the screen is 720x1280"),
        ("error: closed", "the screen is of unknown size"),
    ],
)
def test_a_screen_is_as_large_as_the_virtual_devices_file_says_or_the_device_does_not_come_up(
    settings: AndroidWorldSettings, tmp_path: Path, said: str, refusal: str
) -> None:
    config = Path(settings.android_avd_home) / "Base.avd" / "config.ini"
    config.write_text("AvdId=Base\nhw.lcd.width = 1080\nhw.lcd.height=2400\n")
    log_adb(tmp_path, settings, f"*'wm size reset') ;;\n*'wm size') printf '{said}' ;;\n")
    with closing(EmulatorProcess(settings, 4)) as host:
        if not refusal:
            host.start()
        else:
            with pytest.raises(DeviceError, match=refusal):
                host.start()
    assert "wm size reset" in (tmp_path / "adb_log").read_text()


@pytest.mark.parametrize(
    ("said", "refusal", "is_final"),
    [
        ("error: device unauthorized.", "adb may not use the emulator; adb shell: error: device unauthorized", True),
        ("error: device offline", "adb finds the emulator offline; adb shell: error: device offline", False),
    ],
)
def test_an_emulator_that_adb_refuses_fails_early_in_adbs_words(
    settings: AndroidWorldSettings, said: str, refusal: str, is_final: bool
) -> None:
    Path(settings.adb_path).write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    patient = settings.model_copy(update={"boot_timeout_s": 12})
    began = time.monotonic()
    with closing(EmulatorProcess(patient, 4)) as host, pytest.raises(DeviceError, match=refusal) as caught:
        host.start()
    assert time.monotonic() - began < 8
    assert is_misconfigured(caught.value) is is_final


# ---- setting the base device up --------------------------------------------------------------------------------------


class SettingUp:
    """Stands for the package while the base device is set up."""

    snapshots = "com.android.camera2\ncom.google.android.dialer\n"

    def __init__(self, temporary: Path) -> None:
        self.connected: list[bool] = []
        made.append(self)
        assert not temporary.exists() or temporary.is_dir()

    def connect(self, _endpoint: Any, *, set_up_apps: bool) -> None:
        self.connected.append(set_up_apps)

    def adb(self, *words: str) -> str:
        assert words == ("shell", "ls", "/data/data/android_world/snapshots")
        return self.snapshots

    def disconnect(self) -> None:
        pass


made: list[SettingUp] = []


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> type[SettingUp]:
    class Package(SettingUp):
        pass

    made.clear()
    monkeypatch.setattr(base_setup, "check_package", lambda: None)
    monkeypatch.setattr(base_setup, "AndroidWorldPackage", Package)
    monkeypatch.setattr(
        "slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process._SHUT_DOWN_TIMEOUT_S", 0.1
    )
    return Package


def test_the_base_device_itself_is_booted_set_up_and_shut_down(
    settings: AndroidWorldSettings, tmp_path: Path, set_up: type[SettingUp]
) -> None:
    log_adb(tmp_path, settings)
    kept = base_setup.set_up_base_device(settings)
    assert kept == set_up.snapshots.split()
    assert made[0].connected == [True]
    words, _ = how_it_was_started(tmp_path)
    assert words[words.index("-avd") + 1] == "Base"
    assert not list(Path(settings.android_avd_home).glob("orphan_test_*"))
    assert "reboot -p" in (tmp_path / "adb_log").read_text()


def how_it_was_started(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments of the only emulator and its environment; adb calls it booted before it has written them."""
    deadline = time.monotonic() + 20
    while not (folder / "written").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (start,) = (folder / "starts").read_text().splitlines()
    lines = (line.partition("=") for line in (folder / "environment").read_text().splitlines())
    return start.split(), {name: value for name, _, value in lines}


def test_an_emulator_that_never_boots_is_ended_and_can_be_started_again(
    settings: AndroidWorldSettings, tmp_path: Path
) -> None:
    records = tmp_path / "records"
    Path(settings.adb_path).write_text("#!/bin/sh\nexit 0\n")
    with closing(EmulatorProcess(settings, 0)) as host:
        for _ in range(2):
            with pytest.raises(DeviceError, match=r"was not up after 2\.4 s"):
                host.start()
            assert recorded(records) == []
    assert len((tmp_path / "starts").read_text().splitlines()) == 2
