"""Recorded sessions of android_world, replayed from both sides: what the phone answers, what the adapter asks.

android_world (d9c569f, android_env 1.2.3) asked; neither is needed here, but the phone's gRPC answers need
android_env's messages. ``tests/record_android_world_session.py`` made the device adapter's session. The other one has
what was asked while six tasks were set up, played and scored: a folder ``exchanges`` beside a simulated emulator's
sockets gets every command.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.exchanges import (
    Annotation,
    Call,
    Exchange,
    ExchangeRecorder,
    read_session,
)
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from slime_plugins.rollout_buffer.generator.android_world.emulator.gestures import Gestures
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton

DATA = Path(__file__).parents[3] / "tests" / "data"
RECORD = DATA / "device_session.jsonl"
GESTURES = ("shell input ", "shell am start ")


def session() -> list[Exchange | Call | Annotation]:
    return list(read_session(RECORD))


def remarks(key: str) -> list[Any]:
    return [entry.fields[key] for entry in session() if isinstance(entry, Annotation) and key in entry.fields]


# ---- the phone -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("android_env") is None, reason="the package android-env is not installed")
@pytest.mark.parametrize("record", [RECORD, DATA / "adb_exchanges.jsonl"], ids=lambda path: str(path.stem))
def test_the_phone_answers_adb_and_grpc_as_it_was_recorded(record: Path, tmp_path: Path) -> None:
    front = importlib.import_module("rollout_buffer_lab.simulated_phone.interfaces.emulator_controller")
    messages = importlib.import_module("android_env.proto.emulator_controller_pb2")
    service = messages.DESCRIPTOR.services_by_name["EmulatorController"]
    phone = EmulatorState()
    adb, calls = AdbShell(phone), front.servicer_of(phone, Faults())
    for number, entry in enumerate(read_session(record)):
        if isinstance(entry, Exchange):
            check_adb(adb, entry, tmp_path / "file", f"line {number + 1}: {' '.join(entry.arguments)}")
        elif isinstance(entry, Call):
            kind = getattr(messages, service.methods_by_name[entry.name].input_type.name, None)
            request = kind.FromString(entry.request) if kind is not None else None
            answer = front.comparable(entry.name, getattr(calls, entry.name)(request, None))
            assert answer == entry.answer, f"line {number + 1}: {entry.name}"
    phone.close()


def check_adb(adb: AdbShell, exchange: Exchange, host_file: Path, shown: str) -> None:
    host_file.write_bytes(exchange.content or b"")
    output = adb.run(exchange.with_file(host_file))
    assert (output.code, output.text) == (exchange.output.code, exchange.text_on(host_file)), shown
    assert host_file.read_bytes() == (exchange.content or b""), shown


def test_a_pull_and_a_push_are_recorded_with_their_file(tmp_path: Path) -> None:
    phone = EmulatorState()
    adb, recorder = AdbShell(phone), ExchangeRecorder(tmp_path / "record")
    host_file = tmp_path / "one.txt"
    host_file.write_bytes(b"\x00\xff")
    for words in (["push", str(host_file), "/sdcard/one.txt"], ["pull", "/sdcard/one.txt", str(host_file)]):
        recorder.record(words, adb.run(words))
    found = [entry for entry in read_session(tmp_path / "record") if isinstance(entry, Exchange)]
    assert [one.content for one in found] == [b"\x00\xff", b"\x00\xff"]
    assert not [one for one in found if str(tmp_path) in " ".join(one.arguments)]
    phone.close()


def test_the_record_has_everything_that_a_device_is_asked() -> None:
    entries = session()
    called = {entry.name for entry in entries if isinstance(entry, Call)}
    assert called == {"getStatus", "getScreenshot", "sendTouch", "sendKey"}
    asked = [" ".join(entry.arguments) for entry in entries if isinstance(entry, Exchange)]
    for verb in ("tap", "swipe", "text", "keyevent"):
        assert any(line.startswith(f"shell input {verb} ") for line in asked), verb
    assert {fields["kind"] for fields in remarks("action")} == {kind.value for kind in ActionKind}
    assert len(remarks("reset")) == len(remarks("score")) == 2


# ---- the adapter -----------------------------------------------------------------------------------------------------


class RecordedPackage:
    """The adapter's view of the package: takes adb commands if they are the recorded ones, in the recorded order."""

    def __init__(self, apps: dict[str, str], expected: Sequence[Exchange]) -> None:
        self._apps = apps
        self._expected: Iterator[Exchange] = iter(expected)
        self.env = self
        self.controller = self
        self.interaction_cache = ""

    @property
    def adb_utils(self) -> RecordedPackage:
        return self

    def apps(self) -> dict[str, str]:
        return self._apps

    def adb(self, *words: str) -> str:
        exchange = next(self._expected)
        assert exchange.arguments == words
        return exchange.output.text.decode()

    def type_text(self, text: str, controller: Any) -> None:
        """The package's own: a command for each word, one for each blank between, Enter for a line feed."""
        typed = ""
        for exchange in self._expected:
            verb, word = exchange.arguments[2], exchange.arguments[-1]
            typed += "\n" if verb == "keyevent" else word.replace("%s", " ")
            if spoken(typed) == spoken(text):
                return
        raise AssertionError(f"{typed!r} was typed, not {text!r}")

    def rest(self) -> list[Exchange]:
        return list(self._expected)


def spoken(text: str) -> str:
    """The letters of a text, without what a shell needs around them."""
    return "".join(one for one in text if one.isalnum() or one in "&:\n")


def test_the_adapter_turns_every_recorded_action_into_the_recorded_commands() -> None:
    (apps,) = remarks("apps")
    compared = 0
    for fields, commands, note in recorded_actions():
        package: Any = RecordedPackage(apps, commands)
        assert Gestures(package).do(action_of(fields)) == note, fields
        assert package.rest() == [], fields
        compared += len(commands)
        assert package.interaction_cache == (fields["text"] if fields["kind"] == "answer" else "")
    assert compared >= 12


def recorded_actions() -> Iterator[tuple[dict[str, Any], list[Exchange], str]]:
    """Each action with the gestures between it and its note."""
    fields: dict[str, Any] = {}
    commands: list[Exchange] = []
    for entry in session():
        if isinstance(entry, Annotation) and "action" in entry.fields:
            fields, commands = entry.fields["action"], []
        elif isinstance(entry, Annotation) and "note" in entry.fields:
            yield fields, commands, entry.fields["note"]
        elif isinstance(entry, Exchange) and " ".join(entry.arguments).startswith(GESTURES):
            commands.append(entry)


def action_of(fields: dict[str, Any]) -> Action:
    made: dict[str, Any] = {**fields, "kind": ActionKind(fields["kind"])}
    made |= {name: tuple(fields[name]) for name in ("point", "end_point") if name in fields}
    made |= {"button": SystemButton(fields["button"])} if "button" in fields else {}
    return Action(**made)
