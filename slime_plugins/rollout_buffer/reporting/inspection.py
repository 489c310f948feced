"""Read-only queries: past deliveries and trajectories.

Each query is one read transaction, hence consistent. Lists are paged by a row's key, newest first.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from slime_plugins.rollout_buffer.errors import ConflictError, DamagedError, NotFoundError
from slime_plugins.rollout_buffer.reporting.message_texts import preview_of
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.state.job_lookup import find_job
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import delivery_rows, payload_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.wire.delivery_replies import DeliveryEntry, DeliveryPage
from slime_plugins.rollout_buffer.wire.query_params import MAX_KEY, PageQuery, TrajectoryFilters, TrajectoryPageQuery
from slime_plugins.rollout_buffer.wire.trajectory_replies import (
    GroupMember,
    ListedTrajectory,
    Neighbours,
    TrajectoryEntry,
    TrajectoryPage,
    TrajectorySummary,
)

PREVIEW_BYTES = 16 * 1024 * 1024
"""Limit of payload bytes read for the previews of a page."""
REWARD_BINS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTrajectory:
    """One stored trajectory: its columns, as JSON keys, and its payload, as JSON."""

    entry: TrajectoryEntry
    body: bytes


class Inspection:
    """Read-only queries of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store

    # --- deliveries --------------------------------------------------------------------------------------------------

    def delivery(self, delivery_id: str) -> Delivery:
        """Returns a past delivery, whose content ``Buffer.delivered_pieces`` reads.

        Raises:
            NotFoundError: there is no delivery with this id.
        """
        with self.store.read() as connection:
            delivery = delivery_rows.find_delivery(connection, delivery_id)
        if delivery is None:
            raise NotFoundError(f"there is no delivery {delivery_id[:300]!r}; GET /jobs/<job_id>/deliveries lists them")
        return Delivery(key=delivery.key, delivery_id=delivery.delivery_id, meta_info=delivery.meta_info)

    def deliveries(self, job_id: str, page: PageQuery) -> DeliveryPage:
        """Returns one page of a job's deliveries, newest first.

        Raises:
            NotFoundError: there is no such job.
        """
        query = (
            "SELECT key, delivery_id, state, consumer_id, poll_id, created_at, lease_expires_at, "
            "(SELECT count(*) FROM delivery_groups WHERE delivery_key = deliveries.key) AS groups, "
            "(SELECT count(*) FROM delivery_groups JOIN members USING (group_key) WHERE delivery_key = deliveries.key) "
            "AS samples FROM deliveries WHERE job_key = ? AND key < ? ORDER BY key DESC LIMIT ?"
        )
        with self.store.read() as connection:
            job = find_job(connection, job_id)
            before = MAX_KEY if page.cursor is None else page.cursor
            rows = connection.execute(query, (job.key, before, page.limit + 1)).fetchall()
        return DeliveryPage(
            job_id=job.job_id,
            deliveries=[cast("DeliveryEntry", _without_key(row)) for row in rows[: page.limit]],
            next_cursor=_next(rows, page),
        )

    # --- trajectories ------------------------------------------------------------------------------------------------

    def trajectories(self, page: TrajectoryPageQuery) -> TrajectoryPage:
        """Returns one page of trajectories without their payloads, newest first or as the page is sorted.

        Raises:
            NotFoundError: the job that is asked for does not exist.
        """
        with self.store.read() as connection:
            conditions, values = _conditions(connection, page)
            order = _Order(page)
            conditions, values = [*conditions, order.after], [*values, *order.values]
            # The index covers every filter, so that table rows are read only for the page.
            keys = f"SELECT key FROM trajectories INDEXED BY {_LIST_INDEX} WHERE {' AND '.join(conditions)}"
            query = f"{_ENTRIES} WHERE trajectories.key IN ({keys} {order.by} LIMIT ?) {order.by}"
            rows = connection.execute(query, (*values, page.limit + 1)).fetchall()
        entries = [cast("ListedTrajectory", _entry(row)) for row in rows[: page.limit]]
        if page.previews:
            self._add_previews(entries, [row["key"] for row in rows])
        return TrajectoryPage(trajectories=entries, next_cursor=_next(rows, page))

    def _add_previews(self, entries: Sequence[ListedTrajectory], keys: Sequence[int]) -> None:
        """Adds a preview of task and answer to each entry, within ``PREVIEW_BYTES``."""
        bytes_left = PREVIEW_BYTES
        for entry, key in zip(entries, keys, strict=False):
            bytes_left -= entry["body_bytes"]
            entry["goal"] = entry["answer"] = None
            if bytes_left >= 0:
                with contextlib.suppress(DamagedError):  # an entry with a lost payload is listed without a preview
                    entry["goal"], entry["answer"] = preview_of(orjson.loads(self.payload(key)))

    def summary(self, filters: TrajectoryFilters) -> TrajectorySummary:
        """Returns the number of trajectories that match filters, their means, and a histogram of rewards.

        Raises:
            NotFoundError: the job that is asked for does not exist.
        """
        with self.store.read() as connection:
            conditions, values = _conditions(connection, filters)
            where = f"FROM trajectories INDEXED BY {_LIST_INDEX} WHERE {' AND '.join(conditions)}"
            totals = dict(connection.execute(f"{_TOTALS} {where}", values).fetchone())
            low, high = totals["reward_min"], totals["reward_max"]
            has_range = bool(totals["trajectories"] and high > low)
            width = (high - low) / REWARD_BINS if has_range else 1.0
            # The highest reward belongs to the last bin, not to a bin of its own.
            binned = f"SELECT min(CAST((reward - ?) / ? AS INTEGER), ?) AS bin, count(*) AS times {where} GROUP BY bin"
            counts = dict.fromkeys(range(REWARD_BINS if has_range else 1), 0)
            if totals["trajectories"]:
                rows = connection.execute(binned, (low, width, len(counts) - 1, *values)).fetchall()
                counts |= {row["bin"]: row["times"] for row in rows}
        bins = list(counts.values()) if totals["trajectories"] else []
        return cast("TrajectorySummary", {**totals, "bin_width": width, "bins": bins})

    def keys_before(self, filters: TrajectoryFilters, cursor: int | None, limit: int) -> list[int]:
        """Returns the keys of matching trajectories before a cursor, newest first.

        Raises:
            NotFoundError: the job that is asked for does not exist.
        """
        with self.store.read() as connection:
            conditions, values = _conditions(connection, filters)
            # The index has the order of keys within a job only. For all jobs, the table itself is read in that order.
            index = "NOT INDEXED" if filters.job_id is None else f"INDEXED BY {_LIST_INDEX}"
            query = (
                f"SELECT key FROM trajectories {index} WHERE {' AND '.join(conditions)} AND key < ? "
                "ORDER BY key DESC LIMIT ?"
            )
            before = MAX_KEY if cursor is None else cursor
            return [row["key"] for row in connection.execute(query, (*values, before, limit))]

    def payload(self, key: int) -> bytes:
        """Returns a trajectory's payload by its row key.

        Raises:
            DamagedError: its bytes are missing or differ from what was written.
        """
        with self.store.read_one() as connection:
            row = connection.execute("SELECT body, body_place FROM trajectories WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise DamagedError("the trajectory was deleted")
        return self.store.get_payload(row["body"], row["body_place"])

    def entries(self, keys: Sequence[int]) -> list[TrajectoryEntry]:
        """Returns trajectories without payloads, by row key, in that order."""
        with self.store.read() as connection:
            rows = [connection.execute(f"{_ENTRIES} WHERE trajectories.key = ?", (key,)).fetchone() for key in keys]
        return [_entry(row) for row in rows]

    def trajectory(self, uid: str, job_id: str | None) -> StoredTrajectory:
        """Returns the trajectory with a uid.

        Raises:
            NotFoundError: there is no such trajectory or job, or retention has purged the payload.
            DamagedError: its payload is damaged.
            ConflictError: several jobs have a trajectory with this uid, and ``job_id`` is None.
        """
        with self.store.read() as connection:
            row = _find_trajectory(connection, uid, job_id)
            stored = payload_rows.payload_of(connection, row["job_key"], uid)
        if stored == (None, None):
            raise NotFoundError(f"the payload of trajectory {uid!r} was purged by retention")
        return StoredTrajectory(entry=_entry(row), body=self.store.get_payload(*stored))

    def neighbours(self, uid: str, job_id: str | None) -> Neighbours:
        """Returns the uids of the job's previous and next trajectory.

        Raises:
            NotFoundError: there is no such trajectory or job.
            ConflictError: several jobs have a trajectory with this uid, and ``job_id`` is None.
        """
        with self.store.read() as connection:
            row = _find_trajectory(connection, uid, job_id)
            rows = {
                name: connection.execute(
                    f"SELECT uid FROM trajectories INDEXED BY {_LIST_INDEX} WHERE job_key = ? AND key {comparison} ? "
                    f"ORDER BY key {direction} LIMIT 1",
                    (row["job_key"], row["key"]),
                ).fetchone()
                for name, comparison, direction in (("older", "<", "DESC"), ("newer", ">", "ASC"))
            }
        older, newer = (found and found["uid"] for found in rows.values())
        return Neighbours(uid=uid, job_id=row["job_id"], older=older, newer=newer)


_COLUMNS = (
    "SELECT trajectories.key AS key, trajectories.job_key, jobs.job_id, trajectories.instance_id, groups.epoch, "
    "groups.state AS group_state, groups.key AS group_index, deliveries.delivery_id, body_bytes, "
    f"{', '.join(f'trajectories.{name}' for name in GroupMember.__annotations__)}"
)
_TABLES = (
    " FROM trajectories JOIN jobs ON jobs.key = trajectories.job_key "
    "LEFT JOIN groups ON groups.key = trajectories.group_key "
    "LEFT JOIN deliveries ON deliveries.key = groups.delivery_key"
)
_ENTRIES = _COLUMNS + _TABLES
_LIST_INDEX = "trajectories_to_look_at"
LOWEST = -1.0e300
"""Takes the place of a missing value when rows are sorted, so that they come before or after all others."""
_TOTALS = (
    "SELECT count(*) AS trajectories, avg(reward) AS reward_mean, min(reward) AS reward_min, "
    "max(reward) AS reward_max, avg(success >= 1) AS success, avg(turns) AS turns, "
    "sum(sampled_tokens) AS sampled_tokens, avg(played_s) AS played_s"
)


class _Order:
    """The order of a page, as SQL: the condition of its cursor, and the ORDER BY. A cursor is a row's key."""

    def __init__(self, page: TrajectoryPageQuery) -> None:
        column = "trajectories.key" if page.sort == "created_at" else f"coalesce(trajectories.{page.sort}, {LOWEST})"
        direction, beyond = ("DESC", "<") if page.order == "descending" else ("ASC", ">")
        self.by = f"ORDER BY {column} {direction}, trajectories.key {direction}"
        self.values: list[Any] = [] if page.cursor is None else [page.cursor]
        if page.sort == "created_at":
            self.values = self.values or [MAX_KEY if beyond == "<" else 0]
            self.after = f"trajectories.key {beyond} ?"
        elif page.cursor is None:
            self.after = "TRUE"
        else:
            of_cursor = f"SELECT coalesce(last.{page.sort}, {LOWEST}), last.key FROM trajectories AS last WHERE key = ?"
            self.after = f"({column}, trajectories.key) {beyond} ({of_cursor})"


def _find_trajectory(connection: Connection, uid: str, job_id: str | None) -> sqlite3.Row:
    """Finds a trajectory job by job: uids are indexed within a job."""
    if job_id is None:
        keys = [row[0] for row in connection.execute("SELECT key FROM jobs")]
    else:
        keys = [find_job(connection, job_id).key]
    marks = ", ".join("?" for _ in keys)
    query = f"{_ENTRIES} WHERE trajectories.job_key IN ({marks}) AND trajectories.uid = ?"
    rows: list[sqlite3.Row] = connection.execute(query, (*keys, uid)).fetchall()
    if not rows:
        raise NotFoundError(f"there is no trajectory {uid[:300]!r}; GET /trajectories lists them")
    if len(rows) > 1:
        names = [row["job_id"] for row in rows]
        raise ConflictError(
            f"{len(rows)} jobs have a trajectory {uid!r}: name one with job_id ({', '.join(names[:10])})",
            {"job_ids": names[:100]},
        )
    return rows[0]


def without_generations(body: bytes) -> bytes:
    """Returns a stored payload without its generations; ``turn_timings`` has the times of each."""
    payload = orjson.loads(body)
    generations = payload.pop("generations", None) or ()
    payload["turn_timings"] = [{name: turn.get(name) for name in ("engine_s", "environment_s")} for turn in generations]
    return orjson.dumps(payload)


def _entry(row: sqlite3.Row) -> TrajectoryEntry:
    columns = {name: value for name, value in dict(row).items() if name not in ("key", "job_key")}
    return cast("TrajectoryEntry", {**columns, "late": bool(columns["late"])})


def _without_key(row: sqlite3.Row) -> dict[str, Any]:
    return {name: value for name, value in dict(row).items() if name != "key"}


def _conditions(connection: Connection, page: TrajectoryFilters) -> tuple[list[str], list[Any]]:
    conditions: list[str] = ["TRUE"]
    values: list[Any] = []
    if page.job_id is not None:
        conditions.append("job_key = ?")
        values.append(find_job(connection, page.job_id).key)
    if page.search is not None:
        conditions.append(f"({CONTAINS.format('instance_id')} OR {CONTAINS.format('uid')})")
        values += [like_pattern(page.search)] * 2
    if page.success is not None:
        conditions.append("success >= 1" if page.success else "success < 1")
    filters = {
        "instance_id = ?": page.instance_id,
        "outcome = ?": page.outcome,
        "stop_reason = ?": page.stop_reason,
        "reward >= ?": page.min_reward,
        "reward <= ?": page.max_reward,
        "oldest_version >= ?": page.min_version,
        "oldest_version <= ?": page.max_version,
    }
    given = {condition: value for condition, value in filters.items() if value is not None}
    return [*conditions, *given], [*values, *given.values()]


CONTAINS = "{} LIKE ? ESCAPE '\\'"
"""SQL condition that a column contains a text, whose pattern ``like_pattern`` makes."""


def like_pattern(text: str) -> str:
    """Returns a LIKE pattern that matches the text anywhere, with % and _ escaped."""
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _next(rows: Sequence[sqlite3.Row], page: PageQuery) -> int | None:
    return rows[page.limit - 1]["key"] if len(rows) > page.limit else None
