"""Checks whether a host can run the configured devices: SDK, KVM, base device, ports, disk, memory, Python packages.

``rollout-buffer doctor`` runs them here, or on every node of a Ray cluster. Changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from slime_plugins.rollout_buffer.devices.ray_cluster.resource_check import in_words
from slime_plugins.rollout_buffer.extensions import Group, installed
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import SHIPPED_KINDS, kind_of
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import (
    allocated_bytes,
    running_emulator,
    shares_blocks,
)
from slime_plugins.rollout_buffer.generator.android_world.emulator.kind import MIN_MEMORY_OF_AN_EMULATOR
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import FORWARDER_PACKAGE
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import free_console_ports

_FREE_BYTES_PER_EMULATOR = 12 * 1024**3
_COPY_BYTES_PER_S = 200e6
"""Assumed speed of a disk, for the estimate of how long the copies take."""
_KVM_GET_API_VERSION = 0xAE00
_KVM_VERSION = 12
_PACKAGES = {
    "android-env": "android_env.loader",
    "android_world": "android_world.registry",
    "slime-rollout-buffer, for the devices": "slime_plugins.rollout_buffer.devices.device_process",
}
_INSTALL_REMEDY = "make that environment with scripts/install_android_world"
_IMPORT_TIMEOUT_S = 60.0
_VERSION_TIMEOUT_S = 10.0


class State(StrEnum):
    OK = "ok"  # present, or passed
    MISSING = "missing"  # needed and not present
    NOT_NEEDED = "not needed"  # not present, and not needed by these settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check, and its remedy."""

    name: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlan:
    """What to examine: the settings, and how many devices this host runs. ``kvm`` is for tests."""

    settings: AndroidWorldSettings
    devices: int
    kvm: Path = Path("/dev/kvm")


def examine_host(host: HostPlan) -> list[Finding]:
    """Returns the findings of all checks of this host, in the order of installation."""
    kind = kind_of(host.settings.device)
    emulators = (_disk, _memory, _kvm, _ports, _sdk, _avd) if kind.boots_emulators else ()
    package = (_package, _ffmpeg) if kind.uses_package else ()
    return [finding for check in (*emulators, _checks_of_kind, *package) for finding in check(host)]


def room_for_devices(settings: AndroidWorldSettings, resources: Mapping[str, float]) -> int:
    """Returns the largest number of devices that Ray can place on a node with these resources."""
    wanted = settings.resources_per_worker.as_ray_names_them()
    # Integers in ten-thousandths, as Ray counts, because 1.0 // 0.1 is 9.
    room = [round(resources.get(name, 0.0) * 1e4) // max(1, round(amount * 1e4)) for name, amount in wanted.items()]
    return min([settings.num_workers + settings.spare_devices, *room])


def examine_node(settings: AndroidWorldSettings, resources: Mapping[str, float]) -> list[Finding]:
    """Returns the findings of ``examine_host`` on a node of a Ray cluster, for as many devices as fit on it."""
    room = room_for_devices(settings, resources)
    if not room:
        detail = f"no room for a device in {in_words(resources)}"
        remedy = "nothing, if this node is to hold no devices; otherwise start it with more --num-cpus or --memory"
        return checked("devices", False, detail, remedy, needed=False)
    return [
        *checked("devices", True, f"room for {room}", "", needed=True),
        *examine_host(HostPlan(settings=settings, devices=room)),
    ]


def checked(name: str, passed: bool, detail: str, remedy: str, *, needed: bool) -> list[Finding]:
    """Returns the finding of a check, as a list; its remedy only if it failed."""
    state = State.OK if passed else State.MISSING if needed else State.NOT_NEEDED
    return [Finding(name=name, state=state, detail=detail, remedy="" if passed else remedy)]


def free_space(name: str, folder: Path, wanted: int) -> list[Finding]:
    """Checks the free space of the disk that holds the folder, or will hold it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    detail = f"{free / 1024**3:.1f} GiB free at {existing}, {wanted / 1024**3:.0f} GiB wanted"
    return checked(name, free >= wanted, detail, "free space, or name another folder", needed=True)


def _disk(host: HostPlan) -> list[Finding]:
    folder = Path(host.settings.android_avd_home).expanduser()
    return free_space("disk of the virtual devices", folder, _bytes_wanted(host, _FREE_BYTES_PER_EMULATOR))


def _bytes_wanted(host: HostPlan, each: int) -> int:
    """Returns the disk space for the clones of all devices, ``each`` bytes, less what existing clones already take."""
    settings = host.settings
    home = Path(settings.android_avd_home).expanduser()
    names = map(settings.base_avd_name_pattern.format, range(settings.num_workers + settings.spare_devices))
    taken = [min(each, allocated_bytes(home / f"{name}.avd")) for name in names]
    return host.devices * each - sum(sorted(taken)[-host.devices :])


def _memory(host: HostPlan) -> list[Finding]:
    """Compares the total memory of the machine, in use or free, with what the emulators need."""
    settings = host.settings
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = host.devices * (settings.resources_per_worker.memory or MIN_MEMORY_OF_AN_EMULATOR)
    detail = f"{total / 1024**3:.0f} GiB here, {wanted / 1024**3:.0f} GiB wanted by {host.devices} emulators"
    remedy = "set num_workers lower, or spread the devices over a Ray cluster"
    return checked("memory", total >= wanted, detail, remedy, needed=True)


def _kvm(host: HostPlan) -> list[Finding]:
    problem = _kvm_problem(host.kvm)
    detail = f"{host.kvm} {problem or 'can be used'}"
    remedy = "use a host with hardware virtualisation, load the module kvm_intel or kvm_amd, join the group kvm"
    return checked("KVM", not problem, detail, remedy, needed=True)


def _kvm_problem(path: Path) -> str:
    """Returns the problem of KVM, empty if it works. Opens the device, because root has access even to a broken one."""
    try:
        device = os.open(path, os.O_RDWR)
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    try:
        version = fcntl.ioctl(device, _KVM_GET_API_VERSION)
    except OSError as error:
        return f"is no KVM device: {error.strerror}"
    finally:
        os.close(device)
    return "" if version == _KVM_VERSION else f"has API version {version}, not {_KVM_VERSION}"


def _ports(host: HostPlan) -> list[Finding]:
    base, wanted = host.settings.base_console_port, host.devices
    free = free_console_ports(base)
    detail = f"{free} pairs of console ports are free from {base} on, {wanted} wanted"
    remedy = "end other emulators or set base_console_port lower; a host has 64 pairs at most: spread the rest over Ray"
    return checked("ports of the emulators", free >= wanted, detail, remedy, needed=True)


def _sdk(host: HostPlan) -> list[Finding]:
    findings = []
    for key, part in (("emulator_path", "emulator"), ("adb_path", "platform-tools")):
        path = Path(getattr(host.settings, key)).expanduser()
        works = path.is_file() and os.access(path, os.X_OK)
        detail = f"{path}" if works else f"no program at {path}"
        if works and part == "platform-tools":
            works, detail = _run_adb(path)
        remedy = f"install the Android SDK package {part} with sdkmanager, or set {key}"
        findings += checked(f"Android SDK: {part}", works, detail, remedy, needed=True)
    return findings


def _run_adb(adb: Path) -> tuple[bool, str]:
    """Returns whether adb runs, and its version or error."""
    try:
        result = subprocess.run(
            [adb, "version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{adb} does not run: {error}"
    return result.returncode == 0, ", ".join([str(adb), *(result.stdout or result.stderr).splitlines()[:1]])


def _avd(host: HostPlan) -> list[Finding]:
    settings = host.settings
    config = Path(settings.android_avd_home).expanduser() / f"{settings.avd_name}.avd" / "config.ini"
    # The apps of a virtual device can be checked only while it runs; without the forwarder its boot fails.
    detail = f"{config.parent}" if config.is_file() else f"there is no {config}"
    remedy = (
        "create it with avdmanager (Pixel 6, API 33), run scripts/set_up_base_device once: it installs "
        f"AndroidWorld's apps and {FORWARDER_PACKAGE}; or set avd_name and android_avd_home"
    )
    findings = checked(f"virtual device {settings.avd_name}", config.is_file(), detail, remedy, needed=True)
    return [*findings, *(_clones(host, config.parent) if config.is_file() else [])]


def _clones(host: HostPlan, base: Path) -> list[Finding]:
    """Checks whether the base device can be copied now, and the disk space of all copies."""
    pid = running_emulator(base)
    detail = "it is not running" if pid is None else f"the process {pid} runs it"
    findings = checked("base device can be cloned", pid is None, detail, "stop that emulator", needed=True)
    try:
        shared = shares_blocks(base.parent)
    except OSError as error:
        return [*findings, *checked("copies of the base device", False, str(error), "make it writable", needed=True)]
    each, emulators = allocated_bytes(base), host.devices
    space = 0 if shared else _bytes_wanted(host, each)
    advice = "the file system shares blocks" if shared else "XFS with reflink or Btrfs would share blocks"
    detail = (
        f"{each / 1024**3:.1f} GiB each; {emulators} of them take {space / 1024**3:.0f} GiB more and, at "
        f"{_COPY_BYTES_PER_S / 1e6:.0f} MB/s, about {space / _COPY_BYTES_PER_S / 60:.0f} min: {advice}"
    )
    enough = shutil.disk_usage(base.parent).free >= space
    return [*findings, *checked("copies of the base device", enough, detail, "free space on that disk", needed=True)]


def _checks_of_kind(host: HostPlan) -> list[Finding]:
    """Runs the checks that the device kind itself defines."""
    checks = kind_of(host.settings.device).examine(host.settings)
    return [line for each in checks for line in checked(each.name, each.passed, each.detail, each.remedy, needed=True)]


def _package(host: HostPlan) -> list[Finding]:
    """Checks whether the device workers' Python can import each package."""
    python, device = host.settings.android_world_python or sys.executable, host.settings.device
    packages = {name: (module, _INSTALL_REMEDY) for name, module in _PACKAGES.items()}
    if device not in SHIPPED_KINDS:
        known = installed(Group.DEVICES)
        address = known[device].target if device in known else device
        packages[f"of the device kind {device}"] = (address.partition(":")[0], "install it there, too")
    findings = []
    for name, (module, installing) in packages.items():
        problem = _import_problem(python, module)
        detail = f"{python} cannot import {module}: {problem}" if problem else f"{python} can import it"
        remedy = f"{installing}; or name a Python that has it in android_world_python"
        findings += checked(f"package {name}", not problem, detail, remedy, needed=True)
    return findings


def _import_problem(python: str, module: str) -> str:
    """Imports a module with that Python; returns the last line of its error, empty if it works."""
    command = [python, "-c", f"import {module}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if result.returncode == 0 else (result.stderr.strip().splitlines() or ["it failed"])[-1]


def _ffmpeg(host: HostPlan) -> list[Finding]:
    path = shutil.which("ffmpeg")
    remedy = "install ffmpeg: tasks with music and videos make their files with it"
    return checked("ffmpeg", path is not None, path or "not on PATH", remedy, needed=True)
