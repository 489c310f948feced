"""A trainer's progress in a job: received groups, and consumed instance ids in the metadata of its checkpoint.

The metadata maps ``str(rollout_id)`` to the instance ids that the rollout consumed, one per group. If the input is
repeated (``rollout_buffer_on_exhausted: repeat``), ``rollout_buffer_passes`` maps it to the pass over the input in
which the rollout ended, and to the number of its last ids that belong to that pass: ``{"7": {"pass": 1, "ids": 3}}``.
The job of a pass needs only the ids of that pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_plugins.rollout_buffer.wire import RolloutData

PASSES_KEY = "rollout_buffer_passes"
FINISHED_KEY = "finished_groups"
"""Key of ids that were consumed before all rollouts of the metadata."""


@dataclass(kw_only=True, slots=True)
class JobProgress:
    """Progress of this process in a job that it started."""

    pass_number: int = 0
    last_returned: int | None = None
    """The id of the rollout that was returned last."""
    groups_in_pass: int = 0
    seen_groups: set[int] = field(default_factory=set)
    ended_groups: set[int] = field(default_factory=set)
    """The filtered and failed groups that received deliveries named."""
    lost_deliveries: set[str] = field(default_factory=set)
    """Deliveries that went to another consumer before they were acknowledged: it trains them."""

    def went_back_to(self, rollout_id: int) -> bool:
        """Returns True if ``rollout_id`` is not newer than the last returned one: the trainer repeats a rollout."""
        return self.last_returned is not None and rollout_id <= self.last_returned

    def new_part(self, delivery: RolloutData) -> RolloutData | None:
        """Returns a delivery without groups that were received or named before; None if nothing is new.

        Groups are redelivered if their lease expired before the acknowledgement. Such a delivery may also name again
        the groups that were filtered or failed.
        """
        items = tuple(item for item in delivery.items if item.group_index not in self.seen_groups)
        ended = _ended_groups(delivery)
        new_ended = {number: name for number, name in ended.items() if number not in self.ended_groups}
        if len(items) == len(delivery.items) and new_ended == ended:
            return delivery
        new_ids = [*new_ended.values(), *{item.group_index: item.instance_id for item in items}.values()]
        if not new_ids:
            return None
        changes = {"finished_groups": new_ids, "ended_groups": [*new_ended]}
        return replace(delivery, items=items, meta_info={**delivery.meta_info, **changes})

    def remember(self, delivery: RolloutData) -> None:
        """Records the groups of a delivery as received, and the filtered and failed groups that it names."""
        self.seen_groups |= delivery.group_numbers
        self.ended_groups |= _ended_groups(delivery).keys()

    def lose(self, deliveries: Mapping[str, frozenset[int]]) -> None:
        """Records deliveries that went to another consumer; their groups may be received again."""
        for delivery_id in deliveries.keys() - self.lost_deliveries:
            self.seen_groups -= deliveries[delivery_id]
        self.lost_deliveries |= deliveries.keys()

    def begin_next_pass(self) -> None:
        """Starts the next pass and forgets the received groups of the last one."""
        self.pass_number += 1
        self.groups_in_pass = 0
        self.forget_groups()

    def forget_groups(self) -> None:
        """Forgets the received groups: a new job may number its groups as the last one did."""
        self.seen_groups.clear()
        self.ended_groups.clear()


def _ended_groups(delivery: RolloutData) -> dict[int, str]:
    """Returns the instance ids of the filtered and failed groups that a delivery names, by ``group_index``."""
    numbers, names = (delivery.meta_info.get(key) or () for key in ("ended_groups", "finished_groups"))
    return dict(zip(numbers, map(str, names), strict=False))


def skip_list(metadata: Mapping[str, Any]) -> list[str]:
    """Returns all consumed ids of the metadata, one per group, earliest rollout first.

    The ids of ``finished_groups``, which a custom trainer may store, come first.
    """
    earlier = metadata.get(FINISHED_KEY) or ()
    listed = [str(instance_id) for instance_id in earlier] if isinstance(earlier, list | tuple) else []
    return [*listed, *(instance_id for _, ids in sorted(_rollouts(metadata).items()) for instance_id in ids)]


def consumed_before(metadata: Mapping[str, Any], rollout_id: int, pass_number: int) -> dict[str, list[str]]:
    """Returns, by rollout, the ids of one pass that rollouts before ``rollout_id`` consumed.

    A trainer that generates ahead also saves ids of rollouts that are not trained yet: these ids are left out.
    """
    earlier = {rollout: ids for rollout, ids in _rollouts(metadata).items() if rollout < rollout_id}
    before = {str(rollout): _ids_in_pass(metadata, rollout, ids, pass_number) for rollout, ids in earlier.items()}
    if FINISHED_KEY in metadata and pass_number == 0:
        before[FINISHED_KEY] = skip_list({FINISHED_KEY: metadata[FINISHED_KEY]})
    return before


def pass_before(metadata: Mapping[str, Any], rollout_id: int) -> int:
    """Returns the pass over the input, counted from 0, that the rollouts before ``rollout_id`` had reached."""
    passes = [_last_pass(metadata, rollout)[0] for rollout in _rollouts(metadata) if rollout < rollout_id]
    return max(passes, default=0)


def consumed_metadata(
    metadata: Mapping[str, Any], rollout_id: int, ids_by_pass: Mapping[int, Sequence[str]], pass_number: int
) -> dict[str, Any]:
    """Returns the changed metadata entries for the ids that a rollout consumed; it ended in pass ``pass_number``."""
    ids = [instance_id for number in sorted(ids_by_pass) for instance_id in ids_by_pass[number]]
    changes: dict[str, Any] = {str(rollout_id): ids}
    passes = {rollout: entry for rollout, entry in metadata.get(PASSES_KEY, {}).items() if rollout != str(rollout_id)}
    if pass_number:
        passes[str(rollout_id)] = {"pass": pass_number, "ids": len(ids_by_pass.get(pass_number, ()))}
    if passes or PASSES_KEY in metadata:
        changes[PASSES_KEY] = passes
    return changes


def _rollouts(metadata: Mapping[str, Any]) -> dict[int, list[str]]:
    return {
        int(key): [str(instance_id) for instance_id in ids]
        for key, ids in metadata.items()
        if str(key).isdecimal() and isinstance(ids, list | tuple)
    }


def _ids_in_pass(metadata: Mapping[str, Any], rollout: int, ids: list[str], pass_number: int) -> list[str]:
    number, count = _last_pass(metadata, rollout)
    if number != pass_number:
        return []
    return ids if count is None else ids[len(ids) - count :]


def _last_pass(metadata: Mapping[str, Any], rollout: int) -> tuple[int, int | None]:
    """Returns the pass in which a rollout ended, and how many of its ids belong to that pass (None: all)."""
    entry = metadata.get(PASSES_KEY, {}).get(str(rollout))
    return (0, None) if entry is None else (int(entry["pass"]), int(entry["ids"]))
