"""Records what the adapter and the real package say to the simulated phone in two episodes, and what it answers.

Run it with the python of an environment that has the android_world package and this project:
``python -m tests.record_android_world_session tests/data/device_session.jsonl``. The tests that replay the record need
no package. Record it again when an answer changes on purpose.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
from android_env.proto import emulator_controller_pb2, emulator_controller_pb2_grpc

from rollout_buffer_lab.simulated_phone.interfaces.exchanges import ExchangeRecorder
from rollout_buffer_lab.simulated_phone.interfaces.simulated_sdk import make_simulated_sdk
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton
from tests.android_world_sweep import cloned

EPISODES = {
    "SystemWifiTurnOff": (
        Action(kind=ActionKind.OPEN, text="Settings"),
        Action(kind=ActionKind.CLICK, point=(540, 331)),
        Action(kind=ActionKind.CLICK, point=(1000, 331)),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.BACK),
        Action(kind=ActionKind.SWIPE, point=(540, 1900), end_point=(540, 700)),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.MENU),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.HOME),
        Action(kind=ActionKind.TERMINATE, status="success"),
    ),
    "MarkorCreateNote": (
        Action(kind=ActionKind.OPEN, text="Markor"),
        Action(kind=ActionKind.LONG_PRESS, point=(540, 521), duration_s=0.8),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.BACK),
        Action(kind=ActionKind.CLICK, point=(950, 2100)),
        Action(kind=ActionKind.TYPE, text="two words\n& a line: é"),
        Action(kind=ActionKind.OPEN, text="No Such App"),
        Action(kind=ActionKind.WAIT, duration_s=0.1),
        Action(kind=ActionKind.SYSTEM_BUTTON, button=SystemButton.ENTER),
        Action(kind=ActionKind.ANSWER, text="done"),
    ),
}


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="aw_") as folder:
        sdk = make_simulated_sdk(Path(folder))
        (sdk.devices / "exchanges").mkdir()
        with cloned(sdk) as device:
            record = sdk.devices / "exchanges" / f"{device.health()['serial']}.jsonl"
            _play(device, ExchangeRecorder(record))
            _touch(AndroidWorldSettings().base_grpc_port, ExchangeRecorder(record))
            Path(words[0]).write_bytes(record.read_bytes())


def _play(device: AndroidWorldDevice, recorder: ExchangeRecorder) -> None:
    recorder.remark(apps=device.package.apps())
    for task, actions in EPISODES.items():
        recorder.remark(reset=task)
        device.reset(task, 0)
        for action in actions:
            recorder.remark(action={key: value for key, value in asdict(action).items() if value is not None})
            recorder.remark(note=device.step(action).note)
        recorder.remark(score=device.score())


def _touch(port: int, recorder: ExchangeRecorder) -> None:
    """Records touches and keys by gRPC, which the emulator has and the adapter does not use."""
    recorder.remark(touches=True)
    with grpc.secure_channel(f"localhost:{port}", grpc.local_channel_credentials()) as channel:
        stub: Any = emulator_controller_pb2_grpc.EmulatorControllerStub(channel)
        messages = emulator_controller_pb2
        stub.sendKey(messages.KeyboardEvent(key="GoHome", eventType=messages.KeyboardEvent.keypress))
        for y, pressure in ((1900, 1), (1200, 1), (500, 1), (400, 0), (700, 1), (700, 0)):
            stub.sendTouch(messages.TouchEvent(touches=[messages.Touch(x=540, y=y, pressure=pressure)]))
        stub.sendKey(messages.KeyboardEvent(text="typed"))


if __name__ == "__main__":
    main(sys.argv[1:])
