"""How rewards are normalised: group means and standard deviations, z-scores, returns of turns and tokens. Pure.

A reward is normalised by these functions alone. Their callers, in the order in which a reward passes them:

1. ``rules/groups.py``, ``normalize_group_data``: ``z_scores`` of a closed group whose job sets ``normalize_rewards``.
2. ``trainer/row_builder.py``: ``mean`` of its group for a member that cannot be trained, ``token_returns`` where turns
   earned rewards.
3. ``slime/rollout/agent_rollout_advantages.py``: ``group_baseline`` of a group, as slime's arguments say. The lab's
   reference trainer uses the same function.

``state/reward_versions.py`` gives a delivery the rewards of another judge, and normalises nothing.

The return of token i of turn t is what is earned from there on, a turn being one step of time:

    R(t, i) = ρ(t, i) + … + ρ(t, last) + r(t) + γ · R(t + 1, first)

with r the rewards of turns, ρ those of single tokens and γ the discount (Sutton and Barto, "Reinforcement Learning",
2nd edition, 2018, equation 3.9). Within a turn nothing is discounted. A trajectory without rewards of turns is one turn
that earned its reward: the return of each of its tokens is this reward.

The advantage is the return less the group's mean, over the group's standard deviation, as in GRPO (Shao et al.,
"DeepSeekMath", 2024, arXiv:2402.03300, section 4.1.2). In mean and deviation each trajectory has weight 1, and each
of its n turns has weight 1/n. Where every trajectory is one turn this is GRPO by trajectory, number for number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

STD_EPSILON = 1e-6
Z_SCORE_EPSILON = 1e-8


def mean(values: Sequence[float]) -> float:
    """Returns the mean, exactly rounded; 0 if there are no values."""
    return math.fsum(values) / len(values) if values else 0.0


def z_scores(rewards: Sequence[float]) -> list[float]:
    """Returns (reward - mean) / (population standard deviation + 1e-8) of each reward; all 0 for equal rewards."""
    group_mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    if deviation == 0.0:
        return [0.0] * len(rewards)
    return [(reward - group_mean) / (deviation + Z_SCORE_EPSILON) for reward in rewards]


def group_baseline(returns: Sequence[Sequence[float]], *, by_std: bool = True) -> tuple[float, float]:
    """Returns what to subtract from a group's returns, and the factor for the differences, for advantages as in GRPO.

    ``returns`` has the returns of each trajectory's turns; a trajectory of one reward is one turn. The result is (mean,
    0), so that nothing has an advantage, if the returns do not differ or are of fewer than two trajectories. The
    standard deviation is that of a sample (n - 1); with ``by_std`` False nothing is divided by it.
    """
    trajectories = [list(turns) for turns in returns if turns]
    group_mean = mean([mean(turns) for turns in trajectories])
    all_returns = [one for turns in trajectories for one in turns]
    if len(trajectories) < 2 or max(all_returns) == min(all_returns):
        return group_mean, 0.0
    if not by_std:
        return group_mean, 1.0
    squares = math.fsum(mean([(one - group_mean) ** 2 for one in turns]) for turns in trajectories)
    return group_mean, 1.0 / (math.sqrt(squares / (len(trajectories) - 1)) + STD_EPSILON)


def token_returns(
    turn_rewards: Sequence[float] | None,
    token_rewards: Sequence[Sequence[float] | None] | None,
    lengths: Sequence[int],
    discount: float,
) -> list[list[float]]:
    """Returns, for each trained turn, the return of each of its sampled tokens; ``lengths`` says how many they are.

    Rewards that are None count as 0. A turn without tokens has no returns of its own; what is earned
    after it still counts for the turns before it.
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
