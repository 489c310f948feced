"""Every SQL statement of the buffer, each in a function that takes the open transaction. Rows in, typed records out.

Nothing here decides anything: the rules are in ``buffer.py``, the pure ones in ``jobs.py`` and ``groups.py``.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer.groups import Member
from slime_plugins.rollout_buffer.jobs import KnownGroup, PlannedGroup
from slime_plugins.rollout_buffer.packs import Place
from slime_plugins.rollout_buffer.types import GroupState, JobState

MAX_MARKS = 500
IN_SKIP_LIST = "in the skip list"
"""The cause of a group that a trainer's skip list skipped: another list may want it after all."""

RUNNER_NAME = "runner:{}"
"""The name under which the runner of a job, named by its key, says how its engine is."""

Connection = sqlite3.Connection


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRecord:
    """A row of ``jobs``."""

    key: int
    job_id: str
    task_type: str
    state: JobState
    cause: str
    identity: str
    start_id: str | None
    engine_url: str | None
    settings: dict[str, Any]
    has_runner: bool
    has_input: bool
    group_size: int
    instance_count: int
    num_epoch: int
    fence: int
    weight_version: int | None
    meta_info: dict[str, Any]
    created_at: float
    updated_at: float
    finished_at: float | None
    last_poll_at: float | None
    waiting_since: float | None
    portion: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A row of ``groups``."""

    key: int
    job_key: int
    epoch: int
    position: int
    instance_id: str
    state: GroupState
    cause: str
    opened_at: float | None
    last_write_at: float | None
    delivery_key: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveryRecord:
    """A row of ``deliveries``."""

    key: int
    delivery_id: str
    job_key: int
    state: str
    lease_s: float | None
    meta_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeliveredMember:
    """One member of a delivered group with where its payload is; a dummy has none."""

    uid: str
    source_uid: str | None
    instance_id: str
    group_key: int
    epoch: int
    slot: int
    reward: float | None
    raw_reward: float | None
    remove_sample: bool
    outcome: str
    stop_reason: str
    oldest_version: int | None
    body: bytes | None
    body_place: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSums:
    """Sums over trajectories, from which every statistic of ``meta_info`` follows."""

    samples: int
    groups: int
    total: float
    square_total: float
    low: float | None
    high: float | None


# --- jobs ------------------------------------------------------------------------------------------------------------


def insert_job(connection: Connection, **columns: Any) -> int:
    """Adds a job and returns its key."""
    columns["settings"] = json.dumps(columns["settings"])
    names = ", ".join(columns)
    marks = ", ".join(f":{name}" for name in columns)
    return int(connection.execute(f"INSERT INTO jobs ({names}) VALUES ({marks}) RETURNING key", columns).fetchone()[0])


def find_job(connection: Connection, job_id: str) -> JobRecord | None:
    """Returns the job of that id."""
    row = connection.execute("SELECT * FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    return None if row is None else _job(row)


def get_job(connection: Connection, key: int) -> JobRecord:
    """Returns the job of that key."""
    return _job(connection.execute("SELECT * FROM jobs WHERE key = ?", (key,)).fetchone())


def all_jobs(connection: Connection) -> list[JobRecord]:
    """Returns every job, newest first."""
    return [_job(row) for row in connection.execute("SELECT * FROM jobs ORDER BY key DESC")]


def jobs_in_states(connection: Connection, states: Iterable[JobState]) -> list[JobRecord]:
    """Returns the jobs that are in one of the states, oldest first."""
    wanted = list(states)
    marks = ", ".join("?" for _ in wanted)
    return [
        _job(row) for row in connection.execute(f"SELECT * FROM jobs WHERE state IN ({marks}) ORDER BY key", wanted)
    ]


def jobs_with_groups_for_a_trainer(connection: Connection) -> list[JobRecord]:
    """Returns the jobs a poll without a job id can mean: still open, or with groups that are ready or leased."""
    rows = connection.execute(
        "SELECT * FROM jobs WHERE state IN ('running', 'paused') OR EXISTS "
        "(SELECT 1 FROM groups WHERE job_key = jobs.key AND state IN ('ready', 'leased')) ORDER BY key"
    )
    return [_job(row) for row in rows]


def update_job(connection: Connection, key: int, **columns: Any) -> None:
    """Changes columns of a job."""
    assignments = ", ".join(f"{name} = :{name}" for name in columns)
    connection.execute(f"UPDATE jobs SET {assignments} WHERE key = :key", {**columns, "key": key})


def _job(row: sqlite3.Row) -> JobRecord:
    values = {name: row[name] for name in row.keys()}  # noqa: SIM118 - iterating a Row gives values, not names
    values["state"] = JobState(values["state"])
    values["settings"] = orjson.loads(values["settings"])
    values["meta_info"] = orjson.loads(values["meta_info"])
    values["has_runner"], values["has_input"] = bool(values["has_runner"]), bool(values["has_input"])
    return JobRecord(**values)


# --- instances and groups --------------------------------------------------------------------------------------------


def insert_instances(connection: Connection, job_key: int, lines: Iterable[tuple[int, str, bytes]]) -> None:
    """Adds instances as (position, instance_id, line)."""
    rows = ((job_key, position, instance_id, line) for position, instance_id, line in lines)
    connection.executemany("INSERT INTO instances (job_key, position, instance_id, line) VALUES (?, ?, ?, ?)", rows)


def instance_line(connection: Connection, job_key: int, position: int) -> bytes:
    """Returns one line of the job's input, as JSON."""
    query = "SELECT line FROM instances WHERE job_key = ? AND position = ?"
    return bytes(connection.execute(query, (job_key, position)).fetchone()[0])


def insert_groups(
    connection: Connection,
    job_key: int,
    instance_ids: Sequence[str] | Mapping[int, str],
    planned: Iterable[PlannedGroup],
) -> None:
    """Adds the groups of a job, open or skipped."""
    rows = (
        (
            job_key,
            group.epoch,
            group.position,
            instance_ids[group.position],
            GroupState.SKIPPED.value if group.skipped else GroupState.OPEN.value,
            IN_SKIP_LIST if group.skipped else "",
        )
        for group in planned
    )
    connection.executemany(
        "INSERT INTO groups (job_key, epoch, position, instance_id, state, cause) VALUES (?, ?, ?, ?, ?, ?)", rows
    )


def insert_group_of_new_instance(connection: Connection, job_key: int, instance_id: str) -> None:
    """Adds an instance that the first written item named, with one open group for it."""
    query = "SELECT coalesce(max(position), -1) + 1 FROM instances WHERE job_key = ?"
    position = int(connection.execute(query, (job_key,)).fetchone()[0])
    line = json.dumps({"instance_id": instance_id}).encode()
    insert_instances(connection, job_key, [(position, instance_id, line)])
    connection.execute("UPDATE jobs SET instance_count = instance_count + 1 WHERE key = ?", (job_key,))
    insert_groups(
        connection, job_key, {position: instance_id}, [PlannedGroup(epoch=0, position=position, skipped=False)]
    )


def known_groups(connection: Connection, job_key: int) -> list[KnownGroup]:
    """Returns every group of a job in epoch order, as the skip list is compared with them."""
    query = "SELECT key, instance_id, state, delivery_key, cause FROM groups WHERE job_key = ? ORDER BY epoch, position"
    return [
        KnownGroup(
            key=row[0],
            instance_id=row[1],
            state=GroupState(row[2]),
            delivery_key=row[3],
            by_skip_list=row[4] == IN_SKIP_LIST,
        )
        for row in connection.execute(query, (job_key,))
    ]


def get_group(connection: Connection, key: int) -> GroupRecord:
    """Returns the group of that key."""
    return _group(connection.execute("SELECT * FROM groups WHERE key = ?", (key,)).fetchone())


def open_groups(connection: Connection, job_key: int, *, after: tuple[int, int], limit: int) -> list[GroupRecord]:
    """Returns open groups in the order they are played, from the one after (epoch, position) on."""
    query = (
        "SELECT * FROM groups WHERE job_key = ? AND state = 'open' AND (epoch, position) > (?, ?) "
        "ORDER BY epoch, position LIMIT ?"
    )
    return [_group(row) for row in connection.execute(query, (job_key, *after, limit))]


def open_groups_with_room(connection: Connection, job_key: int, group_size: int) -> Iterator[GroupRecord]:
    """Yields open groups, in playing order, in which fewer slots are filled or being filled than there are."""
    query = (
        "SELECT * FROM groups g WHERE job_key = ? AND state = 'open' AND "
        "(SELECT count(*) FROM attempts WHERE group_key = g.key AND state IN ('running', 'finished')) < ? "
        "ORDER BY epoch, position"
    )
    return (_group(row) for row in connection.execute(query, (job_key, group_size)))


def groups_of_instance(connection: Connection, job_key: int, instance_id: str) -> list[GroupRecord]:
    """Returns the groups of an instance, earliest epoch first."""
    query = "SELECT * FROM groups WHERE job_key = ? AND instance_id = ? ORDER BY epoch"
    return [_group(row) for row in connection.execute(query, (job_key, instance_id))]


def begun_open_groups(connection: Connection, job_key: int) -> list[GroupRecord]:
    """Returns open groups that something was written to."""
    query = "SELECT * FROM groups WHERE job_key = ? AND state = 'open' AND last_write_at IS NOT NULL"
    return [_group(row) for row in connection.execute(query, (job_key,))]


def restart_group_clocks(connection: Connection, job_key: int, now: float) -> None:
    """Makes the last write of every open group that has one as young as now."""
    query = "UPDATE groups SET last_write_at = ? WHERE job_key = ? AND state = 'open' AND last_write_at IS NOT NULL"
    connection.execute(query, (now, job_key))


def update_group(connection: Connection, key: int, **columns: Any) -> None:
    """Changes columns of a group."""
    assignments = ", ".join(f"{name} = :{name}" for name in columns)
    connection.execute(f"UPDATE groups SET {assignments} WHERE key = :key", {**columns, "key": key})


def next_sequence(connection: Connection) -> int:
    """Returns the next number in the order of becoming ready."""
    row = connection.execute(
        "SELECT sequence FROM groups INDEXED BY groups_by_sequence WHERE sequence IS NOT NULL "
        "ORDER BY sequence DESC LIMIT 1"
    ).fetchone()
    return 1 if row is None else int(row[0]) + 1


def move_groups(connection: Connection, job_key: int, source: GroupState, target: GroupState, cause: str) -> None:
    """Moves all groups of a job that are in one state to another."""
    connection.execute(
        "UPDATE groups SET state = ?, cause = ? WHERE job_key = ? AND state = ?",
        (target.value, cause, job_key, source.value),
    )


def count_groups(connection: Connection, job_key: int) -> dict[GroupState, int]:
    """Counts the groups of a job by state."""
    counted = dict.fromkeys(GroupState, 0)
    query = "SELECT state, count(*) FROM groups WHERE job_key = ? GROUP BY state"
    counted.update({GroupState(row[0]): row[1] for row in connection.execute(query, (job_key,))})
    return counted


def count_causes(connection: Connection, job_key: int) -> dict[str, dict[str, int]]:
    """Counts why groups were filtered or failed."""
    query = (
        "SELECT state, cause, count(*) FROM groups WHERE job_key = ? AND state IN ('filtered', 'failed') "
        "GROUP BY state, cause ORDER BY 3 DESC LIMIT 50"
    )
    causes: dict[str, dict[str, int]] = {}
    for state, cause, count in connection.execute(query, (job_key,)):
        causes.setdefault(state, {})[cause] = count
    return causes


def _group(row: sqlite3.Row) -> GroupRecord:
    return GroupRecord(
        key=row["key"],
        job_key=row["job_key"],
        epoch=row["epoch"],
        position=row["position"],
        instance_id=row["instance_id"],
        state=GroupState(row["state"]),
        cause=row["cause"],
        opened_at=row["opened_at"],
        last_write_at=row["last_write_at"],
        delivery_key=row["delivery_key"],
    )


# --- attempts --------------------------------------------------------------------------------------------------------


def insert_attempt(connection: Connection, group_key: int, slot: int, fence: int, now: float) -> int:
    """Begins the next attempt to fill a slot and returns its number, from 1."""
    query = "SELECT coalesce(max(attempt), 0) + 1 FROM attempts WHERE group_key = ? AND slot = ?"
    attempt = int(connection.execute(query, (group_key, slot)).fetchone()[0])
    connection.execute(
        "INSERT INTO attempts (group_key, slot, attempt, fence, state, started_at) VALUES (?, ?, ?, ?, 'running', ?)",
        (group_key, slot, attempt, fence, now),
    )
    return attempt


def attempt_state(connection: Connection, group_key: int, slot: int, attempt: int) -> str | None:
    """Returns the state of an attempt."""
    query = "SELECT state FROM attempts WHERE group_key = ? AND slot = ? AND attempt = ?"
    row = connection.execute(query, (group_key, slot, attempt)).fetchone()
    return None if row is None else str(row[0])


def end_attempt(
    connection: Connection,
    group_key: int,
    slot: int,
    attempt: int,
    state: str,
    now: float,
    error: tuple[str, str] | None,
) -> None:
    """Ends an attempt; ``error`` is (code, message) when it failed."""
    code, message = error or (None, None)
    connection.execute(
        "UPDATE attempts SET state = ?, ended_at = ?, error_code = ?, error_message = ? "
        "WHERE group_key = ? AND slot = ? AND attempt = ?",
        (state, now, code, message, group_key, slot, attempt),
    )


def give_up_running_attempts(connection: Connection, job_key: int, now: float) -> int:
    """Fences off every attempt of a job that still runs; a result of one is refused from now on."""
    return connection.execute(
        "UPDATE attempts SET state = 'given_up', ended_at = ? WHERE state = 'running' AND group_key IN "
        "(SELECT key FROM groups WHERE job_key = ?)",
        (now, job_key),
    ).rowcount


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotUse:
    """What became of a slot so far: filled, being filled, and how many attempts of it failed."""

    filled: bool = False
    running: bool = False
    failures: int = 0


def slot_uses(connection: Connection, group_key: int) -> dict[int, SlotUse]:
    """Returns the use of each slot of a group that was begun, also of those that were filled without an attempt."""
    query = (
        "SELECT slot, 1, 0, 0 FROM trajectories WHERE group_key = :key AND late = 0 UNION ALL "
        "SELECT slot, 0, state = 'running', state = 'failed' FROM attempts WHERE group_key = :key"
    )
    uses: dict[int, SlotUse] = {}
    for slot, filled, running, failed in connection.execute(query, {"key": group_key}):
        use = uses.get(slot, SlotUse())
        uses[slot] = SlotUse(
            filled=use.filled or bool(filled), running=use.running or bool(running), failures=use.failures + failed
        )
    return uses


def find_group(connection: Connection, job_key: int, epoch: int, position: int) -> GroupRecord | None:
    """Returns the group of one (job, epoch, instance)."""
    query = "SELECT * FROM groups WHERE job_key = ? AND epoch = ? AND position = ?"
    row = connection.execute(query, (job_key, epoch, position)).fetchone()
    return None if row is None else _group(row)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """How one attempt stands; ``reward`` and ``late`` are of what it brought, None when it brought nothing."""

    state: str
    error_code: str | None
    error_message: str | None
    reward: float | None
    late: bool | None


def find_attempt(connection: Connection, group_key: int, slot: int, attempt: int) -> AttemptRecord | None:
    """Returns one attempt and what it brought."""
    query = (
        "SELECT a.state, error_code, error_message, reward, late FROM attempts a LEFT JOIN trajectories t "
        "ON t.group_key = a.group_key AND t.slot = a.slot AND t.attempt = a.attempt "
        "WHERE a.group_key = ? AND a.slot = ? AND a.attempt = ?"
    )
    row = connection.execute(query, (group_key, slot, attempt)).fetchone()
    return None if row is None else AttemptRecord(**{name: row[name] for name in AttemptRecord.__slots__})


def end_running_attempts(connection: Connection, job_key: int, now: float, code: str, message: str) -> int:
    """Gives up every running attempt of a job and says why; returns how many there were."""
    return connection.execute(
        "UPDATE attempts SET state = 'given_up', ended_at = ?, error_code = ?, error_message = ? "
        "WHERE state = 'running' AND group_key IN (SELECT key FROM groups WHERE job_key = ?)",
        (now, code, message, job_key),
    ).rowcount


def slot_progress(connection: Connection, group_key: int) -> dict[int, tuple[bool, int]]:
    """Returns for each slot that was begun: (has a trajectory, number of failed attempts)."""
    query = (
        "SELECT slot, max(state = 'finished'), sum(state = 'failed') FROM attempts WHERE group_key = ? GROUP BY slot"
    )
    return {row[0]: (bool(row[1]), int(row[2])) for row in connection.execute(query, (group_key,))}


def count_attempts(connection: Connection, job_key: int) -> dict[str, int]:
    """Counts the attempts of a job by state, and the failed ones by error code."""
    query = (
        "SELECT attempts.state, error_code, count(*) FROM attempts JOIN groups ON groups.key = group_key "
        "WHERE job_key = ? GROUP BY attempts.state, error_code"
    )
    counted: dict[str, int] = {}
    for state, code, count in connection.execute(query, (job_key,)):
        counted[state] = counted.get(state, 0) + count
        if code:
            counted[f"{state}:{code}"] = count
    return counted


# --- trajectories ----------------------------------------------------------------------------------------------------


def insert_trajectory(connection: Connection, **columns: Any) -> None:
    """Adds a trajectory."""
    names = ", ".join(columns)
    marks = ", ".join(f":{name}" for name in columns)
    portion = "(SELECT portion FROM jobs WHERE key = :job_key)"
    connection.execute(f"INSERT INTO trajectories ({names}, portion) VALUES ({marks}, {portion})", columns)


def has_trajectory(connection: Connection, job_key: int, uid: str) -> bool:
    """Tells whether the job has a trajectory of that uid."""
    query = "SELECT 1 FROM trajectories WHERE job_key = ? AND uid = ?"
    return connection.execute(query, (job_key, uid)).fetchone() is not None


def has_trajectory_of_job(connection: Connection, job_id: str, uid: str) -> bool | None:
    """Tells whether the job has a trajectory of that uid; None when there is no such job."""
    query = "SELECT EXISTS (SELECT 1 FROM trajectories WHERE job_key = jobs.key AND uid = ?) FROM jobs WHERE job_id = ?"
    row = connection.execute(query, (uid, job_id)).fetchone()
    return None if row is None else bool(row[0])


def count_trajectories(connection: Connection, job_key: int) -> int:
    """Counts the trajectories of a job."""
    return int(connection.execute("SELECT count(*) FROM trajectories WHERE job_key = ?", (job_key,)).fetchone()[0])


def count_members(connection: Connection, group_key: int) -> int:
    """Counts the trajectories that count for a group."""
    query = "SELECT count(*) FROM trajectories WHERE group_key = ? AND late = 0"
    return int(connection.execute(query, (group_key,)).fetchone()[0])


def members_of(connection: Connection, group_key: int) -> list[Member]:
    """Returns the trajectories of a group as members, in slot order."""
    query = (
        "SELECT uid, instance_id, slot, reward, raw_reward FROM trajectories "
        "WHERE group_key = ? AND late = 0 ORDER BY slot, key"
    )
    return [
        Member(
            uid=row["uid"],
            instance_id=row["instance_id"],
            slot=row["slot"],
            reward=row["reward"],
            raw_reward=row["raw_reward"],
            source_uid=row["uid"],
        )
        for row in connection.execute(query, (group_key,))
    ]


def uids_of(connection: Connection, job_key: int) -> list[str]:
    """Returns the uids of a job's trajectories, oldest first."""
    return [
        row[0] for row in connection.execute("SELECT uid FROM trajectories WHERE job_key = ? ORDER BY key", (job_key,))
    ]


def body_of(connection: Connection, job_key: int, uid: str) -> tuple[bytes | None, str | None]:
    """Returns where the payload of a trajectory is: (bytes in the row, name of the file)."""
    query = "SELECT body, body_place FROM trajectories WHERE job_key = ? AND uid = ?"
    row = connection.execute(query, (job_key, uid)).fetchone()
    return row["body"], row["body_place"]


def insert_members(connection: Connection, group_key: int, members: Sequence[Member]) -> None:
    """Keeps what a group delivers, once and for all: every delivery of it reads the same rows."""
    rows = (
        (group_key, ordinal, m.uid, None if m.remove_sample else m.source_uid, m.reward, m.raw_reward, m.remove_sample)
        for ordinal, m in enumerate(members)
    )
    connection.executemany(
        "INSERT INTO members (group_key, ordinal, uid, source_uid, reward, raw_reward, remove_sample) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        rows,
    )


def count_outcomes(connection: Connection, job_key: int) -> dict[str, int]:
    """Counts the trajectories of a job by outcome."""
    query = (
        "SELECT coalesce(sum(completed), 0) AS completed, coalesce(sum(truncated), 0) AS truncated, "
        "coalesce(sum(aborted), 0) AS aborted FROM trajectory_minutes WHERE job_key = ?"
    )
    row = connection.execute(query, (job_key,)).fetchone()
    return {name: row[name] for name in row.keys() if row[name]}  # noqa: SIM118 - iterating a Row gives values


def count_late(connection: Connection, job_key: int) -> int:
    """Counts trajectories that came after their group had closed."""
    query = "SELECT count(*) FROM trajectories INDEXED BY trajectories_late WHERE job_key = ? AND late = 1"
    return int(connection.execute(query, (job_key,)).fetchone()[0])


# --- bytes -----------------------------------------------------------------------------------------------------------


def image_places(connection: Connection, hashes: Sequence[str]) -> dict[str, Place]:
    """Returns where the screenshots of those hashes are; one that is not stored is left out."""
    found: dict[str, Place] = {}
    for start in range(0, len(hashes), MAX_MARKS):
        digests = [bytes.fromhex(sha256) for sha256 in hashes[start : start + MAX_MARKS]]
        query = f"SELECT sha256, place FROM images WHERE sha256 IN ({', '.join('?' for _ in digests)})"
        found.update({digest.hex(): Place.parse(place) for digest, place in connection.execute(query, digests)})
    return found


def insert_images(connection: Connection, places: Mapping[str, Place], now: float) -> None:
    """Keeps where screenshots are. The first place stays: another writer may have been quicker."""
    rows = [(bytes.fromhex(sha256), str(place), now) for sha256, place in places.items()]
    connection.executemany(
        "INSERT INTO images (sha256, place, last_used) VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET last_used = excluded.last_used",
        rows,
    )


def use_images(connection: Connection, hashes: Sequence[str], now: float) -> int:
    """Notes that a trajectory names screenshots that were there already; returns how many still are."""
    used = 0
    for start in range(0, len(hashes), MAX_MARKS - 1):
        digests = [bytes.fromhex(sha256) for sha256 in hashes[start : start + MAX_MARKS - 1]]
        query = f"UPDATE images SET last_used = ? WHERE sha256 IN ({', '.join('?' for _ in digests)})"
        used += connection.execute(query, (now, *digests)).rowcount
    return used


def replace_image(connection: Connection, sha256: str, place: Place) -> None:
    """Keeps a new place for a screenshot whose old bytes are damaged."""
    connection.execute("UPDATE images SET place = ? WHERE sha256 = ?", (str(place), bytes.fromhex(sha256)))


def use_packs(connection: Connection, places: Iterable[Place]) -> None:
    """Notes how far rows name bytes of packs: what lies beyond may be cut off."""
    ends: dict[int, int] = {}
    for place in places:
        ends[place.pack] = max(place.end, ends.get(place.pack, 0))
    connection.executemany(
        "INSERT INTO packs (number, used_to) VALUES (?, ?) ON CONFLICT DO UPDATE SET "
        "used_to = max(used_to, excluded.used_to)",
        list(ends.items()),
    )


def oldest_undelivered(connection: Connection, default: float) -> float:
    """Returns when the oldest trajectory was written that is still to be delivered."""
    query = (
        "SELECT min(trajectories.created_at) FROM groups JOIN trajectories ON group_key = groups.key "
        "WHERE groups.state IN ('open', 'ready', 'leased')"
    )
    found = connection.execute(query).fetchone()[0]
    return default if found is None else float(found)


def forget_payloads(connection: Connection, before: float) -> int:
    """Takes the payloads out of trajectories written before a time; returns how many had one."""
    return connection.execute(
        "UPDATE trajectories SET body = NULL, body_place = NULL "
        "WHERE created_at < ? AND (body IS NOT NULL OR body_place IS NOT NULL)",
        (before,),
    ).rowcount


def forget_images(connection: Connection, before: float) -> int:
    """Forgets screenshots that no trajectory has named since a time."""
    return connection.execute("DELETE FROM images WHERE last_used < ?", (before,)).rowcount


def packs_with_contents(connection: Connection) -> set[int]:
    """Returns the packs that some row names bytes of."""
    query = (
        "SELECT DISTINCT CAST(substr(place, 1, instr(place, ':') - 1) AS INTEGER) FROM images UNION "
        "SELECT DISTINCT CAST(substr(body_place, 1, instr(body_place, ':') - 1) AS INTEGER) FROM trajectories "
        "WHERE body_place IS NOT NULL"
    )
    return {int(row[0]) for row in connection.execute(query)}


def drop_pack(connection: Connection, number: int) -> None:
    """Forgets a pack that is about to be removed."""
    connection.execute("DELETE FROM packs WHERE number = ?", (number,))


def with_payloads(connection: Connection, group_keys: Sequence[int]) -> list[int]:
    """Returns those of the groups of which no payload was forgotten."""
    query = (
        "SELECT count(*) FROM members JOIN groups ON groups.key = members.group_key JOIN trajectories "
        "ON trajectories.job_key = groups.job_key AND trajectories.uid = members.source_uid "
        "WHERE members.group_key = ? AND body IS NULL AND body_place IS NULL"
    )
    return [key for key in group_keys if connection.execute(query, (key,)).fetchone()[0] == 0]


def used_packs(connection: Connection) -> dict[int, int]:
    """Returns for each pack that rows name how far they name it."""
    return {row[0]: row[1] for row in connection.execute("SELECT number, used_to FROM packs")}


def body_places(connection: Connection) -> Iterator[tuple[int, str, Place]]:
    """Yields (job key, uid, place) of every payload that is in a pack."""
    query = "SELECT job_key, uid, body_place FROM trajectories WHERE body_place IS NOT NULL"
    return ((row[0], row[1], Place.parse(row[2])) for row in connection.execute(query))


def all_image_places(connection: Connection) -> Iterator[tuple[str, Place]]:
    """Yields (hash, place) of every screenshot."""
    return ((row[0].hex(), Place.parse(row[1])) for row in connection.execute("SELECT sha256, place FROM images"))


def note_damage(connection: Connection, job_key: int, uid: str, damage: str) -> None:
    """Keeps why a trajectory could not be read."""
    query = "UPDATE trajectories SET damage = ? WHERE job_key = ? AND uid = ?"
    connection.execute(query, (damage, job_key, uid))


def count_damaged(connection: Connection, job_key: int) -> int:
    """Counts trajectories that could not be read when they were to be delivered."""
    query = "SELECT count(*) FROM trajectories WHERE job_key = ? AND damage IS NOT NULL"
    return int(connection.execute(query, (job_key,)).fetchone()[0])


# --- deliveries ------------------------------------------------------------------------------------------------------


def insert_delivery(connection: Connection, **columns: Any) -> int:
    """Adds a delivery and returns its key."""
    columns["meta_info"] = json.dumps(columns["meta_info"])
    names = ", ".join(columns)
    marks = ", ".join(f":{name}" for name in columns)
    query = f"INSERT INTO deliveries ({names}) VALUES ({marks}) RETURNING key"
    return int(connection.execute(query, columns).fetchone()[0])


def set_meta_info(connection: Connection, delivery_key: int, meta_info: dict[str, Any]) -> None:
    """Keeps what a delivery says of itself, so that it says the same when it is delivered again."""
    connection.execute("UPDATE deliveries SET meta_info = ? WHERE key = ?", (json.dumps(meta_info), delivery_key))


def find_delivery(connection: Connection, delivery_id: str) -> DeliveryRecord | None:
    """Returns the delivery of that id."""
    row = connection.execute("SELECT * FROM deliveries WHERE delivery_id = ?", (delivery_id,)).fetchone()
    return None if row is None else _delivery(row)


def delivery_of_poll(connection: Connection, job_key: int, consumer_id: str, poll_id: str) -> DeliveryRecord | None:
    """Returns what an earlier call of the same poll was given."""
    query = "SELECT * FROM deliveries WHERE job_key = ? AND consumer_id = ? AND poll_id = ?"
    row = connection.execute(query, (job_key, consumer_id, poll_id)).fetchone()
    return None if row is None else _delivery(row)


def lapsed_deliveries(connection: Connection, now: float) -> list[DeliveryRecord]:
    """Returns leased deliveries whose lease has run out."""
    query = "SELECT * FROM deliveries WHERE state = 'leased' AND lease_expires_at <= ?"
    return [_delivery(row) for row in connection.execute(query, (now,))]


def shorten_leases(connection: Connection, now: float) -> None:
    """Ends leases no later than their length from now."""
    query = (
        "UPDATE deliveries SET lease_expires_at = ? + lease_s WHERE state = 'leased' AND lease_expires_at > ? + lease_s"
    )
    connection.execute(query, (now, now + 1.0))


def leased_deliveries(connection: Connection, job_key: int) -> list[DeliveryRecord]:
    """Returns the deliveries of a job that are leased."""
    query = "SELECT * FROM deliveries WHERE state = 'leased' AND job_key = ?"
    return [_delivery(row) for row in connection.execute(query, (job_key,))]


def oldest_expired_delivery(connection: Connection, job_key: int) -> DeliveryRecord | None:
    """Returns the delivery that comes back next: expired, and all its groups still waiting."""
    query = (
        "SELECT * FROM deliveries WHERE job_key = ? AND state = 'expired' AND EXISTS (SELECT 1 FROM groups "
        "WHERE delivery_key = deliveries.key AND state = 'ready') ORDER BY key LIMIT 1"
    )
    row = connection.execute(query, (job_key,)).fetchone()
    return None if row is None else _delivery(row)


def dissolve_delivery(connection: Connection, delivery_key: int) -> None:
    """Takes everything that still waits, or was only reported, out of a delivery that will not come back whole."""
    connection.execute(
        "UPDATE groups SET delivery_key = NULL WHERE delivery_key = ? AND state IN ('ready', 'filtered', 'failed')",
        (delivery_key,),
    )
    connection.execute("UPDATE portion_sums SET reported_in = NULL WHERE reported_in = ?", (delivery_key,))


def update_delivery(connection: Connection, key: int, **columns: Any) -> None:
    """Changes columns of a delivery."""
    assignments = ", ".join(f"{name} = :{name}" for name in columns)
    connection.execute(f"UPDATE deliveries SET {assignments} WHERE key = :key", {**columns, "key": key})


def insert_delivery_groups(connection: Connection, delivery_key: int, group_keys: Sequence[int]) -> None:
    """Keeps which groups a delivery holds, in order."""
    rows = ((delivery_key, ordinal, key) for ordinal, key in enumerate(group_keys))
    connection.executemany("INSERT INTO delivery_groups (delivery_key, ordinal, group_key) VALUES (?, ?, ?)", rows)


def groups_in_delivery(connection: Connection, delivery_key: int) -> list[GroupRecord]:
    """Returns the groups that a delivery holds, in order."""
    query = (
        "SELECT groups.* FROM delivery_groups JOIN groups ON groups.key = group_key "
        "WHERE delivery_groups.delivery_key = ? ORDER BY ordinal"
    )
    return [_group(row) for row in connection.execute(query, (delivery_key,))]


def ready_groups(connection: Connection, job_key: int, limit: int | None) -> list[GroupRecord]:
    """Returns ready groups, the first to become ready first. None is unlimited."""
    query = "SELECT * FROM groups WHERE job_key = ? AND state = 'ready' ORDER BY sequence LIMIT ?"
    return [_group(row) for row in connection.execute(query, (job_key, -1 if limit is None else limit))]


def count_in_state(connection: Connection, job_key: int, *states: GroupState) -> int:
    """Counts the groups of a job in the given states."""
    marks = ", ".join("?" for _ in states)
    query = f"SELECT count(*) FROM groups WHERE job_key = ? AND state IN ({marks})"
    return int(connection.execute(query, (job_key, *(state.value for state in states))).fetchone()[0])


def has_groups(connection: Connection, job_key: int, *states: GroupState) -> bool:
    """Tells whether a job has a group in one of the states, however many it has."""
    query = "SELECT 1 FROM groups WHERE job_key = ? AND state = ? LIMIT 1"
    return any(connection.execute(query, (job_key, state.value)).fetchone() is not None for state in states)


def make_ready_again(connection: Connection, group_keys: Sequence[int]) -> None:
    """Takes groups back out of the deliveries they went out in, and their trajectories out of the reports."""
    rows = [(key,) for key in group_keys]
    connection.executemany("UPDATE groups SET state = 'ready', delivery_key = NULL WHERE key = ?", rows)
    _report_again(connection, group_keys)


def make_unreported(connection: Connection, group_keys: Sequence[int]) -> None:
    """Lets filtered and failed groups be reported once more."""
    connection.executemany("UPDATE groups SET delivery_key = NULL WHERE key = ?", [(key,) for key in group_keys])


def unskip_groups(connection: Connection, group_keys: Sequence[int]) -> None:
    """Makes skipped groups ready again when they were judged before, else open."""
    rows = [(key,) for key in group_keys]
    connection.executemany(
        "UPDATE groups SET cause = '', delivery_key = NULL, state = "
        "CASE WHEN EXISTS (SELECT 1 FROM members WHERE group_key = groups.key) THEN 'ready' ELSE 'open' END "
        "WHERE key = ? AND state = 'skipped'",
        rows,
    )
    _report_again(connection, group_keys)


def skip_groups(connection: Connection, group_keys: Sequence[int], cause: str) -> None:
    """Skips groups that are still to come."""
    rows = [(cause, key) for key in group_keys]
    connection.executemany("UPDATE groups SET state = 'skipped', cause = ? WHERE key = ?", rows)


def raise_weight_version(connection: Connection, job_key: int, version: int) -> int:
    """Notes a newer weight version of a job's engine and returns the newest; an older one changes nothing."""
    row = connection.execute(
        "UPDATE jobs SET weight_version = max(coalesce(weight_version, ?), ?) WHERE key = ? RETURNING weight_version",
        (version, version, job_key),
    ).fetchone()
    return int(row[0])


def stale_ready_groups(connection: Connection, job_key: int, oldest_allowed: int) -> list[tuple[int, int]]:
    """Returns ready groups with a member sampled by weights older than allowed, as (key, oldest version)."""
    query = (
        "SELECT groups.key, min(oldest_version) FROM groups JOIN trajectories ON group_key = groups.key AND late = 0 "
        "WHERE groups.job_key = ? AND groups.state = 'ready' GROUP BY groups.key HAVING min(oldest_version) < ?"
    )
    return [(row[0], row[1]) for row in connection.execute(query, (job_key, oldest_allowed))]


def set_groups_of_delivery(connection: Connection, delivery_key: int, source: GroupState, target: GroupState) -> None:
    """Moves the groups of a delivery from one state to another."""
    connection.execute(
        "UPDATE groups SET state = ? WHERE delivery_key = ? AND state = ?", (target.value, delivery_key, source.value)
    )


def report_in(connection: Connection, job_key: int, delivery_key: int) -> list[str]:
    """Reports what ended without being delivered in this delivery; returns the instance ids, oldest first."""
    rows = connection.execute(
        "UPDATE groups INDEXED BY groups_unreported SET delivery_key = ? WHERE job_key = ? "
        "AND state IN ('filtered', 'failed') AND delivery_key IS NULL RETURNING closed_at, instance_id",
        (delivery_key, job_key),
    ).fetchall()
    return [row[1] for row in sorted(rows, key=tuple)]


def sum_unreported(connection: Connection, job_key: int, delivery_key: int) -> tuple[RewardSums, dict[str, int]]:
    """Sums the rewards written since the last delivery, unfiltered, and marks them as reported in this one.

    The sums are there already, so that this takes the same time however much was written.
    """
    rows = connection.execute(
        "SELECT portion, outcome, samples, groups, total, square_total, low, high FROM portion_sums "
        "WHERE job_key = ? AND reported_in IS NULL",
        (job_key,),
    ).fetchall()
    outcomes: dict[str, int] = {}
    for row in rows:
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + row["samples"]
    sums = RewardSums(
        samples=sum(outcomes.values()),
        groups=_count_groups_in(connection, job_key, rows),
        total=sum((row["total"] for row in rows), 0.0),
        square_total=sum((row["square_total"] for row in rows), 0.0),
        low=min((row["low"] for row in rows), default=None),
        high=max((row["high"] for row in rows), default=None),
    )
    if rows:
        query = "UPDATE portion_sums SET reported_in = ? WHERE job_key = ? AND reported_in IS NULL"
        connection.execute(query, (delivery_key, job_key))
        connection.execute("UPDATE jobs SET portion = portion + 1 WHERE key = ?", (job_key,))
    return sums, outcomes


def _count_groups_in(connection: Connection, job_key: int, rows: Sequence[sqlite3.Row]) -> int:
    portions = sorted({row["portion"] for row in rows})
    if len(portions) <= 1:
        return sum(row["groups"] for row in rows)
    # What came back is reported together with what is new: a group may have members in both.
    found: set[int] = set()
    for portion in portions:
        query = "SELECT DISTINCT group_key FROM trajectories WHERE job_key = ? AND portion = ? AND group_key NOT NULL"
        found.update(row[0] for row in connection.execute(query, (job_key, portion)))
    return len(found)


def _report_again(connection: Connection, group_keys: Sequence[int]) -> None:
    """Takes the trajectories of groups out of what was reported, and sums both sides anew. Rare."""
    touched: set[tuple[int, int]] = set()
    for key in group_keys:
        query = "SELECT DISTINCT job_key, portion FROM trajectories WHERE group_key = ?"
        touched.update((row[0], row[1]) for row in connection.execute(query, (key,)))
        connection.execute(
            "UPDATE trajectories SET portion = (SELECT portion FROM jobs WHERE key = job_key) WHERE group_key = ?",
            (key,),
        )
    for job_key in {job_key for job_key, _ in touched}:
        portion = connection.execute("SELECT portion FROM jobs WHERE key = ?", (job_key,)).fetchone()[0]
        touched.add((job_key, portion))
    for job_key, portion in touched:
        _sum_portion(connection, job_key, portion)


def _sum_portion(connection: Connection, job_key: int, portion: int) -> None:
    here = (job_key, portion)
    query = "SELECT reported_in FROM portion_sums WHERE job_key = ? AND portion = ? LIMIT 1"
    before = connection.execute(query, here).fetchone()
    connection.execute("DELETE FROM portion_sums WHERE job_key = ? AND portion = ?", here)
    connection.execute(
        "INSERT INTO portion_sums SELECT job_key, portion, outcome, count(*), 0, total(reward), "
        "total(reward * reward), min(reward), max(reward), ? FROM trajectories "
        "WHERE job_key = ? AND portion = ? GROUP BY outcome",
        (None if before is None else before[0], *here),
    )
    connection.execute(
        "UPDATE portion_sums SET groups = (SELECT count(DISTINCT group_key) FROM trajectories WHERE job_key = ? AND "
        "portion = ?) WHERE job_key = ? AND portion = ? AND outcome = (SELECT min(outcome) FROM portion_sums WHERE "
        "job_key = ? AND portion = ?)",
        (*here, *here, *here),
    )


def delivered_members(connection: Connection, group_key: int) -> list[DeliveredMember]:
    """Returns the members of a group as they are delivered, in order, with where their payloads are."""
    query = (
        "SELECT members.uid, members.source_uid, members.reward, members.raw_reward, members.remove_sample, "
        "groups.key AS group_key, groups.instance_id, groups.epoch, members.ordinal AS slot, "
        "trajectories.outcome, trajectories.stop_reason, trajectories.oldest_version, trajectories.body, "
        "trajectories.body_place "
        "FROM groups JOIN members ON members.group_key = groups.key "
        "LEFT JOIN trajectories ON trajectories.job_key = groups.job_key AND trajectories.uid = members.source_uid "
        "WHERE groups.key = ? ORDER BY members.ordinal"
    )
    return [
        DeliveredMember(
            uid=row["uid"],
            source_uid=row["source_uid"],
            instance_id=row["instance_id"],
            group_key=row["group_key"],
            epoch=row["epoch"],
            slot=row["slot"],
            reward=row["reward"],
            raw_reward=row["raw_reward"],
            remove_sample=bool(row["remove_sample"]),
            outcome=row["outcome"] or "failed",
            stop_reason=row["stop_reason"] or "aborted",
            oldest_version=row["oldest_version"],
            body=row["body"],
            body_place=row["body_place"],
        )
        for row in connection.execute(query, (group_key,))
    ]


def _delivery(row: sqlite3.Row) -> DeliveryRecord:
    return DeliveryRecord(
        key=row["key"],
        delivery_id=row["delivery_id"],
        job_key=row["job_key"],
        state=row["state"],
        lease_s=row["lease_s"],
        meta_info=json.loads(row["meta_info"]),
    )


# --- services --------------------------------------------------------------------------------------------------------


def beat(connection: Connection, name: str, pid: int, now: float, detail: dict[str, Any]) -> None:
    """Says that a process lives."""
    connection.execute(
        "INSERT INTO services (name, pid, heartbeat_at, detail) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
        "pid = excluded.pid, heartbeat_at = excluded.heartbeat_at, detail = excluded.detail",
        (name, pid, now, json.dumps(detail)),
    )


def heartbeat(connection: Connection, name: str) -> tuple[float, dict[str, Any]] | None:
    """Returns when a process last said that it lives, and what it said."""
    row = connection.execute("SELECT heartbeat_at, detail FROM services WHERE name = ?", (name,)).fetchone()
    return None if row is None else (float(row[0]), json.loads(row[1]))


def forget(connection: Connection, name: str) -> None:
    """Removes a process that ended in order."""
    connection.execute("DELETE FROM services WHERE name = ?", (name,))


def heartbeats(connection: Connection, prefix: str) -> list[tuple[float, dict[str, Any]]]:
    """Returns when all processes whose names begin so last said that they live, and what they said."""
    query = "SELECT heartbeat_at, detail FROM services WHERE substr(name, 1, ?) = ? ORDER BY name"
    return [(float(row[0]), json.loads(row[1])) for row in connection.execute(query, (len(prefix), prefix))]


def forget_before(connection: Connection, prefix: str, moment: float) -> None:
    """Removes processes whose names begin so and that have said nothing since then."""
    connection.execute(
        "DELETE FROM services WHERE substr(name, 1, ?) = ? AND heartbeat_at < ?", (len(prefix), prefix, moment)
    )
