"""The state of the simulated phone before an episode: each part that an episode spoils is found by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.android_world.restored_state import SNAPSHOTS, StateCheck, StatePart

NOTES = "net.gsantner.markor"


class Phone:
    """Stands for ``AdbServer``. ``added`` is said besides, of what the simulated phone has not."""

    def __init__(self) -> None:
        self._adb = AdbShell(EmulatorState())
        self.added = ""

    def run(self, *words: str, timeout_s: float = 0.0) -> tuple[bool, str]:
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
    assert list(spoiled) == ["accounts", f"apps:{NOTES}", "settings", "storage"]
    assert "agent@example.org" in spoiled["accounts"]
    assert "files/notes.db" in spoiled[f"apps:{NOTES}"]
    assert "screen_brightness=7" in spoiled["settings"]
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


@pytest.mark.parametrize("said", ["error: device offline", "sh: syntax error: echo @settings; echo @end"])
def test_a_state_that_cannot_be_read_is_an_error_in_adbs_words(tmp_path: Path, said: str) -> None:
    class Refusing(Phone):
        def run(self, *words: str, timeout_s: float = 0.0) -> tuple[bool, str]:
            return False, said

    phone: Any = Refusing()
    with pytest.raises(DeviceError, match=f"the state of phone cannot be read: {said}"):
        StateCheck(file=tmp_path / "state").compare(phone, "phone", [])
