"""From rewards of turns to what each sampled token is worth: returns, and advantages within a group. Pure.

The return of token i of turn t is what is earned from there on, a turn being one step of time:

    R(t, i) = ρ(t, i) + … + ρ(t, last) + r(t) + γ · R(t + 1, first)

with r the rewards of turns, ρ those of single tokens and γ the discount (Sutton and Barto, "Reinforcement Learning",
2nd edition, 2018, equation 3.9). Within a turn nothing is discounted. A trajectory that says nothing of its turns is
one turn that earned its reward: each of its tokens returns that.

The advantage is the return less the group's mean, over the group's standard deviation, as in GRPO (Shao et al.,
"DeepSeekMath", 2024, arXiv:2402.03300, section 4.1.2). Each trajectory counts once in both, and each of its n turns
1/n in it. Where every trajectory is one turn this is GRPO by trajectory, number for number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime_plugins.rollout_buffer.errors import ConfigError

STD_EPSILON = 1e-6


def checked_discount(value: object, name: str) -> float | None:
    """Returns a discount, None where there is none.

    Raises:
        ConfigError: it is no number from 0 to 1.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value!r}; use a number from 0 to 1, which is what the turn after counts")
    return float(value)


def token_returns(
    turn_rewards: Sequence[float] | None,
    token_rewards: Sequence[Sequence[float] | None] | None,
    lengths: Sequence[int],
    discount: float,
) -> list[list[float]]:
    """Returns, for each trained turn, the return of each of its sampled tokens; ``lengths`` says how many they are.

    Either may be None, not both: the other is 0 then. A turn of no tokens passes on what came after it.
    """
    turns = len(lengths)
    of_turns = turn_rewards if turn_rewards is not None else [0.0] * turns
    of_tokens = token_rewards if token_rewards is not None else [None] * turns
    returns: list[list[float]] = []
    after = 0.0
    for reward, own, length in zip(reversed(of_turns), reversed(of_tokens), reversed(lengths), strict=True):
        after = reward + discount * after
        tokens = []
        for earned in reversed(own or [0.0] * length):
            after += earned
            tokens.append(after)
        returns.append(tokens[::-1])
    return returns[::-1]


def turn_baseline(returns: Sequence[Sequence[float]], *, by_std: bool = True) -> tuple[float, float]:
    """Returns what to subtract from returns and what to multiply them by; ``returns`` has each trajectory's turns.

    (mean, 0) where they do not differ, or a group has fewer than two trajectories: then nothing has an advantage.
    """
    played = [list(turns) for turns in returns if turns]
    mean = _mean([_mean(turns) for turns in played])
    every = [one for turns in played for one in turns]
    if len(played) < 2 or max(every) == min(every):
        return mean, 0.0
    if not by_std:
        return mean, 1.0
    spread = math.fsum(_mean([(one - mean) ** 2 for one in turns]) for turns in played)
    return mean, 1.0 / (math.sqrt(spread / (len(played) - 1)) + STD_EPSILON)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
