"""Pure: compares a job's stored groups with the skip list of a resuming trainer: an instance id per consumed group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slime_plugins.rollout_buffer.types import GroupState


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGroup:
    """A stored group as ``compare_with_skip_list`` needs it.

    ``delivery_key`` is the delivery that contained or reported it. ``by_skip_list`` is true if an earlier skip list
    skipped it, and not a cancellation.
    """

    key: int
    instance_id: str
    state: GroupState
    delivery_key: int | None
    by_skip_list: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """The changes that a skip list makes, as group keys."""

    ready_again: list[int]
    """Groups that were delivered but not consumed, also those whose lease expired: they are delivered again."""
    reported_again: list[int]
    """Filtered or failed groups that the skip list does not name: they are reported again."""
    skipped: list[int]
    """Groups that were not delivered, but consumed in an earlier run of the trainer: they are skipped."""
    consumed: list[int]
    """Groups that were consumed although their lease expired without an ack: they are not delivered again."""
    not_skipped: list[int] = field(default_factory=list)
    """Groups that an earlier list skipped and this list does not name: the trainer resumed from an older checkpoint."""
    not_used: Mapping[str, int] = field(default_factory=dict)
    """Number of entries without a stored group, by instance: they skip groups that have no row yet."""


def compare_with_skip_list(groups: Sequence[KnownGroup], skip_instance_ids: Iterable[str]) -> Resumption:
    """Compares the groups of a job with the skip list.

    Each entry is matched with one group, in the order in which the trainer can have collected them: groups skipped
    before, then deliveries in order (including filtered and failed groups that they reported), then undelivered groups,
    earliest epoch first. ``groups`` are those that have rows, in epoch order.
    """
    to_skip = Counter(skip_instance_ids)

    def use_entry(group: KnownGroup) -> bool:
        if to_skip[group.instance_id] <= 0:
            return False
        to_skip[group.instance_id] -= 1
        return True

    skipped_before = (group for group in groups if group.state is GroupState.SKIPPED)
    not_skipped = [group.key for group in skipped_before if not use_entry(group) and group.by_skip_list]
    in_deliveries = [group for group in groups if group.delivery_key is not None]
    in_deliveries.sort(key=lambda group: (group.delivery_key or 0, group.key))
    not_named = [group for group in in_deliveries if group.state is not GroupState.SKIPPED and not use_entry(group)]
    not_consumed = {group.key for group in not_named}
    expired = [group.key for group in in_deliveries if group.state is GroupState.READY]
    waiting = (group for group in groups if group.state in (GroupState.OPEN, GroupState.READY))
    skipped = [group.key for group in waiting if group.delivery_key is None and use_entry(group)]
    delivered = (GroupState.LEASED, GroupState.DELIVERED, GroupState.READY)
    return Resumption(
        ready_again=[group.key for group in not_named if group.state in delivered],
        reported_again=[group.key for group in not_named if group.state in (GroupState.FILTERED, GroupState.FAILED)],
        skipped=skipped,
        consumed=[key for key in expired if key not in not_consumed],
        not_skipped=not_skipped,
        not_used=+to_skip,
    )
