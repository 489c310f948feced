"""The simulated phone inside of android_env, in the same process: a simulator for ``android_env.AndroidEnv``.

``android_environment(phone)`` is an environment of android_env's own classes (coordinator, adb calls, actions,
observations) over the phone: no emulator, no adb program, no port. It needs the package ``android-env``, which is
imported where it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.adb_commands import AdbShell
from rollout_buffer_lab.simulated_phone.interfaces.commands_input import press_key
from rollout_buffer_lab.simulated_phone.interfaces.emulator_controller import Touch
from rollout_buffer_lab.simulated_phone.interfaces.emulator_state import EmulatorState
from rollout_buffer_lab.simulated_phone.interfaces.screen_capture import rgba_of

_CHANNELS = 4


def android_environment(phone: EmulatorState) -> Any:
    """Returns an ``android_env.environment.AndroidEnv`` over the phone. Closing it leaves the phone to its owner."""
    from android_env import environment
    from android_env.components import coordinator, device_settings, task_manager
    from android_env.proto import task_pb2

    simulator = simulator_of(phone)
    tasks = task_manager.TaskManager(task_pb2.Task(id="simulated_phone", max_episode_sec=172_800))
    conductor = coordinator.Coordinator(simulator, tasks, device_settings.DeviceSettings(simulator))
    return environment.AndroidEnv(simulator=simulator, coordinator=conductor, task_manager=tasks)


def simulator_of(phone: EmulatorState) -> Any:
    """Returns a ``BaseSimulator`` over the phone; its base classes exist only where android_env is installed."""
    import numpy as np
    from android_env.components import config_classes
    from android_env.components.simulators import base_simulator

    touch = Touch(phone)

    class PhoneSimulator(base_simulator.BaseSimulator):  # type: ignore[misc]  # untyped base
        """The phone as android_env sees a device."""

        def adb_device_name(self) -> str:
            return "simulated-phone"

        def create_adb_controller(self) -> Any:
            config = config_classes.AdbControllerConfig(device_name=self.adb_device_name())
            return _adb_controller_of(phone, config)

        def create_log_stream(self) -> Any:
            return _silent_log()

        def _launch_impl(self) -> None:
            """Does nothing: the phone is always on."""

        def send_touch(self, touches: list[tuple[int, int, bool, int]]) -> None:
            for x, y, is_down, _ in touches:
                touch.moved(x, y, is_down)

        def send_key(self, keycode: Any, event_type: str) -> None:
            if event_type != "keyup":
                with phone.lock:
                    press_key(phone.ui, str(int(keycode)))

        def _get_screenshot_impl(self) -> Any:
            width, height, pixels = rgba_of(phone)
            return np.frombuffer(pixels, np.uint8).reshape(height, width, _CHANNELS)[:, :, :3]

    return PhoneSimulator(config_classes.SimulatorConfig())


def _adb_controller_of(phone: EmulatorState, config: Any) -> Any:
    """Answers adb's commands from the phone. As with adb, a command that fails is an error."""
    from android_env.components import adb_controller, errors

    shell = AdbShell(phone)

    class PhoneAdbController(adb_controller.AdbController):  # type: ignore[misc]  # untyped base
        """The phone's adb."""

        def execute_command(self, args: list[str], timeout: float | None = None, device_specific: bool = True) -> bytes:
            if not device_specific:
                return b""  # a command for the adb server, which does not exist here
            output = shell.run(args)
            if output.code != 0:
                raise errors.AdbControllerError(f"adb {' '.join(args)}: {output.text.decode(errors='replace')}")
            return output.text

    return PhoneAdbController(config)


def _silent_log() -> Any:
    """Returns a log in which nothing is ever written."""
    from android_env.components import log_stream

    class PhoneLog(log_stream.LogStream):  # type: ignore[misc]  # untyped base
        """The phone's log."""

        def __init__(self) -> None:
            super().__init__(verbose=False)
            self._stopped = threading.Event()

        def _get_stream_output(self) -> Iterator[str]:
            while not self._stopped.wait(0.1):
                yield ""

        def stop_stream(self) -> None:
            self._stopped.set()

    return PhoneLog()
