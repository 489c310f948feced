"""Inserts the row of a trajectory, which a runner played or a program wrote as an item."""

from __future__ import annotations

from dataclasses import dataclass

from slime_plugins.rollout_buffer.rules.prompt_receipts import prompt_counts
from slime_plugins.rollout_buffer.rules.trajectory_stats import facts_of, forks_of
from slime_plugins.rollout_buffer.state.staleness import note_versions
from slime_plugins.rollout_buffer.storage.payload_store import StoredPayload
from slime_plugins.rollout_buffer.storage.tables import prompt_rows, trajectory_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire.written_items import WrittenItem


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotOfTrajectory:
    """The slot that a trajectory fills. ``late`` is true if its group is closed, or if no group of the instance has a
    free slot: then ``group_key`` is None.

    ``attempt_began_at`` is None if unknown.
    """

    job_key: int
    group_key: int | None
    instance_id: str
    slot: int
    attempt: int
    late: bool
    attempt_began_at: float | None = None


def insert_trajectory(
    connection: Connection,
    now: float,
    filled: SlotOfTrajectory,
    played: Trajectory | WrittenItem,
    payload: StoredPayload,
) -> None:
    """Adds the row of a trajectory, and records its payload, weight versions, prompt checks and forks.

    Raises:
        UnavailableError: a stored screenshot has just been purged; the client repeats the write with it.
    """
    payload.record(connection, now)
    versions = note_versions(connection, filled.job_key, played.generations, attempt_began_at=filled.attempt_began_at)
    if (counts := prompt_counts(played.generations)) is not None:
        prompt_rows.add_counts(connection, filled.job_key, counts)
    if forks := forks_of(played.extra_info):
        prompt_rows.add(connection, prompt_rows.FORKS, filled.job_key, forks)
    trajectory_rows.insert_trajectory(
        connection,
        job_key=filled.job_key,
        uid=played.uid,
        group_key=filled.group_key,
        slot=filled.slot,
        attempt=filled.attempt,
        instance_id=filled.instance_id,
        outcome=played.outcome.value,
        stop_reason=played.stop_reason.value,
        reward=played.reward,
        raw_reward=played.raw_reward,
        **versions,
        **facts_of(played.extra_info, played.timings_s, played.generations)._asdict(),
        late=filled.late,
        created_at=now,
        **payload.columns(),
    )
