"""Rows of ``prompt_sums``, the prompt checks of a job, and rows of ``counters`` for its forks and continued turns."""

from __future__ import annotations

from dataclasses import asdict, fields

from slime_plugins.rollout_buffer.rules.prompt_receipts import PromptCounts
from slime_plugins.rollout_buffer.storage.tables.connection import Connection

FORKS = "forks"
"""Branches of closed sessions."""
CONTINUED = "continued_turns"
"""Turns that were continued after their engine had broken off its stream."""
_NAMES = [field.name for field in fields(PromptCounts)]


def add_counts(connection: Connection, job_key: int, counts: PromptCounts) -> None:
    """Adds the counts of a trajectory to its job's sums."""
    connection.execute(
        f"INSERT INTO prompt_sums (job_key, {', '.join(_NAMES)}) VALUES (:job_key, :{', :'.join(_NAMES)}) "
        f"ON CONFLICT (job_key) DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in _NAMES)}",
        {"job_key": job_key, **asdict(counts)},
    )


def sums_of(connection: Connection, job_key: int) -> PromptCounts | None:
    """Returns the sums over a job's trajectories; None if none has a prompt receipt."""
    query = f"SELECT {', '.join(_NAMES)} FROM prompt_sums WHERE job_key = ?"
    row = connection.execute(query, (job_key,)).fetchone()
    return None if row is None else PromptCounts(**dict(zip(_NAMES, row, strict=True)))


def add(connection: Connection, counted: str, job_key: int, number: int) -> None:
    """Adds a number to a count of a job: ``counted`` is ``FORKS`` or ``CONTINUED``."""
    query = "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET last = last + excluded.last"
    connection.execute(query, (f"{counted} of job {job_key}", number))


def number_of(connection: Connection, counted: str, job_key: int) -> int:
    """Returns a count of a job: ``counted`` is ``FORKS`` or ``CONTINUED``."""
    row = connection.execute("SELECT last FROM counters WHERE name = ?", (f"{counted} of job {job_key}",)).fetchone()
    return 0 if row is None else int(row[0])
