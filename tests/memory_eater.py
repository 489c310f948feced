"""A device whose emulator, a process of its own, takes ever more memory once its episode has begun."""

from __future__ import annotations

import subprocess
import sys

from slime_plugins.rollout_buffer.devices.interface import Observation
from slime_plugins.rollout_buffer.testing.fake_device import FakeDevice

ADDRESS = f"{__name__}:create_device"
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
