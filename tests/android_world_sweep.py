"""Plays every AndroidWorld task once on the simulated phone and writes one JSON line each: set up, score, torn down.

Run it with the python of an environment that has the android_world package and this project:
``python -m tests.android_world_sweep OUTPUT [--adb-only] [TASK ...]``. About ten seconds a task on one core. With
``--adb-only`` the phone is attached by its serial, and the emulator's gRPC interface and console are not used.
``docs/android_world_coverage.md`` holds the result.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.simulated_sdk import SimulatedSdk, make_simulated_sdk
from slime_plugins.rollout_buffer.errors import EpisodeError
from slime_plugins.rollout_buffer.generator.android_world.attached.host import AttachedHost
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess
from tests.android_world_player import SOLUTIONS
from tests.simulated_phone_player import Player

PARAMS_IDX = 0
SUITE_SEED = AndroidWorldSettings().suite_seed
NAMED_BY_THE_CLOCK = ("MarkorCreateFolder",)
"""Tasks whose parameters contain the time of their creation, so that a second object would have others."""
CONSOLE_PORT, GRPC_PORT = 5674, 43674


def main(words: list[str]) -> None:
    """Writes a line for each task named, or for all."""
    logging.basicConfig(level=logging.WARNING)
    names = [word for word in words[1:] if word != "--adb-only"]
    with tempfile.TemporaryDirectory(prefix="aw_") as folder:
        sdk = make_simulated_sdk(Path(folder))
        connected = _attached(sdk) if "--adb-only" in words else cloned(sdk)
        with connected as device, Path(words[0]).open("a", encoding="utf-8") as output:
            for name in names or device.package.task_names():
                output.write(json.dumps(_played(device, name)) + "\n")
                output.flush()


@contextmanager
def cloned(sdk: SimulatedSdk) -> Iterator[AndroidWorldDevice]:
    settings = AndroidWorldSettings(
        device="android_world",
        avd_name=sdk.avd_name,
        android_avd_home=str(sdk.avd_home),
        emulator_path=str(sdk.emulator_path),
        adb_path=str(sdk.adb_path),
    )
    with closing(AndroidWorldDevice(settings, 0, EmulatorProcess(settings, 0))) as device:
        yield device


@contextmanager
def _attached(sdk: SimulatedSdk) -> Iterator[AndroidWorldDevice]:
    ports = ["-port", str(CONSOLE_PORT), "-grpc", str(GRPC_PORT)]
    phone = subprocess.Popen(
        [str(sdk.emulator_path), "-avd", sdk.avd_name, *ports], env=os.environ | {"ANDROID_AVD_HOME": str(sdk.avd_home)}
    )
    options = {"inventory": {"phone": {"serial": f"emulator-{CONSOLE_PORT}", "restore": "apps"}}}
    settings = AndroidWorldSettings(device="attached", device_options=options, adb_path=str(sdk.adb_path))
    try:
        with closing(AndroidWorldDevice(settings, 0, AttachedHost(settings, 0))) as device:
            yield device
    finally:
        phone.terminate()
        phone.wait()


def _played(device: AndroidWorldDevice, name: str) -> dict[str, Any]:
    start = time.monotonic()
    line: dict[str, Any] = {"task": name}
    try:
        first = device.reset(name, PARAMS_IDX)
        line["budget"], line["not_restored"] = first.step_budget, first.details["not_restored"]
        if name in SOLUTIONS:
            params = _params(device, name)
            line["actions"] = _solved(Player(device, first), name, params)
        line["score"] = device.score()
        device.task.tear_down(device.package.env)
        line["torn_down"] = True
    except EpisodeError as error:
        line["error"] = f"{type(error).__name__}: {error}"
    line["seconds"] = round(time.monotonic() - start, 1)
    return line


def _params(device: AndroidWorldDevice, name: str) -> Any:
    """The parameters of a new task object, because setting a task up rewords those of the one that is played."""
    if name in NAMED_BY_THE_CLOCK:
        return device.task.params
    return device.package.new_task(name, PARAMS_IDX, SUITE_SEED).params


def _solved(player: Player, name: str, params: Any) -> int:
    try:
        SOLUTIONS[name](player, params)
    except AssertionError as error:
        logging.warning("%s: the player is lost: %s", name, error)
    return player.actions


if __name__ == "__main__":
    main(sys.argv[1:])
