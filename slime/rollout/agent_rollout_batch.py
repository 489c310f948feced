"""Selects the groups of a batch so that it has as many played trajectories as slime trains. Pure.

slime's mean is over all trajectories of a step, including dummies: with four dummies in eight, the update is half as
large. Members that could not be played are therefore replaced. No step consists of dummies alone.

* Rewards normalised by ``group_index`` (``post_process_rewards``), or not at all: the played members of a short group
  are used, and members of another group replace the rest.
* Rewards normalised by slime, which does so by position: a whole group replaces a short one.
* Dummies without weight in the loss: another group is fetched only if more than half of its members are needed;
  otherwise dummies fill the batch, so that no finished member is left out.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.rollout.agent_rollout_advantages import normalizes, scales_by_played_share
from slime.rollout.agent_rollout_argument_checks import ESTIMATORS_WITHOUT_DUMMIES
from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH
from slime.rollout.agent_rollout_samples import Group, as_dummy, rows_of, trajectories_of
from slime.rollout.agent_rollout_settings import ShortGroups, buffer_attributes, step_size
from slime_plugins.rollout_buffer.errors import GeneratorError

logger = logging.getLogger(__name__)

OWN_REWARDS_PATH = "slime.rollout.agent_rollout.post_process_rewards"
NO_LOG_PROBS = "it has no log-probs of the engine, and most trajectories of its batch have some"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRule:
    """A batch has ``groups`` times ``members`` trajectories, in steps of ``step`` trajectories.

    With ``whole_groups`` only groups of which all members were played count; short groups fill a batch that lacks whole
    groups. Otherwise a group counts from ``min_played`` played members on, because a single member has no baseline and
    so no advantage. ``weightless_dummies``: slime's loss is the mean over played trajectories, with or without dummies
    in the batch.
    """

    groups: int
    members: int
    step: int
    short_groups: ShortGroups
    whole_groups: bool
    min_played: int
    weightless_dummies: bool = False

    @property
    def trajectories(self) -> int:
        """Trajectories of a rollout that slime trains."""
        return self.groups * self.members

    def missing(self, fetched: Sequence[Group]) -> int:
        """Returns the number of missing groups if all of them are whole; 0 if the batch is full."""
        if self.short_groups is ShortGroups.KEEP:
            return max(0, self.groups - len(fetched))
        if self.whole_groups:
            return max(0, self.groups - sum(played(group) == self.members for group in fetched))
        lacking = self.trajectories - sum(played(group) for group in fetched if self._counts(group))
        left_to_dummies = self.members // 2 if self.weightless_dummies else 0
        return max(0, math.ceil((lacking - left_to_dummies) / self.members))

    def batch(self, fetched: Sequence[Group]) -> list[Group]:
        """Returns the batch made of the fetched groups.

        Raises:
            GeneratorError: so few trajectories were played that a training step would consist of dummies alone.
        """
        return self._without_empty_steps(self._chosen(fetched))

    def _chosen(self, fetched: Sequence[Group]) -> list[Group]:
        if self.short_groups is ShortGroups.KEEP or all(played(group) == self.members for group in fetched):
            return list(fetched[: self.groups])
        if self.whole_groups:
            return sorted(fetched, key=lambda group: played(group) < self.members)[: self.groups]
        counted = [_played_members(group) for group in fetched if self._counts(group)]
        lacking = self.trajectories - sum(map(len, counted))
        if lacking <= 0:
            return self._evenly_cut(counted, -lacking)
        # ``min_played`` is at most 2: each of the groups that do not count has a single played member.
        single = [_played_members(group) for group in fetched if 0 < played(group) < self.min_played]
        single.sort(key=lambda group: _selection_hash(group[0]))
        return self._with_dummies([*counted, *single[:lacking]], fetched)

    def _with_dummies(self, batch: list[Group], fetched: Sequence[Group]) -> list[Group]:
        """Adds dummies to the groups in turn until the batch is full."""
        lacking = self.trajectories - sum(map(len, batch))
        dummies = [member for group in fetched for member in group if rows_of(member)[0].remove_sample][:lacking]
        if not batch:
            return [dummies]
        return [[*group, *dummies[number :: len(batch)]] for number, group in enumerate(batch)]

    def _evenly_cut(self, groups: list[Group], surplus: int) -> list[Group]:
        """Removes ``surplus`` members, one by one from the largest group.

        A group that would become too small is removed as a whole, unless more than ``surplus`` members would go.
        Members are chosen by a hash of their uid: the order in which they finished depends on their length.
        """
        sizes = [len(group) for group in groups]
        hashes = [sorted(map(_selection_hash, group)) for group in groups]
        while surplus:
            largest = max(range(len(sizes)), key=lambda number: (sizes[number], hashes[number]))
            removed = sizes[largest] if sizes[largest] == self.min_played <= surplus else 1
            sizes[largest] -= removed
            surplus -= removed
        selected = [set(of_group[:size]) for of_group, size in zip(hashes, sizes, strict=True)]
        cut = (
            [member for member in group if _selection_hash(member) in selected_hashes]
            for group, selected_hashes in zip(groups, selected, strict=True)
        )
        return [group for group in cut if group]

    def _counts(self, group: Group) -> bool:
        return played(group) >= self.min_played

    def _without_empty_steps(self, batch: list[Group]) -> list[Group]:
        """Reorders the groups, if necessary, so that every step has a played trajectory."""
        if self._every_step_is_played(batch):
            return batch
        steps = max(1, self.trajectories // self.step)
        by_played = sorted(batch, key=played, reverse=True)
        reordered = [group for step in range(steps) for group in by_played[step::steps]]
        if not self._every_step_is_played(reordered):
            raise GeneratorError(
                f"{sum(map(played, batch))} of {self.trajectories} trajectories of this rollout were played: a "
                "training step would train nothing, and still update the weights by Adam's momentum"
            )
        return reordered

    def _every_step_is_played(self, batch: Sequence[Group]) -> bool:
        members = [not rows[0].remove_sample for rows in trajectories_of(batch)]
        return all(any(members[start : start + self.step]) for start in range(0, len(members), self.step))


def rule_of(args: Any) -> BatchRule:
    """Returns the rule for slime's arguments.

    Raises:
        ConfigError: ``rollout_buffer_short_groups`` has an unknown value.
    """
    members = int(args.n_samples_per_prompt)
    path = getattr(args, "custom_reward_post_process_path", None)
    return BatchRule(
        groups=int(args.rollout_batch_size),
        members=members,
        step=step_size(args),
        short_groups=buffer_attributes(args).rollout_buffer_short_groups,
        whole_groups=path not in (None, OWN_REWARDS_PATH) or (path is None and normalizes(args)),
        min_played=2 if normalizes(args) and members > 1 else 1,
        weightless_dummies=_dummies_have_no_weight(args),
    )


def _dummies_have_no_weight(args: Any) -> bool:
    """Returns True if dummies change no term of slime's loss.

    The hook on the training ranks removes their weight from every term. ``post_process_rewards`` removes it from the
    policy's term only, if rewards are normalised; that suffices without KL and entropy terms. In a loss per token a
    dummy counts as one token, which is negligible.
    """
    if getattr(args, "advantage_estimator", "grpo") in ESTIMATORS_WITHOUT_DUMMIES:
        return False
    in_every_term = getattr(args, "rollout_data_postprocess_path", None) == POSTPROCESS_PATH
    if in_every_term or getattr(args, "calculate_per_token_loss", False):
        return True
    own_rewards = getattr(args, "custom_reward_post_process_path", None) == OWN_REWARDS_PATH
    other_terms = any(getattr(args, name, 0) for name in ("kl_coef", "use_kl_loss", "entropy_coef"))
    return own_rewards and normalizes(args) and scales_by_played_share(args) and not other_terms


def played(group: Group) -> int:
    """Returns the number of members of a group that are not dummies."""
    return len(_played_members(group))


def replace_trajectories_without_log_probs(groups: Sequence[Group]) -> int:
    """Replaces trajectories without log-probs by dummies if most of the batch have some; returns their number.

    slime uses the log-probs of all samples or of none: one trajectory without log-probs would remove all others'.
    """
    trained = [rows for rows in trajectories_of(groups) if not rows[0].remove_sample]
    lacking = [rows for rows in trained if any(row.rollout_log_probs is None for row in rows)]
    if not lacking or 2 * len(lacking) >= len(trained):
        return 0
    uids = {rows[0].prompt for rows in lacking}
    for group in groups:
        group[:] = [as_dummy(member, NO_LOG_PROBS) if rows_of(member)[0].prompt in uids else member for member in group]
        _give_mean(group)
    logger.warning(
        "%d of %d trajectories have no log-probs of the engine: they are not trained, so that the others use theirs",
        len(lacking),
        len(trained),
    )
    return len(lacking)


def _give_mean(group: Group) -> None:
    """Sets the rewards of dummies to the means of the group's played members."""
    first_rows = [rows_of(member)[0] for member in _played_members(group)]
    if not first_rows:
        return
    rewards: list[Any] = [sample.reward for sample in first_rows]
    reward = math.fsum(rewards) / len(first_rows)
    raw = math.fsum(float(sample.metadata["raw_reward"]) for sample in first_rows) / len(first_rows)
    for number, member in enumerate(group):
        sample = rows_of(member)[0]
        if sample.remove_sample:
            group[number] = replace(sample, reward=reward, metadata={**sample.metadata, "raw_reward": raw})


def _selection_hash(member: Any) -> bytes:
    """Returns the hash of a member's uid, which slime's Sample carries as its ``prompt``."""
    return hashlib.sha256(str(rows_of(member)[0].prompt).encode("utf-8", "surrogatepass")).digest()


def _played_members(group: Group) -> Group:
    return [member for member in group if not rows_of(member)[0].remove_sample]
