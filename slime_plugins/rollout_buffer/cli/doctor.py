"""``rollout-buffer doctor``: checks whether this machine has what the configured devices need. Changes nothing.

The checks depend on ``device`` in the Android World settings: a simulated phone needs no SDK, so no SDK is checked.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from slime_plugins.rollout_buffer.cli.host_checks import Finding, HostPlan, State, checked, examine_host, free_space
from slime_plugins.rollout_buffer.credentials import redacted
from slime_plugins.rollout_buffer.devices.ray_cluster.pool import run_probe
from slime_plugins.rollout_buffer.devices.settings import PoolKind
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.prompt_probe import EngineFidelity
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.extensions import Group, installed, missing
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import SHIPPED_KINDS, kind_of
from slime_plugins.rollout_buffer.generator.miniwob.browser import find_chromium
from slime_plugins.rollout_buffer.install_hints import advice_on_two_slimes, install_extra
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer

_PYTHON_VERSIONS = ((3, 11), (3, 12), (3, 13))
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
_ENGINE_TIMEOUT_S = 5.0
_CLUSTER_TIMEOUT_S = 90.0
_NODES_TIMEOUT_S = 150.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What to examine. ``engine_url`` None skips the engine. Tests replace ``kvm``.

    With ``ray_address`` the devices are on the nodes of that cluster; without it they are on this machine.

    With ``tokenizer_path``, the folder of the engine's model, the engine is also tested for running prompts exactly.
    """

    settings: AndroidWorldSettings
    data_dir: Path
    engine_url: str | None = None
    tokenizer_path: Path | None = None
    ray_address: str | None = None
    kvm: Path = Path("/dev/kvm")


def examine(examination: Examination) -> list[Finding]:
    """Returns the findings of all checks, in the order of installation."""
    checks: Sequence[Callable[[Examination], list[Finding]]] = (
        _python, _two_slimes, _extras, _extensions, _browser, _ray, _ray_cluster, _disk, _devices, _engine, _prompts,
    )  # fmt: skip
    return [finding for check in checks for finding in check(examination)]


def verdict(findings: Sequence[Finding], device: str) -> str:
    """Returns a sentence on what is missing."""
    missing = [finding.name for finding in findings if finding.state is State.MISSING]
    if not missing:
        return f"Nothing is missing for device: {device}."
    return f"Missing for device: {device}: {', '.join(missing)}. See the remedies above."


def check_launch(kind: str, *, quietly: bool = False) -> tuple[int, list[str]]:
    """Runs the launch script's checks of a training; returns the script's exit code, or 2 if there is no script.

    The output goes to the terminal, or is returned as lines if ``quietly``. The scripts are part of a checkout of the
    project, or of slime with the overlay, not of an installed package.
    """
    program = Path(__file__).resolve().parents[3] / "tools" / "launch_training.py"
    if not program.is_file():
        problem = f"doctor --launch: there is no {program}: run it in a checkout of this project, or of slime overlaid"
        sys.stderr.write(f"{problem}\n")
        return 2, [problem]
    output = subprocess.PIPE if quietly else None
    result = subprocess.run(
        [sys.executable, str(program), kind, "--check"], stdout=output, stderr=subprocess.STDOUT if quietly else None,
        text=True, check=False,
    )  # fmt: skip
    return result.returncode, (result.stdout or "").splitlines()


def _python(_: Examination) -> list[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    supported = sys.version_info[:2] in _PYTHON_VERSIONS
    return checked("Python", supported, f"{version} at {sys.executable}", "use Python 3.11, 3.12 or 3.13", needed=True)


def _two_slimes(_: Examination) -> list[Finding]:
    """Reports a second slime or slime_plugins on the path; returns no finding if there is none."""
    advice = advice_on_two_slimes()
    if advice is None:
        return []
    detail, _colon, remedy = advice.partition(": ")
    return checked("one slime", False, detail, remedy, needed=True)


def _extras(examination: Examination) -> list[Finding]:
    findings = []
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if not _is_installed(module)]
        needed = extra == "android" and not examination.settings.android_world_python
        detail = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(modules)}"
        remedy = install_extra(extra)
        findings += checked(f"extra {extra}", not missing, detail, remedy, needed=needed)
    return findings


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _extensions(examination: Examination) -> list[Finding]:
    """Reports each installed extension: ok if it loads, else missing. An unknown device kind is missing, too."""
    findings = []
    device = examination.settings.device
    if device not in SHIPPED_KINDS and ":" not in device and device not in installed(Group.DEVICES):
        findings.append(Finding(name=f"devices {device}", state=State.MISSING, detail=missing(Group.DEVICES, device)))
    for extension in (extension for group in Group for _, extension in sorted(installed(group).items())):
        name, detail = f"{extension.group.name.lower()} {extension.name}", f"{extension.package}, {extension.target}"
        try:
            extension.load()
        except ConfigError as error:
            findings.append(Finding(name=name, state=State.MISSING, detail=error.message, remedy="fix or uninstall it"))
        else:
            findings.append(Finding(name=name, state=State.OK, detail=detail))
    return findings


def _browser(_: Examination) -> list[Finding]:
    """Checks the browser, which only task type miniwob needs."""
    try:
        passed, detail = True, find_chromium() or "the one that Playwright installed"
        remedy = ""
    except ConfigError as error:
        passed, (detail, _colon, remedy) = False, error.message.partition(": ")
    return checked("browser (task type miniwob)", passed, detail, remedy, needed=False)


def _ray(examination: Examination) -> list[Finding]:
    needed = examination.settings.device_pool is PoolKind.RAY
    try:
        detail, passed = f"version {importlib.metadata.version('ray')}", True
    except importlib.metadata.PackageNotFoundError:
        detail, passed = "not installed", False
    remedy = f"{install_extra('android')}, or set device_pool: local, which does not need it"
    return checked("Ray", passed, detail, remedy, needed=needed)


def _ray_cluster(examination: Examination) -> list[Finding]:
    """Joins the cluster."""
    if examination.ray_address is None:
        return []
    try:
        answer = run_probe(examination.ray_address, _CLUSTER_TIMEOUT_S)
        passed, output = answer.returncode == 0, answer.stdout if answer.returncode == 0 else answer.stderr
    except subprocess.TimeoutExpired:
        passed, output = False, f"no answer within {_CLUSTER_TIMEOUT_S:.0f} s"
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    remedy = "start it, or name its head; both sides need one Ray, one Python and the same token (RAY_AUTH_MODE)"
    return checked("Ray cluster", passed, lines[-1], remedy, needed=True)


def _disk(examination: Examination) -> list[Finding]:
    return free_space("disk of the data folder", examination.data_dir, _FREE_BYTES_SERVER)


def _devices(examination: Examination) -> list[Finding]:
    """Checks what the devices need: on every node of the cluster, or here if no cluster is named."""
    settings = examination.settings
    needs_a_host = kind_of(settings.device).boots_emulators or kind_of(settings.device).uses_package
    if examination.ray_address is None or not needs_a_host:
        emulators = settings.num_workers + settings.spare_devices
        return examine_host(HostPlan(settings=settings, devices=emulators, kvm=examination.kvm))
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer.cli.node_checks", examination.ray_address]
    try:
        answer = subprocess.run(
            command,
            input=settings.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=_NODES_TIMEOUT_S,
            check=True,
        )
        return [Finding(**finding | {"state": State(finding["state"])}) for finding in json.loads(answer.stdout)]
    except (subprocess.SubprocessError, ValueError) as error:
        last_line = (str(getattr(error, "stderr", None) or error).strip().splitlines() or ["no output"])[-1]
        return checked("nodes of the cluster", False, last_line, "see the finding Ray cluster", needed=True)


def _engine(examination: Examination) -> list[Finding]:
    url = examination.engine_url
    if url is None:
        return []
    try:
        reply = requests.get(f"{url.rstrip('/')}/health", timeout=_ENGINE_TIMEOUT_S)
        passed, detail = reply.ok, f"{url} answers {reply.status_code}"
    except requests.RequestException as error:
        passed, detail = False, f"{url}: {type(error).__name__}"
    remedy = "start it, or give its address to --engine-url"
    return checked("inference engine", passed, redacted(detail), remedy, needed=True)


def _prompts(examination: Examination) -> list[Finding]:
    """Checks whether the engine runs token ids exactly as sent, with the tokenizer of its model."""
    url, path = examination.engine_url, examination.tokenizer_path
    if url is None or path is None:
        return []
    try:
        fidelity = asyncio.run(_probed_prompts(url, path))
    except (ConfigError, OSError, ValueError) as error:
        return checked("prompts as they are sent", False, str(error), "name the folder of its model", needed=True)
    prompts = "prompts of text and with images" if fidelity is not None and fidelity.images else "prompts of text"
    problem = "gives no answer" if fidelity is None else fidelity.complaint
    detail = f"the engine {problem}" if problem else f"it runs {prompts} as they are sent"
    remedy = "SGLang 0.5.13 or later keeps ids and reports them; for others see docs/fidelity.md"
    return checked("prompts as they are sent", not problem, detail, remedy, needed=True)


async def _probed_prompts(url: str, tokenizer_path: Path) -> EngineFidelity | None:
    tokenizer = load_tokenizer(str(tokenizer_path))
    engine = make_engine(url.rstrip("/"), tokenizer=tokenizer, tokenizer_path=tokenizer_path)
    try:
        return await engine.probe_prompts()
    finally:
        await engine.close()
