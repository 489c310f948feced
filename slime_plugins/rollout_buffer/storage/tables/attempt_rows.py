"""Rows of ``attempts`` and ``failed_transcripts``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_plugins.rollout_buffer.rules.attempt_uid import AttemptUid
from slime_plugins.rollout_buffer.rules.job_states import FailedAttempts
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import AttemptState

MAX_TRANSCRIPTS = 100
"""Number of a job's newest transcripts that are kept: a job whose attempts all fail must not fill the disk."""
_IS_OPEN_SESSION = "attempts.state = 'running' AND idle_timeout_s IS NOT NULL"
"""Selects open sessions of the gateway in SQL."""
ATTEMPT_KEY = "group_key = :group_key AND slot = :slot AND attempt = :attempt"
"""Identifies an attempt in SQL."""


def insert_attempt(
    connection: Connection, group_key: int, slot: int, fence: int, now: float, *, idle_timeout_s: float | None = None
) -> int:
    """Adds the next attempt at a slot and returns its number, from 1. Only gateway sessions have an idle timeout."""
    query = "SELECT coalesce(max(attempt), 0) + 1 FROM attempts WHERE group_key = ? AND slot = ?"
    attempt = int(connection.execute(query, (group_key, slot)).fetchone()[0])
    connection.execute(
        "INSERT INTO attempts (group_key, slot, attempt, fence, state, started_at, idle_timeout_s) "
        "VALUES (?, ?, ?, ?, 'running', ?, ?)",
        (group_key, slot, attempt, fence, now, idle_timeout_s),
    )
    return attempt


def running_since(connection: Connection, group_key: int, slot: int, attempt: int) -> float | None:
    """Returns the start time of an attempt; None if the attempt is not running."""
    query = "SELECT started_at FROM attempts WHERE group_key = ? AND slot = ? AND attempt = ? AND state = 'running'"
    row = connection.execute(query, (group_key, slot, attempt)).fetchone()
    return None if row is None else float(row[0])


def end_attempt(
    connection: Connection,
    group_key: int,
    slot: int,
    attempt: int,
    state: AttemptState,
    now: float,
    error: tuple[str, str] | None,
) -> None:
    """Ends an attempt; ``error`` is (code, message) when it failed."""
    code, message = error or (None, None)
    connection.execute(
        "UPDATE attempts SET state = ?, ended_at = ?, error_code = ?, error_message = ? "
        "WHERE group_key = ? AND slot = ? AND attempt = ?",
        (state.value, now, code, message, group_key, slot, attempt),
    )


def insert_transcript(
    connection: Connection, job_key: int, group_key: int, slot: int, attempt: int, messages: bytes, now: float
) -> None:
    """Adds the messages of a failed attempt; deletes all but the newest ``MAX_TRANSCRIPTS`` of the job."""
    connection.execute(
        "INSERT OR IGNORE INTO failed_transcripts (job_key, group_key, slot, attempt, kept_at, messages) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (job_key, group_key, slot, attempt, now, messages),
    )
    connection.execute(
        "DELETE FROM failed_transcripts WHERE job_key = :job AND key <= (SELECT key FROM failed_transcripts "
        "WHERE job_key = :job ORDER BY key DESC LIMIT 1 OFFSET :most)",
        {"job": job_key, "most": MAX_TRANSCRIPTS},
    )


def purge_transcripts(connection: Connection, before: float) -> int:
    """Deletes transcripts older than a time; returns their number."""
    return connection.execute("DELETE FROM failed_transcripts WHERE kept_at < ?", (before,)).rowcount


def give_up_running_attempts(connection: Connection, job_key: int, now: float) -> int:
    """Gives up all running attempts of a job, so that their results are refused; returns their number."""
    return connection.execute(
        "UPDATE attempts SET state = 'given_up', ended_at = ? WHERE state = 'running' AND group_key IN "
        "(SELECT key FROM groups WHERE job_key = ?)",
        (now, job_key),
    ).rowcount


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotUse:
    """Whether a slot has a trajectory, whether an attempt at the slot is running, and how many attempts failed."""

    filled: bool = False
    running: bool = False
    failures: int = 0


def slot_uses(connection: Connection, group_key: int) -> dict[int, SlotUse]:
    """Returns the state of each slot with an attempt or a trajectory."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """An attempt. ``reward`` is the reward of its trajectory, None if it has no trajectory."""

    state: AttemptState
    started_at: float
    idle_timeout_s: float | None
    error_code: str | None
    error_message: str | None
    reward: float | None


def find_attempt(connection: Connection, group_key: int, slot: int, attempt: int) -> AttemptRecord | None:
    """Returns an attempt with the reward of its trajectory."""
    query = (
        "SELECT a.state, started_at, idle_timeout_s, error_code, error_message, reward "
        "FROM attempts a LEFT JOIN trajectories t "
        "ON t.group_key = a.group_key AND t.slot = a.slot AND t.attempt = a.attempt "
        "WHERE a.group_key = ? AND a.slot = ? AND a.attempt = ?"
    )
    row = connection.execute(query, (group_key, slot, attempt)).fetchone()
    return None if row is None else AttemptRecord(**{**dict(row), "state": AttemptState(row["state"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSession:
    """A running attempt of a gateway session. ``takes_turns`` is False if its group is closed."""

    uid: AttemptUid
    started_at: float
    idle_timeout_s: float
    used_at: float
    takes_turns: bool


def open_sessions(connection: Connection) -> list[OpenSession]:
    """Returns the running attempts of gateway sessions, oldest first."""
    query = (
        "SELECT job_key, epoch, position, slot, attempt, started_at, idle_timeout_s, coalesce(used_at, started_at), "
        "groups.state = 'open' FROM attempts JOIN groups ON groups.key = group_key "
        f"WHERE {_IS_OPEN_SESSION} ORDER BY started_at"
    )
    return [
        OpenSession(
            uid=AttemptUid(job_key=row[0], epoch=row[1], position=row[2], slot=row[3], attempt=row[4]),
            started_at=row[5],
            idle_timeout_s=row[6],
            used_at=row[7],
            takes_turns=bool(row[8]),
        )
        for row in connection.execute(query)
    ]


def count_open_sessions(connection: Connection) -> int:
    return int(connection.execute(f"SELECT count(*) FROM attempts WHERE {_IS_OPEN_SESSION}").fetchone()[0])


def touch(connection: Connection, keys: Sequence[Mapping[str, int]], now: float) -> None:
    """Sets the time of last use of sessions, which are named by the columns of ``ATTEMPT_KEY``."""
    query = f"UPDATE attempts SET used_at = :now WHERE {ATTEMPT_KEY}"
    connection.executemany(query, [{**key, "now": now} for key in keys])


def touch_all(connection: Connection, now: float) -> None:
    """Sets the time of last use of all open sessions."""
    connection.execute(f"UPDATE attempts SET used_at = ? WHERE {_IS_OPEN_SESSION}", (now,))


def set_refusal(connection: Connection, key: Mapping[str, int], refusal: str) -> None:
    """Stores why the latest request of a session got no turn."""
    connection.execute(f"UPDATE attempts SET refusal = :refusal WHERE {ATTEMPT_KEY}", {**key, "refusal": refusal})


def session_state(connection: Connection, key: Mapping[str, int]) -> tuple[bool, str | None]:
    """Returns whether a session takes turns, and the refusal of its latest request."""
    query = (
        "SELECT attempts.state = 'running' AND groups.state = 'open', refusal "
        f"FROM attempts JOIN groups ON groups.key = group_key WHERE {ATTEMPT_KEY}"
    )
    takes_turns, refusal = connection.execute(query, key).fetchone()
    return bool(takes_turns), refusal


def max_failures_of_a_slot(connection: Connection, job_key: int) -> int:
    """Returns the largest number of failed attempts of an open slot."""
    query = (
        "SELECT coalesce(max(failures), 0) FROM (SELECT sum(attempts.state = 'failed') AS failures FROM attempts "
        "JOIN groups ON groups.key = group_key WHERE job_key = ? AND groups.state = 'open' "
        "AND NOT EXISTS (SELECT 1 FROM trajectories t WHERE t.group_key = groups.key AND t.slot = attempts.slot "
        "AND t.late = 0) GROUP BY group_key, slot)"
    )
    return int(connection.execute(query, (job_key,)).fetchone()[0])


def attempts_by_error(connection: Connection, job_key: int) -> dict[tuple[AttemptState, str], int]:
    """Counts the attempts of a job by (state, error code); the code of an attempt without an error is empty."""
    query = "SELECT state, error_code, attempts FROM attempt_counts WHERE job_key = ? AND attempts > 0"
    return {(AttemptState(row[0]), row[1]): row[2] for row in connection.execute(query, (job_key,))}


def failed_attempts(connection: Connection, job_key: int) -> FailedAttempts | None:
    """Counts attempts that failed in the trainer's present run, with the most frequent error; None if none failed."""
    of_this_run = (
        "JOIN groups ON groups.key = group_key JOIN jobs ON jobs.key = job_key "
        "WHERE job_key = ? AND ended_at >= coalesce(run_began_at, 0) AND attempts.state ="
    )
    errors = connection.execute(
        f"SELECT error_code, error_message, count(*) FROM attempts INDEXED BY attempts_failed {of_this_run} 'failed' "
        "GROUP BY error_code, error_message ORDER BY count(*) DESC, max(ended_at) DESC",
        (job_key,),
    ).fetchall()
    if not errors:
        return None
    by_code: Counter[str] = Counter()
    for code, _, count in errors:
        by_code[code] += count
    ((code, of_code),) = by_code.most_common(1)
    failed = by_code.total()
    finished = connection.execute(f"SELECT count(*) FROM attempts {of_this_run} 'finished'", (job_key,)).fetchone()[0]
    message = next(str(row[1] or "") for row in errors if row[0] == code)
    return FailedAttempts(failed=failed, ended=failed + finished, code=code, of_code=of_code, message=message[:500])


def count_attempts(connection: Connection, job_key: int) -> dict[str, int]:
    """Counts the attempts of a job by state, and by ``state:error code``."""
    counted: dict[str, int] = {}
    for (state, code), count in attempts_by_error(connection, job_key).items():
        counted[state.value] = counted.get(state.value, 0) + count
        if code:
            counted[f"{state.value}:{code}"] = count
    return counted
