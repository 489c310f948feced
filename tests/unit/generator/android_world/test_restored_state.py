"""The state of the simulated phone before an episode: each part that an episode spoils is found by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world import restored_state
from slime_plugins.rollout_buffer.generator.android_world.restored_state import SNAPSHOTS, StateCheck, StatePart

NOTES = "net.gsantner.markor"


class Phone:
    """Stands for ``AdbServer``. ``added`` is said besides, of what the simulated phone has not."""

    def __init__(self) -> None:
        self._adb = AdbShell(EmulatorState())
        self.added = ""
        self.refuses = ""
        self.said: list[str] = []

    def run(self, *words: str, timeout_s: float = 0.0) -> tuple[bool, str]:
        self.said.append(words[-1])
        if self.refuses and "settings put" in words[-1]:
            return False, self.refuses
        output = self._adb.run(words[2:])
        return output.code == 0, output.text.decode().replace("@accounts\n", f"@accounts\n{self.added}\n")

    def shell(self, script: str) -> None:
        assert self.run("-s", "phone", "shell", script)[0], script


@pytest.fixture
def phone() -> Any:
    made = Phone()
    for folder in (SNAPSHOTS, "/data/data"):
        made.shell(f"mkdir -p {folder}/{NOTES}/files; echo a note > {folder}/{NOTES}/files/notes.db")
    return made


@pytest.mark.parametrize("snapshots", ["", SNAPSHOTS])
def test_an_episode_that_spoils_a_part_of_the_state_is_caught_and_its_restore_is_seen(
    phone: Any, tmp_path: Path, snapshots: str
) -> None:
    check = StateCheck(file=tmp_path / "state", snapshots=snapshots)

    def changed() -> dict[str, str]:
        return check.compare(phone, "phone", [NOTES, "not.installed"])

    assert changed() == changed() == {}
    notes = f"/data/data/{NOTES}/files/notes.db"
    phone.shell(f"echo more > {notes}; touch /sdcard/Download/photo.jpg; settings put system screen_brightness 7")
    phone.added = "Account {name=agent@example.org, type=mail}"
    spoiled = changed()
    assert list(spoiled) == ["accounts", f"apps:{NOTES}", "settings:system", "storage"]
    assert "agent@example.org" in spoiled["accounts"]
    assert "files/notes.db" in spoiled[f"apps:{NOTES}"]
    assert "screen_brightness=7" in spoiled["settings:system"]
    assert "/sdcard/Download/photo.jpg" in spoiled["storage"]
    phone.shell(f"echo a note > {notes}; rm /sdcard/Download/photo.jpg; settings put system screen_brightness 102")
    phone.added = ""
    assert changed() == {}


def test_the_clock_is_compared_where_it_is_required(phone: Any, tmp_path: Path) -> None:
    check = StateCheck(file=tmp_path / "state", required=frozenset({StatePart.CLOCK}))
    assert check.compare(phone, "phone", []) == {}
    phone.shell("date 0102030420.00")
    assert list(check.compare(phone, "phone", [])) == ["clock"]


def test_what_is_set_for_every_task_or_changes_by_itself_is_no_change(phone: Any, tmp_path: Path) -> None:
    check = StateCheck(file=tmp_path / "state")
    assert check.compare(phone, "phone", []) == {}
    phone.shell(
        "settings put global boot_count 9; settings put system time_12_24 12; settings put global auto_time 1;"
        "touch /sdcard/Android/data.log"
    )
    assert check.compare(phone, "phone", []) == {}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_state, "_PAUSES_S", (0.0, 0.0))


SWITCHED = """
svc wifi disable; svc bluetooth disable; settings put global airplane_mode_on 1; settings put system screen_brightness 7
settings delete system screen_brightness_mode; settings put secure added_by_the_agent "two words"
settings put global zen_mode 1
"""


def test_settings_and_the_clock_are_written_back_through_androids_services(phone: Any, tmp_path: Path) -> None:
    phone.shell('settings put global zen_mode 0; settings put secure name "it\'s two"')
    check = StateCheck(file=tmp_path / "state", required=frozenset({StatePart.CLOCK}))
    assert check.compare(phone, "phone", []) == {}
    phone.shell(f"date 0102030420.00; settings delete secure name; {SWITCHED}")
    changed = check.compare(phone, "phone", [])
    assert [*changed] == ["clock", "settings:global", "settings:secure", "settings:system"]
    assert check.put_back(phone, "phone", changed, sets_clock=True) == {}
    assert check.compare(phone, "phone", []) == {}
    written = [command.strip() for command in phone.said[-3].split(">/dev/null")]
    assert {"; svc bluetooth enable", "; cmd notification set_dnd off"} <= set(written)
    assert written.index("; cmd connectivity airplane-mode disable") < written.index("; svc wifi enable")


@pytest.mark.parametrize(
    ("recorded", "found"),
    [(["note=hello", "world"], ["note=bye", "$(reboot);id=1"]), ([], ["$(reboot)=1"]), ([], ["two words=1"])],
)
def test_no_line_of_a_longer_value_becomes_a_command(recorded: list[str], found: list[str]) -> None:
    assert list(restored_state._commands("settings:system", recorded, found)) == []


def test_what_cannot_be_put_back_is_named_with_the_reason(phone: Any, tmp_path: Path) -> None:
    check = StateCheck(file=tmp_path / "state", required=frozenset({StatePart.CLOCK}))
    assert check.compare(phone, "phone", []) == {}
    phone.shell("date 0102030420.00; settings put global adb_enabled 0; touch /sdcard/Download/photo.jpg")
    left = check.put_back(phone, "phone", check.compare(phone, "phone", []), sets_clock=False)
    assert [*left] == ["storage", "clock", "settings:global"]
    assert "(not put back: its clock must not be set, or only by root)" in left["clock"]
    assert left["settings:global"].startswith("adb_enabled=0 (not put back"), "adb itself is never switched"
    phone.shell("settings put system volume_ring 0")
    left = check.put_back(phone, "phone", check.compare(phone, "phone", []), sets_clock=False)
    assert left["settings:system"].startswith("volume_ring=0"), "the simulated phone has no service of volumes"
    assert "cmd media_session volume --stream 2 --set 5 >/dev/null" in phone.said
    phone.shell("settings put system screen_brightness 7")
    phone.refuses = "SecurityException: needs WRITE_SECURE_SETTINGS"
    left = check.put_back(phone, "phone", check.compare(phone, "phone", []), sets_clock=False)
    assert left["settings:system"].endswith(f"(not put back: {phone.refuses})")


@pytest.mark.parametrize("said", ["error: device offline", "sh: syntax error: echo @settings; echo @end"])
def test_a_state_that_cannot_be_read_is_an_error_in_adbs_words(tmp_path: Path, said: str) -> None:
    class Refusing(Phone):
        def run(self, *words: str, timeout_s: float = 0.0) -> tuple[bool, str]:
            return False, said

    phone: Any = Refusing()
    with pytest.raises(DeviceError, match=f"the state of phone cannot be read: {said}"):
        StateCheck(file=tmp_path / "state").compare(phone, "phone", [])
