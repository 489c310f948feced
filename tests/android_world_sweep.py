"""Plays every AndroidWorld task once on the simulated phone and writes one JSON line each: set up, score, torn down.

Run it with the python of an environment that has the android_world package and this project:
``python -m tests.android_world_sweep OUTPUT [TASK ...]``. About ten seconds a task on one core.
``docs/android_world_coverage.md`` holds the result.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.simulated_sdk import (
    make_simulated_sdk,
)
from slime_plugins.rollout_buffer.errors import EpisodeError
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess
from tests.android_world_player import SOLUTIONS
from tests.simulated_phone_player import Player

PARAMS_IDX = 0
NAMED_BY_THE_CLOCK = ("MarkorCreateFolder",)


def main(words: list[str]) -> None:
    """Writes a line for each task named, or for all."""
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="aw_") as folder:
        sdk = make_simulated_sdk(Path(folder))
        settings = AndroidWorldSettings(
            device="android_world",
            avd_name=sdk.avd_name,
            android_avd_home=str(sdk.avd_home),
            emulator_path=str(sdk.emulator_path),
            adb_path=str(sdk.adb_path),
        )
        device = AndroidWorldDevice(settings, 0, EmulatorProcess(settings, 0))
        try:
            with Path(words[0]).open("a", encoding="utf-8") as output:
                for name in words[1:] or device.package.task_names():
                    output.write(json.dumps(_played(device, name, settings.suite_seed)) + "\n")
                    output.flush()
        finally:
            device.close()


def _played(device: AndroidWorldDevice, name: str, suite_seed: int) -> dict[str, Any]:
    start = time.monotonic()
    line: dict[str, Any] = {"task": name}
    try:
        first = device.reset(name, PARAMS_IDX)
        line["budget"] = first.step_budget
        if name in SOLUTIONS:
            params = _params(device, name, suite_seed)
            line["actions"] = _solved(Player(device, first), name, params)
        line["score"] = device.score()
        device.task.tear_down(device.package.env)
        line["torn_down"] = True
    except EpisodeError as error:
        line["error"] = f"{type(error).__name__}: {error}"
    line["seconds"] = round(time.monotonic() - start, 1)
    return line


def _params(device: AndroidWorldDevice, name: str, suite_seed: int) -> Any:
    """Those of a new object, because setting a task up rewords the parameters of the one that is played."""
    if name in NAMED_BY_THE_CLOCK:
        return device.task.params
    return device.package.new_task(name, PARAMS_IDX, suite_seed).params


def _solved(player: Player, name: str, params: Any) -> int:
    try:
        SOLUTIONS[name](player, params)
    except AssertionError as error:
        logging.warning("%s: the player is lost: %s", name, error)
    return player.actions


if __name__ == "__main__":
    main(sys.argv[1:])
