"""Advantages within each group: normalised rewards per trajectory, or per token with rewards of turns.

In the rollout process, ``group_normalized_rewards`` normalises rewards for slime's
``--custom-reward-post-process-path``, with the formulas of ``rules/reward_normalization.py``.

With rewards of turns, each token has an advantage. The rollout process computes the advantages within each group
(``give_turn_advantages``), because a training rank has parts of groups only. They are sent to the ranks as part of
``RowName``. On a rank, slime calls ``--custom-advantage-function-path slime.rollout.agent_rollout.turn_advantages``
instead of its own formula (``set_advantages``). Rows without rewards of turns get the advantage of slime's GRPO, bit
for bit. The n rows of a trajectory with rewards of turns weigh 1/n each in the loss, independent of their length. The
rows of other trajectories weigh by their tokens, as in slime.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from slime.rollout.agent_rollout_argument_checks import NORMALIZING_ESTIMATORS, STD_ESTIMATORS
from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH, RowName
from slime.rollout.agent_rollout_sample_fields import execution_of
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.rules.reward_normalization import group_baseline, mean
from slime_plugins.rollout_buffer.trainer.token_alignment import laid_out

logger = logging.getLogger(__name__)

MAX_SUMMABLE_REWARD = 1e30
"""With this limit, the sum over a hundred million tokens is below the limit of 32-bit floats, 3.4e38."""
RowOfTrajectory = tuple[Any, Sample]
"""A row with the key of its trajectory."""


def normalizes(args: Any) -> bool:
    """Returns True if rewards are compared within their group, by slime's arguments."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    return estimator in NORMALIZING_ESTIMATORS and bool(getattr(args, "rewards_normalization", True))


def divides_by_std(args: Any) -> bool:
    """Returns True if normalised rewards are divided by their group's standard deviation, by slime's arguments."""
    estimator = getattr(args, "advantage_estimator", "grpo")
    return estimator in STD_ESTIMATORS and bool(getattr(args, "grpo_std_normalization", True))


def group_normalized_rewards(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Returns raw and normalised rewards, one per sample: GRPO within each ``group_index``.

    Each trajectory counts once, independent of its number of rows; ``remove_sample`` dummies do not count and get 0.
    The arguments are slime's: the advantage estimator, ``--disable-rewards-normalization`` and
    ``--disable-grpo-std-normalization``. If a step has dummies, the rewards are divided by its share of played
    trajectories (``played_shares``), because slime's mean over the step counts dummies.
    """
    raw_rewards = _raw_rewards(args, samples)
    if not normalizes(args):
        return raw_rewards, summable(raw_rewards)
    baselines = {
        index: group_baseline([[reward] for reward in rewards.values()], by_std=divides_by_std(args))
        for index, rewards in _played_rewards(samples, raw_rewards).items()
    }
    shares = played_shares(args, samples)
    normalized = []
    for position, (sample, reward) in enumerate(zip(samples, raw_rewards, strict=True)):
        baseline, scale = baselines.get(sample.group_index, (0.0, 0.0))
        share = shares.get(trajectory_key(sample, position), 1.0)
        normalized.append(0.0 if sample.remove_sample else (reward - baseline) * scale / share)
    return raw_rewards, summable(normalized)


def _raw_rewards(args: Any, samples: Sequence[Sample]) -> list[float]:
    """Returns the reward of each sample; a failed sample gets the mean of its group's played trajectories.

    If its whole group failed, it gets the batch's mean. So logged means are those of played trajectories.
    """
    rewards = [float(sample.get_reward_value(args)) for sample in samples]
    groups = _played_rewards(samples, rewards)
    means = {index: mean(list(played.values())) for index, played in groups.items()}
    batch_mean = mean([reward for played in groups.values() for reward in played.values()])
    return [
        means.get(sample.group_index, batch_mean) if _is_failed(sample) else reward
        for sample, reward in zip(samples, rewards, strict=True)
    ]


def _played_rewards(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[Any, dict[Any, float]]:
    """Returns the reward of each played trajectory, by group and trajectory."""
    groups: dict[Any, dict[Any, float]] = {}
    for position, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, {})[trajectory_key(sample, position)] = reward
    return groups


def _is_failed(sample: Sample) -> bool:
    """Returns True for a failed episode of slime's own rollouts; dummies of the buffer have their group's mean."""
    return sample.remove_sample and "error" in (sample.metadata or {})


def scales_by_played_share(args: Any) -> bool:
    """Returns True if advantages are divided by the played share of their step, which removes the weight of dummies.

    slime's mean over the trajectories of a step counts dummies. The division undoes that for estimators whose advantage
    is the reward. It is left out where the hook on the training ranks corrects the mean, and with
    ``--calculate-per-token-loss``: that mean is over tokens, of which a dummy is one.
    """
    return (
        getattr(args, "rollout_data_postprocess_path", None) != POSTPROCESS_PATH
        and getattr(args, "advantage_estimator", "grpo") in STD_ESTIMATORS
        and not getattr(args, "calculate_per_token_loss", False)
    )


def played_shares(args: Any, samples: Sequence[Sample]) -> dict[Any, float]:
    """Returns, for each trajectory, the played share of its step; {} unless ``scales_by_played_share``."""
    if not scales_by_played_share(args):
        return {}
    is_played: dict[Any, bool] = {}
    for position, sample in enumerate(samples):
        key = trajectory_key(sample, position)
        is_played[key] = is_played.get(key, False) or not sample.remove_sample
    keys = list(is_played)
    size = getattr(args, "global_batch_size", None) or len(keys)
    steps = [keys[start : start + size] for start in range(0, len(keys), size)]
    shares = {key: sum(is_played[other] for other in step) / len(step) for step in steps for key in step}
    return {key: share for key, share in shares.items() if share > 0}


def trajectory_key(sample: Sample, position: int) -> Any:
    """Returns the key of a sample's trajectory; a sample without an execution number is a trajectory of its own."""
    execution = execution_of(sample)
    return execution if execution is not None else ("row", position)


def summable(rewards: Sequence[float]) -> list[float]:
    """Limits rewards to ``MAX_SUMMABLE_REWARD``: slime sums them over the tokens of a step in 32 bits."""
    if any(abs(reward) > MAX_SUMMABLE_REWARD for reward in rewards):
        _warn_of_cut_rewards()
    return [max(-MAX_SUMMABLE_REWARD, min(MAX_SUMMABLE_REWARD, reward)) for reward in rewards]


@functools.lru_cache(maxsize=1)
def _warn_of_cut_rewards() -> None:
    logger.warning(
        "rewards beyond %g are limited to it: slime adds them up over all tokens in 32 bits, and a larger sum is "
        "infinite; check the rewards of the generator",
        MAX_SUMMABLE_REWARD,
    )


# --- rewards of turns ------------------------------------------------------------------------------------------------


def give_turn_advantages(args: Any, samples: Sequence[Sample]) -> None:
    """Adds token advantages to the ``index`` of each row in groups with rewards of turns, except of dummies.

    The normalization arguments are those of ``post_process_rewards``.
    """
    shares = played_shares(args, samples)
    for group in _groups_with_turns(samples):
        returns = list(_returns(group).values())
        baseline, scale = group_baseline(returns, by_std=divides_by_std(args)) if normalizes(args) else (0.0, 1.0)
        rows = _trained_rows(group)
        for key, sample in group:
            share = shares.get(key, 1.0)
            of_trained = summable([(value - baseline) * scale / share for value in _token_returns(sample)])
            advantages = laid_out(sample.loss_mask or [], of_trained, 0.0)
            sample.index = RowName.with_advantages(sample.index, advantages, rows=rows[key])


def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets ``advantages`` and ``returns`` of one rank's rows, and the weights of rows with rewards of turns.

    Raises:
        ValueError: a row has advantages for another number of tokens.
    """
    import torch

    shapes = rollout_data["kl"]  # a tensor for each row, with this rank's part of its response tokens
    rewards = torch.tensor(rollout_data["rewards"], dtype=torch.float32, device=shapes[0].device if shapes else None)
    returns = []
    for number, (name, shape) in enumerate(zip(rollout_data["sample_indices"], shapes, strict=True)):
        advantages = getattr(name, "advantages", None)
        if advantages is None:
            returns.append(torch.ones_like(shape) * rewards[number])  # as slime's get_grpo_returns
            continue
        of_rank = _of_this_rank(torch.tensor(advantages, dtype=shape.dtype, device=shape.device), rollout_data, number)
        if of_rank.shape != shape.shape:
            raise ValueError(f"row {number} ({name}) has {len(of_rank)} advantages for {len(shape)} tokens")
        returns.append(of_rank)
    rollout_data["returns"] = returns
    rollout_data["advantages"] = list(returns)
    _weigh_rows_equally(rollout_data)


def _weigh_rows_equally(rollout_data: Mapping[str, Any]) -> None:
    """Gives each of the n rows of a trajectory with rewards of turns the weight 1/n.

    slime divides the sum over a row's tokens by ``rollout_mask_sums``, which becomes n times its trained tokens.
    """
    sums = rollout_data["rollout_mask_sums"]
    for number, name in enumerate(rollout_data["sample_indices"]):
        rows = getattr(name, "rows", 1)
        if rows > 1 and getattr(name, "advantages", None) is not None:
            sums[number] = rows * rollout_data["loss_masks"][number].sum()


def _of_this_rank(values: Any, rollout_data: Mapping[str, Any], number: int) -> Any:
    """Returns the part of a row's values that slime's context parallelism assigns to this rank."""
    lengths = (int(rollout_data[key][number]) for key in ("total_lengths", "response_lengths"))
    return import_module("slime.backends.megatron_utils.cp_utils").slice_log_prob_with_cp(values, *lengths)


def _groups_with_turns(samples: Sequence[Sample]) -> Iterator[list[RowOfTrajectory]]:
    """Yields the played rows of each group in which a trajectory has rewards of turns."""
    groups: dict[Any, list[RowOfTrajectory]] = {}
    for position, sample in enumerate(samples):
        if not sample.remove_sample:
            groups.setdefault(sample.group_index, []).append((trajectory_key(sample, position), sample))
    yield from (rows for rows in groups.values() if any(_turn_returns(sample) is not None for _, sample in rows))


def _returns(group: Sequence[RowOfTrajectory]) -> dict[Any, Sequence[float]]:
    """Returns the returns of each trajectory's turns; without rewards of turns, its reward as one turn."""
    return {key: _turn_returns(sample) or [_reward(sample)] for key, sample in group}


def _trained_rows(group: Sequence[RowOfTrajectory]) -> dict[Any, int]:
    """Counts the rows of each trajectory that have a trained token."""
    rows: dict[Any, int] = {}
    for key, sample in group:
        rows[key] = rows.get(key, 0) + any(sample.loss_mask or ())
    return rows


def _token_returns(sample: Sample) -> list[float]:
    """Returns the returns of a row's trained tokens, in order."""
    returns = (sample.metadata or {}).get("token_returns")
    mask = sample.loss_mask or []
    if returns is None:
        return [_reward(sample)] * sum(mask)
    return [value for value, trained in zip(returns, mask, strict=False) if trained]


def _turn_returns(sample: Sample) -> Sequence[float] | None:
    return (sample.metadata or {}).get("turn_returns")


def _reward(sample: Sample) -> float:
    return float(sample.reward)  # type: ignore[arg-type]  # slime's may be None or a mapping; a buffer's is a number
