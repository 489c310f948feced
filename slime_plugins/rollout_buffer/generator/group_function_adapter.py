"""Adapts group functions with slime's signatures to this project's records.

slime's functions take ``(instance_id, items)`` with items as dicts. A generator module may define any of

    is_valid_group((instance_id, items), min_valid_group_size, task_type) -> bool or (valid, finished)
    filter_item(item, task_type) -> bool
    normalize_group_data((instance_id, items)) -> (instance_id, items)
    pad_group_data((instance_id, items), group_size) -> (instance_id, items)
    get_group_data_meta_info({instance_id: items}) -> dict
    transform_group((instance_id, items), task_type) -> (instance_id, items)      (slime's newer name for normalising)

The defaults are those of ``rules/groups.py``. ``finished`` is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS, GroupFunctions, GroupPolicy, Member
from slime_plugins.rollout_buffer.rules.validity import as_reward

ItemDict = dict[str, Any]
SlimeGroup = tuple[str, list[ItemDict]]


def group_functions_of(module: ModuleType) -> GroupFunctions:
    """Returns the group functions of a generator module: its own, adapted, and defaults."""
    adapters: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "is_valid_group": ("is_valid_group", _is_valid_group),
        "filter_item": ("filter_item", _filter_item),
        "transform_group": ("normalize_group_data", _transform_group),
        "normalize_group_data": ("normalize_group_data", _normalize_group_data),
        "pad_group_data": ("pad_group_data", _pad_group_data),
        "get_group_data_meta_info": ("get_group_data_meta_info", _meta_info),
    }
    adapted = {
        field: adapt(getattr(module, name))
        for name, (field, adapt) in adapters.items()
        if callable(getattr(module, name, None))
    }
    return replace(DEFAULT_FUNCTIONS, **adapted, needs_items=True) if adapted else DEFAULT_FUNCTIONS


def _is_valid_group(function: Callable[..., Any]) -> Callable[[Sequence[Member], GroupPolicy], bool]:
    def adapted(members: Sequence[Member], policy: GroupPolicy) -> bool:
        minimum = policy.at_least(policy.min_valid_group_size_ratio)
        answer = function(_slime_group(members), minimum, policy.task_type)
        return bool(answer[0] if isinstance(answer, tuple) else answer)

    return adapted


def _filter_item(function: Callable[..., Any]) -> Callable[[Member, GroupPolicy], bool]:
    return lambda member, policy: bool(function(_as_item(member), policy.task_type))


def _transform_group(function: Callable[..., Any]) -> Callable[[Sequence[Member], GroupPolicy], Sequence[Member]]:
    return lambda members, policy: _as_members(function(_slime_group(members), policy.task_type), members)


def _normalize_group_data(function: Callable[..., Any]) -> Callable[[Sequence[Member], GroupPolicy], Sequence[Member]]:
    return lambda members, policy: _as_members(function(_slime_group(members)), members)


def _pad_group_data(function: Callable[..., Any]) -> Callable[[Sequence[Member], GroupPolicy], Sequence[Member]]:
    return lambda members, policy: _as_members(function(_slime_group(members), policy.group_size), members)


def _meta_info(function: Callable[..., Any]) -> Callable[[Sequence[Sequence[Member]]], Mapping[str, Any]]:
    def adapted(groups: Sequence[Sequence[Member]]) -> Mapping[str, Any]:
        return dict(function(dict(_slime_group(members) for members in groups if members)))

    return adapted


def _slime_group(members: Sequence[Member]) -> SlimeGroup:
    return (members[0].instance_id if members else ""), [_as_item(member) for member in members]


def _as_item(member: Member) -> ItemDict:
    return {
        **member.item,
        "uid": member.uid,
        "instance_id": member.instance_id,
        "reward": member.reward,
        "raw_reward": member.raw_reward,
    }


def _as_members(answer: Any, originals: Sequence[Member]) -> list[Member]:
    """Returns members with the rewards and in the order that a group function returned; a repeated uid is a copy."""
    items = answer[1] if isinstance(answer, tuple) else answer
    members_by_uid = {member.uid: member for member in originals}
    occurrences: Counter[str] = Counter()
    members = []
    for item in items:
        member = members_by_uid[item["uid"]]
        copy_number = occurrences[member.uid]
        occurrences[member.uid] += 1
        uid = f"{member.uid}+copy{copy_number}" if copy_number else member.uid
        raw = item.get("raw_reward", member.raw_reward)
        raw_reward = None if raw is None else as_reward(raw)
        members.append(replace(member, uid=uid, reward=as_reward(item["reward"]), raw_reward=raw_reward))
    return members
