"""Control arms (ablations): batches or trainers corrupted in typical ways, from which nothing should be learned."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

from rollout_buffer_lab.learning.batches import Batch, batch_of, trained_logits
from rollout_buffer_lab.learning.grpo import GrpoSettings, GrpoTrainer
from rollout_buffer_lab.learning.losses import token_log_probs
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutRow, RolloutTrajectory

Trajectories = Sequence[RolloutTrajectory]


class Arm(StrEnum):
    """A corruption of a run's batches, or of its trainer."""

    TRUE = "true"  # no corruption
    LATE_MASK = "late-mask"  # mask and log-probs one token late
    ENVIRONMENT = "environment"  # tokens of the environment are trained as well
    SHUFFLED_REWARDS = "shuffled-rewards"  # rewards are permuted across groups
    OTHER_VERSION = "other-version"  # log-probs of the run's initial weights
    FROZEN = "frozen"  # the engine gets no new weights
    OLD_DENOMINATORS = "old-denominators"  # the loss uses log-probs of the previous step's weights
    SWAPPED_SIBLINGS = "swapped-siblings"  # the best and the worst of each group swap their rewards
    REPEATED = "repeated"  # the first trajectory of each group is trained twice


def corruption_of(arm: Arm, policy: Any, seed: int) -> Callable[[Trajectories], list[RolloutTrajectory]]:
    """Returns the function that corrupts a batch. ``policy`` is the initial policy."""
    rng = random.Random(seed)
    if arm is Arm.LATE_MASK:
        return lambda batch: [_with_rows(each, _shifted) for each in batch]
    if arm is Arm.ENVIRONMENT:
        return lambda batch: [_with_rows(each, _with_environment) for each in batch]
    if arm is Arm.SHUFFLED_REWARDS:
        return lambda batch: _shuffled(batch, rng)
    if arm is Arm.OTHER_VERSION:
        initial = copy.deepcopy(policy)
        return lambda batch: [_with_log_probs_of(initial, each) for each in batch]
    if arm is Arm.SWAPPED_SIBLINGS:
        return _swapped
    if arm is Arm.REPEATED:  # reversed, because a dict keeps the last of equal keys: here a group's first trajectory
        return lambda batch: [*batch, *{each.group_index: each for each in reversed(batch)}.values()]
    return list


def trainer_of(arm: Arm, policy: Any, settings: GrpoSettings, *, seed: int) -> GrpoTrainer:
    """Returns the trainer of an arm: only that of ``OLD_DENOMINATORS`` differs from the reference trainer."""
    kind = _OldDenominators if arm is Arm.OLD_DENOMINATORS else GrpoTrainer
    return kind(policy, settings, seed=seed)


class _OldDenominators(GrpoTrainer):
    """Takes the old log-probs from the weights of the step before."""

    def _update(self, batch: Batch, old: torch.Tensor, advantages: torch.Tensor, *, is_first: bool) -> Any:
        earlier = self._earlier.get(self.version - 1)
        if earlier is not None:
            old, _ = self._evaluate(earlier, batch)
        return super()._update(batch, old, advantages, is_first=is_first)


def _with_rows(trajectory: RolloutTrajectory, change: Callable[[RolloutRow], RolloutRow]) -> RolloutTrajectory:
    return replace(trajectory, rows=tuple(change(row) for row in trajectory.rows))


def _shifted(row: RolloutRow) -> RolloutRow:
    log_probs = row.log_probs or [0.0] * len(row.token_ids)
    return replace(row, loss_mask=[0, *row.loss_mask[:-1]], log_probs=[0.0, *log_probs[:-1]])


def _with_environment(row: RolloutRow) -> RolloutRow:
    return replace(row, loss_mask=[int(index >= row.response_start) for index in range(len(row.token_ids))])


def _shuffled(batch: Trajectories, rng: random.Random) -> list[RolloutTrajectory]:
    rewards = [each.reward for each in batch]
    rng.shuffle(rewards)
    return [replace(each, reward=reward) for each, reward in zip(batch, rewards, strict=True)]


def _swapped(batch: Trajectories) -> list[RolloutTrajectory]:
    rewards = [each.reward for each in batch]
    groups: dict[int, list[int]] = {}
    for index, each in enumerate(batch):
        groups.setdefault(each.group_index, []).append(index)
    for members in groups.values():
        worst, best = min(members, key=rewards.__getitem__), max(members, key=rewards.__getitem__)
        rewards[worst], rewards[best] = rewards[best], rewards[worst]
    return [replace(each, reward=reward) for each, reward in zip(batch, rewards, strict=True)]


def _with_log_probs_of(policy: Any, trajectory: RolloutTrajectory) -> RolloutTrajectory:
    if trajectory.is_dummy:
        return trajectory
    batch = batch_of([trajectory], policy.device.type)
    with torch.no_grad():
        sampled = iter(token_log_probs(trained_logits(policy, batch), batch.targets).tolist())
    rows = [
        replace(row, log_probs=[next(sampled) if trained else 0.0 for trained in row.loss_mask])
        for row in trajectory.rows
    ]
    return replace(trajectory, rows=tuple(rows))
