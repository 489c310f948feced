"""Bans tokens from sampling without distorting the log-probs of the others. Pure.

SGLang adds ``logit_bias`` to the logits before it computes log-probs. With banned tokens, each returned log-prob is
therefore too large by ``-log(1 - m)``, where m is the policy's total probability of the banned tokens. A trainer
computes log-probs without the bias and sees this as a gap from its first step on (5.7e-3 for m = 5.7e-3, measured on
SGLang 0.5.23).

The ban is just strong enough (``e^-40``) that the log-probs of the banned tokens still come back when the request asks
for them (``token_ids_logprob``). From these, the log-probs without the ban are computed. A ban of -100 would be lost in
SGLang's fp32 softmax. Measured: the gap of 5.7e-3 becomes 2.2e-6.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

BAN_DEPTH: Final = 40.0
"""A ban lowers a log-prob by this much: e^-40 is 4e-18, and fp32 still represents 4e-18 times 1e-20."""
GREEDY_BELOW: Final = 1e-6
"""Below this temperature SGLang decodes greedily, and log-probs are those at temperature 1."""


def ban_bias(banned_ids: Collection[int], temperature: float) -> dict[str, float]:
    """Returns the ``logit_bias`` that bans tokens. SGLang adds it before it divides logits by the temperature."""
    depth = BAN_DEPTH * (temperature if temperature >= GREEDY_BELOW else 1.0)
    return {str(token_id): -depth for token_id in sorted(banned_ids)}


def with_banned_mass(log_probs: Sequence[float], banned: Any) -> tuple[float, ...]:
    """Returns the log-probs as they would be without the ban.

    ``banned`` is SGLang's ``output_token_ids_logprobs``: for each sampled token, ``[log_prob, id, text]`` of every
    banned token. If it is missing or its length differs, the log-probs are returned unchanged.
    """
    if not isinstance(banned, list) or len(banned) != len(log_probs):
        return tuple(log_probs)
    return tuple(
        log_prob - math.log1p(_lost_mass(entries)) for log_prob, entries in zip(log_probs, banned, strict=True)
    )


def _lost_mass(entries: Any) -> float:
    """Returns the probability that the ban removed, relative to the probability that remained: nearly m / (1 - m)."""
    if not isinstance(entries, list):
        return 0.0
    # Under the ban all probabilities are divided by Z = 1 - m + m e^-40, and ``left`` is m e^-40 / Z: so that
    # 1 / Z = 1 + left (e^40 - 1).
    left = math.fsum(math.exp(_log_prob(entry)) for entry in entries)
    return left * math.expm1(BAN_DEPTH)


def _log_prob(entry: Any) -> float:
    given = entry[0] if isinstance(entry, list) and entry else None
    return min(0.0, float(given)) if isinstance(given, int | float) else -math.inf
