"""Reports slime's values for each row to the buffer, from the training ranks.

slime forwards only a Sample's ``index`` to the ranks. The index of our rows, the instance id, is therefore a string
subclass that also identifies the row (``RowName``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from slime.rollout.agent_rollout_settings import read_report_rows, read_settings
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport, TrainingReporter


class RowName(str):
    """An instance id with the row's job, trajectory uid and number.

    With rewards of turns it also holds the advantage of each response token, and the number of trained rows of the
    trajectory.
    """

    job_id: str = ""
    uid: str = ""
    row: int = 0
    advantages: Sequence[float] | None = None
    rows: int = 1

    @classmethod
    def of(cls, instance_id: Any, *, job_id: str, uid: str, row: int) -> RowName:
        """Returns the instance id with the row's attributes."""
        name = cls(instance_id)
        name.job_id, name.uid, name.row = job_id, uid, row
        return name

    @classmethod
    def with_advantages(cls, instance_id: Any, advantages: Sequence[float], *, rows: int) -> RowName:
        """Returns a copy with the row's advantages."""
        name = cls(instance_id)
        name.__dict__.update(getattr(instance_id, "__dict__", {}))
        name.advantages, name.rows = list(advantages), rows
        return name


def report_rows(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> bool:
    """Starts to send this rank's rows to the buffer and returns True; returns False if there is nothing to send.

    It does not wait. A report is dropped while the previous one is being sent.

    Raises:
        ConfigError: an argument is invalid.
    """
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
    """Yields the report of each trained row with its job, from slime's data between advantages and step.

    If slime computes its log-probs only in the step (one step per rollout), the report has only the advantage.
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
    """Returns the share of tokens whose ratio to the engine's policy is outside of PPO's clip range."""
    if own is None or theirs is None:
        return None
    ratios = [math.exp(min(20.0, one - other)) for one, other in zip(own, theirs, strict=True)]
    return sum(not low <= ratio <= high for ratio in ratios) / len(ratios)


def reporters() -> Sequence[TrainingReporter]:
    """Returns the reporters of this process."""
    return tuple(_reporters.values())


_reporters: dict[tuple[str, str | None, int], TrainingReporter] = {}


def _reporter(url: str, token: str | None, most_rows: int) -> TrainingReporter:
    key = url, token, most_rows
    if key not in _reporters:
        _reporters[key] = TrainingReporter(url, token=token, most_rows=most_rows)
    return _reporters[key]
