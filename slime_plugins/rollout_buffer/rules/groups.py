"""Pure: the verdict on a group that gets no more members, by the five group functions in this order:

    is_valid_group → filter_item → normalize_group_data → pad_group_data      (get_group_data_meta_info separately)

A group function that raises gives a failed verdict with the function's name, never an exception: one group must not
stop the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import TypedDict

from slime_plugins.rollout_buffer.errors import GeneratorError
from slime_plugins.rollout_buffer.rules import causes
from slime_plugins.rollout_buffer.rules.causes import NO_CAUSE, Cause, CauseCode, Shortfall
from slime_plugins.rollout_buffer.rules.reward_normalization import z_scores
from slime_plugins.rollout_buffer.rules.stored_settings import DEFAULTS
from slime_plugins.rollout_buffer.types import GroupState

RATIO_TOLERANCE = 1e-8
GROUP_TIMEOUT_NOTE = (
    "group_timeout_seconds is set: members that still play when their group times out are given up. They are mostly "
    "slow, so quick members have a larger share of the trained members than of the submitted. Without it only an "
    "attempt has a limit (attempt_timeout_seconds)"
)
"""A note on jobs that the service plays with a group timeout, which biases the selection of members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One trajectory of a group, as passed to the group functions.

    ``item`` is the whole item (messages, extra_info …), filled only for functions with ``needs_items``.
    ``source_uid`` names the trajectory that a padded copy was made from. A dummy has no reward and ``remove_sample``.
    """

    uid: str
    instance_id: str
    slot: int
    reward: float | None
    raw_reward: float | None = None
    remove_sample: bool = False
    source_uid: str | None = None
    item: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPolicy:
    """The settings by which a group is judged. Ratios are fractions of ``group_size``; ``StartPayload`` defines them.

    ``min_valid_group_size_ratio`` has no effect with the default functions: ``judge_group`` asks ``is_valid_group``
    about full groups only.
    """

    group_size: int
    task_type: str
    reward_range: tuple[float, float] | None = DEFAULTS.reward_range
    evaluation: bool = DEFAULTS.evaluation
    min_valid_group_size_ratio: float = DEFAULTS.min_valid_group_size_ratio
    min_valid_item_size_ratio: float = DEFAULTS.min_valid_item_size_ratio
    min_timeout_group_size_ratio: float = DEFAULTS.min_timeout_group_size_ratio
    normalize_rewards: bool = DEFAULTS.normalize_rewards
    padding: str = DEFAULTS.padding

    def at_least(self, ratio: float) -> int:
        """Returns the number of members that a ratio requires, rounded down as slime does; at least 1."""
        return max(1, math.floor(self.group_size * ratio + RATIO_TOLERANCE))

    def accepts_short(self, count: int) -> bool:
        """Returns True if a group with ``count`` members may be delivered: count / n reaches the ratio, unrounded."""
        return count >= max(1.0, self.group_size * self.min_timeout_group_size_ratio - RATIO_TOLERANCE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The state of a closed group, the cause, and the members to deliver (only if ready)."""

    state: GroupState
    cause: Cause = NO_CAUSE
    members: tuple[Member, ...] = ()


Members = Sequence[Member]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFunctions:
    """The five functions; a generator may replace any. ``needs_items`` is True if they read more than rewards."""

    is_valid_group: Callable[[Members, GroupPolicy], bool]
    filter_item: Callable[[Member, GroupPolicy], bool]
    normalize_group_data: Callable[[Members, GroupPolicy], Members]
    pad_group_data: Callable[[Members, GroupPolicy], Members]
    get_group_data_meta_info: Callable[[Sequence[Members]], Mapping[str, Any]] | None = None
    needs_items: bool = False


def judge_group(
    members: Members,
    policy: GroupPolicy,
    functions: GroupFunctions | None = None,
    *,
    shortfall: Shortfall = Shortfall.SLOTS_FAILED,
) -> Verdict:
    """Returns the verdict on a group that gets no more members.

    ``members`` are its trajectories in slot order; ``shortfall`` is the reason for missing ones. A short group is
    padded and delivered from ``min_timeout_group_size_ratio`` on, and fails below it. It skips ``is_valid_group``: the
    missing rewards might have differed.
    """
    functions = functions or DEFAULT_FUNCTIONS
    short = len(members) < policy.group_size
    if short and not policy.accepts_short(len(members)):
        cause = causes.too_short(len(members), policy.group_size, shortfall)
        return Verdict(state=GroupState.FAILED, cause=cause)
    try:
        return _pipeline(members, policy, functions, check_validity=not short)
    except GeneratorError as error:
        return Verdict(state=GroupState.FAILED, cause=Cause(CauseCode.GROUP_FUNCTION, error.message[:500]))


def _pipeline(members: Members, policy: GroupPolicy, functions: GroupFunctions, *, check_validity: bool) -> Verdict:
    if check_validity and not _call("is_valid_group", functions.is_valid_group, members, policy):
        is_custom = functions.is_valid_group is not is_valid_group
        cause = causes.not_valid([one.reward for one in members], is_custom=is_custom)
        return Verdict(state=GroupState.FILTERED, cause=cause)
    accepted = [member for member in members if _call("filter_item", functions.filter_item, member, policy)]
    if len(accepted) < policy.at_least(policy.min_valid_item_size_ratio):
        is_custom = functions.filter_item is not filter_item
        cause = causes.items_filtered(len(accepted), policy.group_size, policy.reward_range, is_custom=is_custom)
        return Verdict(state=GroupState.FILTERED, cause=cause)
    normalized = _call("normalize_group_data", functions.normalize_group_data, accepted, policy)
    padded = _call("pad_group_data", functions.pad_group_data, normalized, policy)
    if len(padded) != policy.group_size:
        raise GeneratorError(f"pad_group_data returned {len(padded)} members for a group of {policy.group_size}")
    return Verdict(state=GroupState.READY, members=tuple(padded))


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    # Code of a generator's author: any exception becomes this group's cause.
    try:
        return function(*arguments)
    except Exception as error:
        raise GeneratorError(f"{name} raised {type(error).__name__}: {error}") from error


# --- the defaults ----------------------------------------------------------------------------------------------------


def is_valid_group(members: Members, policy: GroupPolicy) -> bool:
    """Accepts a group that is large enough and whose rewards differ.

    With equal rewards all advantages of GRPO are zero. The rule does not apply to evaluations nor to n = 1.
    """
    if len(members) < policy.at_least(policy.min_valid_group_size_ratio):
        return False
    if policy.evaluation or policy.group_size == 1:
        return True
    return len({member.reward for member in members}) > 1


def filter_item(member: Member, policy: GroupPolicy) -> bool:
    """Accepts a member whose reward is finite and within the job's reward range, if any, bounds included."""
    low, high = policy.reward_range or (-math.inf, math.inf)
    return member.reward is not None and math.isfinite(member.reward) and low <= member.reward <= high


def normalize_group_data(members: Members, policy: GroupPolicy) -> Members:
    """Fills in ``raw_reward``, the reward before normalization; z-scores rewards if the job sets ``normalize_rewards``.

    Rewards of evaluations, and of groups with n = 1, are not normalized.
    """
    members = [replace(one, raw_reward=one.reward if one.raw_reward is None else one.raw_reward) for one in members]
    if not policy.normalize_rewards or policy.evaluation or policy.group_size == 1:
        return members
    scores = z_scores([_required_reward(member) for member in members])
    return [replace(member, reward=score) for member, score in zip(members, scores, strict=True)]


def pad_group_data(members: Members, policy: GroupPolicy) -> Members:
    """Fills the group up to n with dummies that are never trained, or (``padding: copy``) with copies as slime did.

    With ``copy``, rewards are scaled by n / members. Then the first members are copied, and original and copy get half
    of the reward each. No member is copied twice: dummies fill the rest.
    """
    missing = policy.group_size - len(members)
    if missing <= 0:
        return members
    if policy.padding == "copy":
        members = _with_halved_copies(members, missing, policy.group_size)
        missing = policy.group_size - len(members)
    return [*members, *(_dummy_member(members[0], ordinal) for ordinal in range(missing))]


def _with_halved_copies(members: Members, missing: int, group_size: int) -> list[Member]:
    scale = group_size / len(members)
    scaled = [replace(member, reward=_required_reward(member) * scale) for member in members]
    doubled = min(missing, len(members))
    halves = [replace(member, reward=_required_reward(member) / 2) for member in scaled[:doubled]]
    copies = [replace(half, uid=f"{half.uid}+copy", source_uid=half.uid) for half in halves]
    return [*halves, *scaled[doubled:], *copies]


def _dummy_member(sibling: Member, ordinal: int) -> Member:
    return Member(
        uid=f"{sibling.uid}+dummy{ordinal}",
        instance_id=sibling.instance_id,
        slot=-1 - ordinal,  # no place in the group, and another for each dummy
        reward=None,
        remove_sample=True,
    )


def _required_reward(member: Member) -> float:
    """Returns the reward; raises ``GeneratorError`` if there is none, since a missing reward must not count as 0."""
    if member.reward is None:
        raise GeneratorError(f"trajectory {member.uid} has no reward")
    return member.reward


DEFAULT_FUNCTIONS = GroupFunctions(
    is_valid_group=is_valid_group,
    filter_item=filter_item,
    normalize_group_data=normalize_group_data,
    pad_group_data=pad_group_data,
)


class RewardStatistics(TypedDict):
    """Statistics of all trajectories since the last delivery, before any filter."""

    total_samples: int
    """Trajectories written since the last delivery, before any filter."""
    num_groups: int
    """Number of groups that these trajectories belong to."""
    avg_group_size: float
    """Trajectories of a group, on average."""
    avg_reward: float
    """Mean of the rewards; 0 without trajectories."""
    reward_std: float
    """Standard deviation (n - 1) of the rewards."""
    reward_min: float
    """The lowest reward."""
    reward_max: float
    """The highest reward."""


def summarize_rewards(
    *, samples: int, groups: int, total: float, square_total: float, low: float | None, high: float | None
) -> RewardStatistics:
    """Builds the reward part of ``meta_info`` from sums, without reading trajectories.

    ``reward_std`` is the sample standard deviation (n - 1), 0.0 for fewer than two samples, as in slime.
    """
    mean = total / samples if samples else 0.0
    variance = max(0.0, square_total - samples * mean * mean) / (samples - 1) if samples > 1 else 0.0
    return RewardStatistics(
        total_samples=samples,
        num_groups=groups,
        avg_group_size=samples / groups if groups else 0.0,
        avg_reward=mean,
        reward_std=math.sqrt(variance),
        reward_min=low if low is not None else 0.0,
        reward_max=high if high is not None else 0.0,
    )
