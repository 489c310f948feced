"""The balance of a crash test: what the writers and trainers noted against what the store holds. Pure reading.

Each check is a generator of sentences, one for every discrepancy it finds.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.wire import image_hashes
from tests.crash import checkpoint_trainer, writer
from tests.crash.workload import (
    DEVICES_JOB,
    PLAYED_JOB,
    SESSIONS_JOB,
    WRITTEN_JOB,
    Plan,
    by_hash,
    checksum,
    item,
    names_of_writer,
    played_lines,
    read_journal,
)
from tests.stored_bytes import named_records

Findings = Iterator[str]
SHOWN = 8


class StoreView:
    """Everything there is to compare after a run. Open it when nothing runs any more."""

    def __init__(self, plan: Plan, leasing: Mapping[str, Sequence[str]]) -> None:
        """``leasing`` names the trainers of each job."""
        self.plan = plan
        self.leasing = dict(leasing)
        self.store = Store(plan.path("data"))
        self.database = read_only(plan.path("data"))

    def close(self) -> None:
        """Closes the store."""
        self.database.close()
        self.store.close()

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Returns the rows of a query."""
        return self.database.execute(query, values).fetchall()

    def job_key(self, job_id: str) -> int:
        """Returns the key of a job; -1 when the run did not get as far as to start it."""
        found = self.rows("SELECT key FROM jobs WHERE job_id = ?", job_id)
        return int(found[0]["key"]) if found else -1


def read_only(data_dir: Path) -> sqlite3.Connection:
    """Opens the database of a buffer so that nothing can be changed."""
    connection = sqlite3.connect(f"file:{data_dir / 'buffer.sqlite3'}?mode=ro", uri=True, timeout=30)
    connection.row_factory = sqlite3.Row
    return connection


# --- the database by itself ------------------------------------------------------------------------------------------


def database_is_sound(view: StoreView) -> Findings:
    """SQLite finds no damage and no dangling reference."""
    for row in view.rows("PRAGMA integrity_check"):
        if row[0] != "ok":
            yield f"integrity_check: {row[0]}"
    for row in view.rows("PRAGMA foreign_key_check"):
        yield f"foreign_key_check: {tuple(row)}"


def every_group_is_in_one_state(view: StoreView) -> Findings:
    """Each (job, epoch, instance) is one group, closed, and its members are as many as the job says."""
    for row in view.rows("SELECT job_key, epoch, instance_id FROM groups GROUP BY 1, 2, 3 HAVING count(*) > 1"):
        yield f"instance {row['instance_id']} has several groups in epoch {row['epoch']}"
    for row in view.rows(
        "SELECT job_id, instance_id, epoch, groups.state FROM groups JOIN jobs ON jobs.key = job_key "
        "WHERE groups.state NOT IN ('delivered', 'filtered', 'failed', 'skipped')"
    ):
        yield f"group {row['instance_id']} (epoch {row['epoch']}) of {row['job_id']} is still {row['state']}"
    for row in view.rows(
        "SELECT groups.key, instance_id, group_size, (SELECT count(*) FROM members WHERE group_key = groups.key) AS n "
        "FROM groups JOIN jobs ON jobs.key = job_key WHERE groups.state = 'delivered' AND n != group_size"
    ):
        yield f"group {row['instance_id']} was delivered with {row['n']} members, not {row['group_size']}"


def no_trajectory_is_in_two_places(view: StoreView) -> Findings:
    """A trajectory is a member of one group at most, and no slot of a played group was filled twice."""
    for row in view.rows(
        "SELECT job_key, source_uid, count(*) AS n FROM members JOIN groups ON groups.key = group_key "
        "WHERE source_uid IS NOT NULL GROUP BY 1, 2 HAVING n > 1"
    ):
        yield f"{row['source_uid']} is a member {row['n']} times"
    for row in view.rows(
        "SELECT group_key, slot, count(*) AS n FROM trajectories WHERE late = 0 GROUP BY 1, 2 HAVING n > 1"
    ):
        yield f"slot {row['slot']} of group {row['group_key']} holds {row['n']} trajectories"


def no_stored_trajectory_is_forgotten(view: StoreView) -> Findings:
    """What came in time for a group that was delivered was delivered with it."""
    for row in view.rows(
        "SELECT uid, instance_id FROM trajectories t WHERE late = 0 AND NOT EXISTS (SELECT 1 FROM members m "
        "WHERE m.group_key = t.group_key AND m.source_uid = t.uid) AND EXISTS (SELECT 1 FROM groups g "
        "WHERE g.key = t.group_key AND g.state = 'delivered')"
    ):
        yield f"LOST: {row['uid']} is stored in time and was not delivered with group {row['instance_id']}"


def attempts_and_trajectories_agree(view: StoreView) -> Findings:
    """Every finished attempt brought one trajectory, every trajectory of a runner has its finished attempt."""
    for row in view.rows(
        "SELECT a.group_key, a.slot, a.attempt FROM attempts a LEFT JOIN trajectories t ON t.group_key = a.group_key "
        "AND t.slot = a.slot AND t.attempt = a.attempt WHERE a.state = 'finished' AND t.key IS NULL"
    ):
        yield f"attempt {tuple(row)} is finished and has no trajectory"
    for row in view.rows(
        "SELECT t.uid FROM trajectories t JOIN jobs ON jobs.key = t.job_key AND has_runner LEFT JOIN attempts a "
        "ON a.group_key = t.group_key AND a.slot = t.slot AND a.attempt = t.attempt "
        "WHERE a.state IS NULL OR a.state != 'finished'"
    ):
        yield f"trajectory {row['uid']} has no finished attempt"
    for row in view.rows("SELECT group_key, slot, attempt FROM attempts WHERE state = 'running'"):
        yield f"attempt {tuple(row)} still counts as running"


def bytes_and_rows_agree(view: StoreView) -> Findings:
    """Every payload and every screenshot that a row names can be read whole; screenshots are what their hash says."""
    images = {bytes(row["sha256"]).hex(): row["place"] for row in view.rows("SELECT sha256, place FROM images")}
    for sha256, place in images.items():
        try:
            data = view.store.fetch(BlobRef.parse(place))
        except RolloutBufferError as error:
            yield f"image {sha256}: {error.message}"
        else:
            if hashlib.sha256(data).hexdigest() != sha256:
                yield f"image {sha256} does not hash to its name"
    for row in view.rows("SELECT uid, body, body_place FROM trajectories"):
        try:
            body = view.store.get_payload(row["body"], row["body_place"])
        except RolloutBufferError as error:
            yield f"{row['uid']}: {error.message}"
        else:
            for missing in {*image_hashes(body), *named_records(body)} - images.keys():
                yield f"{row['uid']} names the image or token records {missing}, which are not stored"


def bodies(view: StoreView, job_id: str | None = None) -> Iterator[tuple[str, bytes]]:
    """Yields every stored payload, or those of a job."""
    key = None if job_id is None else view.job_key(job_id)
    query = "SELECT uid, body, body_place FROM trajectories WHERE job_key = coalesce(?, job_key)"
    for row in view.rows(query, key):
        yield row["uid"], view.store.get_payload(row["body"], row["body_place"])


# --- against the writers ---------------------------------------------------------------------------------------------


def every_answered_item_is_stored_once(view: StoreView) -> Findings:
    """Each uid that got its 200 is in the store once, as it was sent; nothing else is."""
    answered = writer.progress(view.plan)
    expected = {name for number in range(view.plan.writers) for name in names_of_writer(view.plan, number)}
    instances = dict(expected)
    stored = Counter(_uids_of(view, WRITTEN_JOB))
    for uid in sorted(answered.keys() - stored.keys()):
        yield f"LOST: {uid} got its 200 and is not in the store"
    for uid in sorted(stored.keys() - instances.keys()):
        yield f"{uid} is in the store and was never written"
    for uid in sorted(instances.keys() - answered.keys()):
        yield f"{uid} never got its 200"
    for uid, count in stored.items():
        if count > 1:
            yield f"DOUBLED: {uid} is in the store {count} times"
    written = {uid: body for uid, body in bodies(view) if uid in instances}
    for uid, body in written.items():
        sent = item(view.plan, uid, instances[uid])["messages"]
        if checksum(json.loads(body)["messages"]) != checksum(by_hash(sent)):
            yield f"{uid} is not stored as it was sent"


def _uids_of(view: StoreView, job_id: str) -> list[str]:
    return [row[0] for row in view.rows("SELECT uid FROM trajectories WHERE job_key = ?", view.job_key(job_id))]


def only_what_must_fail_failed(view: StoreView) -> Findings:
    """A written group with all its members in time is delivered; a short one only ever times out."""
    for row in view.rows(
        "SELECT instance_id, state, cause, (SELECT count(*) FROM trajectories WHERE group_key = groups.key) AS n "
        "FROM groups WHERE job_key = ? AND state != 'delivered'",
        view.job_key(WRITTEN_JOB),
    ):
        if row["n"] >= view.plan.written_size or "timed out" not in row["cause"]:
            yield f"group {row['instance_id']} with {row['n']} members is {row['state']}: {row['cause']}"


def nobody_was_refused(view: StoreView) -> Findings:
    """No right request got a 4xx, and no reply held anything broken."""
    for path in sorted(Path(view.plan.folder).glob("*.jsonl")):
        for event in read_journal(path):
            if "refused" in event or "broken" in event:
                yield f"{path.name}: {event}"


# --- against the leasing trainers ------------------------------------------------------------------------------------


def acknowledged_once_and_never_again(view: StoreView) -> Findings:
    """Each group is in exactly one acknowledged delivery, reads the same every time, and is leased to one at a time."""
    for job_id, names in view.leasing.items():
        yield from _acknowledged_once(view, job_id, names)


def _acknowledged_once(view: StoreView, job_id: str, names: Sequence[str]) -> Findings:
    events = [{**event, "who": name} for name in names for event in read_journal(_leasing_journal(view.plan, name))]
    events.sort(key=lambda event: float(event["at"]))
    groups_of = {event["got"]: set(event["groups"]) for event in events if "got" in event}
    acknowledged = {name: event["at"] for event in reversed(events) for name in event.get("acked", ())}
    yield from _read_the_same(events)
    times = Counter(group for name in acknowledged for group in groups_of.get(name, ()))
    for group, count in times.items():
        if count > 1:
            yield f"DOUBLED: group {group} is in {count} acknowledged deliveries"
    delivered = view.rows(
        "SELECT key, instance_id, delivery_key FROM groups WHERE job_key = ? AND state = 'delivered'",
        view.job_key(job_id),
    )
    for row in delivered:
        if str(row["key"]) not in times and not _acknowledged_in_store(view, row["delivery_key"]):
            yield f"LOST: group {row['instance_id']} counts as delivered and no acknowledgement covers it"
    yield from _none_again(events, acknowledged, groups_of)
    yield from _one_at_a_time(events, acknowledged, view.plan.lease_s)


def _leasing_journal(plan: Plan, name: str) -> Path:
    return plan.path(f"leasing-{name}.jsonl")


def _acknowledged_in_store(view: StoreView, delivery_key: int) -> bool:
    """Whether the store has the acknowledgement: a trainer may have been killed before it noted it."""
    rows = view.rows("SELECT state FROM deliveries WHERE key = ?", delivery_key)
    return bool(rows) and rows[0]["state"] == "acked"


def _read_the_same(events: list[dict[str, Any]]) -> Findings:
    deliveries: dict[str, Any] = {}
    groups: dict[str, str] = {}
    for event in events:
        if "got" not in event:
            continue
        if deliveries.setdefault(event["got"], event["groups"]) != event["groups"]:
            yield f"delivery {event['got']} was not the same when it came again"
        for group, digest in event["groups"].items():
            if groups.setdefault(group, digest) != digest:
                yield f"group {group} was not the same when it came again"


def _none_again(
    events: list[dict[str, Any]], acknowledged: dict[str, float], groups_of: dict[str, set[str]]
) -> Findings:
    since = {group: (at, name) for name, at in acknowledged.items() for group in groups_of.get(name, ())}
    asked: dict[str, float] = {}
    for event in events:
        if "asked" in event:
            asked[event["who"]] = event["at"]
        for group in event.get("groups", ()):
            at, name = since.get(group, (float("inf"), ""))
            if asked[event["who"]] > at and event["got"] != name:
                yield f"DOUBLED: group {group} came again in {event['got']} after {name} was acknowledged"


def _one_at_a_time(events: list[dict[str, Any]], acknowledged: dict[str, float], lease_s: float) -> Findings:
    held: dict[str, tuple[str, str, float]] = {}
    asked: dict[str, float] = {}
    for event in events:
        if "asked" in event:
            asked[event["who"]] = event["at"]
        for group in event.get("groups", ()):
            who, delivery, until = held.get(group, ("", "", 0.0))
            if who not in ("", event["who"]) and event["at"] < until and delivery not in acknowledged:
                yield f"group {group} went to {event['who']} while {who} held it"
            held[group] = (event["who"], event["got"], asked[event["who"]] + lease_s)


# --- against the trainer with checkpoints ----------------------------------------------------------------------------


def trained_once_and_all(view: StoreView) -> Findings:
    """The checkpoints hold each deliverable group of the played job once, with the trajectories of the store.

    Where a group was short, those of another one fill its places, and slime is given no more than its batch.
    """
    trained = checkpoint_trainer.trained_groups(view.plan)
    counted = Counter((group["instance_id"], group["epoch"]) for group in trained)
    for group, count in counted.items():
        if count > 1:
            yield f"DOUBLED: {group} was trained {count} times"
    key = view.job_key(PLAYED_JOB)
    rows = view.rows("SELECT key, instance_id, epoch, state, cause FROM groups WHERE job_key = ?", key)
    if len(rows) != len(played_lines(view.plan)) * view.plan.played_epochs:
        yield f"the played job has {len(rows)} groups"
    for row in rows:
        name = (row["instance_id"], row["epoch"])
        if (row["state"] == "delivered") != (name in counted):
            yield f"LOST: group {name} is {row['state']} and was trained {counted[name]} times"
        yield from _ended_as_planned(view, row)
    for entry in trained:
        members = view.rows(
            "SELECT source_uid FROM members JOIN groups ON groups.key = group_key WHERE job_key = ? AND epoch = ? "
            "AND instance_id = ? AND source_uid IS NOT NULL ORDER BY ordinal",
            key, entry["epoch"], entry["instance_id"],
        )  # fmt: skip
        stored = [row[0] for row in members]
        as_trained = [uid for uid in stored if uid in entry["uids"]] if entry["cut"] else stored
        if as_trained != entry["uids"]:
            yield f"{entry['instance_id']} was trained with {entry['uids']}, the store has {stored}"


def _ended_as_planned(view: StoreView, row: sqlite3.Row) -> Findings:
    name, state, cause = row["instance_id"], row["state"], row["cause"]
    if name.endswith("-same") and state == "delivered":
        of_group = "SELECT uid FROM trajectories WHERE group_key = ?"
        if len(view.rows(of_group, row["key"])) < view.plan.played_size:
            return  # one slot was given up: a short group is not asked whether its rewards differ
    expected = {"-dead": "failed", "-same": "filtered"}.get(name[-5:], "delivered")
    if state != expected and not (state == "failed" and "slots failed" in cause):
        yield f"group {name} is {state} ({cause}), expected {expected}"


# --- against the agents ----------------------------------------------------------------------------------------------


def every_closed_session_is_stored_once(view: StoreView) -> Findings:
    """A session that the gateway called stored is in the store once, with each turn that the agent was told, once."""
    stored = Counter(_uids_of(view, SESSIONS_JOB))
    told = {
        event["stored"]: event
        for path in sorted(Path(view.plan.folder).glob("agent-*.jsonl"))
        for event in read_journal(path)
        if "stored" in event
    }
    for uid in sorted(told.keys() - stored.keys()):
        yield f"LOST: session {uid} was closed as stored and is not in the store"
    for uid, count in stored.items():
        if count > 1:
            yield f"DOUBLED: session {uid} is in the store {count} times"
    for uid, body in bodies(view):
        item = json.loads(body)
        if uid in told and [message["content"] for message in item["messages"][1::2]] != told[uid]["said"]:
            yield f"session {uid} is not stored as the agent heard it"
        turns = len(told[uid]["said"]) + told[uid]["aside"] if uid in told else 0
        if uid in told and len(item["generations"]) != turns:
            yield f"session {uid} trains {len(item['generations'])} turns, and its agent was told {turns}"


def no_fault_failed_a_session_or_device_group(view: StoreView) -> Findings:
    """However often engine, gateway and Ray died: no group of theirs failed, and no failure became a reward."""
    for job_id in (SESSIONS_JOB, DEVICES_JOB):
        for row in view.rows(
            "SELECT instance_id, state, cause FROM groups WHERE job_key = ? AND state != 'delivered'",
            view.job_key(job_id),
        ):
            yield f"group {row['instance_id']} of {job_id} is {row['state']}: {row['cause']}"
        for row in view.rows(
            "SELECT uid, slot, reward FROM trajectories WHERE job_key = ? AND late = 0 AND reward != slot % 2",
            view.job_key(job_id),
        ):
            yield f"{row['uid']} of {job_id} earned {row['reward']} in slot {row['slot']}"


CHECKS: tuple[Callable[[StoreView], Findings], ...] = (
    database_is_sound,
    every_group_is_in_one_state,
    no_trajectory_is_in_two_places,
    no_stored_trajectory_is_forgotten,
    attempts_and_trajectories_agree,
    bytes_and_rows_agree,
    every_answered_item_is_stored_once,
    only_what_must_fail_failed,
    nobody_was_refused,
    acknowledged_once_and_never_again,
    trained_once_and_all,
    every_closed_session_is_stored_once,
    no_fault_failed_a_session_or_device_group,
)
