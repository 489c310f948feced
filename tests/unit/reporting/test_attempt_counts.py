"""How many attempts are in which state is kept beside them, and is right also in a database of the version before."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from tests.support import start_external


def fail_some(buffer: Buffer, job: JobRecord, slots: int, code: str) -> None:
    """One attempt at each slot fails, and one more runs."""
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=9)
    for slot in range(slots):
        number = buffer.begin_attempt(job.fence, group, slot)
        assert number is not None
        buffer.fail_attempt(job.fence, group, slot, number, AttemptFailure(code=code, message="it hangs"))
    buffer.begin_attempt(job.fence, group, 0)


def test_each_job_has_its_own_counts_and_a_new_runner_gives_up_what_ran(buffer: Buffer) -> None:
    one, other = (start_external(buffer, 3, ("a",), job_id=name) for name in ("one", "other"))
    fail_some(buffer, one, 2, "device")
    fail_some(buffer, one, 1, "engine")
    fail_some(buffer, other, 1, "device")
    buffer.begin_running(one.key)
    assert describe_job(buffer.store, one)["attempts"] == {
        "failed": 3,
        "failed:device": 2,
        "failed:engine": 1,
        "given_up": 2,
    }
    assert describe_job(buffer.store, other)["attempts"] == {"failed": 1, "failed:device": 1, "running": 1}


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
    assert describe_job(buffer.store, job)["attempts"] == {"given_up": 1}
