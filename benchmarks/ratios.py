"""Ratios of a benchmark run with their range, and their comparison with the recorded ones.

Seconds and rates depend on the machine; ratios of two contenders that took turns on it depend on it less. For every
ratio higher is better. Pure: JSON in, messages out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MIN_TOLERANCE = 0.10
"""A median may be this much below the recorded one, however small the recorded range."""
TOLERANCE_OF_ONE_ROUND = 0.25
"""The same for a ratio that was measured once: its range is unknown."""


def spread(values: Sequence[float], form: str) -> str:
    """Returns the median and, of several values, the lowest and the highest; empty without a value."""
    if not values:
        return ""
    low, middle, high = map(form.format, (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}–{high})" if len(values) > 1 else middle


class Verdict(StrEnum):
    """Result of comparing a measured ratio with the recorded one."""

    FINE = "fine"  # as good as recorded, or better
    REGRESSED = "regressed"  # its median is below what the recorded spread allows
    NOISY = "noisy"  # the same, but a round reached the recorded median: inconclusive
    MISSING = "missing"  # recorded, and not measured this time
    NEW = "new"  # measured, and not recorded yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One comparison: its name, and its value in each round."""

    name: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def shown(self) -> str:
        """Median and range, for a table."""
        return spread(self.rounds, "{:.2f}" if self.median >= 0.1 else "{:.4f}")

    @property
    def tolerance(self) -> float:
        """The allowed relative loss of a later median: the range of the rounds, at least a tenth."""
        if len(self.rounds) == 1:
            return TOLERANCE_OF_ONE_ROUND
        return max(MIN_TOLERANCE, (max(self.rounds) - min(self.rounds)) / self.median)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A verdict with a message."""

    name: str
    verdict: Verdict
    message: str


def compare(recorded: Sequence[Ratio], measured: Sequence[Ratio]) -> list[Finding]:
    """Returns a finding for every ratio of either report, in the recorded order, new ones last."""
    now = {ratio.name: ratio for ratio in measured}
    known = {ratio.name for ratio in recorded}
    findings = [_judge(ratio, now.get(ratio.name)) for ratio in recorded]
    return findings + [
        Finding(name=ratio.name, verdict=Verdict.NEW, message=f"{ratio.name}: {ratio.shown}, not recorded yet")
        for ratio in measured
        if ratio.name not in known
    ]


def _judge(recorded: Ratio, measured: Ratio | None) -> Finding:
    if measured is None:
        message = f"{recorded.name}: recorded as {recorded.shown}, not measured this time"
        return Finding(name=recorded.name, verdict=Verdict.MISSING, message=message)
    floor = recorded.median * (1 - recorded.tolerance)
    both = f"{recorded.name}: {measured.shown} against a recorded {recorded.shown}"
    if measured.median >= floor:
        return Finding(name=recorded.name, verdict=Verdict.FINE, message=both)
    if max(measured.rounds) >= recorded.median:
        message = f"{both}: below {floor:.2f}, but a round reached the recorded median. Run it again on an idle machine"
        return Finding(name=recorded.name, verdict=Verdict.NOISY, message=message)
    message = f"{both}: below {floor:.2f}, beyond the recorded range"
    return Finding(name=recorded.name, verdict=Verdict.REGRESSED, message=message)


# --- JSON of each benchmark -------------------------------------------------------------------------------------------


def read_ratios(bench: str, report: Any) -> list[Ratio]:
    """Returns the ratios in the JSON of ``bench_<bench>.py``."""
    return READERS[bench](report)


def _round_by_round(name: str, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    return Ratio(name=name, rounds=tuple(a / b for a, b in zip(numerators, denominators, strict=True)))


def _buffer(report: Mapping[str, Any]) -> list[Ratio]:
    return [
        _round_by_round(
            f"buffer: {row['what']} of {row['item']}, to an in-memory ancestor", row["buffer"], row["ancestor"]
        )
        for row in report["rates"]
        if row["ancestor"]
    ]


def _masks(report: Mapping[str, Any]) -> list[Ratio]:
    return [
        _round_by_round(
            f"masks: {entry['pair']}, {entry['question']}, to slime's algorithm", entry["ancestor_s"], entry["ours_s"]
        )
        for entry in report["results"]
    ]


def _gateway(report: Mapping[str, Any]) -> list[Ratio]:
    ratios = []
    keys = ("lowest_round", "requests_per_s", "highest_round")
    for direct, numbers in report.items():
        through = report.get(direct.replace("direct", "gateway")) if direct.startswith("direct") else None
        if through is not None and "0.3 s" in direct:
            name = f"gateway: time to a stream's first event at {direct.rsplit(', ', 1)[1]}, engine alone to through it"
            ratios.append(Ratio(name=name, rounds=(numbers["p50_ms"] / through["p50_ms"],)))
        elif through is not None:
            rounds = tuple(through[key] / numbers[key] for key in keys)
            name = f"gateway: turns per second at {direct.removeprefix('direct ')}, to an instant engine alone"
            ratios.append(Ratio(name=name, rounds=rounds))
    in_memory = report.get("in memory c=16")
    for kind, description in (("gateway", "turns on disk"), ("without fsync", "turns on disk without fsync")):
        if in_memory is not None:
            rounds = tuple(report[f"{kind} c=16"][key] / in_memory[key] for key in keys)
            ratios.append(Ratio(name=f"gateway: turns per second at c=16, {description}, to in memory", rounds=rounds))
    waiting = report.get("gateway, 0.3 s, c=64")
    if waiting is not None:
        rounds = (report["in memory, 0.3 s, c=64"]["p50_ms"] / waiting["p50_ms"],)
        name = "gateway: median of a turn at c=64 with an engine of 0.3 s, in memory, to on disk"
        ratios.append(Ratio(name=name, rounds=rounds))
    return ratios


def _scheduler(report: Mapping[str, Any]) -> list[Ratio]:
    seconds = {name: [entry["seconds"] for entry in rounds] for name, rounds in report["rounds"].items()}
    runner = [entry["of_ideal"] for entry in report["rounds"]["runner"]]
    return [
        Ratio(name="scheduler: runner, to the ideal schedule", rounds=tuple(runner)),
        *(
            _round_by_round(f"scheduler: runner, to {name}", seconds[name], seconds["runner"])
            for name in seconds
            if name != "runner"
        ),
    ]


def _episodes(report: Sequence[Mapping[str, Any]]) -> list[Ratio]:
    costs = {(entry["mode"], entry["steps"]): entry for entry in report}
    steps = sorted({entry["steps"] for entry in report})
    last = steps[-1]
    ratios = [
        Ratio(
            name=f"episodes: bytes to the engine at {last} steps, incremental to history",
            rounds=(costs["incremental", last]["to_engine"] / costs["history", last]["to_engine"],),
        )
    ]
    for mode in dict.fromkeys(entry["mode"] for entry in report):
        short, long = (costs[mode, n]["stored"] / (n * costs[mode, n]["episodes"]) for n in (steps[0], last))
        name = f"episodes: bytes stored for a step, {mode}, {steps[0]} to {last} steps"
        ratios.append(Ratio(name=name, rounds=(short / long,)))
    return ratios


def _prompts(report: Mapping[str, Any]) -> list[Ratio]:
    turn = f"a turn of {report['turn_seconds']:g} s"
    return [
        _round_by_round(f"prompts: {turn} after {name}, compared to not compared", times["blind"], times["compared"])
        for name, times in report["prompts"].items()
    ]


READERS: Mapping[str, Callable[[Any], list[Ratio]]] = {
    "buffer": _buffer,
    "masks": _masks,
    "gateway": _gateway,
    "scheduler": _scheduler,
    "episodes": _episodes,
    "prompts": _prompts,
}
"""Functions that convert each benchmark's JSON into ratios."""
