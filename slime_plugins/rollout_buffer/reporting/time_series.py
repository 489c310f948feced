"""A job's history in buckets of time, for the dashboard's charts. Read-only.

Long ranges are read from sums per minute, short ranges from an index with all columns; payloads are never read. A
caller that already has the earlier buckets requests only the newest ones.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime_plugins.rollout_buffer.rules.selection_bias import FinishedGroup, bias_measures
from slime_plugins.rollout_buffer.storage.tables import prompt_rows, trainer_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.wire.job_replies import CountedColumns, MeasuredColumns, SeriesColumns

BUCKET_WIDTHS_S = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400, 604_800)
WANTED_BUCKETS = 120
MAX_BUCKETS = 400
SUMMED_S = 60
"""Width of a stored sum. Buckets of whole minutes add up these sums, other buckets read single episodes."""
MAX_EPISODES_ONE_BY_ONE = 20_000

_EPISODES_BY_MINUTE = """
SELECT CAST((minute * 60 - :start) / :width AS INTEGER) AS bucket, sum(episodes) AS episodes,
    total(reward_total) / sum(episodes) AS reward_mean, min(reward_min) AS reward_min, max(reward_max) AS reward_max,
    CAST(sum(succeeded) AS REAL) / nullif(sum(judged), 0) AS success,
    sum(completed) AS completed, sum(truncated) AS truncated, sum(aborted) AS aborted,
    CAST(sum(behind_total) AS REAL) / nullif(sum(versioned), 0) AS behind_mean, max(behind_max) AS behind_max,
    CAST(sum(turns_total) AS REAL) / nullif(sum(turns_known), 0) AS turns,
    CAST(sum(sampled_total) AS REAL) / nullif(sum(sampled_known), 0) AS sampled_tokens,
    nullif(sum(generate_s), 0) / :width AS generating, nullif(sum(played_s), 0) / :width AS playing
FROM trajectory_minutes WHERE job_key = :job AND minute >= :start / 60 AND minute < :end / 60 GROUP BY bucket
"""
_EPISODES = """
SELECT CAST((created_at - :start) / :width AS INTEGER) AS bucket, count(*) AS episodes,
    avg(reward) AS reward_mean, min(reward) AS reward_min, max(reward) AS reward_max,
    avg(CASE WHEN success IS NULL THEN NULL ELSE success >= 1 END) AS success,
    sum(outcome = 'completed') AS completed, sum(outcome = 'truncated') AS truncated,
    sum(outcome = 'aborted') AS aborted, avg(versions_behind) AS behind_mean, max(versions_behind) AS behind_max,
    avg(turns) AS turns, avg(sampled_tokens) AS sampled_tokens,
    sum(generate_s) / :width AS generating, sum(played_s) / :width AS playing
FROM trajectories INDEXED BY trajectories_to_look_at
WHERE job_key = :job AND key >= :first AND late = 0 AND created_at >= :start AND created_at < :end GROUP BY bucket
"""
_GROUPS = """
SELECT CAST((closed_at - :start) / :width AS INTEGER) AS bucket,
    sum(state IN ('ready', 'leased', 'delivered')) AS groups_valid, sum(state = 'filtered') AS groups_filtered,
    sum(state = 'failed') AS groups_failed
FROM groups INDEXED BY groups_by_closing
WHERE job_key = :job AND closed_at >= :start AND closed_at < :end GROUP BY bucket
"""
_FAILURES = """
SELECT CAST((ended_at - :start) / :width AS INTEGER) AS bucket, count(*) AS failed
FROM attempts INDEXED BY attempts_failed JOIN groups ON groups.key = group_key
WHERE attempts.state = 'failed' AND ended_at >= :start AND ended_at < :end AND job_key = :job GROUP BY bucket
"""
_WAITS = """
SELECT CAST((created_at - :start) / :width AS INTEGER) AS bucket, count(*) AS deliveries, avg(waited_s) AS wait_mean,
    max(waited_s) AS wait_max
FROM deliveries INDEXED BY deliveries_by_job
WHERE job_key = :job AND created_at >= :start AND created_at < :end GROUP BY bucket
"""

_MEASURES = """
SELECT total(reward_total) / sum(episodes) AS reward_mean, min(reward_min) AS reward_min, max(reward_max) AS reward_max,
    CAST(sum(succeeded) AS REAL) / nullif(sum(judged), 0) AS success_mean,
    CAST(sum(behind_total) AS REAL) / nullif(sum(versioned), 0) AS staleness_mean, max(behind_max) AS staleness_max
FROM trajectory_minutes WHERE job_key = :job
"""
_ALL_WAITS = """
SELECT avg(waited_s) AS poll_wait_seconds_mean, max(waited_s) AS poll_wait_seconds_max
FROM deliveries INDEXED BY deliveries_by_job WHERE job_key = :job
"""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of buckets of one width; both ends are multiples of the width, in seconds since the epoch."""

    start: float
    end: float
    width_s: int

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return round((self.end - self.start) / self.width_s)


def span_of(first: float, last: float, *, width_s: int | None, since: float | None) -> Span:
    """Returns the buckets from ``first``, or from ``since`` if that is later, to ``last``.

    Without a ``width_s`` there are about ``WANTED_BUCKETS`` at most. Only the newest ``MAX_BUCKETS`` are returned.
    """
    length = max(1.0, last - first)
    fitting = (width for width in BUCKET_WIDTHS_S if length / width <= WANTED_BUCKETS)
    width = width_s or next(fitting, BUCKET_WIDTHS_S[-1])
    end = (math.floor(last / width) + 1) * width
    start = max(math.floor(max(first, since or 0.0) / width) * width, end - MAX_BUCKETS * width)
    return Span(min(start, end), end, width)


def job_series(connection: Connection, job_key: int, span: Span) -> SeriesColumns:
    """Returns the columns by name, one entry per bucket; ``t`` is the start of each bucket."""
    columns: dict[str, list[Any]] = {"t": [span.start + index * span.width_s for index in range(span.buckets)]}
    columns |= {name: [0] * span.buckets for name in CountedColumns.__annotations__}
    columns |= {name: [None] * span.buckets for name in MeasuredColumns.__annotations__}
    parameters = {"job": job_key, "start": span.start, "end": span.end, "width": float(span.width_s)}
    by_minute = span.width_s % SUMMED_S == 0
    if not by_minute:
        parameters["first"] = _first_key(connection, job_key, span.start)
    for query in (_EPISODES_BY_MINUTE if by_minute else _EPISODES, _GROUPS, _FAILURES, _WAITS):
        _fill(columns, connection.execute(query, parameters))
    return cast("SeriesColumns", columns)


def is_crowded(connection: Connection, job_key: int, span: Span) -> bool:
    """Returns True if a span has too many episodes to read them one by one."""
    if span.width_s % SUMMED_S == 0:
        return False
    query = (
        "SELECT count(*) FROM (SELECT 1 FROM trajectories INDEXED BY trajectories_to_look_at "
        "WHERE job_key = ? AND key >= ? LIMIT ?)"
    )
    first = _first_key(connection, job_key, span.start)
    (count,) = connection.execute(query, (job_key, first, MAX_EPISODES_ONE_BY_ONE + 1)).fetchone()
    return bool(count > MAX_EPISODES_ONE_BY_ONE)


def job_measures(connection: Connection, job_key: int, closed: Sequence[FinishedGroup]) -> dict[str, dict[str, float]]:
    """Returns the measures of a job over all its trajectories, by measure and statistic; unknown values are left out.

    ``closed`` are the groups that ``bias.closed_groups`` returns.

    ``reward`` has mean, min and max; ``success`` a mean over the episodes that report it; ``staleness`` (in
    weight versions), ``log_prob_gap`` and ``poll_wait_seconds`` mean and max; ``bias`` has those of ``bias_measures``;
    ``prompts`` has the results of the prompt checks (``PromptCounts``); ``forks`` and ``continued_turns`` have a sum
    over all sessions. Late trajectories do not count for reward, success and staleness.
    """
    measures: dict[str, dict[str, float]] = {}
    for query in (_MEASURES, _ALL_WAITS):
        for name, value in dict(connection.execute(query, {"job": job_key}).fetchone()).items():
            measured, _, statistic = name.rpartition("_")
            if value is not None:
                measures.setdefault(measured, {})[statistic] = float(value)
    if (prompts := prompt_rows.sums_of(connection, job_key)) is not None:
        measures["prompts"] = {name: float(count) for name, count in prompts.as_dict().items()}
    for counted in (prompt_rows.FORKS, prompt_rows.CONTINUED):
        if number := prompt_rows.number_of(connection, counted, job_key):
            measures[counted] = {"sum": float(number)}
    if gaps := trainer_rows.gap_statistics(connection, job_key):
        measures["log_prob_gap"] = gaps
    if bias := bias_measures(closed):
        measures["bias"] = bias
    return measures


def _fill(columns: dict[str, list[Any]], rows: Iterable[sqlite3.Row]) -> None:
    for row in rows:
        for name, value in dict(row).items():
            if name != "bucket":
                columns[name][row["bucket"]] = value


def _first_key(connection: Connection, job_key: int, start: float) -> int:
    """Finds the first trajectory written at ``start`` or later, by bisection: keys grow with time."""
    query = (
        "SELECT key, created_at FROM trajectories INDEXED BY trajectories_to_look_at "
        "WHERE job_key = ? AND key >= ? ORDER BY key LIMIT 1"
    )
    low, high = (_end_key(connection, job_key, function) for function in ("min", "max"))
    while low <= high:
        middle = (low + high) // 2
        row = connection.execute(query, (job_key, middle)).fetchone()
        if row is None or row["created_at"] >= start:
            high = middle - 1
        else:
            low = row["key"] + 1
    return int(low)


def _end_key(connection: Connection, job_key: int, function: str) -> int:
    """Returns the lowest or the highest key. If one query asked for both, SQLite would scan the whole index."""
    query = f"SELECT {function}(key) FROM trajectories INDEXED BY trajectories_to_look_at WHERE job_key = ?"
    return int(connection.execute(query, (job_key,)).fetchone()[0] or 0)


def last_delivery_at(connection: Connection, job_key: int) -> float | None:
    """Returns the time of a job's last delivery; None without one."""
    (last,) = connection.execute("SELECT max(created_at) FROM deliveries WHERE job_key = ?", (job_key,)).fetchone()
    return None if last is None else float(last)
