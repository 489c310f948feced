"""Takes the weight off dummies in a training step of slime, on the ranks that train.

slime divides the sum over trajectories by their number, dummies too, in the loss as in what it logs: with d dummies
among n, everything is (n - d) / n of what it should be. Each trajectory's own part is a sum over its tokens divided by
``rollout_mask_sums``. Where those are multiplied by (n - d) / n, the mean is over the played trajectories, exactly, for
every term of the loss. ``--calculate-per-token-loss`` goes by tokens instead: there a dummy counts as one token.

``--rollout-data-postprocess-path slime.rollout.agent_rollout.post_process_rollout_data`` calls this on each rank,
between the advantages and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["POSTPROCESS_PATH", "played_share", "speaks_for_its_rows", "take_weight_off_dummies"]

POSTPROCESS_PATH = "slime.rollout.agent_rollout.post_process_rollout_data"

Gather = Callable[[list[set[int]]], Sequence[Sequence[set[int]]]]


def take_weight_off_dummies(rollout_data: dict[str, Any], gather: Gather | None = None) -> list[float]:
    """Changes ``rollout_mask_sums`` of one rank; returns, for each step, the share of its trajectories that was played.

    ``gather`` gives what every data-parallel rank knows of each step; slime's own group by default. A step without a
    played trajectory is left as it is.
    """
    sums, ids = rollout_data["rollout_mask_sums"], rollout_data["rollout_ids"]
    trained = [bool(mask.any()) for mask in rollout_data["loss_masks"]]
    steps = list(_rows_by_step(rollout_data))
    own = [{ids[row] for row in rows if trained[row]} for rows in steps]
    shares = played_share((gather or _gather_over_ranks)(own), rollout_data["global_batch_sizes"])
    for rows, share in zip(steps, shares, strict=True):
        if 0 < share < 1:
            for row in rows:
                sums[row] = sums[row] * share
    return shares


def played_share(by_rank: Sequence[Sequence[set[int]]], trajectories: Sequence[int]) -> list[float]:
    """Returns, for each step, how many of its trajectories train a token on some rank, of how many there are."""
    return [len(set().union(*(known[step] for known in by_rank))) / count for step, count in enumerate(trajectories)]


def _rows_by_step(rollout_data: Mapping[str, Any]) -> list[list[int]]:
    micro_batches = iter(rollout_data["micro_batch_indices"])
    return [[row for _ in range(count) for row in next(micro_batches)] for count in rollout_data["num_microbatches"]]


def speaks_for_its_rows() -> bool:
    """Tells whether this rank is the one of those that share its rows which has their advantages and reports them."""
    from megatron.core import mpu  # type: ignore[import-not-found]  # only where slime trains

    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return bool(first and mpu.is_pipeline_last_stage() and mpu.get_context_parallel_world_size() == 1)


def _gather_over_ranks(own: list[set[int]]) -> list[list[set[int]]]:
    import torch.distributed as dist
    from megatron.core import mpu

    everyone: list[Any] = [None] * mpu.get_data_parallel_world_size(with_context_parallel=False)
    dist.all_gather_object(everyone, own, group=mpu.get_data_parallel_group_gloo(with_context_parallel=False))
    return everyone
