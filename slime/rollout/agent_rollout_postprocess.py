"""On training ranks, between advantages and step: removes the weight of dummies, and unknown log-probs.

slime divides the sum over trajectories by their number, including dummies, in the loss and in logs: with d dummies in
n, all values are too small by the factor (n - d) / n. The term of each trajectory is a sum over its tokens divided by
``rollout_mask_sums``. Multiplying these by (n - d) / n gives the exact mean over played trajectories for every term of
the loss. With ``--calculate-per-token-loss`` the mean is over tokens, and a dummy counts as one token.

Log-probs of trajectories that consist of messages are NaN until here, because slime needs their shape.

``--rollout-data-postprocess-path slime.rollout.agent_rollout.post_process_rollout_data`` calls this on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

POSTPROCESS_PATH = "slime.rollout.agent_rollout.post_process_rollout_data"

Gather = Callable[[Any], Sequence[Any]]
"""All-gather over data-parallel ranks."""


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
    """Removes ``rollout_log_probs`` on all ranks if any rank has a row without; returns True if it did.

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
    return [len(set().union(*(known[step] for known in by_rank))) / count for step, count in enumerate(trajectories)]


def _rows_by_step(rollout_data: Mapping[str, Any]) -> list[list[int]]:
    micro_batches = iter(rollout_data["micro_batch_indices"])
    return [[row for _ in range(count) for row in next(micro_batches)] for count in rollout_data["num_microbatches"]]


def is_reporting_rank() -> bool:
    """Returns True if this rank reports its rows: one rank of those that share them, with their advantages."""
    from megatron.core import mpu  # type: ignore[import-not-found]  # only where slime trains

    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return bool(first and mpu.is_pipeline_last_stage() and mpu.get_context_parallel_world_size() == 1)


def _gather_over_ranks(own: Any) -> list[Any]:
    import torch.distributed as dist
    from megatron.core import mpu

    everyone: list[Any] = [None] * mpu.get_data_parallel_world_size(with_context_parallel=False)
    dist.all_gather_object(everyone, own, group=mpu.get_data_parallel_group_gloo(with_context_parallel=False))
    return everyone
