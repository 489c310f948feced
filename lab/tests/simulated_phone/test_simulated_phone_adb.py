"""What adb is told about the simulated phone is what its screens do and show, and the other way round."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.handset import Handset
from rollout_buffer_lab.simulated_phone.widgets import WidgetKind

CALENDAR = "/data/data/com.simplemobiletools.calendar.pro/databases"
NOTES = "/sdcard/Documents/Markor"


class Adb:
    """The phone at the other end of the cable."""

    def __init__(self) -> None:
        self.handset = Handset()
        self._adb = AdbShell(self.handset)

    def run(self, *arguments: str) -> str:
        """The output of a command that must succeed."""
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
        widgets = self.handset.shell.screen().widgets
        x, y = next(one.bounds.center for one in widgets if one.text == text and one.kind is kind)
        self.shell("input", "tap", str(x), str(y))


@pytest.fixture
def adb() -> Iterator[Adb]:
    phone = Adb()
    yield phone
    phone.handset.close()


def test_a_switch_that_was_tapped_is_what_settings_get_says(adb: Adb) -> None:
    adb.shell("am", "start", "", "-W", "-n", "com.android.settings/.Settings")
    adb.tap_text("Network & internet")
    adb.tap_text("Wi-Fi")
    assert adb.shell("settings", "get", "global", "wifi_on") == "0\n"
    adb.shell("svc", "wifi", "enable")
    assert adb.shell("settings get global wifi_on") == "1\n"


def test_settings_that_were_never_put_are_null(adb: Adb) -> None:
    assert adb.shell("settings", "get", "system", "nothing") == "null\n"
    adb.shell("settings", "put", "system", "nothing", "7")
    assert "nothing=7\n" in adb.shell("settings", "list", "system")
    adb.shell("settings", "delete", "system", "nothing")
    assert adb.shell("settings", "get", "system", "nothing") == "null\n"


def test_the_date_can_be_set_and_every_touch_takes_a_second(adb: Adb) -> None:
    assert adb.shell("date", "1015153423.00") == "Sun Oct 15 15:34:23 UTC 2023\n".replace(":23 UTC", ":00 UTC")
    before = int(adb.shell("date", "+%s"))
    adb.shell("input", "tap", "5", "5")
    assert int(adb.shell("date", "+%s")) == before + 1


def test_a_typed_word_stands_in_the_field_and_no_enter_follows(adb: Adb) -> None:
    adb.shell("am", "start", "-n", "net.gsantner.markor/.activity.MainActivity")
    adb.tap_text("", WidgetKind.ICON)
    for words in ("a\\ b", "c%sd", "\\(e\\)"):
        adb.shell("input", "text", words)
    adb.shell("input", "keyevent", "KEYCODE_DEL")
    field = next(one for one in adb.handset.shell.screen().widgets if one.kind is WidgetKind.FIELD)
    assert "".join(field.lines) == "a bc d(e"
    adb.shell("input", "keycombination", "113", "29", "&&", "input", "keyevent", "67")
    field = next(one for one in adb.handset.shell.screen().widgets if one.kind is WidgetKind.FIELD)
    assert "".join(field.lines) == ""


def test_the_activity_in_front_is_the_only_visible_task(adb: Adb) -> None:
    adb.shell("am", "start", "-n", "com.google.android.deskclock/com.android.deskclock.DeskClock")
    visible = adb.shell("am", "stack", "list", "|", "grep", "-E", "visible=true")
    component = "com.google.android.deskclock/com.android.deskclock.DeskClock"
    assert visible.count("\n") == 1
    assert visible.endswith(f"topActivity=ComponentInfo{{{component}}}\n")
    adb.shell("am", "force-stop", "com.google.android.deskclock")
    assert "nexuslauncher" in adb.shell("am stack list | grep visible=true")


def test_removing_all_recent_tasks_leaves_none(adb: Adb) -> None:
    for package in ("com.android.settings", "com.google.android.contacts"):
        adb.shell("monkey", "-p", package, "1")
    lines = adb.shell("dumpsys", "activity", "recents").splitlines()[1:]
    assert len(lines) == 2
    for line in lines:
        adb.shell("am", "stack", "remove", line.rpartition("id=")[2])
    assert adb.shell("dumpsys activity recents").count("id=") == 0


def test_an_activity_that_does_not_exist_is_an_error(adb: Adb) -> None:
    assert "Error" in adb.fails("shell", "am", "start", "-n", "com.nobody/.Main")
    assert "not found" in adb.fails("shell", "no-such-command")
    assert "Failed" in adb.fails("shell", "pm", "clear", "com.nobody")


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


def test_a_shell_conditional_tells_files_from_folders(adb: Adb) -> None:
    script = 'if [ -d "{}" ]; then\n echo "Exists"\nelse\n echo "Does not exist"\nfi\n'
    assert adb.shell(script.format(NOTES)) == "Exists\n"
    assert adb.shell(script.format(NOTES + "/none")) == "Does not exist\n"


def test_what_echo_writes_is_found_and_what_find_deletes_is_gone(adb: Adb) -> None:
    adb.shell("echo", "'it'\"'\"'s here'", ">", f"{NOTES}/one.md")
    assert adb.shell("cat", f"{NOTES}/one.md") == "it's here\n"
    assert f"{NOTES}/one.md" in adb.shell("find", NOTES, "-type", "f", "-o", "-type", "d").split("\n")
    adb.shell("find", "/storage/emulated/0/", "-mindepth", "1", "-type", "f", "-delete")
    assert adb.shell("ls", "-1", NOTES) == ""
    assert adb.shell("[", "-d", NOTES, "]") == ""


def test_removing_by_a_wildcard_spares_what_it_does_not_fit(adb: Adb) -> None:
    for name in ("a.md", "b.md", "c.txt"):
        adb.shell("touch", f"{NOTES}/{name}")
    adb.shell("rm", "-r", f"{NOTES}/*.md")
    assert adb.shell("ls", NOTES) == "c.txt\n"
    adb.fails("shell", "rm", "-r", f"{NOTES}/*.md")


def test_a_folder_is_copied_with_all_in_it(adb: Adb) -> None:
    adb.shell("mkdir", "-p", f"{NOTES}/in/deep")
    adb.shell("touch", f"{NOTES}/in/deep/x")
    adb.shell("cp", "-a", f"{NOTES}/.", "/data/data/android_world/snapshots/markor/")
    assert adb.shell("ls", "/data/data/android_world/snapshots/markor/in/deep") == "x\n"


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
    assert "Lunch" in [widget.text for widget in adb.handset.shell.screen().widgets]


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


def test_the_clipboard_is_set_and_read_by_broadcast(adb: Adb) -> None:
    adb.shell("am", "broadcast", "-a", "clipper.set", "-e", "text", "two\\ words")
    assert 'result=-1, data="two words"' in adb.shell("am", "broadcast", "-a", "clipper.get")


def test_a_broadcast_reaches_its_listeners_with_its_extras(adb: Adb) -> None:
    heard: list[tuple[str, dict[str, str]]] = []
    adb.handset.listeners.append(lambda action, extras: heard.append((action, extras)))
    adb.shell("am", "broadcast", "-a", 'x.SET --ei "port" 81 --es "host" 10.0.2.2', "-n", "a/b")
    assert heard == [("x.SET", {"port": "81", "host": "10.0.2.2"})]


def test_a_long_swipe_on_one_spot_is_a_long_press(adb: Adb) -> None:
    adb.shell("touch", f"{NOTES}/one.md")
    adb.shell("monkey", "-p", "net.gsantner.markor", "1")
    row = next(one for one in adb.handset.shell.screen().widgets if one.text == "one.md").bounds.center
    adb.shell("input", "swipe", *[str(part) for part in (*row, *row)], "1000")
    assert "1 selected" in [widget.text for widget in adb.handset.shell.screen().widgets]


@pytest.mark.parametrize("words", ["input tap x y", "input tap", "input fly 1 2", 'echo "', "if true", "| cat", "> "])
def test_nonsense_fails_without_breaking_the_phone(adb: Adb, words: str) -> None:
    adb.fails("shell", words)
    assert adb.shell("whoami") == "root\n"


def test_the_screen_is_captured_at_its_own_size(adb: Adb) -> None:
    output = AdbShell(adb.handset).run(["exec-out", "screencap", "-p"])
    assert output.text.startswith(b"\x89PNG")
    assert "1080x2400" in adb.shell("wm size")
    assert "logicalFrame=[0, 0, 1080, 2400]" in adb.shell("dumpsys input | grep logicalFrame")
