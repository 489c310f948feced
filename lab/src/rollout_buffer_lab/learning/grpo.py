"""The reference trainer: GRPO steps on delivered trajectories, for people without slime.

A step recomputes the log-probs by the weights that sampled each token and compares them with the engine's. Then it
updates on minibatches: old log-probs by the trainer's weights before the step, importance weights, PPO's clip.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from rollout_buffer_lab.learning.batches import UNKNOWN_VERSION, Batch, batch_of, trained_logits
from rollout_buffer_lab.learning.losses import (
    entropies,
    importance_weights,
    policy_loss,
    token_log_probs,
    token_weights,
)
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.rules.reward_normalization import group_baseline
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutTrajectory
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport

MIN_CHECKED = 0.5
"""Minimum share of a step's tokens whose log-probs are recomputed with the weights that sampled them."""
MAX_UNCHECKED_STEPS = 3
"""The last of this many consecutive steps below the minimum is refused."""


class LogProbGapError(RolloutBufferError):
    """The engine's log-probs differ from the trainer's: mask, ids or weights are wrong."""

    code = "log_prob_gap"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoSettings:
    """A step makes ``minibatches`` updates; the learning rate rises over the first ``warmup_updates`` of all updates.

    ``max_log_prob_gap`` limits the mean |trainer - engine| of the log-probs of each weight version, checked before a
    step; 1e-6 is usual in float32, None disables all checks of a step. The weights of the last ``kept_versions`` steps
    are stored, so that tokens sampled by them are checked too.
    """

    learning_rate: float = 1e-3
    warmup_updates: int = 20
    minibatches: int = 4
    clip: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    max_gradient_norm: float = 1.0
    max_log_prob_gap: float | None = 1e-3
    kept_versions: int = 1
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Statistics of a step, as means over its tokens or updates.

    ``log_prob_gap`` is the largest of the versions' mean gaps, None if no version's weights are stored;
    ``checked`` is the share of tokens that were compared. ``lag`` is the mean and ``largest_lag`` the maximum number of
    versions that tokens are behind, without those of unknown version. ``clipped`` is the share of tokens clipped by
    PPO. ``importance`` is the mean importance weight after the cut at ``importance_cap``, ``importance_cut`` the share
    of weights cut.
    """

    loss: float
    entropy: float
    clipped: float
    gradient_norm: float
    importance: float
    importance_cut: float
    log_prob_gap: float | None
    checked: float
    lag: float
    largest_lag: int
    trajectories: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """Statistics of one update."""

    loss: float
    clipped: float
    gradient_norm: float
    importance: float
    importance_cut: float


class GrpoTrainer:
    """A transformers policy with its optimizer; ``version`` counts its steps.

    ``row_reports`` has the log-probs of each row of the last step, before its first update: what ``RolloutFeed.report``
    sends to the buffer, for ``rollout-buffer mismatch``.
    """

    def __init__(self, policy: Any, settings: GrpoSettings, *, seed: int = 0) -> None:
        self.policy, self.settings, self.version = policy, settings, 0
        self.row_reports: list[RowReport] = []
        self._earlier: dict[int, Any] = {}
        self._unchecked_steps = 0
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._warmup = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, 1.0 / max(settings.warmup_updates, 1), total_iters=settings.warmup_updates
        )
        self._shuffle = torch.Generator().manual_seed(seed)

    def step(self, trajectories: Sequence[RolloutTrajectory]) -> StepReport:
        """Trains on the trajectories once and increments ``version``. Dummies are ignored.

        Raises:
            LogProbGapError: the engine's log-probs differ from the trainer's; nothing was trained.
            ValueError: all trajectories are dummies.
        """
        played = [each for each in trajectories if not each.is_dummy]
        if not played:
            raise ValueError("a step needs a trajectory that is no dummy")
        baselines = _baselines(played)
        batches, old, entropy, recomputed, reports = [], [], [], [], []
        parts = list(self._minibatches(len(played)))
        for part in parts:
            batch = batch_of([played[index] for index in part], self.policy.device.type)
            log_probs, entropy_of_tokens = self._evaluate(self.policy, batch)
            batches.append(batch)
            old.append(log_probs)
            entropy.append(entropy_of_tokens)
            recomputed.append(self._log_probs_by_sampling_weights(batch, log_probs))
            reports += list(_row_reports([played[index] for index in part], baselines, log_probs, entropy_of_tokens))
        versions = torch.cat([batch.versions for batch in batches])
        gaps = (torch.cat(recomputed) - torch.cat([batch.log_probs for batch in batches])).abs()
        gap, checked = self._check_gaps(gaps, versions)
        self.row_reports = reports
        policy_before = copy.deepcopy(self.policy) if self.settings.kept_versions else None
        updates = [
            self._update(
                batch,
                before,
                _token_advantages(batch, [played[index] for index in part], baselines),
                is_first=number == 0,
            )
            for number, (batch, before, part) in enumerate(zip(batches, old, parts, strict=True))
        ]
        lags = (self.version - versions[versions != UNKNOWN_VERSION]).float()
        report = StepReport(
            loss=fmean(update.loss for update in updates),
            entropy=float(torch.cat(entropy).mean()),
            clipped=fmean(update.clipped for update in updates),
            gradient_norm=fmean(update.gradient_norm for update in updates),
            importance=fmean(update.importance for update in updates),
            importance_cut=fmean(update.importance_cut for update in updates),
            log_prob_gap=gap,
            checked=checked,
            lag=float(lags.mean()) if len(lags) else 0.0,
            largest_lag=int(lags.max()) if len(lags) else 0,
            trajectories=len(played),
            tokens=len(versions),
        )
        self._store(policy_before)
        self.version += 1
        return report

    def _minibatches(self, count: int) -> Iterator[torch.Tensor]:
        """Yields the indices of each update's trajectories, shuffled; rows of a trajectory stay together."""
        yield from torch.randperm(count, generator=self._shuffle).chunk(self.settings.minibatches)

    def _evaluate(self, policy: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probs and entropies (K each) of the trained tokens under ``policy``, without gradients."""
        with torch.no_grad():
            logits = trained_logits(policy, batch)
        temperature = self.settings.temperature
        return token_log_probs(logits, batch.targets, temperature), entropies(logits, temperature)

    def _log_probs_by_sampling_weights(self, batch: Batch, own: torch.Tensor) -> torch.Tensor:
        """Returns the log-probs (K) by the weights that sampled each token, where these weights are stored.

        Other tokens have those of ``own``, by the trainer's present weights.
        """
        log_probs = own.clone()
        for version, policy in self._earlier.items():
            sampled = batch.versions == version
            if sampled.any():
                log_probs[sampled] = self._evaluate(policy, batch)[0][sampled]
        return log_probs

    def _check_gaps(self, gaps: torch.Tensor, versions: torch.Tensor) -> tuple[float | None, float]:
        """Returns the largest mean gap of a version with stored weights, or None, and the share of checked tokens.

        Raises:
            LogProbGapError: a gap is too large or NaN, a version is newer than the trainer's, or too few tokens were
                checked for several consecutive steps.
        """
        stored = [version for version in versions.unique().tolist() if version in (self.version, *self._earlier)]
        means = [gaps[versions == version].mean() for version in stored]
        gap = float(torch.stack(means).max()) if means else None
        max_gap = self.settings.max_log_prob_gap
        checked = float(sum((versions == version).float().mean() for version in stored))
        self._unchecked_steps = self._unchecked_steps + 1 if checked < MIN_CHECKED else 0
        if max_gap is None:
            return gap, checked
        if gap is not None and not gap <= max_gap:
            raise LogProbGapError(
                f"the engine's log-probs are {gap:.3g} from the trainer's on average, where the weights are the same "
                f"(at most {max_gap:g} is allowed): the mask, the ids or the weights are not those of the sampling"
            )
        if int(versions.max()) > self.version:
            raise LogProbGapError(
                f"tokens are of weight version {int(versions.max())}, and the trainer's newest is {self.version}: "
                "the engine names other versions than those that it was given"
            )
        if self._unchecked_steps >= MAX_UNCHECKED_STEPS:
            raise LogProbGapError(
                f"{self._unchecked_steps} steps in a row, less than {MIN_CHECKED:.0%} of the tokens could be compared: "
                f"they are of weight versions from {int(versions.min())} to {int(versions.max())}, and the weights "
                f"are kept of {min([self.version, *self._earlier])} to {self.version}"
            )
        return gap, checked

    def _store(self, policy: Any) -> None:
        """Stores the weights that the step began with, and drops those that are too old."""
        if policy is not None:
            self._earlier[self.version] = policy.requires_grad_(False)
            self._earlier.pop(self.version - self.settings.kept_versions, None)

    def _check_denominators(self, ratio_distance: float, corrections: torch.Tensor) -> None:
        """Checks that PPO's ratio, and the importance weights of tokens of the present weights, are 1 at first.

        Raises:
            LogProbGapError: one of them is not.
        """
        max_gap = self.settings.max_log_prob_gap
        own_distance = float((corrections - 1).abs().mean()) if corrections.numel() else 0.0
        for name, distance in (("PPO's ratio", ratio_distance), ("the importance weight", own_distance)):
            if max_gap is not None and not distance <= max_gap:
                raise LogProbGapError(
                    f"{name} is {distance:.3g} from 1 on average before anything was updated (at most {max_gap:g} is "
                    "allowed): its denominator is of other weights than those that the step begins with"
                )

    def _update(self, batch: Batch, old: torch.Tensor, advantages: torch.Tensor, *, is_first: bool) -> _Update:
        new = token_log_probs(trained_logits(self.policy, batch), batch.targets, self.settings.temperature)
        corrections = importance_weights(old, batch.log_probs, self.settings.importance_cap)
        result = policy_loss(
            new,
            old,
            advantages,
            token_weights(batch.trajectories) * corrections,
            clip=self.settings.clip,
            clip_high=self.settings.clip_high,
        )
        if is_first:
            self._check_denominators(result.ratio_distance, corrections[batch.versions == self.version])
        self._optimizer.zero_grad()
        result.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_gradient_norm)
        self._optimizer.step()
        self._warmup.step()
        return _Update(
            loss=result.loss.item(),
            clipped=result.clipped,
            gradient_norm=norm.item(),
            importance=float(corrections.mean()),
            importance_cut=float((corrections >= self.settings.importance_cap).float().mean()),
        )


def _baselines(played: Sequence[RolloutTrajectory]) -> dict[int, tuple[float, float]]:
    """Returns the baseline and the scale of the returns in each group, by ``group_index``."""
    groups: dict[int, list[RolloutTrajectory]] = {}
    for each in played:
        groups.setdefault(each.group_index, []).append(each)
    return {
        number: group_baseline([each.turn_returns or (each.reward,) for each in members])
        for number, members in groups.items()
    }


def _token_advantages(
    batch: Batch, trajectories: Sequence[RolloutTrajectory], baselines: Mapping[int, tuple[float, float]]
) -> torch.Tensor:
    """Returns the advantage of each trained token (K), from its return."""
    of_trajectory = [baselines[each.group_index] for each in trajectories]
    means, scales = torch.tensor(of_trajectory, dtype=torch.double, device=batch.returns.device).unbind(1)
    return ((batch.returns.double() - means[batch.trajectories]) * scales[batch.trajectories]).float()


def _row_reports(
    trajectories: Sequence[RolloutTrajectory],
    baselines: Mapping[int, tuple[float, float]],
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
) -> Iterator[RowReport]:
    """Yields the report of each row; ``log_probs`` and ``entropy`` hold the trained tokens of one row after another."""
    start = 0
    for each in trajectories:
        mean, scale = baselines[each.group_index]
        for row in each.rows:
            end = start + row.trained_tokens
            sampled = row.log_probs or ()
            yield RowReport(
                uid=row.uid,
                row=row.number,
                log_probs=log_probs[start:end].tolist(),
                rollout_log_probs=[value for value, trained in zip(sampled, row.loss_mask, strict=False) if trained],
                advantage=(each.reward - mean) * scale,
                entropy=float(entropy[start:end].mean()),
            )
            start = end
