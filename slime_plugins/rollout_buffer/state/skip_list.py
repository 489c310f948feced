"""How a trainer resumes: its skip list says what it has consumed. Rules on an open transaction."""

from __future__ import annotations

from slime_plugins.rollout_buffer.rules.causes import IN_SKIP_LIST
from slime_plugins.rollout_buffer.rules.skip_list import compare_with_skip_list
from slime_plugins.rollout_buffer.state.group_opening import skip_planned
from slime_plugins.rollout_buffer.state.job_end import reopen_finished_job
from slime_plugins.rollout_buffer.storage.tables import content_rows, delivery_rows, group_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import DeliveryState, GroupState


def apply_skip_list(connection: Connection, job: JobRecord, skip_instance_ids: list[str]) -> None:
    """Puts a job where a trainer that resumes has it: what is listed is done with, what else went out returns."""
    known = group_rows.known_groups(connection, job.key)
    resumption = compare_with_skip_list(known, skip_instance_ids)
    for delivery in delivery_rows.leased_deliveries(connection, job.key):
        delivery_rows.update_delivery(connection, delivery.key, state=DeliveryState.EXPIRED.value)
    # What retention has purged cannot be delivered again: it stays delivered.
    delivery_rows.make_ready_again(connection, content_rows.with_payloads(connection, resumption.ready_again))
    delivery_rows.make_unreported(connection, resumption.reported_again)
    delivery_rows.skip_groups(connection, resumption.skipped, IN_SKIP_LIST)
    skip_planned(connection, job.key, resumption.not_used)
    delivery_rows.unskip_groups(connection, resumption.not_skipped)
    reopen_finished_job(connection, job.key)
    # What the skip list says was consumed is delivered, whether or not its acknowledgement arrived.
    delivery_rows.count_as_delivered(connection, resumption.consumed, IN_SKIP_LIST)
    group_rows.move_groups(connection, job.key, GroupState.LEASED, GroupState.DELIVERED, IN_SKIP_LIST)
