"""Whatever is asked over adb, the phone answers with an exit code and goes on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from tests.example_counts import examples

COMMANDS = st.sampled_from(
    [
        *("am", "pm", "input", "settings", "content", "svc", "wm", "dumpsys", "monkey", "uiautomator", "getprop"),
        *("sqlite3", "ls", "find", "cat", "rm", "mkdir", "cp", "mv", "stat", "chmod", "touch"),
        *("[", "echo", "grep", "date", "su", "if"),
    ]
)
WORDS = st.sampled_from(
    [
        *("start", "stack", "list", "remove", "force-stop", "clear", "query", "delete", "insert", "broadcast", "size"),
        *("tap", "swipe", "text", "keyevent", "get", "put", "global", "com.android.settings"),
        *("-n", "-a", "-d", "-rf", "-p", "-l", "-o", "-e", "-type", "-delete", "--uri", "--projection", "--bind"),
        *("/", "/sdcard", "/data/data", "content://sms", "content://contacts/phones"),
        *(";", "&&", "||", "|", ">", ">>", "<", "if", "then", "else", "fi", "'", '"', "*"),
        *("5", "-1", "999999", "1015153423.00", "+%s"),
    ]
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@pytest.fixture(scope="module")
def adb() -> Iterator[AdbShell]:
    phone = EmulatorState()
    yield AdbShell(phone)
    phone.close()


@given(COMMANDS, st.lists(WORDS | TEXTS, max_size=8))
@examples(600)
def test_no_command_breaks_the_phone(adb: AdbShell, command: str, words: list[str]) -> None:
    output = adb.run(["shell", command, *words])
    assert 0 <= output.code <= 255
    assert adb.run(["shell", "whoami"]).text == b"root\n"


@pytest.mark.parametrize(
    "words",
    [
        ["find", "/", "-mindepth", "x"],
        ["cp", "-a", "/sdcard", "/sdcard/x"],
        ["content", "insert", "--uri", "content://sms", "--bind", "date:l:99999999999999999999999"],
        ["input", "tap", "1e400", "5"],
        ["input tap x y"],
        ["input fly 1 2"],
        ['echo "'],
        ["if true"],
        ["| cat"],
        ["> "],
    ],
)
def test_arguments_that_make_no_sense_are_refused(adb: AdbShell, words: list[str]) -> None:
    assert adb.run(["shell", *words]).code != 0


@given(TEXTS)
@examples(200)
def test_what_is_quoted_arrives_unchanged(adb: AdbShell, text: str) -> None:
    output = adb.run(["shell", "echo", "-n", shlex.quote(text), ">", "/sdcard/it"])
    assert output.code == 0
    assert adb.run(["shell", "cat", "/sdcard/it"]).text.decode() == text
