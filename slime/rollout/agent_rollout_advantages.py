"""slime's advantages where turns earned rewards of their own: one for each token, in place of one for each trajectory.

What a group's tokens return is known where the rollout runs, and is compared within the group there
(``give_turn_advantages``); a rank has parts of groups only. It goes to the ranks with the name of its row. There slime
calls ``--custom-advantage-function-path slime.rollout.agent_rollout.turn_advantages`` in the place of its own formula.

A row of which nobody says so has the advantage that slime's GRPO gives it, bit for bit. The n rows of a trajectory with
rewards of turns weigh 1/n each in the loss, whatever their length; all others weigh by their tokens, as in slime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from slime.rollout.agent_rollout_reports import RowName
from slime.rollout.agent_rollout_samples import normalizes_by, played_shares, summable, trajectory_key
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.trainer.token_alignment import laid_out
from slime_plugins.rollout_buffer.trainer.turn_rewards import turn_baseline


def give_turn_advantages(args: Any, samples: Sequence[Sample]) -> int:
    """Names, with each row of a group in which turns earned rewards, the advantage of each of its tokens.

    Returns how many trajectories got some. Dummies get none, nor does a group of which one trajectory was played. The
    same arguments decide as in ``post_process_rewards``.
    """
    shares = played_shares(args, samples)
    given = set()
    for group in _groups_with_turns(samples):
        normalizes, by_std = normalizes_by(args)
        mean, scale = turn_baseline(list(_returns(group).values()), by_std=by_std) if normalizes else (0.0, 1.0)
        rows = _trained_rows(group)
        for key, sample in group:
            share = shares.get(key, 1.0)
            worth = summable([(one - mean) * scale / share for one in _token_returns(sample)])
            along = laid_out(sample.loss_mask or [], worth, 0.0)
            sample.index = RowName.with_advantages(sample.index, along, rows=rows[key])
            given.add(key)
    return len(given)


def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets ``advantages`` and ``returns`` of one rank's rows, and the weights of those of which turns earned rewards.

    Raises:
        ValueError: a row came with advantages for another number of tokens.
    """
    import torch

    shapes = rollout_data["kl"]
    rewards = torch.tensor(rollout_data["rewards"], dtype=torch.float32, device=shapes[0].device if shapes else None)
    returns = []
    for number, (name, shape) in enumerate(zip(rollout_data["sample_indices"], shapes, strict=True)):
        worth = getattr(name, "advantages", None)
        if worth is None:
            returns.append(torch.ones_like(shape) * rewards[number])  # as slime's get_grpo_returns
            continue
        of_row = _of_this_rank(torch.tensor(worth, dtype=shape.dtype, device=shape.device), rollout_data, number)
        if of_row.shape != shape.shape:
            raise ValueError(f"row {number} ({name}) has {len(of_row)} advantages for {len(shape)} tokens")
        returns.append(of_row)
    rollout_data["returns"] = returns
    rollout_data["advantages"] = list(returns)
    _share_rows_alike(rollout_data)


def _share_rows_alike(rollout_data: Mapping[str, Any]) -> None:
    """A row's part of its trajectory is its tokens over ``rollout_mask_sums``: n times its own tokens make it 1/n."""
    sums = rollout_data["rollout_mask_sums"]
    for number, name in enumerate(rollout_data["sample_indices"]):
        rows = getattr(name, "rows", 1)
        if rows > 1 and getattr(name, "advantages", None) is not None:
            sums[number] = rows * rollout_data["loss_masks"][number].sum()


def _of_this_rank(values: Any, rollout_data: Mapping[str, Any], number: int) -> Any:
    """Returns the part of a row's tokens that slime's context parallelism gives this rank; all of them without."""
    lengths = (int(rollout_data[key][number]) for key in ("total_lengths", "response_lengths"))
    return import_module("slime.backends.megatron_utils.cp_utils").slice_log_prob_with_cp(values, *lengths)


Keyed = tuple[Any, Sample]
"""A row with what its trajectory is called."""


def _groups_with_turns(samples: Sequence[Sample]) -> Iterator[list[Keyed]]:
    """Yields the rows of each group of which the turns of some played trajectory earned rewards, dummies left out."""
    groups: dict[Any, list[Keyed]] = {}
    for position, sample in enumerate(samples):
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, []).append((trajectory_key(sample, position), sample))
    yield from (rows for rows in groups.values() if any(_turn_returns(sample) is not None for _, sample in rows))


def _returns(group: Sequence[Keyed]) -> dict[Any, Sequence[float]]:
    """The returns of each trajectory's turns; one that says nothing of its turns is one turn."""
    return {key: _turn_returns(sample) or [_reward(sample)] for key, sample in group}


def _trained_rows(group: Sequence[Keyed]) -> dict[Any, int]:
    rows: dict[Any, int] = {}
    for key, sample in group:
        rows[key] = rows.get(key, 0) + any(sample.loss_mask or ())
    return rows


def _token_returns(sample: Sample) -> list[float]:
    """The returns of a row's trained tokens, in order."""
    returns = (sample.metadata or {}).get("token_returns")
    mask = sample.loss_mask or []
    if returns is None:
        return [_reward(sample)] * sum(mask)
    return [value for value, trained in zip(returns, mask, strict=False) if trained]


def _turn_returns(sample: Sample) -> Sequence[float] | None:
    return (sample.metadata or {}).get("turn_returns")


def _reward(sample: Sample) -> float:
    return float(sample.reward)  # type: ignore[arg-type]  # slime's may be None or a mapping; a buffer's is a number
