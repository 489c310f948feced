"""Devices that seem to use up their node's memory: they take none, but the test replaces the measured usage.

``create_device`` makes a device with an emulator, an idle process that starts with its first episode. Its id is a file
in the folder ``$TEST_EMULATORS``, from which the test computes how much memory is in use. A device of
``create_by_file`` reads that from a file.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.devices.ray_cluster import node_memory
from slime_plugins.rollout_buffer.testing.fake_device import FakeDevice

ADDRESS = f"{__name__}:create_device"
BY_FILE = f"{__name__}:create_by_file"
EMULATORS = "TEST_EMULATORS"


class MemoryEater(FakeDevice):
    """Ends its process in ``close`` or with its worker."""

    _emulator: subprocess.Popen[bytes] | None = None

    def reset(self, task_name: str, params_idx: int) -> Observation:
        if self._emulator is None:
            self._emulator = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            (Path(os.environ[EMULATORS]) / str(self._emulator.pid)).touch()
        return super().reset(task_name, params_idx)

    def close(self) -> None:
        super().close()
        if self._emulator is not None:
            self._emulator.kill()
            self._emulator.wait()


def create_device(_options: object, index: int) -> MemoryEater:
    """A ``DeviceKind``."""
    return MemoryEater(index)


class UsesWhatAFileSays(FakeDevice):
    """``reading`` holds the used share of the node's memory. Three seconds after the device has ended it is 0.5."""

    def __init__(self, reading: Path, index: int) -> None:
        super().__init__(index)
        vars(node_memory)["used_share"] = lambda: float(reading.read_text())
        self._emulator = subprocess.Popen(["sh", "-c", f"cat; sleep 3; echo 0.5 >{reading}"], stdin=subprocess.PIPE)


def create_by_file(options: Mapping[str, Any], index: int) -> UsesWhatAFileSays:
    """A ``DeviceKind``, with the path of the file as its option."""
    return UsesWhatAFileSays(Path(options["reading"]), index)
