"""A recorded session of android_world with the simulated phone, asked again: every answer must be the recorded one.

The record holds what android_world (d9c569f) and android_env 1.2.3 asked while they connected, set six tasks up, let
them be played and scored them, and what our phone answered. It needs neither package. When an answer changes on
purpose, record the session again: a folder ``exchanges`` beside a simulated emulator's sockets gets every command.
"""

from __future__ import annotations

from pathlib import Path

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.exchanges import (
    Exchange,
    ExchangeRecorder,
    read_exchanges,
)

RECORD = Path(__file__).parents[3] / "tests" / "data" / "adb_exchanges.jsonl"
FAMILIES = ("settings", "am", "pm", "input", "dumpsys", "date", "content", "sqlite3", "find", "ls", "mkdir", "echo")


def test_every_recorded_answer_is_given_again(tmp_path: Path) -> None:
    handset = EmulatorState()
    adb, host_file = AdbShell(handset), tmp_path / "file"
    for number, exchange in enumerate(read_exchanges(RECORD)):
        host_file.write_bytes(exchange.content or b"")
        output = adb.run(exchange.with_file(host_file))
        shown = f"exchange {number}: {' '.join(exchange.arguments)}"
        assert (output.code, output.text) == (exchange.output.code, exchange.text_on(host_file)), shown
        assert host_file.read_bytes() == (exchange.content or b""), shown
    handset.close()


def test_the_record_speaks_of_every_family() -> None:
    asked = [" ".join(exchange.arguments) for exchange in read_exchanges(RECORD)]
    assert [name for name in FAMILIES if not any(line.startswith(f"shell {name} ") for line in asked)] == []
    assert len(asked) > 300


def test_a_pull_and_a_push_are_recorded_with_their_file(tmp_path: Path) -> None:
    handset = EmulatorState()
    adb, recorder = AdbShell(handset), ExchangeRecorder(tmp_path / "record")
    host_file = tmp_path / "one.txt"
    host_file.write_bytes(b"\x00\xff")
    words = ["push", str(host_file), "/sdcard/one.txt"]
    recorder.record(words, adb.run(words))
    words = ["pull", "/sdcard/one.txt", str(host_file)]
    recorder.record(words, adb.run(words))
    found: list[Exchange] = list(read_exchanges(tmp_path / "record"))
    assert [one.content for one in found] == [b"\x00\xff", b"\x00\xff"]
    assert not [one for one in found if str(tmp_path) in " ".join(one.arguments)]
    handset.close()
