"""What adb is told about the simulated phone is what its screens do and show, and the other way round."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.widgets import WidgetKind

CALENDAR = "/data/data/com.simplemobiletools.calendar.pro/databases"
NOTES = "/sdcard/Documents/Markor"


class Adb:
    """The phone at the other end of the cable."""

    def __init__(self) -> None:
        self.phone = EmulatorState()
        self._adb = AdbShell(self.phone)

    def run(self, *arguments: str) -> str:
        output = self._adb.run(arguments)
        assert output.code == 0, output
        return output.text.decode()

    def shell(self, *words: str) -> str:
        return self.run("shell", *words)

    def fails(self, *arguments: str) -> str:
        output = self._adb.run(arguments)
        assert output.code != 0, output
        return output.text.decode()

    def tap_text(self, text: str, kind: WidgetKind = WidgetKind.TEXT) -> None:
        widgets = self.phone.ui.screen().widgets
        x, y = next(one.bounds.center for one in widgets if one.text == text and one.kind is kind)
        self.shell("input", "tap", str(x), str(y))


@pytest.fixture
def adb() -> Iterator[Adb]:
    phone = Adb()
    yield phone
    phone.phone.close()


def test_a_switch_that_was_tapped_is_what_settings_get_says(adb: Adb) -> None:
    adb.shell("am", "start", "", "-W", "-n", "com.android.settings/.Settings")
    adb.tap_text("Network & internet")
    adb.tap_text("Wi-Fi")
    assert adb.shell("settings", "get", "global", "wifi_on") == "0\n"
    adb.shell("svc", "wifi", "enable")
    assert adb.shell("settings get global wifi_on") == "1\n"


def test_a_typed_word_stands_in_the_field_and_no_enter_follows(adb: Adb) -> None:
    adb.shell("am", "start", "-n", "net.gsantner.markor/.activity.MainActivity")
    adb.tap_text("", WidgetKind.ICON)
    for words in ("a\\ b", "c%sd", "\\(e\\)"):
        adb.shell("input", "text", words)
    adb.shell("input", "keyevent", "KEYCODE_DEL")
    field = next(one for one in adb.phone.ui.screen().widgets if one.kind is WidgetKind.FIELD)
    assert "".join(field.lines) == "a bc d(e"
    adb.shell("input", "keycombination", "113", "29", "&&", "input", "keyevent", "67")
    field = next(one for one in adb.phone.ui.screen().widgets if one.kind is WidgetKind.FIELD)
    assert "".join(field.lines) == ""


def test_the_activity_in_front_is_the_only_visible_task(adb: Adb) -> None:
    adb.shell("am", "start", "-n", "com.google.android.deskclock/com.android.deskclock.DeskClock")
    visible = adb.shell("am", "stack", "list", "|", "grep", "-E", "visible=true")
    component = "com.google.android.deskclock/com.android.deskclock.DeskClock"
    assert visible.count("\n") == 1
    assert visible.endswith(f"topActivity=ComponentInfo{{{component}}}\n")
    adb.shell("am", "force-stop", "com.google.android.deskclock")
    assert "nexuslauncher" in adb.shell("am stack list | grep visible=true")


def test_a_pushed_file_is_listed_read_and_pulled(adb: Adb, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(b"caf\xc3\xa9\n")
    adb.run("push", str(source), f"{NOTES}/my note.txt")
    assert adb.shell("ls", NOTES) == "my note.txt\n"
    assert adb.shell("cat", f"{NOTES}/my\\ note.txt") == "café\n"
    line = adb.shell(f"ls {NOTES} -ll -au").splitlines()[-1]
    assert line.split(None, 8)[4] == "6"
    assert line.split(None, 8)[8] == "my note.txt"
    adb.run("pull", f"{NOTES}/my note.txt", str(target))
    assert target.read_bytes() == source.read_bytes()
    assert adb.fails("pull", "/sdcard/none", str(target))


def test_a_database_pulled_changed_removed_and_pushed_is_what_the_app_shows(adb: Adb, tmp_path: Path) -> None:
    local = tmp_path / "events.db"
    adb.run("pull", f"{CALENDAR}/events.db", str(local))
    with sqlite3.connect(local) as connection:
        connection.execute("INSERT INTO events (start_ts, end_ts, title) VALUES (1697400000, 1697403600, 'Lunch')")
    connection.close()
    adb.shell("rm", "-r", f"{CALENDAR}/*")
    assert adb.shell("ls", CALENDAR) == ""
    adb.run("push", str(local), f"{CALENDAR}/events.db")
    adb.shell("am", "start", "-n", "com.simplemobiletools.calendar.pro/.activities.MainActivity")
    assert "Lunch" in [widget.text for widget in adb.phone.ui.screen().widgets]


def test_messages_sent_and_received_are_rows_newest_first(adb: Adb) -> None:
    adb.run("emu", "sms", "send", "+15551234", "first")
    adb.run("emu", "sms", "send", "+15551234", "second, with a comma")
    rows = adb.shell("content query --uri content://sms/inbox").splitlines()
    assert ["body=second, with a comma" in rows[0], "body=first" in rows[1]] == [True, True]
    assert adb.shell("content query --uri content://sms/sent") == "No result found.\n"
    database = "/data/data/com.android.providers.telephony/databases/mmssms.db"
    assert adb.shell(f'sqlite3 {database} "SELECT count(*) FROM sms;"') == "2\n"
    adb.shell(f'sqlite3 {database} "DELETE FROM sms;"')
    assert adb.shell("content query --uri content://sms/inbox") == "No result found.\n"


def test_an_intent_fills_the_form_and_saving_makes_the_contact(adb: Adb) -> None:
    adb.shell('am start -a android.intent.action.INSERT -t vnd.android.cursor.dir/contact -e name "Ada L" -e phone 55')
    adb.tap_text("Save", WidgetKind.BUTTON)
    query = "content query --uri content://contacts/phones/ --projection display_name:number"
    assert adb.shell(query) == "Row: 0 display_name=Ada L, number=55\n"
    adb.shell("pm", "clear", "com.android.providers.contacts")
    assert adb.shell(query) == "No result found.\n"


def test_the_screen_is_captured_at_its_own_size(adb: Adb) -> None:
    output = AdbShell(adb.phone).run(["exec-out", "screencap", "-p"])
    assert output.text.startswith(b"\x89PNG")
    assert "1080x2400" in adb.shell("wm size")
    assert "logicalFrame=[0, 0, 1080, 2400]" in adb.shell("dumpsys input | grep logicalFrame")


def test_uiautomator_writes_the_elements_of_a_screen_that_stands_still(adb: Adb) -> None:
    adb.shell("am", "start", "-n", "com.google.android.deskclock/com.android.deskclock.DeskClock")
    adb.tap_text("Stopwatch", WidgetKind.BUTTON)
    said = adb.run("exec-out", "rm -f /sdcard/w.xml; uiautomator dump /sdcard/w.xml; cat /sdcard/w.xml")
    assert said.startswith("UI hierchary dumped to: /sdcard/w.xml\n<?xml ")
    assert 'content-desc="Start"' in said
    adb.tap_text("Start", WidgetKind.BUTTON)
    assert adb.shell("uiautomator dump /sdcard/w.xml") == "ERROR: could not get idle state.\n"
