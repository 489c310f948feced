"""The formulas of the reference trainer, as pure functions on tensors, with their sources.

Shapes: K trained tokens of all rows together, N trajectories, V ids of the vocabulary. What was not sampled never gets
here, so that no mask can be forgotten.
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

    ``trajectories`` (K) numbers the one that a token is of; in how many rows it was makes no difference, and one
    without a trained token, a dummy, does not count. The mean over trajectories of the mean over their tokens:
    DeepSeekMath, equation 3, where a trajectory is one row.
    """
    tokens = torch.bincount(trajectories)
    return 1.0 / (tokens[trajectories] * (tokens > 0).sum())


def importance_weights(trainer: torch.Tensor, engine: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """Weights (K) of tokens that the engine sampled with log-probs other than the trainer's, cut at ``cap``.

    min(π_trainer / π_engine, cap), without a gradient: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025; slime's ``--use-tis``. It corrects for old weight versions as well.
    """
    return (trainer - engine).exp().clamp(max=cap).detach()


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """The loss with its gradient, the share of tokens that the clip took out of it, and the mean |ratio - 1|."""

    loss: torch.Tensor
    clipped: float
    distance: float


def policy_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip: float = 0.2,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """PPO's clipped loss of log-probs ``new`` against ``old``, with each token's advantage and weight (K each).

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347), equation 7; an upper bound
    wider than the lower is Yu et al., "DAPO", 2025 (arXiv:2503.14476), section 3.1; slime's ``--eps-clip-high``.
    """
    ratio = (new - old).exp()
    gain, gain_within = ratio * advantages, ratio.clamp(1 - clip, 1 + clip_high) * advantages
    loss = -(torch.minimum(gain, gain_within) * weights).sum()
    return PolicyLoss(
        loss=loss,
        clipped=float((gain_within < gain).float().mean()),
        distance=float((ratio.detach() - 1).abs().mean()),
    )
