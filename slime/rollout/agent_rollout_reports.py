"""What slime computed of each row goes back to the buffer, from the ranks that train.

slime forwards a Sample's ``index`` to the ranks and nothing else that names it, so the index of a row of ours, its
instance id, also knows which row of which trajectory it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from slime.rollout.agent_rollout_settings import read_report_rows, read_settings
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport, TrainingReporter


class RowName(str):
    """An instance id that also names one row: its job, the trajectory's uid and the row's number.

    Where turns earned rewards it has the advantage of each token of the row's response as well, and how many rows of
    its trajectory are trained.
    """

    job_id: str = ""
    uid: str = ""
    row: int = 0
    advantages: Sequence[float] | None = None
    rows: int = 1

    @classmethod
    def of(cls, instance_id: Any, *, job_id: str, uid: str, row: int) -> RowName:
        """Returns the instance id, with the row's name beside it."""
        name = cls(instance_id)
        name.job_id, name.uid, name.row = job_id, uid, row
        return name

    @classmethod
    def with_advantages(cls, instance_id: Any, advantages: Sequence[float], *, rows: int) -> RowName:
        """Returns the same name with the row's advantages; one of a row without a job names no row."""
        name = cls(instance_id)
        name.__dict__.update(getattr(instance_id, "__dict__", {}))
        name.advantages, name.rows = list(advantages), rows
        return name


def report_rows(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> bool:
    """Sends what this rank knows of its rows to the buffer; returns whether it is on its way. Never raises or waits."""
    most_rows = read_report_rows(args)
    if not most_rows:
        return False
    by_job: dict[str, list[RowReport]] = {}
    for job_id, row in rows_to_report(args, rollout_data):
        by_job.setdefault(job_id, []).append(row)
    if not by_job:
        return False
    settings = read_settings(args)
    return _reporter(settings.buffer_url, settings.token, most_rows).report(by_job, step=rollout_id)


def rows_to_report(args: Any, rollout_data: dict[str, Any]) -> Iterator[tuple[str, RowReport]]:
    """Yields each trained row with its job: what slime has of it between the advantages and the step.

    slime has log-probs of its own there unless it takes them from the step itself (one step for each rollout, and
    nobody asks): then only the advantage is known.
    """
    low, high = 1 - float(getattr(args, "eps_clip", 0.2)), 1 + float(getattr(args, "eps_clip_high", None) or 0.2)
    trajectories = sum(rollout_data["global_batch_sizes"])
    for number, name in enumerate(rollout_data["sample_indices"]):
        mask = rollout_data["loss_masks"][number].bool()
        if not isinstance(name, RowName) or not name.job_id or not mask.any():
            continue
        own, theirs, advantages, entropy = (
            rollout_data[key][number].detach().float()[mask].tolist() if rollout_data.get(key) else None
            for key in ("log_probs", "rollout_log_probs", "advantages", "entropy")
        )
        yield (
            name.job_id,
            RowReport(
                uid=name.uid,
                row=name.row,
                log_probs=own,
                rollout_log_probs=theirs,
                advantage=_mean(advantages),
                entropy=_mean(entropy),
                loss_share=float(mask.sum() / rollout_data["rollout_mask_sums"][number]) / trajectories,
                clip_share=_clipped(own, theirs, low, high),
            ),
        )


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _clipped(own: list[float] | None, theirs: list[float] | None, low: float, high: float) -> float | None:
    """The share of tokens whose ratio to the engine's policy lies outside of what PPO lets through."""
    if own is None or theirs is None:
        return None
    ratios = [math.exp(min(20.0, one - other)) for one, other in zip(own, theirs, strict=True)]
    return sum(not low <= ratio <= high for ratio in ratios) / len(ratios)


def reporters() -> Sequence[TrainingReporter]:
    """Returns what reports from this process; its ``flush`` waits until all has arrived."""
    return tuple(_reporters.values())


_reporters: dict[tuple[str, str | None, int], TrainingReporter] = {}


def _reporter(url: str, token: str | None, most_rows: int) -> TrainingReporter:
    key = url, token, most_rows
    if key not in _reporters:
        _reporters[key] = TrainingReporter(url, token=token, most_rows=most_rows)
    return _reporters[key]
