"""Rows of ``plans``: the planned groups of a job's input. A group gets a row when it is opened or skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.storage.tables.connection import Connection, as_record, update_row


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """A row of ``plans``: each line of the input is one group per epoch.

    ``passed`` counts the groups, in playing order, that are known to have rows. ``unopened`` groups have no row yet.
    ``skipped`` groups were skipped and never get a row.
    """

    job_key: int
    first_position: int
    lines: int
    epochs: int
    digest: str
    passed: int
    unopened: int
    skipped: int


def put_plan(
    connection: Connection, job_key: int, *, first_position: int, lines: int, epochs: int, digest: str, unopened: int
) -> None:
    """Adds the plan of a job, or replaces a plan without unopened groups."""
    connection.execute(
        "INSERT OR REPLACE INTO plans (job_key, first_position, lines, epochs, digest, unopened) "
        "VALUES (?, ?, ?, ?, ?, ?)",
        (job_key, first_position, lines, epochs, digest, unopened),
    )


def find_plan(connection: Connection, job_key: int) -> PlanRecord | None:
    """Returns the plan of a job; None if the job has no input."""
    row = connection.execute("SELECT * FROM plans WHERE job_key = ?", (job_key,)).fetchone()
    return None if row is None else as_record(PlanRecord, row)


def update_plan(connection: Connection, job_key: int, **columns: Any) -> None:
    update_row(connection, "plans", job_key, columns, by="job_key")


def skip_unopened(connection: Connection, job_key: int) -> None:
    """Skips all groups of a job that have no row."""
    query = "UPDATE plans SET skipped = skipped + unopened, unopened = 0 WHERE job_key = ?"
    connection.execute(query, (job_key,))
