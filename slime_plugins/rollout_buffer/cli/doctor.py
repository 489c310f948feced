"""``rollout-buffer doctor``: checks this machine for what the configured devices need, with remedies. Changes nothing.

The checks depend on ``device`` in the Android World settings: a simulated phone needs no SDK, so it is not checked.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import requests

from slime_plugins.rollout_buffer.devices.settings import PoolKind
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.extensions import Group, installed, missing
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import SHIPPED_KINDS, AndroidKind, kind_of
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_clones import (
    allocated_bytes,
    running_emulator,
    shares_blocks,
)
from slime_plugins.rollout_buffer.generator.android_world.emulator.package import FORWARDER_PACKAGE
from slime_plugins.rollout_buffer.generator.android_world.emulator.ports import free_console_ports
from slime_plugins.rollout_buffer.generator.miniwob.browser import find_chromium
from slime_plugins.rollout_buffer.install_hints import advice_on_two_slimes, install_extra
from slime_plugins.rollout_buffer.redaction import redacted
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer

_PYTHON = ((3, 11), (3, 12), (3, 13))
_EXTRAS = {
    "android": ("PIL", "numpy"),
    "context-editing": ("bm25s",),
    "math": ("math_verify",),
    "miniwob": ("miniwob", "playwright"),
    "gateway": ("uvloop",),
    "parquet": ("pyarrow",),
    "datasets": ("datasets", "pyarrow", "PIL"),
    "terminal": ("textual_image", "PIL"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboardX",),
    "telemetry": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
_FREE_BYTES_SERVER = 2 * 1024**3
_FREE_BYTES_PER_EMULATOR = 12 * 1024**3
_COPIED_PER_S = 200e6
_MEMORY_PER_EMULATOR = 4 * 1024**3
_ASK_KVM_FOR_ITS_VERSION = 0xAE00
_KVM_VERSION = 12
_PACKAGES = (
    ("android-env", "android_env.loader", "make that environment with scripts/install_android_world"),
    (
        "android_world",
        "android_world.registry",
        "install google-research/android_world into the environment that scripts/install_android_world makes",
    ),
    (
        "slime-rollout-buffer, for the devices",
        "slime_plugins.rollout_buffer.devices.device_process",
        "make that environment with scripts/install_android_world",
    ),
)
_ENGINE_S = 5.0
_IMPORT_S = 60.0
_CLUSTER_S = 90.0


class State(StrEnum):
    OK = "ok"  # present
    MISSING = "missing"  # needed and not present
    ABSENT = "absent"  # not present, and not needed by these settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check, and its remedy."""

    name: str
    state: State
    detail: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What to examine; ``engine_url`` and ``ray_address`` None skip engine and cluster; ``kvm`` is for tests.

    With ``tokenizer_path``, the folder of the engine's model, it checks whether the engine runs prompts exactly.
    """

    settings: AndroidWorldSettings
    data_dir: Path
    engine_url: str | None = None
    tokenizer_path: Path | None = None
    ray_address: str | None = None
    kvm: Path = Path("/dev/kvm")

    @property
    def kind(self) -> AndroidKind:
        """The kind of devices that the settings name."""
        return kind_of(self.settings.device)

    @property
    def emulators(self) -> int:
        """Number of emulators on this machine, if all run on it."""
        return self.settings.num_workers + self.settings.spare_devices


def examine(examination: Examination) -> list[Finding]:
    """Returns the findings of all checks, in the order of installation."""
    emulators = (_memory, _kvm, _ports, _sdk, _avd) if examination.kind.boots_emulators else ()
    package = (_package, _ffmpeg) if examination.kind.uses_package else ()
    checks: Sequence[Callable[[Examination], list[Finding]]] = (
        _python, _two_slimes, _extras, _extensions, _browser, _ray, _ray_cluster, _disk,
        *emulators, _of_the_kind, *package, _engine, _prompts,
    )  # fmt: skip
    return [finding for check in checks for finding in check(examination)]


def verdict(findings: Sequence[Finding], device: str) -> str:
    """Returns a sentence on what is missing."""
    missing = [finding.name for finding in findings if finding.state is State.MISSING]
    if not missing:
        return f"Nothing is missing for device: {device}."
    return f"Missing for device: {device}: {', '.join(missing)}. See the remedies above."


def check_launch(kind: str, *, quietly: bool = False) -> tuple[int, list[str]]:
    """Runs the launch script's own checks of a training; returns its exit code, 2 if there is no script.

    The output goes to the terminal, or is returned as lines if ``quietly``. The scripts are part of a checkout of the
    project, or of slime with the overlay, not of an installed package.
    """
    program = Path(__file__).resolve().parents[3] / "tools" / "launch_training.py"
    if not program.is_file():
        problem = f"doctor --launch: there is no {program}: run it in a checkout of this project, or of slime overlaid"
        sys.stderr.write(f"{problem}\n")
        return 2, [problem]
    output = subprocess.PIPE if quietly else None
    done = subprocess.run(
        [sys.executable, str(program), kind, "--check"], stdout=output, stderr=subprocess.STDOUT if quietly else None,
        text=True, check=False,
    )  # fmt: skip
    return done.returncode, (done.stdout or "").splitlines()


def _found(name: str, there: bool, detail: str, remedy: str, *, needed: bool) -> list[Finding]:
    state = State.OK if there else State.MISSING if needed else State.ABSENT
    return [Finding(name=name, state=state, detail=detail, remedy="" if there else remedy)]


def _python(_: Examination) -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    right = sys.version_info[:2] in _PYTHON
    return _found("Python", right, f"{version} at {sys.executable}", "use Python 3.11, 3.12 or 3.13", needed=True)


def _two_slimes(_: Examination) -> list[Finding]:
    """Reports a second slime or slime_plugins on the path; nothing without one."""
    advice = advice_on_two_slimes()
    if advice is None:
        return []
    detail, _colon, remedy = advice.partition(": ")
    return _found("one slime", False, detail, remedy, needed=True)


def _extras(examination: Examination) -> list[Finding]:
    findings = []
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if not _is_installed(module)]
        needed = extra == "android" and not examination.settings.android_world_python
        detail = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(modules)}"
        remedy = install_extra(extra)
        findings += _found(f"extra {extra}", not missing, detail, remedy, needed=needed)
    return findings


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _extensions(examination: Examination) -> list[Finding]:
    """Reports each installed extension; one that does not load, or whose configured device does not, is missing."""
    found = []
    device = examination.settings.device
    if device not in SHIPPED_KINDS and ":" not in device and device not in installed(Group.DEVICES):
        found.append(Finding(name=f"devices {device}", state=State.MISSING, detail=missing(Group.DEVICES, device)))
    for extension in (extension for group in Group for _, extension in sorted(installed(group).items())):
        name, detail = f"{extension.group.name.lower()} {extension.name}", f"{extension.package}, {extension.target}"
        try:
            extension.load()
        except ConfigError as error:
            found.append(Finding(name=name, state=State.MISSING, detail=error.message, remedy="mend or uninstall it"))
        else:
            found.append(Finding(name=name, state=State.OK, detail=detail))
    return found


def _browser(_: Examination) -> list[Finding]:
    """Only task type miniwob needs a browser."""
    try:
        there, detail = True, find_chromium() or "the one that Playwright brought"
        remedy = ""
    except ConfigError as error:
        there, (detail, _colon, remedy) = False, error.message.partition(": ")
    return _found("browser (task type miniwob)", there, detail, remedy, needed=False)


def _ray(examination: Examination) -> list[Finding]:
    needed = examination.settings.device_pool is PoolKind.RAY
    try:
        detail, there = f"version {importlib.metadata.version('ray')}", True
    except importlib.metadata.PackageNotFoundError:
        detail, there = "not installed", False
    remedy = f"{install_extra('android')}, or set device_pool: local to do without"
    return _found("Ray", there, detail, remedy, needed=needed)


def _ray_cluster(examination: Examination) -> list[Finding]:
    """Joins the cluster in a separate process, since Ray waits long for an unreachable one."""
    if examination.ray_address is None:
        return []
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.devices.ray_cluster.probe"]
    try:
        answer = subprocess.run(
            [*command, examination.ray_address], capture_output=True, text=True, timeout=_CLUSTER_S, check=False
        )
        there, output = answer.returncode == 0, answer.stdout if answer.returncode == 0 else answer.stderr
    except subprocess.TimeoutExpired:
        there, output = False, f"no answer within {_CLUSTER_S:.0f} s"
    lines = [line for line in output.splitlines() if line.strip()] or ["it said nothing"]
    remedy = "start it, or give the address of its head; both sides need one Ray and one Python"
    return _found("Ray cluster", there, lines[-1], remedy, needed=True)


def _disk(examination: Examination) -> list[Finding]:
    settings = examination.settings
    places = [("disk of the data folder", examination.data_dir, _FREE_BYTES_SERVER)]
    if examination.kind.boots_emulators:
        wanted = examination.emulators * _FREE_BYTES_PER_EMULATOR
        places.append(("disk of the virtual devices", Path(settings.android_avd_home).expanduser(), wanted))
    findings = []
    for name, folder, wanted in places:
        free = shutil.disk_usage(_existing(folder)).free
        detail = f"{free / 1024**3:.1f} GB free at {_existing(folder)}, {wanted / 1024**3:.0f} GB wanted"
        findings += _found(name, free >= wanted, detail, "free space, or name another folder", needed=True)
    return findings


def _existing(folder: Path) -> Path:
    """Returns the folder, or its nearest existing parent."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _memory(examination: Examination) -> list[Finding]:
    """Checks the machine's memory, if all emulators run on it."""
    settings = examination.settings
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = examination.emulators * (settings.resources_per_worker.memory or _MEMORY_PER_EMULATOR)
    detail = f"{there / 1024**3:.0f} GB here, {wanted / 1024**3:.0f} GB wanted by {examination.emulators} emulators"
    remedy = "set num_workers lower, or spread the devices over a Ray cluster"
    return _found("memory", there >= wanted, detail, remedy, needed=True)


def _kvm(examination: Examination) -> list[Finding]:
    problem = _kvm_problem(examination.kvm)
    detail = f"{examination.kvm} {problem or 'can be used'}"
    remedy = "use a host with hardware virtualisation, load the module kvm_intel or kvm_amd, join the group kvm"
    return _found("KVM", not problem, detail, remedy, needed=True)


def _kvm_problem(path: Path) -> str:
    """Opens KVM, because root can read any file; returns the problem, empty if it works."""
    try:
        device = os.open(path, os.O_RDWR)
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    try:
        version = fcntl.ioctl(device, _ASK_KVM_FOR_ITS_VERSION)
    except OSError as error:
        return f"is no KVM device: {error.strerror}"
    finally:
        os.close(device)
    return "" if version == _KVM_VERSION else f"speaks version {version}, not {_KVM_VERSION}"


def _ports(examination: Examination) -> list[Finding]:
    base, wanted = examination.settings.base_console_port, examination.emulators
    free = free_console_ports(base)
    detail = f"{free} pairs of console ports are free from {base} on, {wanted} wanted"
    remedy = "end other emulators or set base_console_port lower; a host has 64 pairs at most: spread the rest over Ray"
    return _found("ports of the emulators", free >= wanted, detail, remedy, needed=True)


def _sdk(examination: Examination) -> list[Finding]:
    findings = []
    for key, part in (("emulator_path", "emulator"), ("adb_path", "platform-tools")):
        path = Path(getattr(examination.settings, key)).expanduser()
        there = path.is_file() and os.access(path, os.X_OK)
        detail = f"{path}" if there else f"no program at {path}"
        remedy = f"install the Android SDK package {part} with sdkmanager, or set {key}"
        findings += _found(f"Android SDK: {part}", there, detail, remedy, needed=True)
    return findings


def _avd(examination: Examination) -> list[Finding]:
    settings = examination.settings
    config = Path(settings.android_avd_home).expanduser() / f"{settings.avd_name}.avd" / "config.ini"
    # Its apps can be checked only when it runs: booting fails without the forwarder.
    detail = f"{config.parent}" if config.is_file() else f"there is no {config}"
    remedy = (
        "create it with avdmanager (Pixel 6, API 33), set AndroidWorld's apps and the accessibility forwarder "
        f"({FORWARDER_PACKAGE}) up in it once, stop it; or set avd_name and android_avd_home"
    )
    findings = _found(f"virtual device {settings.avd_name}", config.is_file(), detail, remedy, needed=True)
    return [*findings, *(_clones(examination, config.parent) if config.is_file() else [])]


def _clones(examination: Examination, base: Path) -> list[Finding]:
    """Checks whether the base device can be copied now, and the disk space of all copies."""
    pid = running_emulator(base)
    stands = "it stands still" if pid is None else f"the process {pid} runs it"
    findings = _found("base device can be cloned", pid is None, stands, "stop that emulator", needed=True)
    try:
        shared = shares_blocks(base.parent)
    except OSError as error:
        return [*findings, *_found("copies of the base device", False, str(error), "make it writable", needed=True)]
    each, emulators = allocated_bytes(base), examination.emulators
    space = 0 if shared else emulators * each
    how = "the file system shares blocks" if shared else "XFS with reflink or Btrfs would share blocks"
    detail = (
        f"{each / 1024**3:.1f} GB each; {emulators} of them take {space / 1024**3:.0f} GB and, at "
        f"{_COPIED_PER_S / 1e6:.0f} MB/s, about {space / _COPIED_PER_S / 60:.0f} min: {how}"
    )
    enough = shutil.disk_usage(base.parent).free >= space
    return [*findings, *_found("copies of the base device", enough, detail, "free space on that disk", needed=True)]


def _of_the_kind(examination: Examination) -> list[Finding]:
    """Reports what the kind of devices itself examines."""
    checks = examination.kind.examine(examination.settings)
    return [
        finding
        for check in checks
        for finding in _found(check.name, check.passed, check.detail, check.remedy, needed=True)
    ]


def _package(examination: Examination) -> list[Finding]:
    """Checks each package of the device workers' Python."""
    python = examination.settings.android_world_python or sys.executable
    findings = []
    for name, module, remedy in _PACKAGES:
        problem = _import_problem(python, module)
        detail = f"{python} cannot import {module}: {problem}" if problem else f"{python} can import it"
        remedy = f"{remedy}; or name a Python that has it in android_world_python"
        findings += _found(f"package {name}", not problem, detail, remedy, needed=True)
    return findings


def _import_problem(python: str, module: str) -> str:
    """Imports a module with that Python; returns the last line of its error, empty if it works."""
    command = [python, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1]


def _ffmpeg(examination: Examination) -> list[Finding]:
    path = shutil.which("ffmpeg")
    remedy = "install ffmpeg: tasks with music and videos make their files with it"
    return _found("ffmpeg", path is not None, path or "not on PATH", remedy, needed=True)


def _engine(examination: Examination) -> list[Finding]:
    url = examination.engine_url
    if url is None:
        return []
    try:
        reply = requests.get(f"{url.rstrip('/')}/health", timeout=_ENGINE_S)
        there, detail = reply.ok, f"{url} answers {reply.status_code}"
    except requests.RequestException as error:
        there, detail = False, f"{url}: {type(error).__name__}"
    return _found(
        "inference engine", there, redacted(detail), "start it, or give its address to --engine-url", needed=True
    )


def _prompts(examination: Examination) -> list[Finding]:
    """Checks whether the engine runs token ids exactly as sent, with the tokenizer of its model."""
    url, path = examination.engine_url, examination.tokenizer_path
    if url is None or path is None:
        return []
    try:
        fidelity = asyncio.run(_probed_prompts(url, path))
    except (ConfigError, OSError, ValueError) as error:
        return _found("prompts as they are sent", False, str(error), "name the folder of its model", needed=True)
    kept = "prompts of text and with images" if fidelity is not None and fidelity.images else "prompts of text"
    problem = "gives no answer" if fidelity is None else fidelity.complaint
    detail = f"the engine {problem}" if problem else f"it runs {kept} as they are sent"
    remedy = "SGLang 0.5.13 or later keeps ids and tells them; for others see docs/fidelity.md"
    return _found("prompts as they are sent", not problem, detail, remedy, needed=True)


async def _probed_prompts(url: str, tokenizer_path: Path) -> EngineFidelity | None:
    tokenizer = load_tokenizer(str(tokenizer_path))
    engine = make_engine(url.rstrip("/"), tokenizer=tokenizer, tokenizer_path=tokenizer_path)
    try:
        return await engine.probe_prompts()
    finally:
        await engine.close()
