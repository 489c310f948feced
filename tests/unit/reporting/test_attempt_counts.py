"""How many attempts are in which state is kept beside them, and is right also in a database of the version before."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.storage.tables.attempt_rows import attempts_by_error
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from tests.support import start_external, written


def fail_some(buffer: Buffer, job: JobRecord, slots: int, code: str) -> None:
    """One attempt at each slot fails, and one more runs."""
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=9)
    for slot in range(slots):
        number = buffer.begin_attempt(job.fence, group, slot)
        assert number is not None
        buffer.fail_attempt(job.fence, group, slot, number, code=code, message="it hangs")
    buffer.begin_attempt(job.fence, group, 0)


def test_each_job_has_its_own_counts_and_a_new_runner_gives_up_what_ran(buffer: Buffer) -> None:
    one, other = (start_external(buffer, 3, ("a",), job_id=name) for name in ("one", "other"))
    fail_some(buffer, one, 2, "device")
    fail_some(buffer, one, 1, "engine")
    fail_some(buffer, other, 1, "device")
    buffer.begin_running(one.key)
    assert buffer.describe(one)["attempts"] == {"failed": 3, "failed:device": 2, "failed:engine": 1, "given_up": 2}
    assert buffer.describe(other)["attempts"] == {"failed": 1, "failed:device": 1, "running": 1}


def test_who_asks_does_not_go_through_the_attempts(buffer: Buffer) -> None:
    job = start_external(buffer, 3, ("a",))
    fail_some(buffer, job, 2, "device")
    asked: list[str] = []
    with buffer.store.read() as connection:
        connection.set_trace_callback(asked.append)
        attempts_by_error(connection, job.key)
        connection.set_trace_callback(None)
        plan = [row[3] for query in asked for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")]
    assert plan == ["SEARCH attempt_counts USING PRIMARY KEY (job_key=?)"]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_no_attempt_begins_once_its_job_is_over_so_none_runs_on_in_the_counts(buffer: Buffer, end: str) -> None:
    """A runner notices the end a moment later; nobody would end an attempt that it began meanwhile."""
    job = start_external(buffer, 3, ("a",))
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=9)
    buffer.begin_attempt(job.fence, group, 0)
    if end == "cancelled":
        buffer.change_job(job.job_id, "cancel")
    else:
        buffer.fail_job(job.key, "all of them fail alike")
    with pytest.raises(StaleAttemptError, match=end):
        buffer.begin_attempt(job.fence, group, 1)
    assert buffer.describe(job)["attempts"] == {"given_up": 1}


def test_a_job_that_is_finished_has_no_attempt_that_runs(buffer: Buffer) -> None:
    """Its group was filled by others while an attempt at it ran."""
    job = start_external(buffer, 1, ("a",))
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=9)
    buffer.begin_attempt(job.fence, group, 0)
    buffer.write_items(job.job_id, [wire.decode_written_item(written("u", "a"))])
    assert buffer.finish_if_done(job.key)
    assert buffer.describe(job)["attempts"] == {"given_up": 1}
