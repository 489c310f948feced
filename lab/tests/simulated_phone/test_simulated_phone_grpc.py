"""The emulator's gRPC service of the simulated phone, called over a real connection."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.exchanges import Call, ExchangeRecorder, read_session
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("android_env") is None, reason="the package android-env is not installed"
)
LAUNCHER = "com.google.android.apps.nexuslauncher"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phone:
    """A phone, the stub that calls it, and the messages' module."""

    phone: EmulatorState
    stub: Any
    messages: Any

    @property
    def front(self) -> str:
        return self.phone.ui.front.package

    def touch(self, x: int, y: int, pressure: int) -> None:
        """One message of a finger: on the screen with pressure, lifted without."""
        touch = self.messages.Touch(x=x, y=y, identifier=0, pressure=pressure)
        self.stub.sendTouch(self.messages.TouchEvent(touches=[touch]))

    def tap(self, label: str) -> None:
        """A finger that comes down on this label and is lifted."""
        x, y = self.center(label)
        self.touch(x, y, 1)
        self.touch(x, y, 0)

    def center(self, label: str) -> tuple[int, int]:
        found = [one for one in self.phone.ui.screen().widgets if label in (one.text, one.icon) and one.on_tap]
        return found[0].bounds.center

    def key(self, **fields: Any) -> None:
        self.stub.sendKey(self.messages.KeyboardEvent(**fields))

    def texts(self) -> str:
        widgets = self.phone.ui.screen().widgets
        return " ".join([text for widget in widgets for text in (widget.text, *widget.lines)])


def served(faults: Faults, recorder: ExchangeRecorder | None = None) -> Iterator[Phone]:
    import grpc
    from android_env.proto import emulator_controller_pb2, emulator_controller_pb2_grpc

    from rollout_buffer_lab.simulated_phone.interfaces.emulator_controller import serve_emulator_controller

    phone, port = EmulatorState(), free_port()
    server = serve_emulator_controller(phone, port, faults, recorder)
    channel = grpc.secure_channel(
        f"localhost:{port}",
        grpc.local_channel_credentials(),
        options=[("grpc.max_receive_message_length", -1)],
    )
    stub = emulator_controller_pb2_grpc.EmulatorControllerStub(channel)
    yield Phone(phone=phone, stub=stub, messages=emulator_controller_pb2)
    channel.close()
    server.stop(None).wait()
    phone.close()


@pytest.fixture
def phone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Phone]:
    from rollout_buffer_lab.simulated_phone.interfaces import emulator_controller

    # On a busy machine half a second may lie between the two halves of a tap.
    monkeypatch.setattr(emulator_controller, "_LONG_TOUCH_S", 30.0)
    yield from served(Faults())


def empty() -> Any:
    from google.protobuf import empty_pb2

    return empty_pb2.Empty()


def test_the_status_says_whether_it_has_booted(phone: Phone) -> None:
    status = phone.stub.getStatus(empty())
    assert status.booted
    assert status.version == "simulated"
    never = next(phones := served(Faults(never_boots=True)))
    assert not never.stub.getStatus(empty()).booted
    assert next(phones, None) is None


def test_a_finger_that_stays_presses_long(phone: Phone, monkeypatch: pytest.MonkeyPatch) -> None:
    phone.tap("Contacts")
    phone.tap("add")
    x, y = phone.center("First name")
    monkeypatch.undo()
    phone.touch(x, y, 1)
    time.sleep(0.5)
    phone.touch(x, y, 0)
    assert "Select all" in phone.texts()


def test_keys_press_and_texts_type(phone: Phone) -> None:
    phone.tap("Contacts")
    phone.tap("add")
    phone.tap("First name")
    phone.key(text="Ada Lovelace")
    assert "Ada Lovelace" in phone.texts()
    phone.key(key="Backspace", eventType=phone.messages.KeyboardEvent.keypress)
    assert "Ada Lovelac " in phone.texts() + " "
    before = phone.texts()
    phone.key(key="GoHome", eventType=phone.messages.KeyboardEvent.keyup)  # the press has gone before it
    assert phone.texts() == before
    phone.key(key="GoHome", eventType=phone.messages.KeyboardEvent.keypress)
    assert phone.front == LAUNCHER
    phone.key(key="NoSuchKey", eventType=phone.messages.KeyboardEvent.keypress)
    assert phone.front == LAUNCHER


def test_what_is_not_served_says_so(phone: Phone) -> None:
    import grpc

    with pytest.raises(grpc.RpcError) as caught:
        phone.stub.getBattery(empty())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_calls_are_recorded_with_their_answers(tmp_path: Path) -> None:
    phones = served(Faults(), ExchangeRecorder(tmp_path / "record"))
    phone = next(phones)
    phone.stub.getStatus(empty())
    phone.tap("Settings")
    phone.stub.getScreenshot(phone.messages.ImageFormat(format=1))
    assert next(phones, None) is None
    calls = [entry for entry in read_session(tmp_path / "record") if isinstance(entry, Call)]
    assert [call.name for call in calls] == ["getStatus", "sendTouch", "sendTouch", "getScreenshot"]
    assert phone.messages.EmulatorStatus.FromString(calls[0].answer).uptime == 0
    assert len(phone.messages.Image.FromString(calls[-1].answer).image) == 32
