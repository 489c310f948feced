"""Attempts to fill a slot, and fencing: results of a replaced runner are refused.

``buffer.py`` opens the transaction. The one that ends an attempt of an external job also closes the attempt's group if
the group is full then; runners close the groups of their jobs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import JobPausedError, StaleAttemptError, UnavailableError
from slime_plugins.rollout_buffer.rules import job_states
from slime_plugins.rollout_buffer.state.group_closing import close_full_groups
from slime_plugins.rollout_buffer.state.trajectory_insert import SlotOfTrajectory, insert_trajectory
from slime_plugins.rollout_buffer.storage.payload_store import PendingPayload, StoredPayload
from slime_plugins.rollout_buffer.storage.tables import attempt_rows, group_rows, job_rows, trajectory_rows, turn_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.types import AttemptState, GroupState, JobState, Message, Trajectory, WriteStatus
from slime_plugins.rollout_buffer.wire.delivery_replies import WriteResult
from slime_plugins.rollout_buffer.wire.written_items import encode_body


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """The trajectory of an attempt; ``fence`` is the fencing number of its runner.

    ``turns`` is the number of stored turns that the trajectory holds.
    """

    fence: int
    group: GroupRecord
    slot: int
    attempt: int
    trajectory: Trajectory
    turns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFailure:
    """Why an attempt failed or, with ``given_up``, was stopped; only failures count towards ``max_attempts``.

    ``transcript`` and ``traceback`` of a failed attempt are stored, shortened, for people to read.
    """

    code: str
    message: str
    given_up: bool = False
    transcript: Sequence[Message] = ()
    traceback: str = ""


def check_fence(connection: Connection, job_key: int, fence: int) -> JobState:
    """Returns the job's state if the runner may write.

    Raises:
        StaleAttemptError: another runner has taken over the job.
    """
    current, state = job_rows.fence_and_state(connection, job_key)
    if current != fence:
        raise StaleAttemptError(f"runner {fence} was replaced by runner {current}: its results are refused")
    return state


def begin_attempt(connection: Connection, now: float, fence: int, group: GroupRecord, slot: int) -> int | None:
    """Begins an attempt; see ``Buffer.begin_attempt``."""
    state = check_fence(connection, group.job_key, fence)
    if state in job_states.FINAL_STATES:
        raise StaleAttemptError(f"the job is {state.value}: no attempt begins")
    if state is JobState.PAUSED:
        raise JobPausedError("the job is paused: no attempt begins")
    current = group_rows.get_group(connection, group.key)
    if current.state is not GroupState.OPEN:
        return None
    if current.opened_at is None:
        group_rows.update_group(connection, group.key, opened_at=now)
    return attempt_rows.insert_attempt(connection, group.key, slot, fence, now)


def end_running_attempt(
    connection: Connection,
    now: float,
    group: GroupRecord,
    slot: int,
    attempt: int,
    state: AttemptState,
    error: tuple[str, str] | None,
    transcript: bytes = b"",
) -> None:
    """Ends a running attempt and stores its transcript; does nothing to an attempt that has ended.

    ``error`` is (code, message). A group of an external job that is full then is closed.
    """
    if attempt_rows.running_since(connection, group.key, slot, attempt) is None:
        return
    attempt_rows.end_attempt(connection, group.key, slot, attempt, state, now, error)
    if transcript:
        attempt_rows.insert_transcript(connection, group.job_key, group.key, slot, attempt, transcript, now)
    close_full_groups(connection, now, job_rows.get_job(connection, group.job_key), only=group.key)


def is_duplicate(connection: Connection, result: AttemptResult) -> bool:
    """Returns True if the trajectory is stored already.

    Raises:
        StaleAttemptError: the trajectory is not stored, and its attempt was given up, or another runner has taken over.
    """
    group, slot, attempt = result.group, result.slot, result.attempt
    if trajectory_rows.has_trajectory(connection, group.job_key, result.trajectory.uid):
        return True
    check_fence(connection, group.job_key, result.fence)
    if attempt_rows.running_since(connection, group.key, slot, attempt) is None:
        raise StaleAttemptError(f"attempt {attempt} of slot {slot} was given up before its result came")
    return False


def pending_payload(trajectory: Trajectory) -> PendingPayload:
    """Returns the payload of a trajectory, which is made durable before its row."""
    body = orjson.dumps(encode_body(trajectory), option=orjson.OPT_NON_STR_KEYS)
    data = {image.sha256: image.data for image in trajectory.images}
    for generation in trajectory.generations:
        data |= {record.sha256: record.data for record in generation.records.values() if record.data is not None}
    hashes = list(dict.fromkeys((*data, *wire.image_hashes(body), *wire.record_hashes(trajectory.generations))))
    return PendingPayload(body, hashes, data, f"trajectory {trajectory.uid}", trajectory.uid)


def add_trajectory(connection: Connection, now: float, result: AttemptResult, payload: StoredPayload) -> WriteResult:
    """Adds the row of a trajectory whose payload is durable, and ends its attempt; closes a full group of an external
    job. See ``Buffer.add_trajectory``."""
    group, slot, attempt, uid = result.group, result.slot, result.attempt, result.trajectory.uid
    if is_duplicate(connection, result):
        return WriteResult(uid=uid, status=WriteStatus.DUPLICATE)
    if turn_rows.count_turns(connection, group.key, slot, attempt) != result.turns:
        raise UnavailableError(f"another process has added a turn to {uid}: send it again")
    late = group_rows.get_group(connection, group.key).state is not GroupState.OPEN
    filled = SlotOfTrajectory(
        job_key=group.job_key,
        group_key=group.key,
        instance_id=group.instance_id,
        slot=slot,
        attempt=attempt,
        late=late,
        attempt_began_at=attempt_rows.running_since(connection, group.key, slot, attempt),
    )
    insert_trajectory(connection, now, filled, result.trajectory, payload)
    attempt_rows.end_attempt(connection, group.key, slot, attempt, AttemptState.FINISHED, now, None)
    group_rows.update_group(connection, group.key, last_write_at=now)
    close_full_groups(connection, now, job_rows.get_job(connection, group.job_key), only=group.key)
    return WriteResult(uid=uid, status=WriteStatus.LATE if late else WriteStatus.STORED)
