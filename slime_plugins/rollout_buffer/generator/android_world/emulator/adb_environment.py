"""android_world's controller of an Android that only adb reaches: no gRPC interface, no console, no forwarder.

Screens come from ``screencap``, elements from ``uiautomator dump``; all input is ``adb shell input``. ``package``
imports this in a device worker, because the classes inherit from those of android_env and android_world.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
from android_env import environment
from android_env.components import (
    adb_controller,
    config_classes,
    coordinator,
    device_settings,
    log_stream,
    task_manager,
)
from android_env.components.simulators import base_simulator
from android_env.proto import task_pb2
from android_world.env import android_world_controller, representation_utils
from PIL import Image

from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidEndpoint

Read = TypeVar("Read")

_READ_TIMEOUT_S = 30.0
_READ_TRIES = 2
_PNG = b"\x89PNG"
_DUMP = "/data/local/tmp/rollout_buffer_window.xml"
_MOVING = "could not get idle state"
"""What ``uiautomator`` prints if the screen never stands still."""
_SCREENCAP = "screencap -p"
# Without rm, cat would print the elements of an earlier screen after a dump that fails.
_UIAUTOMATOR = f"rm -f {_DUMP}; uiautomator dump {_DUMP}; cat {_DUMP}"


class AdbController(android_world_controller.AndroidWorldController):  # type: ignore[misc]  # untyped base
    """android_world's controller with elements that are read when a task asks for them."""

    def __init__(self, endpoint: AndroidEndpoint) -> None:
        self._screens = AdbSimulator(endpoint)
        tasks = task_manager.TaskManager(task_pb2.Task(id="rollout_buffer"))  # no time limit: the runner has one
        conductor = coordinator.Coordinator(self._screens, tasks, device_settings.DeviceSettings(self._screens))
        super().__init__(
            environment.AndroidEnv(simulator=self._screens, coordinator=conductor, task_manager=tasks),
            a11y_method=android_world_controller.A11yMethod.NONE,
        )

    def screenshot(self) -> np.ndarray[Any, Any]:
        """Returns the screen's pixels (height, width, 3)."""
        return np.asarray(self._screens.get_screenshot())

    def get_ui_elements(self) -> list[Any]:
        """Returns the elements of the present screen.

        Raises:
            EnvironmentSetupError: the screen never stands still, which is no fault of the device.
            DeviceError: ``uiautomator`` refuses for another reason.
        """
        try:
            return self._screens.read(_UIAUTOMATOR, _elements)
        except DeviceError as error:
            if _MOVING in error.message:
                raise EnvironmentSetupError(error.message) from error
            raise

    def reset(self) -> Any:
        """Leaves the elements out: no task reads those of a reset, and a home screen may never stand still."""
        timestep = self.env.reset()
        timestep.observation[android_world_controller.OBSERVATION_KEY_FOREST] = None
        timestep.observation[android_world_controller.OBSERVATION_KEY_UI_ELEMENTS] = []
        return timestep


class AdbSimulator(base_simulator.BaseSimulator):  # type: ignore[misc]  # untyped base
    """A running device; android_env calls every device a simulator."""

    def __init__(self, endpoint: AndroidEndpoint) -> None:
        super().__init__(config_classes.SimulatorConfig())
        self._adb = config_classes.AdbControllerConfig(
            adb_path=endpoint.adb_path, adb_server_port=endpoint.adb_server_port, device_name=endpoint.serial
        )
        self._command = self.create_adb_controller().command_prefix()
        self._side_lengths: list[int] = []  # in order of size: a screen may rotate

    def adb_device_name(self) -> str:
        return str(self._adb.device_name)

    def create_adb_controller(self) -> Any:
        return adb_controller.AdbController(self._adb)

    def create_log_stream(self) -> Any:
        return _NoLog()

    def send_touch(self, touches: list[tuple[int, int, bool, int]]) -> None:
        """Accepts the lifted finger that android_env sends with each look."""
        if any(is_down for _, _, is_down, _ in touches):
            raise NotImplementedError("touches are sent by `adb shell input`")

    def send_key(self, keycode: Any, event_type: str) -> None:
        raise NotImplementedError("keys are sent by `adb shell input`")

    def read(self, script: str, parse: Callable[[bytes], Read]) -> Read:
        """Returns what ``parse`` makes of the output of a script of the device's shell.

        Raises:
            DeviceError: adb does not answer in time, or no try gave an output that can be parsed; the exit code of
                ``exec-out`` says nothing.
        """
        problem = ""
        for _ in range(_READ_TRIES):
            try:
                result = subprocess.run(
                    [*self._command, "exec-out", script], capture_output=True, timeout=_READ_TIMEOUT_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise DeviceError(f"adb exec-out {script}: {error}") from error
            try:
                return parse(result.stdout or result.stderr)
            except (ValueError, OSError, SyntaxError) as error:  # SyntaxError: broken PNG and XML
                problem = f"{error} {result.stderr.decode('utf-8', 'replace')}".strip()
        raise DeviceError(f"adb exec-out {script}: {problem}")

    def _launch_impl(self) -> None:
        """Does nothing: the host has waited for Android."""

    def _get_screenshot_impl(self) -> np.ndarray[Any, Any]:
        return self.read(_SCREENCAP, self._pixels)

    def _pixels(self, output: bytes) -> np.ndarray[Any, Any]:
        """Returns the pixels of the PNG image in the output; a warning of ``screencap`` may come before it."""
        with Image.open(io.BytesIO(_starting_at(_PNG, output))) as image:
            pixels = np.asarray(image.convert("RGB"))
        height, width, _ = pixels.shape
        self._side_lengths = self._side_lengths or sorted((height, width))
        if sorted((height, width)) != self._side_lengths:
            raise ValueError(f"a screen of {width}x{height}, whose sides were {self._side_lengths} before")
        return pixels


class _NoLog(log_stream.LogStream):  # type: ignore[misc]  # untyped base
    """A log without lines: android_env looks in it for the rewards of its own tasks."""

    def _get_stream_output(self) -> Iterator[str]:
        return iter(())

    def stop_stream(self) -> None:
        pass


def _elements(output: bytes) -> list[Any]:
    dump = _starting_at(b"<?xml", output).decode("utf-8", "replace")
    return list(representation_utils.xml_dump_to_ui_elements(dump))


def _starting_at(start: bytes, output: bytes) -> bytes:
    """Returns the output from ``start`` on.

    Raises:
        ValueError: ``start`` is not in the output; the message is the output.
    """
    position = output.find(start)
    if position < 0:
        raise ValueError(output[:400].decode("utf-8", "replace").strip() or "no output")
    return output[position:]
