"""The ``meta_info`` of a delivery, and of a reply without groups. ``buffer.py`` opens the transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import cast

from slime_plugins.rollout_buffer.rules import job_states
from slime_plugins.rollout_buffer.rules.groups import summarize_rewards
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, reward_sum_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState
from slime_plugins.rollout_buffer.wire.delivery_replies import MetaInfo


def meta_info_of(
    connection: Connection, job: JobRecord, key: int, delivery_id: str, ready: Sequence[GroupRecord], stale: set[int]
) -> MetaInfo:
    """Returns the ``meta_info`` of the new delivery ``key`` of the groups ``ready``.

    ``stale`` are the keys of ready groups whose weights are too old. The statistics cover all trajectories since the
    last delivery, including those of filtered groups.
    """
    ended = reward_sum_rows.report_ended_groups(connection, job.key, key)
    sums, outcomes = reward_sum_rows.sum_unreported(connection, job.key, key)
    return {
        **cast("MetaInfo", job.meta_info),  # statistics by the generator; the keys below override them
        **summarize_rewards(**asdict(sums)),
        "ended_groups": [*ended],
        "finished_groups": [*ended.values(), *(group.instance_id for group in ready)],
        "delivery_id": delivery_id,
        "job_id": job.job_id,
        "outcomes": outcomes,
        "weight_version": job.weight_version,
        "exhausted": is_exhausted(connection, job, but_for=key),
        "stale_groups": [group.key for group in ready if group.key in stale],
    }


def empty_meta_info(connection: Connection, job: JobRecord | None) -> MetaInfo:
    """Returns the ``meta_info`` of a reply without groups; ``job`` is None if no job is named and no job is open."""
    statistics = summarize_rewards(samples=0, groups=0, total=0.0, square_total=0.0, low=None, high=None)
    empty: MetaInfo = {
        **cast("MetaInfo", statistics),
        "finished_groups": [],
        "delivery_id": None,
        "exhausted": False,
        "outcomes": {},
    }
    if job is not None:
        empty["exhausted"] = is_exhausted(connection, job)
        empty["job_id"], empty["job_state"], empty["job_cause"] = job.job_id, job.state, job.cause
    return empty


def is_exhausted(connection: Connection, job: JobRecord, *, but_for: int | None = None) -> bool:
    """Returns True if the job will have no more ready groups; groups of the delivery ``but_for`` are not counted.

    False while groups are leased, because they may be redelivered, and for an open job without input, because it may
    get items until it is cancelled.
    """
    if not job.has_input and job.state in job_states.OPEN_STATES:
        return False
    if delivery_rows.has_groups(connection, job.key, GroupState.OPEN, GroupState.READY):
        return False
    return all(delivery.key == but_for for delivery in delivery_rows.leased_deliveries(connection, job.key))
