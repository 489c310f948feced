"""Devices that use up their node's memory: by an emulator that takes ever more, or as a file says.

``create_device`` makes the first, whose emulator, a process of its own, begins with its episode.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.devices.ray_cluster import node_memory
from slime_plugins.rollout_buffer.testing.fake_device import FakeDevice

ADDRESS = f"{__name__}:create_device"
BY_FILE = f"{__name__}:create_by_file"
_EAT = """
import os, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
held = []
while True:
    held.append(bytearray(os.urandom(1)) * 20_000_000)
    time.sleep(0.1)
"""


class MemoryEater(FakeDevice):
    """Ends its process in ``close`` or with its worker."""

    _emulator: subprocess.Popen[bytes] | None = None

    def reset(self, task_name: str, params_idx: int) -> Observation:
        if self._emulator is None:
            self._emulator = subprocess.Popen([sys.executable, "-c", _EAT], stdin=subprocess.PIPE)
        return super().reset(task_name, params_idx)

    def close(self) -> None:
        super().close()
        if self._emulator is not None:
            self._emulator.kill()
            self._emulator.wait()


def create_device(_options: object, index: int) -> MemoryEater:
    """A ``DeviceKind``."""
    return MemoryEater(index)


class TakesWhatAFileSays(FakeDevice):
    """``reading`` holds the used share of the node's memory. Some is free three seconds after its end."""

    def __init__(self, reading: Path, index: int) -> None:
        super().__init__(index)
        vars(node_memory)["used_share"] = lambda: float(reading.read_text())
        self._emulator = subprocess.Popen(["sh", "-c", f"cat; sleep 3; echo 0.5 >{reading}"], stdin=subprocess.PIPE)


def create_by_file(options: Mapping[str, Any], index: int) -> TakesWhatAFileSays:
    """A ``DeviceKind``, with the path of the file as its option."""
    return TakesWhatAFileSays(Path(options["reading"]), index)
