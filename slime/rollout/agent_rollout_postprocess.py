"""What training ranks do between the advantages and the step: dummies lose their weight, unknown log-probs go.

slime divides the sum over trajectories by their number, dummies too, in the loss as in what it logs: with d dummies
among n, everything is (n - d) / n of what it should be. Each trajectory's own part is a sum over its tokens divided by
``rollout_mask_sums``. Where those are multiplied by (n - d) / n, the mean is over the played trajectories, exactly, for
every term of the loss. ``--calculate-per-token-loss`` goes by tokens instead: there a dummy counts as one token.

Log-probs of trajectories that came as messages only are NaN up to here, for their shape; then slime goes without.

``--rollout-data-postprocess-path slime.rollout.agent_rollout.post_process_rollout_data`` calls this on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

POSTPROCESS_PATH = "slime.rollout.agent_rollout.post_process_rollout_data"

Gather = Callable[[Any], Sequence[Any]]
"""What every data-parallel rank said, for what this one says."""


def take_weight_off_dummies(rollout_data: dict[str, Any], gather: Gather | None = None) -> list[float]:
    """Changes ``rollout_mask_sums`` of one rank; returns, for each step, the share of its trajectories that was played.

    ``gather`` gives what every data-parallel rank knows of each step; slime's own group by default. A step without a
    played trajectory is left as it is.
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
    """Returns, for each step, the trajectories of which a row of this rank trains a token."""
    ids, masks = rollout_data["rollout_ids"], rollout_data["loss_masks"]
    return [{ids[row] for row in rows if bool(masks[row].any())} for rows in _rows_by_step(rollout_data)]


def drop_unknown_log_probs(rollout_data: dict[str, Any], gather: Gather | None = None) -> bool:
    """Removes ``rollout_log_probs`` on every rank where some rank has a row without; returns whether it did.

    Ranks agree on it, since they add up what they log, key by key.
    """
    if all((gather or _gather_over_ranks)(knows_log_probs(rollout_data))):
        return False
    rollout_data.pop("rollout_log_probs", None)
    return True


def knows_log_probs(rollout_data: Mapping[str, Any]) -> bool:
    """Returns True if every row of this rank has the engine's log-probs, where the batch has some."""
    return not any(bool(row.isnan().any()) for row in rollout_data.get("rollout_log_probs") or ())


def played_share(by_rank: Sequence[Sequence[set[int]]], trajectories: Sequence[int]) -> list[float]:
    """Returns, for each step, how many of its trajectories train a token on some rank, of how many there are."""
    return [len(set().union(*(known[step] for known in by_rank))) / count for step, count in enumerate(trajectories)]


def _rows_by_step(rollout_data: Mapping[str, Any]) -> list[list[int]]:
    micro_batches = iter(rollout_data["micro_batch_indices"])
    return [[row for _ in range(count) for row in next(micro_batches)] for count in rollout_data["num_microbatches"]]


def speaks_for_its_rows() -> bool:
    """Returns True if this rank is the one of those that share its rows which has their advantages and reports them."""
    from megatron.core import mpu  # type: ignore[import-not-found]  # only where slime trains

    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return bool(first and mpu.is_pipeline_last_stage() and mpu.get_context_parallel_world_size() == 1)


def _gather_over_ranks(own: Any) -> list[Any]:
    import torch.distributed as dist
    from megatron.core import mpu

    everyone: list[Any] = [None] * mpu.get_data_parallel_world_size(with_context_parallel=False)
    dist.all_gather_object(everyone, own, group=mpu.get_data_parallel_group_gloo(with_context_parallel=False))
    return everyone
