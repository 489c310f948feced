"""Runs all benchmarks with small rounds, and compares their ratios with the recorded ones.

    scripts/bench                 about ten minutes on two cores; writes build/bench.json and build/bench.md
    scripts/bench --check         the same, then compares: exit code 1 for a regression, 3 when the machine was too busy
    scripts/bench --record        the same, then stores it: benchmarks/recorded.json and the table in docs/benchmarks.md
    scripts/bench --only masks    one of them; the report keeps the others' results
    scripts/bench --without-run --check    checks the existing report

Each benchmark is a separate program with ``--json``; this file selects sizes and evaluates results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ratios import Finding, Ratio, Verdict, compare, read_ratios

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "bench.json"
RECORDED = ROOT / "benchmarks" / "recorded.json"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- scripts/bench: begin -->", "<!-- scripts/bench: end -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One program of the set. ``caveat`` limits the interpretation of its numbers."""

    name: str
    arguments: tuple[str, ...]
    limit_s: int
    caveat: str

    def command(self, target: Path) -> list[str]:
        """Returns its command line; it writes its numbers to ``target``."""
        return [sys.executable, "-m", f"benchmarks.bench_{self.name}", *self.arguments, "--json", str(target)]


BENCHES: tuple[Bench, ...] = (
    Bench(
        name="buffer",
        arguments=("--rounds", "3", "--folder", "build"),
        limit_s=240,
        caveat="client and server share the cores; the ancestor keeps everything in memory and loses it in a crash",
    ),
    Bench(
        name="masks",
        arguments=("--rounds", "3", "--batch", "64"),
        limit_s=240,
        caveat="slime's algorithm is restated; needs the real tokenizers (python tests/fetch_tokenizers.py)",
    ),
    Bench(
        name="gateway",
        arguments=("--rounds", "2", "--seconds", "1"),
        limit_s=300,
        caveat="the engine answers at once; a real one takes seconds, beside which the gateway disappears",
    ),
    Bench(
        name="scheduler",
        arguments=("--episodes", "256", "--rounds", "2"),
        limit_s=220,
        caveat="latencies are uniform and a fifth of real ones; devices and engine only wait",
    ),
    Bench(
        name="episodes",
        arguments=("--episodes", "32", "--steps", "10", "25"),
        limit_s=80,
        caveat="simulated phones, scripted replies; bytes, not seconds",
    ),
    Bench(
        name="prompts",
        arguments=("--rounds", "5", "--turns", "8"),
        limit_s=120,
        caveat="the engine waits and answers from memory, in the client's process",
    ),
)
"""The set, in the order of its runs. The limits together are at most 20 minutes."""


# --- running ---------------------------------------------------------------------------------------------------------


def run_bench(bench: Bench, folder: Path) -> dict[str, Any]:
    """Runs one program and returns its entry of the report.

    Raises:
        SystemExit: it failed or timed out.
    """
    target = folder.resolve() / f"bench_{bench.name}.json"
    load, begun = os.getloadavg()[0], time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    try:
        finished = subprocess.run(bench.command(target), cwd=ROOT, env=environment, timeout=bench.limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"bench: {bench.name} did not finish within {bench.limit_s} s") from None
    if finished.returncode != 0:
        raise SystemExit(f"bench: {bench.name} exited with {finished.returncode}")
    results = json.loads(target.read_text(encoding="utf-8"))
    return {
        "arguments": list(bench.arguments),
        "seconds": round(time.monotonic() - begun, 1),
        "load_before": round(load, 2),
        "caveat": bench.caveat,
        "ratios": [asdict(ratio) for ratio in read_ratios(bench.name, results)],
        "found": results,
    }


def machine() -> dict[str, Any]:
    """Returns facts about the machine."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.system() + " " + platform.release(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


# --- report ----------------------------------------------------------------------------------------------------------


def ratios_of(report: Mapping[str, Any], names: Sequence[str] | None = None) -> list[Ratio]:
    """Returns the ratios of a report, of all or of the named benchmarks."""
    return [
        Ratio(name=ratio["name"], rounds=tuple(ratio["rounds"]))
        for name, entry in report["benches"].items()
        if names is None or name in names
        for ratio in entry["ratios"]
    ]


def report_table(report: Mapping[str, Any]) -> str:
    """Returns a report as Markdown: the machine, and for each benchmark its caveat and every ratio with its range."""
    about = report["machine"]
    lines = [
        f"{about['cores']} cores ({about['processor']}), {about['memory_gb']} GB, {about['system']}, "
        f"Python {about['python']}.",
        "Ratios of rounds run in turn: the median, in brackets the lowest and highest round. More is better.",
        *(line for name, entry in report["benches"].items() for line in _bench_lines(name, entry)),
    ]
    return "\n".join(lines) + "\n"


TWO_AXES = {"buffer": " of ", "masks": ", "}
"""Benchmarks with tables of two axes, and what separates these in a ratio's name: ``ROW of COLUMN, to BASELINE``."""


def _bench_lines(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    cells: dict[str, dict[str, str]] = {}
    baseline = ""
    for ratio in ratios_of({"benches": {name: entry}}):
        row, column = ratio.name.removeprefix(f"{name}: "), "ratio"
        if name in TWO_AXES and ", to " in row:
            subject, baseline = row.rsplit(", to ", 1)
            row, column = subject.split(TWO_AXES[name], 1)
        cells.setdefault(row, {})[column] = ratio.shown
    columns = list(dict.fromkeys(column for row_cells in cells.values() for column in row_cells))
    duration = f"{entry['seconds']:.0f} s, load {entry['load_before']} before"
    against = f", to {baseline}" if baseline else ""
    yield from (
        "",
        f"**`benchmarks/bench_{name}.py {' '.join(entry['arguments'])}`**{against} ({duration}): {entry['caveat']}.",
        "",
    )
    yield from (f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|")
    for row, row_cells in cells.items():
        yield f"| {row} | {' | '.join(row_cells.get(column, '–') for column in columns)} |"


def busy_benches(report: Mapping[str, Any]) -> list[str]:
    """Returns the benchmarks before which the machine's load exceeded its cores."""
    cores = report["machine"]["cores"]
    return [name for name, entry in report["benches"].items() if entry["load_before"] > cores]


def exit_code_of(findings: Sequence[Finding], busy: Sequence[str]) -> int:
    """Returns 1 for a missing ratio or a regression, 3 if the machine was busy before each that regressed, else 0."""
    if any(finding.verdict is Verdict.MISSING for finding in findings):
        return 1
    regressed = [finding for finding in findings if finding.verdict is Verdict.REGRESSED]
    if not regressed:
        return 0
    return 3 if all(finding.name.split(":")[0] in busy for finding in regressed) else 1


def check(report: Mapping[str, Any], recorded: Mapping[str, Any], only: Sequence[str] | None) -> int:
    """Prints every finding that is not fine, and returns the exit code."""
    findings = compare(ratios_of(recorded, only), ratios_of(report, only))
    busy = busy_benches(report)
    for finding in findings:
        if finding.verdict is not Verdict.FINE:
            _print_line(f"{finding.verdict.value}: {finding.message}")
    if busy:
        _print_line(f"the machine was busy before {', '.join(busy)}: these results are not conclusive")
    fine = sum(finding.verdict is Verdict.FINE for finding in findings)
    _print_line(f"{fine} of {len(findings)} ratios are as recorded or better")
    return exit_code_of(findings, busy)


def _print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- the program -----------------------------------------------------------------------------------------------------


def keep(report: Mapping[str, Any], recorded: Path = RECORDED, page: Path = PAGE) -> None:
    """Stores a report as the recorded one, without raw numbers, and puts its table into the page.

    Raises:
        SystemExit: the report lacks a benchmark, or the page lacks the markers of the table.
    """
    lacking = [bench.name for bench in BENCHES if bench.name not in report["benches"]]
    if lacking:
        raise SystemExit(f"bench: the report lacks {', '.join(lacking)}; record a whole run")
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"bench: {page.name} has no lines {BEGIN} and {END}")
    benches = {
        name: {key: value for key, value in entry.items() if key != "found"}
        for name, entry in report["benches"].items()
    }
    recorded.write_text(json.dumps({**report, "benches": benches}, indent=1) + "\n", encoding="utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{report_table(report)}\n{END}{tail}", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise SystemExit(f"bench: {path} does not exist; scripts/bench writes it")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def measure(names: Sequence[str], target: Path) -> dict[str, Any]:
    """Runs the named benchmarks in sequence and updates the report after each."""
    target.parent.mkdir(parents=True, exist_ok=True)
    report = _read(target) if target.exists() and len(names) < len(BENCHES) else {"benches": {}}
    report["machine"] = machine()
    for bench in BENCHES:
        if bench.name in names:
            _print_line(f"== {bench.name}: {' '.join(bench.arguments)}")
            report["benches"][bench.name] = run_bench(bench, target.parent)
            report["benches"] = {
                one.name: report["benches"][one.name] for one in BENCHES if one.name in report["benches"]
            }
            target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(report_table(report), encoding="utf-8")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    names = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=names, help="these benchmarks; the report keeps the others' results"
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="where the report is written to and read from")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="what --check compares with")
    parser.add_argument("--without-run", action="store_true", help="measure nothing, use the existing report")
    parser.add_argument("--check", action="store_true", help="compare the ratios with the recorded ones")
    parser.add_argument("--record", action="store_true", help="store this run as the recorded one")
    options = parser.parse_args(arguments)
    report = _read(options.report) if options.without_run else measure(options.only or names, options.report)
    _print_line(report_table(report))
    if options.record:
        keep(report, options.recorded)
    return check(report, _read(options.recorded), options.only) if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
