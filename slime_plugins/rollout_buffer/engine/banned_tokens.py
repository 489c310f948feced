"""Tokens that may not be sampled, without a mark on the log-probs of those that are. Pure.

SGLang adds ``logit_bias`` to the logits before it computes log-probs, so that those of a request with banned tokens are
of the distribution without them: each is too large by ``-log(1 - m)``, m the probability that the policy gives the
banned tokens together. A trainer, which computes its log-probs without the bias, finds that as a gap at its first step
already (5.7e-3 where m is 5.7e-3, measured on SGLang 0.5.23).

The ban is therefore just strong enough (``e^-40``) that the banned tokens' own log-probs still come back where the
request asks for them (``token_ids_logprob``): what they were without the ban is what is taken from the others. A ban of
-100 would be lost in SGLang's fp32 softmax. Measured: the gap of 5.7e-3 becomes 2.2e-6.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

BAN_DEPTH: Final = 40.0
"""By how much a ban lowers a log-prob: e^-40 is 4e-18, and fp32 still holds what it leaves of 1e-20."""
GREEDY_BELOW: Final = 1e-6
"""From here on SGLang takes the likeliest token, and log-probs are those at temperature 1."""


def ban_bias(banned_ids: Collection[int], temperature: float) -> dict[str, float]:
    """Returns the ``logit_bias`` that bans tokens. Logits are divided by the temperature after it is added."""
    depth = BAN_DEPTH * (temperature if temperature >= GREEDY_BELOW else 1.0)
    return {str(token_id): -depth for token_id in sorted(banned_ids)}


def with_banned_mass(log_probs: Sequence[float], banned: Any) -> tuple[float, ...]:
    """Returns the log-probs as they are without the ban.

    ``banned`` is SGLang's ``output_token_ids_logprobs``: for each sampled token the banned tokens' ``[log_prob, id,
    text]``. An engine that sends none, or not one for each, leaves the log-probs as they are.
    """
    if not isinstance(banned, list) or len(banned) != len(log_probs):
        return tuple(log_probs)
    return tuple(
        log_prob - math.log1p(_lost_mass(entries)) for log_prob, entries in zip(log_probs, banned, strict=True)
    )


def _lost_mass(entries: Any) -> float:
    """What the ban took from the banned tokens, as a share of what was sampled from; close to m / (1 - m)."""
    if not isinstance(entries, list):
        return 0.0
    left = math.fsum(math.exp(_log_prob(entry)) for entry in entries)
    return left * math.expm1(BAN_DEPTH)


def _log_prob(entry: Any) -> float:
    given = entry[0] if isinstance(entry, list) and entry else None
    return min(0.0, float(given)) if isinstance(given, int | float) else -math.inf
