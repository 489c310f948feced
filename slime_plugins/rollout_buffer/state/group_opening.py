"""Opens groups when they are needed. A job's plan describes all its groups; a group gets a row when it is opened.

Playing order is epoch by epoch in the order of the input; runners take the next groups in this order. A written item, a
claim or an entry of a skip list names an instance and takes the next epoch of that instance. Those groups of an
instance that have rows are therefore always its first epochs. The plan counts the groups without rows (``unopened``).

``buffer.py`` opens the transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime_plugins.rollout_buffer.rules.causes import IN_SKIP_LIST, NO_CAUSE, Cause
from slime_plugins.rollout_buffer.storage.tables import group_rows, input_rows, plan_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.input_rows import PackedInput
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState, Instance


def plan_groups(
    connection: Connection, job_key: int, packed: PackedInput, epochs: int, *, first_position: int = 0, opened: int = 0
) -> None:
    """Stores an input and its plan: each line is one group per epoch; ``opened`` of these groups have rows already."""
    lines = len(packed.instance_ids)
    input_rows.insert_input(connection, job_key, packed, first_position=first_position)
    plan_rows.put_plan(
        connection,
        job_key,
        first_position=first_position,
        lines=lines,
        epochs=epochs,
        digest=packed.digest,
        unopened=lines * epochs - opened,
    )


def add_input(connection: Connection, job: JobRecord, packed: PackedInput, epochs: int) -> int:
    """Adds a trainer's input to a job that may have groups; returns the job's number of instances.

    Existing groups of the same instance and epoch are used. The same input again only adds missing epochs. Before
    another input is planned, all groups of the first plan get rows.
    """
    plan = plan_rows.find_plan(connection, job.key)
    if plan is not None and plan.digest == packed.digest:
        more_epochs = max(0, epochs - plan.epochs)
        unopened = plan.unopened + more_epochs * plan.lines
        plan_rows.update_plan(connection, job.key, epochs=plan.epochs + more_epochs, unopened=unopened)
        return job.instance_count
    if plan is not None:
        open_next(connection, job.key, plan.unopened)
    added_ids = set(packed.instance_ids)
    group_counts = group_rows.count_by_instance(connection, job.key)
    opened = sum(min(count, epochs) for name, count in group_counts.items() if name in added_ids)
    plan_groups(connection, job.key, packed, epochs, first_position=job.instance_count, opened=opened)
    return len(added_ids | group_counts.keys())


def open_next(connection: Connection, job_key: int, limit: int) -> int:
    """Opens the next groups in playing order; returns their number."""
    plan = plan_rows.find_plan(connection, job_key)
    if plan is None:
        return 0
    limit = min(limit, plan.unopened)
    opened, passed = 0, plan.passed
    while opened < limit and passed < plan.lines * plan.epochs:
        epoch, line = divmod(passed, plan.lines)
        first = plan.first_position + line
        positions = range(first, first + min(limit - opened, plan.lines - line))  # at most to the end of the epoch
        instances = input_rows.instances_at(connection, job_key, positions)
        groups = ((epoch, position, instance) for position, instance in zip(positions, instances, strict=True))
        opened += group_rows.insert_groups(connection, job_key, groups)
        passed += len(positions)
    plan_rows.update_plan(connection, job_key, passed=passed, unopened=plan.unopened - opened)
    return opened


def planned_instances(connection: Connection, job_key: int) -> Iterator[Instance]:
    """Yields the lines of the job's input."""
    plan = plan_rows.find_plan(connection, job_key)
    if plan is not None:
        positions = range(plan.first_position, plan.first_position + plan.lines)
        yield from input_rows.instances_at(connection, job_key, positions)


def open_next_of_instance(connection: Connection, job_key: int, instance_id: str) -> GroupRecord | None:
    """Opens the next group of an instance; None if all its groups have rows, or the input lacks the instance."""
    if not _add_next_groups(connection, job_key, {instance_id: 1}, GroupState.OPEN):
        return None
    return group_rows.groups_of_instance(connection, job_key, instance_id)[-1]


def skip_planned(connection: Connection, job_key: int, counts: Mapping[str, int]) -> None:
    """Skips the next groups of instances; ``counts`` has the number of groups to skip by instance id."""
    _add_next_groups(connection, job_key, counts, GroupState.SKIPPED, IN_SKIP_LIST)


def is_planned(connection: Connection, job_key: int, instance_id: str) -> bool:
    """Returns True if the input has an instance."""
    plan = plan_rows.find_plan(connection, job_key)
    return plan is not None and bool(input_rows.line_numbers(connection, job_key, plan.lines, [instance_id]))


def instance_of(connection: Connection, group: GroupRecord) -> Instance:
    """Returns the instance of a group; an instance that is not in the input has only its id."""
    plan = plan_rows.find_plan(connection, group.job_key)
    position = group.position
    if plan is not None and position < plan.first_position:
        # The group is older than the input, which may have its instance.
        numbers = input_rows.line_numbers(connection, group.job_key, plan.lines, [group.instance_id])
        position = plan.first_position + numbers[group.instance_id] if numbers else position
    instance = next(input_rows.instances_at(connection, group.job_key, [position]), None)
    return instance or Instance(instance_id=group.instance_id, data={"instance_id": group.instance_id})


def _add_next_groups(
    connection: Connection, job_key: int, counts: Mapping[str, int], state: GroupState, cause: Cause = NO_CAUSE
) -> int:
    """Adds rows for the next groups of instances, at most ``counts[instance_id]`` each; returns their number."""
    plan = plan_rows.find_plan(connection, job_key)
    if plan is None or plan.unopened == 0:
        return 0
    numbers = input_rows.line_numbers(connection, job_key, plan.lines, counts)
    positions = sorted(plan.first_position + number for number in numbers.values())
    added = 0
    for position, instance in zip(positions, input_rows.instances_at(connection, job_key, positions), strict=True):
        existing = group_rows.count_groups_of_instance(connection, job_key, instance.instance_id)
        epochs = range(existing, min(existing + counts[instance.instance_id], plan.epochs))
        groups = ((epoch, position, instance) for epoch in epochs)
        added += group_rows.insert_groups(connection, job_key, groups, state, cause)
    plan_rows.update_plan(connection, job_key, unopened=plan.unopened - added)
    return added
