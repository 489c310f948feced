"""Pure: builds the report of an evaluation, and compares two reports.

A sample is the trajectory that fills a slot. A slot without a sample (device, engine or environment failed in each
attempt) is not a failure of the policy. It is left out of all rates and counted separately;
``success_failures_as_zero`` is the rate that counts such slots as unsolved.
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
"""Version of the report's keys."""
Report = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """One line of the task list. ``groups`` maps categories of the report (``app`` …) to the line's values in them."""

    instance_id: str
    task: str | None = None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord:
    """A sample of a task: the trajectory that fills a slot."""

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
    """A line of the task list with its samples, and with the number of samples that were planned."""

    task: TaskRecord
    samples: Sequence[SampleRecord]
    planned: int

    @property
    def solved(self) -> int:
        return sum(sample.solved for sample in self.samples)


def default_pass_at_ks(samples_per_task: int) -> list[int]:
    """Returns the default k of pass@k: powers of two, and the number of samples."""
    powers = [2**power for power in range(samples_per_task.bit_length())]
    return sorted({k for k in [*powers, samples_per_task] if k <= samples_per_task})


def build_report(
    tasks: Sequence[TaskRecord],
    samples: Iterable[SampleRecord],
    *,
    samples_per_task: int,
    ks: Sequence[int],
    failed_attempts: Mapping[str, int],
    complete: bool,
) -> Report:
    """Returns the report as JSON values.

    Args:
        tasks: every line of the task list, in order.
        samples: the sample of each filled slot; at most ``samples_per_task`` for each task.
        samples_per_task: planned samples of each task.
        ks: the k of pass@k; a task with fewer than k samples is left out, and counted.
        failed_attempts: numbers of failed attempts by error code.
        complete: True if every slot was played or given up.
    """
    by_task: dict[str, list[SampleRecord]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.slot):
        by_task[sample.instance_id].append(sample)
    lines = [_Line(task, by_task[task.instance_id], samples_per_task) for task in tasks]
    categories = sorted({name for task in tasks for name in task.groups})
    return {
        "format": FORMAT,
        "complete": complete,
        **_summary(lines),
        "pass_at_k": {str(k): _pass_at(lines, k) for k in ks},
        "failed_tries": dict(sorted(failed_attempts.items())),
        "weight_versions": _weight_versions([sample for line in lines for sample in line.samples]),
        "outcomes": _counted(sample.outcome for line in lines for sample in line.samples),
        "stop_reasons": _counted(sample.stop_reason for line in lines for sample in line.samples),
        "by_task": _grouped(lines, [() if task.task is None else (task.task,) for task in tasks]),
        **{f"by_{name}": _grouped(lines, [task.groups.get(name, ()) for task in tasks]) for name in categories},
        "instances": [_instance(line) for line in lines],
    }


def compare_reports(new: Report, old: Report, seed: int = 0) -> Report:
    """Returns the difference between ``new`` and ``old`` on their common tasks, paired by task.

    Raises:
        ValueError: no task was played in both.
    """
    new_shares, old_shares = solved_shares(new), solved_shares(old)
    common = [instance_id for instance_id in new_shares if instance_id in old_shares]
    if not common:
        raise ValueError("the two evaluations have no task in common that both played")
    differences = [new_shares[instance_id] - old_shares[instance_id] for instance_id in common]
    return {
        "tasks": len(common),
        "only_new": len(new_shares) - len(common),
        "only_old": len(old_shares) - len(common),
        "new": statistics.fmean(new_shares[instance_id] for instance_id in common),
        "old": statistics.fmean(old_shares[instance_id] for instance_id in common),
        "difference": asdict(mean_difference(differences, seed)),
        "better": sum(difference > 0 for difference in differences),
        "equal": sum(difference == 0 for difference in differences),
        "worse": sum(difference < 0 for difference in differences),
    }


def _summary(lines: Sequence[_Line]) -> Report:
    played_lines = [line for line in lines if line.samples]
    samples = [sample for line in lines for sample in line.samples]
    planned = sum(line.planned for line in lines)
    return {
        "tasks": len(lines),
        "tasks_without_attempt": len(lines) - len(played_lines),
        "slots": {"planned": planned, "played": len(samples), "not_played": planned - len(samples)},
        "solved": sum(line.solved for line in lines),
        "success": _estimate([line.solved / len(line.samples) for line in played_lines], len(samples)),
        "success_failures_as_zero": _estimate([line.solved / line.planned for line in lines], planned),
        "reward_mean": mean_of_known(sample.reward for sample in samples),
        "turns_mean": mean_of_known(sample.turns for sample in samples),
        "played_s_mean": mean_of_known(sample.played_s for sample in samples),
    }


def _weight_versions(samples: Sequence[SampleRecord]) -> Report:
    """Returns the range of weight versions, and the number of samples that span several."""
    known = [sample.versions for sample in samples if sample.versions is not None]
    first = min((oldest for oldest, _ in known), default=None)
    last = max((newest for _, newest in known), default=None)
    spanning = sum(oldest != newest for oldest, newest in known)
    unknown = len(samples) - len(known)
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
    """Returns pass@k over the tasks with at least ``k`` samples, and the number of tasks that are left out."""
    used = [line for line in lines if len(line.samples) >= k]
    chances = [pass_at_k(len(line.samples), line.solved, k) for line in used]
    independent_draws = sum(len(line.samples) for line in used) / k  # one draw takes k samples
    estimate = _estimate(chances, independent_draws) or {"value": None, "low": None, "high": None, "tasks": 0}
    return {**estimate, "left_out": len(lines) - len(used)}


def _grouped(lines: Sequence[_Line], names_of_lines: Sequence[Iterable[str]]) -> Report:
    """Returns a summary for each name, over the lines that have it."""
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
        "played": len(line.samples),
        "not_played": line.planned - len(line.samples),
        "attempts": [_sample(sample) for sample in line.samples],
    }


def _sample(sample: SampleRecord) -> Report:
    names = ("slot", "uid", "solved", "reward", "outcome", "stop_reason", "turns", "played_s")
    return {name: getattr(sample, name) for name in names}


def _estimate(shares: Sequence[float], independent_samples: float) -> Report | None:
    return asdict(mean_over_tasks(shares, independent_samples)) if shares else None


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def solved_shares(report: Report) -> dict[str, float]:
    """Returns the share of solved samples of each task that was played, by ``instance_id``."""
    played = [entry for entry in report["instances"] if entry["played"]]
    return {entry["instance_id"]: entry["solved"] / entry["played"] for entry in played}
