"""Counts of attempts by state: none is counted as running once its job is over."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from tests.support import start_external


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_no_attempt_begins_once_its_job_is_over_so_none_is_counted_as_running(buffer: Buffer, end: str) -> None:
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
