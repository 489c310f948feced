"""Attached devices behind an adb that drops, refuses, boots slowly and renames them; inventories with mistakes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import TimeoutExpired
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from slime_plugins.rollout_buffer.cli.doctor import Examination, examine
from slime_plugins.rollout_buffer.cli.host_checks import State
from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.devices.kinds import is_misconfigured
from slime_plugins.rollout_buffer.devices.leased_device import NOT_RESTORED
from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world import adb as attached_adb
from slime_plugins.rollout_buffer.generator.android_world import restored_state
from slime_plugins.rollout_buffer.generator.android_world.attached import host as attached_host
from slime_plugins.rollout_buffer.generator.android_world.attached.host import AttachedHost
from slime_plugins.rollout_buffer.generator.android_world.attached.inventory import inventory_of
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings, read_settings
from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
from slime_plugins.rollout_buffer.generator.android_world.emulator.screen_stability import StabilityTimeouts
from slime_plugins.rollout_buffer.generator.android_world.restored_state import StateCheck, StatePart, differences, read
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind
from slime_plugins.rollout_buffer.testing.android_host_conformance import AndroidHostContract
from slime_plugins.rollout_buffer.testing.device_conformance import DeviceContract
from tests import bad_adb
from tests.adb_phone import UNKNOWN_TASK, AdbPackage
from tests.bad_adb import NO_SPACE, make_adb, set_devices
from tests.processes import write_program

ROOT = Path(__file__).resolve().parents[4]
PHONE = {"serial": "R58M1", "restore": "apps"}
Farm = Callable[..., AndroidWorldSettings]


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Farm:
    """Returns settings with an inventory of these entries, and ``settings`` besides."""
    monkeypatch.setenv("ROLLOUT_BUFFER_PORT_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr(attached_host, "_RECONNECT_TIMEOUT_S", 0.6)
    monkeypatch.setattr(attached_host, "_POLL_S", 0.05)
    monkeypatch.setattr(restored_state, "_PAUSES_S", (0.0,))

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        """adb in this process: the program itself would be started 600 times."""
        code, text = bad_adb.answer([str(tmp_path), *command[1:]])
        said = (b"", text.encode())
        return subprocess.CompletedProcess(command, code, said[code == 0], said[code != 0])

    monkeypatch.setattr(attached_adb, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutExpired))
    adb = make_adb(tmp_path, ROOT)
    set_devices(tmp_path, R58M1={"state": "device"})

    def made(settings: str = "", **entries: Any) -> AndroidWorldSettings:
        (tmp_path / "phones.yaml").write_text(yaml.safe_dump({"devices": entries or {"bench": PHONE}}))
        config = tmp_path / "farm.yaml"
        config.write_text(
            f"device: attached\ndevice_options: {{inventory: {tmp_path / 'phones.yaml'}}}\nadb_path: {adb}\n"
            f"boot_timeout_s: 8\n{settings}\n"
        )
        return read_settings(config)

    return made


@pytest.fixture
def host(farm: Farm) -> Iterator[AttachedHost]:
    made = AttachedHost(farm(), 0)
    yield made
    made.close()


class TestAttachedHost(AndroidHostContract):
    """Restored by clearing the apps; settings and the clock are written back."""

    checked_parts: ClassVar[tuple[str, ...]] = tuple(map(str, StatePart))
    restored_parts: ClassVar[tuple[str, ...]] = ("apps", "clock", "settings", "storage")
    way: ClassVar[Any] = "apps"

    @pytest.fixture
    def host(self, farm: Farm, tmp_path: Path) -> Iterator[AttachedHost]:
        self.folder = tmp_path
        way = json.loads(json.dumps(self.way).replace("FOLDER", str(tmp_path)))
        made = AttachedHost(farm(bench=PHONE | {"restore": way, "check_restored": self.checked_parts}), 0)
        yield made
        made.close()

    def break_down(self, host: AttachedHost) -> None:
        set_devices(self.folder, R58M1={"state": ""})

    def spoil(self, host: AttachedHost, part: str) -> None:
        names = {"apps": "apps:org.example.notes", "settings": "settings:system"}
        set_devices(self.folder, R58M1={"state": "device", "spoiled": [names.get(part, part)]})

    def mend(self, host: AttachedHost, part: str) -> None:
        set_devices(self.folder, R58M1={"state": "device"})


class TestHostOfAnEmulatorWithASnapshot(TestAttachedHost):
    restored_parts: ClassVar[tuple[str, ...]] = TestAttachedHost.checked_parts
    way: ClassVar[Any] = {"snapshot": "clean"}


class TestHostThatACommandRestores(TestAttachedHost):
    restored_parts: ClassVar[tuple[str, ...]] = TestAttachedHost.checked_parts
    way: ClassVar[Any] = {"command": ["sed", "-i", 's/"spoiled": .*]/"spoiled": []/', "FOLDER/devices.json"]}


class TestAttachedDevice(DeviceContract):
    task, unknown_task = ("Tap", 0), UNKNOWN_TASK

    @pytest.fixture
    def device(self, farm: Farm, tmp_path: Path) -> Iterator[AndroidWorldDevice]:
        settings = farm()
        package: Any = AdbPackage(tmp_path)
        times = StabilityTimeouts(change_s=0.0, still_s=1.0, between_s=0.001)
        made = AndroidWorldDevice(settings, 0, AttachedHost(settings, 0), package=package, times=times)
        yield made
        made.close()

    def harmless_action(self) -> Action:
        return Action(kind=ActionKind.WAIT, duration_s=0.01)


def adb_log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


# ---- an adb at its worst ---------------------------------------------------------------------------------------------


def test_a_device_that_dropped_is_connected_again_before_it_is_given_up(tmp_path: Path, farm: Farm) -> None:
    address = "10.0.0.7:5555"
    set_devices(tmp_path, **{address: {"state": "device"}})
    host = AttachedHost(farm(cloud={"connect": address, "restore": "apps"}), 0)
    assert host.start().serial == address
    for state in ("", "offline"):
        set_devices(tmp_path, **{address: {"state": state, "comes_back": True}})
        assert not host.check_alive()
        assert host.check_alive()
    set_devices(tmp_path, **{address: {"state": ""}})
    with pytest.raises(DeviceError, match=f"failed to connect to {address}: refused; adb lists no device"):
        host.check_alive()
    host.close()


def test_a_phone_on_usb_that_is_offline_is_reconnected(host: AttachedHost, tmp_path: Path) -> None:
    set_devices(tmp_path, R58M1={"state": "offline", "comes_back": True})
    assert host.start().serial == "R58M1"


@pytest.mark.parametrize("state", ["unauthorized", "no permissions (user in plugdev group)"])
def test_a_device_that_adb_may_not_use_is_given_up_at_once_in_adbs_words(
    host: AttachedHost, tmp_path: Path, state: str
) -> None:
    set_devices(tmp_path, R58M1={"state": state})
    with pytest.raises(DeviceError) as caught:
        host.start()
    assert caught.value.message == f"adb may not use the device bench: R58M1 {state}"
    assert is_misconfigured(caught.value)


def test_a_device_stands_still_between_actions(host: AttachedHost, tmp_path: Path) -> None:
    host.start()
    scales = ("window_animation_scale", "transition_animation_scale", "animator_duration_scale")
    assert {f"-s R58M1 shell settings put global {scale} 0" for scale in scales} <= set(adb_log(tmp_path))


def test_a_slow_boot_is_waited_for_and_a_full_disk_is_said(host: AttachedHost, tmp_path: Path) -> None:
    set_devices(tmp_path, R58M1={"state": "device", "slow_boot": 3})
    host.start()
    host.close()
    set_devices(tmp_path, R58M1={"state": "device", "is_full": True})
    with pytest.raises(DeviceError, match=NO_SPACE):
        host.start()


def test_a_device_whose_serial_moved_is_found_by_its_name_and_another_is_never_taken_for_it(
    host: AttachedHost, tmp_path: Path
) -> None:
    host.start()
    set_devices(tmp_path, other={"state": "device"}, moved={"state": "device", "name": "bench"})
    assert not host.check_alive()
    assert host.start().serial == "moved"
    set_devices(tmp_path, other={"state": "device"})
    with pytest.raises(DeviceError, match="adb lists other device, not R58M1"):
        host.check_alive()


def test_a_failed_command_restarts_no_adb_server_that_others_use(host: AttachedHost, tmp_path: Path) -> None:
    endpoint = host.start()
    for verb in ("kill-server", "start-server", "devices"):
        subprocess.run([endpoint.adb_path, "-P", "5037", verb], check=True, capture_output=True)
    assert [line for line in adb_log(tmp_path) if "server" in line] == []
    assert adb_log(tmp_path)[-1] == "devices"


def test_two_workers_never_share_a_device(host: AttachedHost, farm: Farm) -> None:
    host.start()
    second = AttachedHost(farm(), 0)
    with pytest.raises(DeviceError, match="bench is used by another device worker"):
        second.start()
    other_name = AttachedHost(farm(phone=PHONE | {"adb_server": "localhost:5037"}), 0)
    with pytest.raises(DeviceError, match="phone is used by another device worker"):
        other_name.start()
    host.close()
    second.start()
    second.close()


# ---- restoring -------------------------------------------------------------------------------------------------------


def test_apps_are_cleared_with_the_shared_storage_or_the_reason_is_said(host: AttachedHost, tmp_path: Path) -> None:
    host.start()
    assert host.restore(["org.notes"])
    assert "-s R58M1 shell pm clear org.notes" in adb_log(tmp_path)
    assert any(line.startswith("-s R58M1 shell rm -rf ") and "/sdcard/Download/*" in line for line in adb_log(tmp_path))
    set_devices(tmp_path, R58M1={"state": "device", "cannot_clear": True})
    with pytest.raises(DeviceError, match=r"pm clear org.notes: Failed"):
        host.restore(["org.notes"])


@pytest.mark.parametrize(
    ("way", "problem"),
    [
        ({"snapshot": "clean"}, ""),
        ({"snapshot": "lost"}, "KO: no such snapshot"),
        ({"command": ["sh", "-c", 'test "$ANDROID_SERIAL $ROLLOUT_BUFFER_DEVICE_NAME" = "R58M1 bench"']}, ""),
        ({"command": ["sh", "-c", "echo no such image >&2; exit 3"]}, "exited with code 3: no such image"),
    ],
)
def test_a_snapshot_or_a_command_of_the_owners_restores_and_connections_are_made_anew(
    farm: Farm, way: dict[str, Any], problem: str
) -> None:
    host = AttachedHost(farm(bench=PHONE | {"restore": way}), 0)
    host.start()
    if problem:
        with pytest.raises(DeviceError, match=problem):
            host.restore([])
    else:
        assert not host.restore([])
    host.close()


def test_a_device_that_shares_its_hosts_kernel_is_never_asked_to_set_a_clock(farm: Farm, tmp_path: Path) -> None:
    settings = farm(redroid=PHONE | {"shares_host_kernel": True, "capabilities": ["clock", "root"]})
    package: Any = AdbPackage(tmp_path)
    device = AndroidWorldDevice(settings, 0, AttachedHost(settings, 0), package=package)
    with pytest.raises(EnvironmentSetupError, match="Tap needs clock, which R58M1 does not have"):
        device.reset("Tap", 0)
    device.close()
    assert not any(" date" in line for line in adb_log(tmp_path))


def test_the_device_s_shell_tells_each_part_that_an_episode_spoiled(tmp_path: Path) -> None:
    """The script runs in a real shell, with programs in the place of Android's."""
    data, storage, said, programs = (tmp_path / name for name in ("data", "sdcard", "said", "bin"))
    app, snapshot = data / "org.notes", data / "snapshots" / "org.notes"
    for folder in (app, snapshot, storage, said):
        folder.mkdir(parents=True)
    for program, output in {"settings": "brightness=3\n", "dumpsys": "Account {name=a}\nsync 7\n"}.items():
        (said / program).write_text(output)
        write_program(programs / program, f'test "$2" = global || cat {said / program}')

    def state(snapshots: str = "") -> dict[str, list[str]]:
        check = StateCheck(file=tmp_path / "state", required=frozenset(StatePart), snapshots=snapshots)
        script = check.script(["org.notes", "not.there"])
        script = script.replace("/data/data/", f"{data}/").replace("/sdcard/", f"{storage}/")
        paths = {"PATH": f"{programs}:{os.environ['PATH']}"}
        return read(subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env=paths).stdout)

    def changed_by(file: Path, text: str) -> list[str]:
        before = state()
        file.write_text(text)
        return list(differences(before, state()))

    assert sorted(state()) == [
        "accounts",
        "apps:org.notes",
        "clock",
        *(f"settings:{table}" for table in ("global", "secure", "system")),
        "storage",
    ]
    assert changed_by(said / "settings", "brightness=3\nboot_count=5\nauto_time=0\n") == []
    assert changed_by(said / "settings", "brightness=4\n") == ["settings:secure", "settings:system"]
    assert changed_by(said / "dumpsys", "Account {name=a}\nsync 8\n") == []
    assert changed_by(said / "dumpsys", "Account {name=b}\n") == ["accounts"]
    assert changed_by(storage / "a file", "x") == ["storage"]
    assert changed_by(app / "notes.db", "x") == ["apps:org.notes"]
    assert differences(state() | {"clock": ["-3600"]}, state()).keys() == {"clock"}
    (snapshot / "notes.db").write_text("x")
    of_snapshots = state(snapshots="/data/data/snapshots")
    assert of_snapshots["apps:org.notes"] == of_snapshots["snapshot:org.notes"] != []


def test_what_is_not_restored_is_counted_or_refused_where_the_owner_requires_it(farm: Farm, tmp_path: Path) -> None:
    def device_with(*required: str) -> AndroidWorldDevice:
        settings, package = farm(bench=PHONE | {"check_restored": required}), AdbPackage(tmp_path)
        times = StabilityTimeouts(change_s=0.0, still_s=1.0, between_s=0.001)
        return AndroidWorldDevice(settings, 0, AttachedHost(settings, 0), package=package, times=times)  # type: ignore[arg-type]

    for part in ("apps:org.example.notes", "storage", "settings:system", "accounts"):
        device = device_with("clock")
        set_devices(tmp_path, R58M1={"state": "device"})
        assert device.reset("Tap", 0).details[NOT_RESTORED] == ""
        set_devices(tmp_path, R58M1={"state": "device", "spoiled": [part]})
        assert device.reset("Tap", 0).details[NOT_RESTORED] == ("accounts" if part == "accounts" else "")
        set_devices(tmp_path, R58M1={"state": "device", "spoiled": [part], "stays": True})
        assert device.reset("Tap", 0).details[NOT_RESTORED] == part
        device.close()
        device = device_with(part.partition(":")[0])
        with pytest.raises(DeviceError, match=f"its state differs in {part} \\(.*(clean|102)") as caught:
            device.reset("Tap", 0)
        assert caught.value.detail["fault"] == NOT_RESTORED
        assert sum("shell rm -rf /sdcard" in line for line in adb_log(tmp_path)[-20:]) == 2
        (state,) = (tmp_path / "locks").glob("*.state")
        state.unlink()
        assert device.reset("Tap", 0).details[NOT_RESTORED] == ""
        device.close()
        state.unlink()


# ---- the inventory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("devices: {}", "phones.yaml: line 1: devices: Dictionary should have at least 1 item"),
        ("devices:\n  a:\n    restore: apps", "line 2: devices.a: needs either serial, as `adb devices` shows it, or"),
        ("devices:\n  a:\n    serial: x", "line 2: devices.a.restore: Field required"),
        (
            "devices:\n  a:\n    serial: x\n    restore: all",
            "line 4: devices.a.restore: must be apps, {snapshot: NAME}",
        ),
        ("devices:\n  a: {connect: host, restore: apps}", "line 2: devices.a.connect: must be HOST:PORT, not 'host'"),
        ("devices:\n  a: {serial: x, restore: apps}\n  b: {serial: x, restore: apps}", "a and b are the same device x"),
        ("devices:\n  a: {serial: x, restore: apps, sereal: y}", "devices.a.sereal is not a setting"),
        ("devices:\n  a: {serial: x, restore: apps, capabilities: [grpc]}", "grpc needs console_port and grpc_port"),
        ("devices:\n  a: {serial: x, restore: apps, capabilities: [fly]}", "devices.a.capabilities.0: Input should be"),
    ],
)
def test_a_mistake_in_the_inventory_is_one_sentence_with_its_line(
    farm: Farm, tmp_path: Path, text: str, sentence: str
) -> None:
    farm()
    (tmp_path / "phones.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings(tmp_path / "farm.yaml")
    assert sentence in caught.value.message


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "device: attached needs inventory"),
        ({"inventry": "/x"}, "device: attached needs inventory, the path of a YAML file, not inventry"),
        ({"inventory": "phones.yaml"}, "must be an absolute path"),
        ({"inventory": "/nowhere/phones.yaml"}, "cannot be read"),
    ],
)
def test_options_that_the_kind_does_not_take_are_refused(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        AndroidWorldSettings(device="attached", device_options=options)
    if options:
        with pytest.raises(ValueError, match="are not accepted: simulated has no options"):
            AndroidWorldSettings(device_options=options)


def test_the_documented_inventory_is_read_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "android_farm.md").read_text()
    written = next(block for block in page.split("```yaml\n")[1:] if block.startswith("devices:")).partition("```")[0]
    (tmp_path / "phones.yaml").write_text(written)
    settings = AndroidWorldSettings(device="attached", device_options={"inventory": str(tmp_path / "phones.yaml")})
    assert list(inventory_of(settings.device_options)) == ["bench-1", "cloud-7", "emulator-of-ci", "redroid-1"]


def test_a_farm_has_as_many_workers_as_its_inventory_and_never_more(farm: Farm) -> None:
    two = {"a": PHONE, "b": PHONE | {"serial": "R58M2"}}
    settings = farm(**two)
    assert (settings.num_workers, settings.resources_per_worker.num_cpus) == (2, 1)
    with pytest.raises(ConfigError, match="ask for 3 devices, and the inventory has 2"):
        farm("spare_devices: 1", **two)


def test_every_node_gets_the_entries_themselves(farm: Farm, tmp_path: Path) -> None:
    pool = farm().for_devices()
    (tmp_path / "phones.yaml").unlink()
    options = json.loads(json.dumps(pool.device_options))
    host = AttachedHost(AndroidWorldSettings.model_validate(options), 0)
    assert Capability.CLOCK in host.start().capabilities
    host.close()
    assert pool.prepare == ""


def test_the_doctor_says_what_adb_says_of_each_device(farm: Farm, tmp_path: Path) -> None:
    set_devices(tmp_path, R58M1={"state": "device"}, R58M2={"state": "unauthorized"})
    away = {"connect": "10.0.0.5:5555", "restore": "apps"}
    settings = farm(a=PHONE, b=PHONE | {"serial": "R58M2"}, c=PHONE | {"serial": "R58M3"}, d=away)
    found = {one.name: one for one in examine(Examination(settings=settings, data_dir=tmp_path))}
    states = {name: (found[f"device {name}"].state, found[f"device {name}"].detail) for name in "abcd"}
    assert states == {
        "a": (State.OK, "device"),
        "b": (State.MISSING, "unauthorized"),
        "c": (State.MISSING, "adb does not list R58M3"),
        "d": (State.MISSING, "failed to connect to 10.0.0.5:5555: refused"),
    }
    assert "allow USB debugging" in found["device b"].remedy
    assert "let its adb listen at 10.0.0.5:5555" in found["device d"].remedy
    assert "tasks of b" not in found
    assert found["tasks of a"].detail == (
        "plays 110 (AudioRecorderRecordAudio, AudioRecorderRecordAudioWithFileName, …) of the 116 tasks; "
        "grpc is missing for 2 (ClockStopWatchRunning, ContactsNewContactDraft); sms is missing for 4 (SimpleSmsReply, "
        "SimpleSmsReplyMostRecent, SimpleSmsResend, SimpleSmsSendReceivedAddress)"
    )
    assert "KVM" not in found
    assert "package android_world" in found


def test_the_doctor_says_which_tasks_each_missing_capability_costs(farm: Farm, tmp_path: Path) -> None:
    ports = {"console_port": 5554, "grpc_port": 8554}
    shared = PHONE | ports | {"shares_host_kernel": True}
    every = {"capabilities": [str(one) for one in Capability if one != Capability.SMS]}

    def tasks_of(**entry: Any) -> tuple[State, str]:
        settings = farm(a=entry)
        found = {one.name: one for one in examine(Examination(settings=settings, data_dir=tmp_path))}
        return found["tasks of a"].state, found["tasks of a"].detail

    assert tasks_of(**PHONE, **ports, **every) == (
        State.OK,
        "plays 112 (AudioRecorderRecordAudio, AudioRecorderRecordAudioWithFileName, …) of the 116 tasks; sms is "
        "missing for 4 (SimpleSmsReply, SimpleSmsReplyMostRecent, SimpleSmsResend, "
        "SimpleSmsSendReceivedAddress)",
    )
    assert tasks_of(**shared) == (
        State.OK,
        "plays 4 (BrowserDraw, BrowserMaze, BrowserMultiply, RetroPlaylistDuration) of the 116 tasks; clock is missing "
        "for 112 (AudioRecorderRecordAudio, AudioRecorderRecordAudioWithFileName, …)",
    )
