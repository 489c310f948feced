"""Pure: builds the report of an evaluation, and compares two reports.

A slot without a complete attempt (device, engine or environment failed each time) is not a failure of the policy. It is
left out of all rates and counted separately; ``success_failures_as_zero`` is the rate with such slots as unsolved.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.evaluation.statistics import mean_difference, mean_over_tasks, pass_at_k
from slime_plugins.rollout_buffer.rules.trajectory_stats import mean_of_known

FORMAT = 1
Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """One line of the task list. ``groups`` maps categories of the report (``app`` …) to the line's values in them."""

    instance_id: str
    task: str | None = None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """A complete attempt at a slot."""

    instance_id: str
    slot: int
    uid: str
    solved: bool
    reward: float
    outcome: str
    stop_reason: str
    turns: int | None = None
    played_s: float | None = None
    versions: tuple[int, int] | None = None
    """The oldest and the newest weight version that sampled it; None if unknown."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A task with its attempts; ``planned`` is their planned number."""

    task: TaskRecord
    attempts: Sequence[AttemptRecord]
    planned: int

    @property
    def solved(self) -> int:
        return sum(attempt.solved for attempt in self.attempts)

    @property
    def share(self) -> float:
        return self.solved / len(self.attempts)


def default_pass_at_ks(samples_per_task: int) -> list[int]:
    """Returns the default k of pass@k: powers of two, and the number of samples."""
    powers = [2**power for power in range(samples_per_task.bit_length())]
    return sorted({k for k in [*powers, samples_per_task] if k <= samples_per_task})


def build_report(
    tasks: Sequence[TaskRecord],
    attempts: Iterable[AttemptRecord],
    *,
    samples_per_task: int,
    ks: Sequence[int],
    failed_tries: Mapping[str, int],
    complete: bool,
) -> Report:
    """Returns the report as JSON values.

    Args:
        tasks: every line of the task list, in order.
        attempts: the completed attempt of each filled slot: the samples; at most ``samples_per_task`` for each task.
        samples_per_task: planned samples of each task.
        ks: the k of pass@k; a task with fewer than k samples is left out, and counted.
        failed_tries: numbers of failed attempts by error code.
        complete: True if every slot was played or given up.
    """
    by_task: dict[str, list[AttemptRecord]] = defaultdict(list)
    for attempt in attempts:
        by_task[attempt.instance_id].append(attempt)
    lines = [
        _Line(task, sorted(by_task[task.instance_id], key=lambda attempt: attempt.slot), samples_per_task)
        for task in tasks
    ]
    names = sorted({name for task in tasks for name in task.groups})
    return {
        "format": FORMAT,
        "complete": complete,
        **_summary(lines),
        "pass_at_k": {str(k): _pass_at(lines, k) for k in ks},
        "failed_tries": dict(sorted(failed_tries.items())),
        "weight_versions": _weight_versions([attempt for line in lines for attempt in line.attempts]),
        "outcomes": _counted(line.attempts for line in lines),
        "stop_reasons": _counted((line.attempts for line in lines), "stop_reason"),
        "by_task": _grouped(lines, [() if task.task is None else (task.task,) for task in tasks]),
        **{f"by_{name}": _grouped(lines, [task.groups.get(name, ()) for task in tasks]) for name in names},
        "instances": [_instance(line) for line in lines],
    }


def compare_reports(new: Report, old: Report, seed: int = 0) -> Report:
    """Returns the difference between ``new`` and ``old`` on their common tasks, paired by task.

    Raises:
        ValueError: they have no task in common.
    """
    ours, theirs = solved_shares(new), solved_shares(old)
    common = [name for name in ours if name in theirs]
    if not common:
        raise ValueError("the two evaluations have no task in common that both played")
    differences = [ours[name] - theirs[name] for name in common]
    return {
        "tasks": len(common),
        "only_new": len(ours) - len(common),
        "only_old": len(theirs) - len(common),
        "new": statistics.fmean(ours[name] for name in common),
        "old": statistics.fmean(theirs[name] for name in common),
        "difference": asdict(mean_difference(differences, seed)),
        "better": sum(difference > 0 for difference in differences),
        "equal": sum(difference == 0 for difference in differences),
        "worse": sum(difference < 0 for difference in differences),
    }


def _summary(lines: Sequence[_Line]) -> Report:
    played = [line for line in lines if line.attempts]
    attempts = [attempt for line in lines for attempt in line.attempts]
    planned = sum(line.planned for line in lines)
    return {
        "tasks": len(lines),
        "tasks_without_attempt": len(lines) - len(played),
        "slots": {"planned": planned, "played": len(attempts), "not_played": planned - len(attempts)},
        "solved": sum(line.solved for line in lines),
        "success": _estimate([line.share for line in played], len(attempts)),
        "success_failures_as_zero": _estimate([line.solved / line.planned for line in lines], planned),
        "reward_mean": mean_of_known(attempt.reward for attempt in attempts),
        "turns_mean": mean_of_known(attempt.turns for attempt in attempts),
        "played_s_mean": mean_of_known(attempt.played_s for attempt in attempts),
    }


def _weight_versions(attempts: Sequence[AttemptRecord]) -> Report:
    """Returns the range of weight versions, and the number of attempts that span several."""
    known = [attempt.versions for attempt in attempts if attempt.versions is not None]
    first, last = min((one[0] for one in known), default=None), max((one[1] for one in known), default=None)
    spanning = sum(oldest != newest for oldest, newest in known)
    unknown = len(attempts) - len(known)
    if not known:
        message = "the engine named no weight version"
    elif first == last:
        message = f"one weight version: {first}"
    else:
        span = f"{spanning} of {len(known)} episodes span a change"
        message = f"changed during it: weight versions {first} to {last}, {span}"
    if known and unknown:
        message += f"; {unknown} episodes have no known version"
    counted = {"spanning": spanning, "known": len(known), "unknown": unknown}
    return {"first": first, "last": last, **counted, "message": message}


def _pass_at(lines: Sequence[_Line], k: int) -> Report:
    enough = [line for line in lines if len(line.attempts) >= k]
    chances = [pass_at_k(len(line.attempts), line.solved, k) for line in enough]
    choices = sum(len(line.attempts) for line in enough) / k
    estimate = _estimate(chances, choices) or {"value": None, "low": None, "high": None, "tasks": 0}
    return {**estimate, "left_out": len(lines) - len(enough)}


def _grouped(lines: Sequence[_Line], names_of_lines: Sequence[Iterable[str]]) -> Report:
    groups: dict[str, list[_Line]] = defaultdict(list)
    for line, names in zip(lines, names_of_lines, strict=True):
        for name in names:
            groups[name].append(line)
    return {name: _summary(groups[name]) for name in sorted(groups)}


def _instance(line: _Line) -> Report:
    return {
        "instance_id": line.task.instance_id,
        "task": line.task.task,
        **{name: list(values) for name, values in line.task.groups.items()},
        "solved": line.solved,
        "played": len(line.attempts),
        "not_played": line.planned - len(line.attempts),
        "attempts": [_attempt(attempt) for attempt in line.attempts],
    }


def _attempt(attempt: AttemptRecord) -> Report:
    names = ("slot", "uid", "solved", "reward", "outcome", "stop_reason", "turns", "played_s")
    return {name: getattr(attempt, name) for name in names}


def _estimate(shares: Sequence[float], independent: float) -> Report | None:
    return asdict(mean_over_tasks(shares, independent)) if shares else None


def _counted(attempts_of_lines: Iterable[Sequence[AttemptRecord]], name: str = "outcome") -> dict[str, int]:
    counts = Counter(str(getattr(attempt, name)) for attempts in attempts_of_lines for attempt in attempts)
    return dict(sorted(counts.items()))


def solved_shares(report: Report) -> dict[str, float]:
    """Returns the share of solved attempts of each task that was played."""
    played = [entry for entry in report["instances"] if entry["played"]]
    return {entry["instance_id"]: entry["solved"] / entry["played"] for entry in played}
