"""The reference trainer: GRPO steps on delivered trajectories, for people without slime.

old log-probs by the trainer's own weights → compared with the engine's → minibatches: importance weights, PPO's clip
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.learning.batches import Batch, batch_of, trained_logits
from slime_plugins.rollout_buffer.learning.losses import (
    entropies,
    group_advantages,
    importance_weights,
    policy_loss,
    token_log_probs,
    token_weights,
)
from slime_plugins.rollout_buffer.trainer.records import RolloutTrajectory
from slime_plugins.rollout_buffer.trainer.reports import RowReport
from slime_plugins.rollout_buffer.trainer.turn_rewards import turn_baseline

__all__ = ["GrpoSettings", "GrpoTrainer", "LogProbGapError", "StepReport"]


class LogProbGapError(RolloutBufferError):
    """The engine's log-probs are not those of the tokens that would be trained: mask, ids or weights are wrong."""

    code = "log_prob_gap"


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoSettings:
    """``minibatches`` updates for each step; the learning rate rises over ``warmup_updates``.

    ``max_log_prob_gap`` is the largest mean |trainer - engine| over tokens of the trainer's own weights that a step may
    begin with: 1e-6 is usual in float32. None looks away.
    """

    learning_rate: float = 1e-3
    warmup_updates: int = 20
    minibatches: int = 4
    clip: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    max_gradient_norm: float = 1.0
    max_log_prob_gap: float | None = 1e-3
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a step saw, as means over its tokens or updates.

    ``log_prob_gap`` is over tokens of the trainer's own weights, None where there was none; ``lag`` is how many
    versions tokens were behind; ``clipped`` is the share that the clip took out.
    """

    loss: float
    entropy: float
    clipped: float
    gradient_norm: float
    log_prob_gap: float | None
    lag: float
    trajectories: int
    tokens: int


class GrpoTrainer:
    """A policy of transformers with its optimizer; ``version`` counts its steps.

    ``row_reports`` is what the last step computed of each row before it trained: for the buffer, to find mismatches.
    """

    def __init__(self, policy: Any, settings: GrpoSettings, *, seed: int = 0) -> None:
        self.policy, self.settings, self.version = policy, settings, 0
        self.row_reports: list[RowReport] = []
        self._optimizer = torch.optim.AdamW(
            policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self._warmup = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, 1.0 / max(settings.warmup_updates, 1), total_iters=settings.warmup_updates
        )
        self._shuffle = torch.Generator().manual_seed(seed)

    def step(self, trajectories: Sequence[RolloutTrajectory]) -> StepReport:
        """Trains on the trajectories once and raises ``version``. Dummies among them count for nothing.

        Raises:
            LogProbGapError: the engine's log-probs are not the trainer's; nothing was trained.
        """
        played = [each for each in trajectories if not each.is_dummy]
        rewards = torch.tensor([each.reward for each in played])
        advantages = group_advantages(rewards, torch.tensor([each.group_index for each in played]))
        of_turns = _baselines(played)
        batches, old, entropy, gaps, reports = [], [], [], [], []
        chosen = list(self._minibatches(len(played)))
        for part in chosen:
            batch = batch_of([played[at] for at in part], self.policy.device.type)
            log_probs, entropy_of_tokens = self._before(batch)
            batches.append(batch)
            old.append(log_probs)
            entropy.append(entropy_of_tokens)
            gaps.append((log_probs - batch.log_probs).abs()[batch.versions == self.version])
            reports += list(_row_reports([played[at] for at in part], advantages[part], log_probs, entropy_of_tokens))
        gap = self._checked(torch.cat(gaps))
        self.row_reports = reports
        updates = [
            self._update(batch, before, _of_tokens(batch, [played[at] for at in part], advantages[part], of_turns))
            for batch, before, part in zip(batches, old, chosen, strict=True)
        ]
        losses, clipped, norms = zip(*updates, strict=True)
        versions = torch.cat([batch.versions for batch in batches]).float()
        report = StepReport(
            loss=fmean(losses),
            entropy=float(torch.cat(entropy).mean()),
            clipped=fmean(clipped),
            gradient_norm=fmean(norms),
            log_prob_gap=gap,
            lag=float(self.version - versions.mean()),
            trajectories=len(played),
            tokens=len(versions),
        )
        self.version += 1
        return report

    def _minibatches(self, count: int) -> Iterator[torch.Tensor]:
        """Which trajectories each update takes; their rows stay together."""
        yield from torch.randperm(count, generator=self._shuffle).chunk(self.settings.minibatches)

    def _before(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The trainer's own log-probs and entropies of the tokens, before any update."""
        with torch.no_grad():
            logits = trained_logits(self.policy, batch)
        temperature = self.settings.temperature
        return token_log_probs(logits, batch.targets, temperature), entropies(logits, temperature)

    def _checked(self, gaps: torch.Tensor) -> float | None:
        """The mean log-prob gap, None of no tokens; refused when it is too large, or no number."""
        gap, most = float(gaps.mean()) if gaps.numel() else None, self.settings.max_log_prob_gap
        if gap is not None and most is not None and not gap <= most:
            raise LogProbGapError(
                f"the engine's log-probs are {gap:.3g} from the trainer's on average, where the weights are the same "
                f"(at most {most:g} is allowed): the mask, the ids or the weights are not those that were sampled with"
            )
        return gap

    def _update(self, batch: Batch, old: torch.Tensor, advantages: torch.Tensor) -> tuple[float, float, float]:
        new = token_log_probs(trained_logits(self.policy, batch), batch.targets, self.settings.temperature)
        corrections = importance_weights(old, batch.log_probs, self.settings.importance_cap)
        found = policy_loss(
            new,
            old,
            advantages,
            token_weights(batch.trajectories) * corrections,
            clip=self.settings.clip,
            clip_high=self.settings.clip_high,
        )
        self._optimizer.zero_grad()
        found.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_gradient_norm)
        self._optimizer.step()
        self._warmup.step()
        return found.loss.item(), found.clipped, norm.item()


def _baselines(played: Sequence[RolloutTrajectory]) -> dict[int, tuple[float, float]]:
    """What returns are compared with in each group of which some trajectory has rewards of turns, and their scale."""
    groups: dict[int, list[RolloutTrajectory]] = {}
    for each in played:
        groups.setdefault(each.group_index, []).append(each)
    return {
        number: turn_baseline([each.turn_returns or (each.reward,) for each in members])
        for number, members in groups.items()
        if any(each.turn_returns is not None for each in members)
    }


def _of_tokens(
    batch: Batch,
    trajectories: Sequence[RolloutTrajectory],
    advantages: torch.Tensor,
    baselines: Mapping[int, tuple[float, float]],
) -> torch.Tensor:
    """The advantage of each token (K): its trajectory's, or in a group with rewards of turns that of its return."""
    found = advantages.to(batch.returns.device)[batch.trajectories]
    for number, each in enumerate(trajectories):
        if each.group_index in baselines:
            mean, scale = baselines[each.group_index]
            own = batch.trajectories == number
            found[own] = ((batch.returns[own].double() - mean) * scale).float()
    return found


def _row_reports(
    trajectories: Sequence[RolloutTrajectory], advantages: torch.Tensor, log_probs: torch.Tensor, entropy: torch.Tensor
) -> Iterator[RowReport]:
    """What was computed of each row; its tokens stand one after another, row by row."""
    start = 0
    for each, advantage in zip(trajectories, advantages.tolist(), strict=True):
        for row in each.rows:
            end = start + row.trained_tokens
            sampled = row.log_probs or ()
            yield RowReport(
                uid=row.uid,
                row=row.number,
                log_probs=log_probs[start:end].tolist(),
                rollout_log_probs=[value for value, trained in zip(sampled, row.loss_mask, strict=False) if trained],
                advantage=advantage,
                entropy=float(entropy[start:end].mean()),
            )
            start = end
