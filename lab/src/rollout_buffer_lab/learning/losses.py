"""The formulas of the reference trainer, as pure functions on tensors, with their sources.

Shapes: K trained tokens of all rows together, V ids of the vocabulary. Tokens that were not sampled are left out by the
caller, so that no formula can forget a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Returns the log-probs (K) of the tokens ``ids`` (K) under the logits (K, V)."""
    return torch.log_softmax(logits.float() / temperature, dim=-1).gather(-1, ids[:, None])[:, 0]


def entropies(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Returns the entropies in nats (K) of the distributions with logits (K, V)."""
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def token_weights(trajectories: torch.Tensor) -> torch.Tensor:
    """Returns the weight of each token (K), with sum 1: equal per trajectory, and equal per token within it.

    ``trajectories`` (K) has the number of each token's trajectory; the number of its rows makes no difference, and a
    number without a token does not count. The weighted sum of a loss is its mean over trajectories of the mean over
    their tokens: DeepSeekMath, equation 3, where a trajectory is one row.
    """
    tokens = torch.bincount(trajectories)
    return 1.0 / (tokens[trajectories] * (tokens > 0).sum())


def importance_weights(trainer: torch.Tensor, engine: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """Returns the weights (K) that correct for engine log-probs other than the trainer's, cut at ``cap``.

    min(π_trainer / π_engine, cap), without a gradient: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025; slime's ``--use-tis``. It corrects for old weight versions as well.
    """
    return (trainer - engine).exp().clamp(max=cap).detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss with its gradient, the share of tokens that the clip took out of it, and the mean |ratio - 1|."""

    loss: torch.Tensor
    clipped: float
    ratio_distance: float


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip: float = 0.2,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """Returns PPO's clipped loss of log-probs ``new`` against ``old``, with each token's advantage and weight (K each).

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347), equation 7. The wider upper
    bound is from Yu et al., "DAPO", 2025 (arXiv:2503.14476), section 3.1; slime's ``--eps-clip-high``.
    """
    ratio = (new - old).exp()
    gain, clipped_gain = ratio * advantages, ratio.clamp(1 - clip, 1 + clip_high) * advantages
    loss = -(torch.minimum(gain, clipped_gain) * weights).sum()
    return PolicyLoss(
        loss=loss,
        clipped=float((clipped_gain < gain).float().mean()),
        ratio_distance=float((ratio.detach() - 1).abs().mean()),
    )
