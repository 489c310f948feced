"""A real device without Android: the shipped device on a small emulator, through the real ``adb``.

``python -m tests.adb_phone -m MODULE DESCRIPTOR`` is started in the place of the device workers' Python, as
``android_world_python``. All but the package ``android_world`` is what runs in production: clone, ports, adb server,
guard, emulator process, boot and the order of an episode. A task is solved by one tap that reached its own emulator.
While a file ``held_tasks`` is in the home folder, each task's set-up waits, so that all devices of a farm are lent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slime_plugins.rollout_buffer.devices import device_process
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.android_world.android_host import AndroidEndpoint
from slime_plugins.rollout_buffer.generator.android_world.emulator import device
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import NO_ADB_SEARCH

ADB_TIMEOUT_S = 60.0
HELD_TASKS = "held_tasks"
UNKNOWN_TASK = "NoSuchTask"


class AdbPackage:
    """Stands for ``AndroidWorldPackage``: every look, action and score is a command of the real adb."""

    def __init__(self, temporary_folder: Path) -> None:
        del temporary_folder
        self.env: Any = self
        self.taps = 0
        self._adb_command: list[str] = []

    def connect(self, endpoint: AndroidEndpoint) -> None:
        self._adb_command = [endpoint.adb_path, "-P", str(endpoint.adb_server_port)]
        listed = [line.split("\t")[0] for line in self._run("devices").splitlines()[1:] if line]
        if endpoint.console_port is not None and listed != [endpoint.serial]:
            raise DeviceError(f"crossed: the adb server of {endpoint.serial} knows {listed}")
        self._adb_command += ["-s", endpoint.serial]

    def disconnect(self) -> None:
        pass

    def new_task(self, name: str, params_idx: int, suite_seed: int) -> AdbTask:
        del params_idx, suite_seed
        if name == UNKNOWN_TASK:
            raise EnvironmentSetupError(f"there is no task {name}")
        return AdbTask(self, name)

    def app_packages(self, task: Any) -> list[str]:
        del task
        return ["org.example.notes"]

    def adb(self, *words: str) -> str:
        """Runs a shell command, which the small emulator answers with its own words."""
        output = self._run(*words)
        self.taps += words[:3] == ("shell", "input", "tap")
        if output.strip() != " ".join(words[1:]):
            raise DeviceError(f"adb {words} said {output!r}")
        return output

    def reset(self, *, go_home: bool) -> None:
        assert go_home
        self.taps = 0

    def hide_automation_ui(self) -> None:
        pass

    def look(self) -> tuple[Any, Any]:
        brightness = min(self.taps * 80, 255)  # each tap changes the screen
        return np.full((1200, 540, 3), brightness, np.uint8), []

    def await_fresh_tree(self) -> None:
        pass

    def drop_accessibility_trees(self) -> None:
        pass

    def check_connection(self) -> None:
        pass

    def _run(self, *words: str) -> str:
        environment = {**os.environ, **NO_ADB_SEARCH}
        done = subprocess.run(
            [*self._adb_command, *words],
            capture_output=True, text=True, timeout=ADB_TIMEOUT_S, check=True, env=environment,
        )  # fmt: skip
        return done.stdout


class AdbTask:
    """Solved once the phone was tapped."""

    app_names = ("none",)
    complexity = 1.0
    start_on_home_screen = False

    def __init__(self, package: AdbPackage, name: str) -> None:
        self._package, self.goal = package, f"Tap for {name}."

    def initialize_task(self, env: Any) -> None:
        while (Path.home() / HELD_TASKS).exists():
            time.sleep(0.1)

    def is_successful(self, env: Any) -> float:
        self._package.adb("shell", "score")
        return float(env.taps > 0)

    def tear_down(self, env: Any) -> None:
        pass


def main(words: list[str]) -> int:
    """Serves one such device, as ``device_process`` does; ``words`` are what its Python is started with."""
    names: Mapping[str, Any] = vars(device)
    assert {"AndroidWorldPackage", "check_package"} <= names.keys()
    setattr(device, "AndroidWorldPackage", AdbPackage)  # noqa: B010 - a name that type checkers take for a constant
    setattr(device, "check_package", lambda: None)  # noqa: B010
    return device_process.main(words[2:])  # without "-m MODULE"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
