"""Pure: the skip list, which is how a trainer that resumes says what it has consumed already.

Which groups of the job that it attaches to are delivered again, skipped, or done with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slime_plugins.rollout_buffer.types import GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGroup:
    """A stored group as ``compare_with_skip_list`` needs it.

    ``delivery_key`` is the delivery it went out or was reported in. ``by_skip_list`` says that an earlier skip list
    skipped it, and nobody else.
    """

    key: int
    instance_id: str
    state: GroupState
    delivery_key: int | None
    by_skip_list: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """What a resumed trainer's skip list changes, as group keys."""

    ready_again: list[int]
    """Handed out, but not consumed: they are delivered once more, also those that have come back by themselves."""
    reported_again: list[int]
    """Filtered or failed, and the report of it was lost: they are reported once more."""
    skipped: list[int]
    """Still to come, but consumed already."""
    consumed: list[int]
    """Consumed, though their lease ran out unacknowledged: they do not come back."""
    not_skipped: list[int] = field(default_factory=list)
    """Skipped by an earlier list: the trainer has gone back to before it consumed them."""
    not_used: Mapping[str, int] = field(default_factory=dict)
    """Entries that fit no group, by instance: they skip groups that have no row yet."""


def compare_with_skip_list(groups: Sequence[KnownGroup], skip_instance_ids: Iterable[str]) -> Resumption:
    """Compares what was handed out with what a resumed trainer says it consumed.

    Entries of the skip list are used up in the order in which the trainer can have collected them: groups skipped from
    the start, then deliveries in their order (filtered and failed groups were reported in one), and only then groups
    to come, earliest first. ``groups`` are those that have rows, in epoch order: the earliest ones of each instance.
    """
    to_skip = Counter(skip_instance_ids)

    def use_entry(group: KnownGroup) -> bool:
        if to_skip[group.instance_id] <= 0:
            return False
        to_skip[group.instance_id] -= 1
        return True

    skipped_before = (group for group in groups if group.state is GroupState.SKIPPED)
    not_skipped = [group.key for group in skipped_before if not use_entry(group) and group.by_skip_list]
    gone_out = sorted((group for group in groups if group.delivery_key is not None), key=_delivery_order)
    unused = [group for group in gone_out if group.state is not GroupState.SKIPPED and not use_entry(group)]
    not_consumed = {group.key for group in unused}
    came_back = [group.key for group in gone_out if group.state is GroupState.READY]
    to_come = (group for group in groups if group.state in (GroupState.OPEN, GroupState.READY))
    skipped = [group.key for group in to_come if group.delivery_key is None and use_entry(group)]
    handed_out = (GroupState.LEASED, GroupState.DELIVERED, GroupState.READY)
    return Resumption(
        ready_again=[group.key for group in unused if group.state in handed_out],
        reported_again=[group.key for group in unused if group.state in (GroupState.FILTERED, GroupState.FAILED)],
        skipped=skipped,
        consumed=[key for key in came_back if key not in not_consumed],
        not_skipped=not_skipped,
        not_used=+to_skip,
    )


def _delivery_order(group: KnownGroup) -> tuple[int, int]:
    return group.delivery_key or 0, group.key
