"""Samples tokens and their log-probs from logits, by each request's parameters.

The log-prob of a token is of the whole distribution at the request's temperature, before ``top_k``, ``top_p`` and
``min_p`` cut it: what SGLang reports, and what a trainer recomputes. For a greedy request the temperature is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout_buffer_lab.sglang_routes.sampling import Sampling


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One sampled token, with the requested log-probs of other tokens."""

    token_id: int
    log_prob: float
    asked_log_probs: tuple[float, ...] = ()


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float]) -> list[TokenChoice]:
    """Samples one token per row of ``logits``; ``draws`` are uniform random numbers in [0, 1).

    Equal rows, parameters and draws give equal tokens in any batch, up to rounding of the logits.
    """
    scores = logits.float().cpu()  # not every device supports float64
    for row, sampling in zip(scores, samplings, strict=True):
        row[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()))
    temperatures = torch.tensor([1.0 if sampling.greedy else sampling.temperature for sampling in samplings])
    log_probs = torch.log_softmax(scores / temperatures[:, None], dim=-1)
    likeliest = log_probs.argmax(dim=-1)
    greedy = torch.tensor([sampling.greedy for sampling in samplings])
    chosen = (
        likeliest if greedy.all() else torch.where(greedy, likeliest, _drawn(log_probs, likeliest, samplings, draws))
    )
    chosen_log_probs = log_probs.gather(1, chosen[:, None])[:, 0]
    if not torch.isfinite(chosen_log_probs).all():
        raise ValueError("the model's logits are not finite")
    asked = [tuple(row[list(sampling.asked_ids)].tolist()) for row, sampling in zip(log_probs, samplings, strict=True)]
    return [TokenChoice(*choice) for choice in zip(chosen.tolist(), chosen_log_probs.tolist(), asked, strict=True)]


def _drawn(
    log_probs: torch.Tensor, likeliest: torch.Tensor, samplings: Sequence[Sampling], draws: Sequence[float]
) -> torch.Tensor:
    """Returns one token per row: the first at which the cumulative probability exceeds its draw.

    Where rounding leads to a token of probability 0, the likeliest token is returned.
    """
    probs = log_probs.double().exp()
    if any(sampling.cuts for sampling in samplings):
        probs = _cut(probs, samplings)
    summed = probs.cumsum(dim=-1)
    shares = torch.tensor(draws, dtype=torch.double)[:, None] * summed[:, -1:]
    drawn = torch.searchsorted(summed, shares, right=True).clamp(max=probs.shape[-1] - 1)
    return torch.where(probs.gather(1, drawn) > 0, drawn, likeliest[:, None])[:, 0]


def _cut(probs: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Sets probabilities excluded by top_k, then top_p, then min_p to zero; the most likely token always remains."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1])
    top_k = torch.tensor([sampling.top_k if sampling.top_k > 0 else probs.shape[-1] for sampling in samplings])
    ordered = ordered * (rank < top_k[:, None])
    ordered /= ordered.sum(dim=-1, keepdim=True)
    top_p = torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.double)[:, None]
    min_p = torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.double)[:, None]
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered * (((before < top_p) | (top_p >= 1)) & (ordered >= min_p * ordered[:, :1]))
    return torch.zeros_like(probs).scatter_(1, order, ordered)
