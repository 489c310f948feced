"""Runs the checks that need more than a plain machine, and prints a table of results (``scripts/verify``).

Each row selects tests that ``scripts/test`` skips if their requirements are missing, and names these: one environment
variable, or a program. A row with a missing requirement is reported instead of run.

    scripts/verify                   every row whose requirements are met
    scripts/verify slime npm         these rows; a missing requirement is a failure
    scripts/verify --list            all rows and their requirements
    scripts/verify --require-all     any missing requirement is a failure, as before a release

Exit codes: 0 every row that ran passed, 1 a row failed (or a requirement of a named row is missing), 2 there is no such
row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import xml.etree.ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MAX_S = 3600.0
_ANSWER_S = 5.0

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One check: its tests, a description of its requirements, and ``lacks``, which returns the missing one."""

    name: str
    needs: str
    tests: tuple[str, ...]
    lacks: Callable[[Environment], str]
    adds: Callable[[Environment], dict[str, str]] = field(default=lambda _: {})
    """Variables derived from the one that is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of a row. ``state`` is passed, failed or missing."""

    row: Row
    state: str
    detail: str
    seconds: float = 0.0


# --- requirements ----------------------------------------------------------------------------------------------------


def _folder(variable: str, *holds: str) -> Callable[[Environment], str]:
    """Requires a variable that names a folder with those files in it."""

    def lacks(environment: Environment) -> str:
        value = environment.get(variable, "")
        if not value:
            return f"{variable} is not set"
        missing = [name for name in holds or (".",) if not (Path(value) / name).exists()]
        return f"{variable}={value} has no {', '.join(missing)}" if missing else ""

    return lacks


def _python(variable: str, module: str) -> Callable[[Environment], str]:
    """Requires a variable that names a Python with that package."""

    def lacks(environment: Environment) -> str:
        value = environment.get(variable, "")
        if not value:
            return f"{variable} is not set"
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        try:
            process = subprocess.run([value, "-c", code], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{variable}={value} cannot be run: {error}"
        return f"{variable}={value} has no {module}" if process.returncode else ""

    return lacks


def _program(*names: str, variable: str = "") -> Callable[[Environment], str]:
    """Requires one of these programs on the PATH, or the program that a variable names."""

    def lacks(environment: Environment) -> str:
        if value := environment.get(variable, ""):
            return "" if shutil.which(value) else f"{variable}={value} is no program"
        if any(shutil.which(name, path=environment.get("PATH")) for name in names):
            return ""
        return f"no {' or '.join(names)} on the PATH" + (f", and {variable} is not set" if variable else "")

    return lacks


def _module(name: str) -> Callable[[Environment], str]:
    return lambda _: "" if importlib.util.find_spec(name) else f"{name} is not installed in {sys.executable}"


def _engine(variable: str) -> Callable[[Environment], str]:
    """Requires a variable with the address of a running SGLang, and a torch that recomputes its log-probs."""

    def lacks(environment: Environment) -> str:
        url = environment.get(variable, "")
        if not url:
            return f"{variable} is not set"
        if not _model_of(url):
            return f"no SGLang with a model on this machine answers at {variable}={url}"
        if environment.get("ROLLOUT_BUFFER_TEST_TORCH_PYTHON"):
            return ""
        return _module("torch")(environment)

    return lacks


def _model_of(url: str) -> str:
    """Returns the folder of a server's model; empty if unknown or not on this machine."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/get_model_info", timeout=_ANSWER_S) as reply:
            path = str(json.load(reply).get("model_path", ""))
    except (OSError, ValueError):
        return ""
    return path if Path(path).is_dir() else ""


def _text_models(environment: Environment) -> dict[str, str]:
    path = _model_of(environment["ROLLOUT_BUFFER_TEST_ENGINE_URL"])
    return {"ROLLOUT_BUFFER_TEST_MODEL": path, "ROLLOUT_BUFFER_TEST_ENGINE_MODEL": path}


def _vision_model(environment: Environment) -> dict[str, str]:
    return {"ROLLOUT_BUFFER_TEST_VISION_MODEL": _model_of(environment["ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL"])}


def _all(*needs: Callable[[Environment], str]) -> Callable[[Environment], str]:
    """Requires all of these; the result names the first missing one."""
    return lambda environment: next((missing for need in needs if (missing := need(environment))), "")


_SLIME = _folder("ROLLOUT_BUFFER_TEST_SLIME", "slime/ray/rollout.py", "train_async.py")
_SLIME_TORCH = _all(_SLIME, _python("ROLLOUT_BUFFER_TEST_SLIME_PYTHON", "torch"))

ROWS: tuple[Row, ...] = (
    Row(
        name="sglang",
        needs="ROLLOUT_BUFFER_TEST_ENGINE_URL: an SGLang with a text model of this machine, in float32 (a CPU will do)",
        tests=(
            "tests/integration/test_engine_real.py",
            "tests/integration/test_rows_real_engine.py",
            "tests/integration/test_gateway_real_engine.py",
            "lab/tests/integration/test_embedded_engine_real.py",
            "tests/integration/test_context_editing_real_engine.py",
        ),
        lacks=_engine("ROLLOUT_BUFFER_TEST_ENGINE_URL"),
        adds=_text_models,
    ),
    Row(
        name="sglang-vision",
        needs="ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL: an SGLang with a Qwen-VL of this machine; torchvision",
        tests=("tests/integration/test_engine_real.py", "tests/integration/test_images_real_engine.py"),
        lacks=_all(_engine("ROLLOUT_BUFFER_TEST_VISION_ENGINE_URL"), _module("torchvision")),
        adds=_vision_model,
    ),
    Row(
        name="sglang-policy",
        needs="ROLLOUT_BUFFER_TEST_ENGINE_POLICY_URL: an SGLang with a folder that `scripts/learn --only-model` made",
        tests=("lab/tests/integration/test_learning_real_engine.py",),
        lacks=_all(_engine("ROLLOUT_BUFFER_TEST_ENGINE_POLICY_URL"), _module("torch")),
    ),
    Row(
        name="sglang-android",
        needs="SLIME_TEST_SGLANG_PORT and SLIME_TEST_MODEL: the engine and its model for whole Android episodes",
        tests=("tests/integration/test_android_world_verification.py",),
        lacks=_all(
            lambda environment: (
                "" if environment.get("SLIME_TEST_SGLANG_PORT") else "SLIME_TEST_SGLANG_PORT is not set"
            ),
            _folder("SLIME_TEST_MODEL", "config.json"),
        ),
    ),
    Row(
        name="slime",
        needs="ROLLOUT_BUFFER_TEST_SLIME: a slime checkout; its parsers, its mask code, the overlay, the launcher",
        tests=(
            "tests/unit/docs/test_arguments_page.py",
            "tests/unit/tools/test_install_into_slime.py",
            "tests/unit/tools/test_launch_training.py",
            "tests/unit/tools/test_install_hints.py",
            "tests/integration/test_plain_generators.py",
        ),
        lacks=_SLIME,
    ),
    Row(
        name="slime-contract",
        needs="also ROLLOUT_BUFFER_TEST_SLIME_PYTHON (torch, ray, transformers) and torch here; slime's RolloutManager",
        tests=(
            "tests/integration/test_slime_contract.py",
            "tests/integration/test_slime_sweep.py",
            "lab/tests/learning/test_losses.py",
        ),
        lacks=_all(_SLIME_TORCH, _module("torch")),
    ),
    Row(
        name="slime-versions",
        needs="ROLLOUT_BUFFER_TEST_SLIME_GIT: slime with its history; both ends of each range that the docs name",
        tests=("tests/integration/test_slime_versions.py",),
        lacks=_all(_folder("ROLLOUT_BUFFER_TEST_SLIME_GIT"), _python("ROLLOUT_BUFFER_TEST_SLIME_PYTHON", "torch")),
    ),
    Row(
        name="train-step",
        needs="also ROLLOUT_BUFFER_TEST_MEGATRON: Megatron-LM with slime's patch; slime's own training step on a CPU",
        tests=("tests/integration/test_slime_train_step.py", "tests/integration/test_slime_token_records.py"),
        lacks=_all(_SLIME_TORCH, _folder("ROLLOUT_BUFFER_TEST_MEGATRON", "megatron")),
    ),
    Row(
        name="android_world",
        needs="ROLLOUT_BUFFER_TEST_ANDROID_WORLD: a Python with android_world (scripts/install_android_world)",
        tests=(
            "tests/integration/test_android_world_real.py",
            "tests/integration/test_android_world_adb_only.py",
            "tests/integration/test_android_world_farm.py",
            "tests/integration/test_android_world_needs.py",
        ),
        lacks=_python("ROLLOUT_BUFFER_TEST_ANDROID_WORLD", "android_world"),
    ),
    Row(
        name="chromium",
        needs="a Chromium on the PATH, or ROLLOUT_BUFFER_CHROMIUM: the dashboard in a browser",
        tests=("tests/integration/test_dashboard_browser.py",),
        lacks=_all(
            _program("chromium", "chromium-browser", "google-chrome", variable="ROLLOUT_BUFFER_CHROMIUM"),
            _module("playwright"),
        ),
    ),
    Row(
        name="prometheus",
        needs="a Prometheus on the PATH, or ROLLOUT_BUFFER_PROMETHEUS: every query of the Grafana dashboard",
        tests=("tests/integration/test_grafana_prometheus.py",),
        lacks=_program("prometheus", variable="ROLLOUT_BUFFER_PROMETHEUS"),
    ),
    Row(
        name="torch",
        needs="torch in this environment: the embedded engine, the reference trainer, slime's image processors",
        tests=(
            "lab/tests/integration/test_embedded_engine.py",
            "lab/tests/integration/test_embedded_engine_images.py",
            "tests/integration/test_vision_processors.py",
            "lab/tests/learning/test_reference_trainer.py",
            "lab/tests/integration/test_learning.py",
        ),
        lacks=_module("torch"),
    ),
    Row(
        name="agents",
        needs="ROLLOUT_BUFFER_TEST_AGENTS_PYTHON: a Python with openai-agents; the SDK's tool loop at the gateway",
        tests=("tests/integration/test_gateway_agents.py",),
        lacks=_python("ROLLOUT_BUFFER_TEST_AGENTS_PYTHON", "agents"),
    ),
    Row(
        name="npm",
        needs="ROLLOUT_BUFFER_TEST_NPM: a folder of `npm install openai @anthropic-ai/claude-code @openai/codex`",
        tests=(
            "tests/integration/test_npm_client.py",
            "tests/integration/test_gateway_command_line_agents.py",
            "tests/crash/test_crash_short.py",
        ),
        lacks=_all(_folder("ROLLOUT_BUFFER_TEST_NPM", "node_modules/openai"), _program("node")),
    ),
    Row(
        name="adb",
        needs="adb on the PATH (Debian's package): how its server behaves",
        tests=("tests/integration/test_adb_servers.py",),
        lacks=_program("adb"),
    ),
    Row(
        name="wheel",
        needs="ROLLOUT_BUFFER_TEST_WHEEL=1, and an index to install from: a wheel in an empty environment",
        tests=("tests/integration/test_wheel.py",),
        lacks=lambda environment: (
            "" if environment.get("ROLLOUT_BUFFER_TEST_WHEEL") else "ROLLOUT_BUFFER_TEST_WHEEL is not set"
        ),
    ),
)


# --- running ---------------------------------------------------------------------------------------------------------


def run_row(row: Row, environment: Environment) -> Result:
    """Runs a row's tests in a subprocess, if its requirements are met."""
    if missing := row.lacks(environment):
        return Result(row=row, state="missing", detail=missing)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        try:
            process = subprocess.run(
                [*command, *row.tests], cwd=ROOT, env={**environment, **row.adds(environment)}, timeout=MAX_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(row=row, state="failed", detail="it took too long", seconds=MAX_S)
        state, detail = read_report(report, process.returncode)
    return Result(row=row, state=state, detail=detail, seconds=time.monotonic() - began)


def read_report(report: Path, exit_code: int) -> tuple[str, str]:
    """Returns state and detail of a run: its counts, or the first failure. A run with only skips does not pass."""
    try:
        suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    except (OSError, xml.etree.ElementTree.ParseError):
        suite = None
    if suite is None:
        return "failed", f"pytest ended with {exit_code} and no report"
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    bad = [case.get("name", "?") for case in suite.iter("testcase") if {e.tag for e in case} & {"failure", "error"}]
    reasons = sorted({skip.get("message", "") for skip in suite.iter("skipped")})
    if exit_code not in (0, 5) or bad:
        return (
            "failed",
            f"{len(bad)} of {count['tests']}: {', '.join(bad[:3])}" if bad else f"pytest ended with {exit_code}",
        )
    skipped = f", {count['skipped']} skipped ({'; '.join(reasons)[:200]})" if reasons else ""
    return ("passed" if passed else "missing"), f"{passed} passed{skipped}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the requested rows and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true", help="list all rows and their requirements; run nothing")
    parser.add_argument("--require-all", action="store_true", help="any missing requirement is a failure")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    by_name = {row.name: row for row in ROWS}
    if unknown := [name for name in options.rows if name not in by_name]:
        parser.error(f"there is no row {', '.join(unknown)}: {', '.join(by_name)}")
    chosen = [by_name[name] for name in options.rows] or list(ROWS)
    if options.list:
        console.print(_listed(chosen))
        return 0
    results = []
    for row in chosen:
        console.rule(row.name)
        results.append(run_row(row, os.environ))
    console.print(_table(results))
    bad = {"failed", "missing"} if options.rows or options.require_all else {"failed"}
    return int(any(result.state in bad for result in results))


def _listed(rows: Sequence[Row]) -> Table:
    table = Table("row", "needs", "here")
    for row in rows:
        missing = row.lacks(os.environ)
        table.add_row(row.name, row.needs, missing or "yes")
    return table


_COLORS = {"passed": "green", "failed": "bold red", "missing": "yellow"}


def _table(results: Sequence[Result]) -> Table:
    table = Table("row", "state", "result", "seconds")
    for result in results:
        seconds = f"{result.seconds:.0f}" if result.seconds else ""
        table.add_row(result.row.name, f"[{_COLORS[result.state]}]{result.state}[/]", result.detail, seconds)
    return table


if __name__ == "__main__":
    sys.exit(main())
