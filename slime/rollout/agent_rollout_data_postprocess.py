"""On training ranks, between advantages and step: takes the weight off dummies, drops unknown log-probs, reports rows.

In the loss and in logs, slime divides the sum over trajectories by their number, including dummies: with d dummies
among n trajectories, all values are too small by the factor (n - d) / n. The term of each trajectory is a sum over its
tokens divided by ``rollout_mask_sums``. Multiplying ``rollout_mask_sums`` by (n - d) / n gives the exact mean over
played trajectories for every term of the loss. With ``--calculate-per-token-loss`` the mean is over tokens, and a dummy
counts as one token.

Log-probs of trajectories that consist of messages are NaN until here, because slime needs lists of the right shape.

slime forwards only a Sample's ``index`` to the ranks. The index of our rows, the instance id, is therefore a string
subclass that also identifies the row (``RowName``), for the report of slime's values to the buffer.

``--rollout-data-postprocess-path slime.rollout.agent_rollout.post_process_rollout_data`` calls this on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slime.rollout.agent_rollout_settings import buffer_attributes, read_settings
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport, TrainingReporter

POSTPROCESS_PATH = "slime.rollout.agent_rollout.post_process_rollout_data"

Gather = Callable[[Any], Sequence[Any]]
"""All-gather over data-parallel ranks."""

_reporters: dict[tuple[str, str | None, int], TrainingReporter] = {}
"""The reporters of this process, by the buffer's URL, token and limit of rows."""


def take_weight_off_dummies(rollout_data: dict[str, Any], gather: Gather | None = None) -> list[float]:
    """Scales ``rollout_mask_sums`` of one rank; returns the share of played trajectories of each step.

    ``gather`` is an all-gather over data-parallel ranks, by default in slime's process group. A step without a played
    trajectory is not changed.
    """
    sums = rollout_data["rollout_mask_sums"]
    own = played_trajectories(rollout_data)
    shares = played_share((gather or _gather_over_ranks)(own), rollout_data["global_batch_sizes"])
    for rows, share in zip(_rows_by_step(rollout_data), shares, strict=True):
        if 0 < share < 1:
            for row in rows:
                sums[row] = sums[row] * share
    return shares


def played_trajectories(rollout_data: Mapping[str, Any]) -> list[set[int]]:
    """Returns, for each step, the trajectories with a trained token on this rank."""
    ids, masks = rollout_data["rollout_ids"], rollout_data["loss_masks"]
    return [{ids[row] for row in rows if bool(masks[row].any())} for rows in _rows_by_step(rollout_data)]


def drop_unknown_log_probs(rollout_data: dict[str, Any], gather: Gather | None = None) -> bool:
    """Removes ``rollout_log_probs`` on all ranks if any rank has a row without log-probs; returns True if it did.

    All ranks must have the same keys, because slime sums their logs by key.
    """
    if all((gather or _gather_over_ranks)(knows_log_probs(rollout_data))):
        return False
    rollout_data.pop("rollout_log_probs", None)
    return True


def knows_log_probs(rollout_data: Mapping[str, Any]) -> bool:
    """Returns True if no row of this rank has unknown log-probs."""
    return not any(bool(row.isnan().any()) for row in rollout_data.get("rollout_log_probs") or ())


def played_share(by_rank: Sequence[Sequence[set[int]]], trajectories: Sequence[int]) -> list[float]:
    """Returns, for each step, the share of its trajectories with a trained token on any rank."""
    return [len(set().union(*(played[step] for played in by_rank))) / count for step, count in enumerate(trajectories)]


def _rows_by_step(rollout_data: Mapping[str, Any]) -> list[list[int]]:
    """Returns the indices of this rank's rows in each step."""
    micro_batches = iter(rollout_data["micro_batch_indices"])
    return [[row for _ in range(count) for row in next(micro_batches)] for count in rollout_data["num_microbatches"]]


def is_reporting_rank() -> bool:
    """Returns True if this rank reports its rows: of the ranks with the same rows, one that has their advantages.

    With context parallelism no rank reports, because each has only parts of its rows.
    """
    from megatron.core import mpu  # type: ignore[import-not-found]  # only where slime trains

    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return bool(first and mpu.is_pipeline_last_stage() and mpu.get_context_parallel_world_size() == 1)


def _gather_over_ranks(own: Any) -> list[Any]:
    import torch.distributed as dist
    from megatron.core import mpu

    by_rank: list[Any] = [None] * mpu.get_data_parallel_world_size(with_context_parallel=False)
    dist.all_gather_object(by_rank, own, group=mpu.get_data_parallel_group_gloo(with_context_parallel=False))
    return by_rank


# --- the report to the buffer ----------------------------------------------------------------------------------------


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
    most_rows = buffer_attributes(args).rollout_buffer_report_rows
    if not most_rows:
        return False
    by_job: dict[str, list[RowReport]] = {}
    for job_id, row in rows_to_report(args, rollout_data):
        by_job.setdefault(job_id, []).append(row)
    if not by_job:
        return False
    settings = read_settings(args)
    key = settings.buffer_url, settings.token, most_rows
    if key not in _reporters:
        _reporters[key] = TrainingReporter(settings.buffer_url, token=settings.token, most_rows=most_rows)
    return _reporters[key].report(by_job, step=rollout_id)


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
        log_probs, engine_log_probs, advantages, entropy = (
            rollout_data[key][number].detach().float()[mask].tolist() if rollout_data.get(key) else None
            for key in ("log_probs", "rollout_log_probs", "advantages", "entropy")
        )
        yield (
            name.job_id,
            RowReport(
                uid=name.uid,
                row=name.row,
                log_probs=log_probs,
                rollout_log_probs=engine_log_probs,
                advantage=_mean(advantages),
                entropy=_mean(entropy),
                loss_share=float(mask.sum() / rollout_data["rollout_mask_sums"][number]) / trajectories,
                clip_share=_clipped(log_probs, engine_log_probs, low, high),
            ),
        )


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _clipped(ours: list[float] | None, engines: list[float] | None, low: float, high: float) -> float | None:
    """Returns the share of tokens whose ratio to the engine's policy is outside of PPO's clip range.

    ``ours`` and ``engines`` are the log-probs of the trainer and of the engine.
    """
    if ours is None or engines is None:
        return None
    ratios = [math.exp(min(20.0, one - other)) for one, other in zip(ours, engines, strict=True)]
    return sum(not low <= ratio <= high for ratio in ratios) / len(ratios)


def reporters() -> Sequence[TrainingReporter]:
    """Returns the reporters of this process."""
    return tuple(_reporters.values())
