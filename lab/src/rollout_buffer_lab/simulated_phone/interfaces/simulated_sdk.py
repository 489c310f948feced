"""A folder that looks like an Android SDK with one virtual device, whose programs are those of the simulated phone.

Whatever drives real emulators (our own device adapter, android_world's launcher) can be pointed at it.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from rollout_buffer_lab.simulated_phone.interfaces.fault_plan import FaultPlan
from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults

_PROGRAMS = Path(__file__).parent
_MODULE = f"{__package__}.emulator_process"
_SOURCES = _PROGRAMS.parents[2]
"""The folder of this package, for the device workers' Python, which may not have it installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSdk:
    """The paths of the SDK. ``folder`` must be short: the path of a Unix socket may have about a hundred bytes."""

    folder: Path
    avd_name: str

    @property
    def emulator_path(self) -> Path:
        """The emulator program."""
        return self.folder / "emulator" / "emulator"

    @property
    def adb_path(self) -> Path:
        """The adb program."""
        return self.folder / "platform-tools" / "adb"

    @property
    def avd_home(self) -> Path:
        """The folder of the virtual devices."""
        return self.folder / "avd"

    @property
    def devices(self) -> Path:
        """The folder of the phones' sockets."""
        return self.folder / "devices"

    @property
    def fault_plan(self) -> FaultPlan:
        """The planned faults."""
        return FaultPlan(self.devices)

    def set_faults(self, serial: str, faults: Faults) -> None:
        """Sets the faults of a running emulator."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self.devices / f"{serial}.sock"))
            connection.sendall(json.dumps({"faults": faults.to_json()}).encode() + b"\n")
            connection.recv(1024)


def make_simulated_sdk(folder: Path, *, python: str = sys.executable, avd_name: str = "SimulatedAvd") -> SimulatedSdk:
    """Writes the programs and one virtual device below the folder. ``python`` must have android_env and the product."""
    sdk = SimulatedSdk(folder=folder, avd_name=avd_name)
    for path in (sdk.emulator_path.parent, sdk.adb_path.parent, sdk.devices, sdk.avd_home / f"{avd_name}.avd"):
        path.mkdir(parents=True, exist_ok=True)
    run = shlex.quote(python)
    _write_program(sdk.adb_path, f"{run} -S -E {shlex.quote(str(_PROGRAMS / 'fake_adb.py'))} {_quoted(sdk.devices)}")
    sources = f"PYTHONPATH={_quoted(_SOURCES)}${{PYTHONPATH:+:$PYTHONPATH}}"
    _write_program(sdk.emulator_path, f"env {sources} {run} -m {_MODULE} --folder {_quoted(sdk.devices)}")
    avd = sdk.avd_home / f"{avd_name}.avd"
    (avd / "config.ini").write_text(f"AvdId={avd_name}\nhw.lcd.width=1080\nhw.lcd.height=2400\n")
    (sdk.avd_home / f"{avd_name}.ini").write_text(f"path={avd}\npath.rel=avd/{avd_name}.avd\ntarget=android-33\n")
    return sdk


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _write_program(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
