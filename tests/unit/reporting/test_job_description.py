"""What became of a job's attempts and groups, as the job, its metrics and its explanation say it."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.trainer.metrics import job_metrics
from tests.support import poll, start_external, write, written


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


def test_a_job_that_drops_its_slow_groups_says_so_everywhere(buffer: Buffer, clock: SettableClock) -> None:
    quick, slow = [f"q{i}" for i in range(24)], [f"s{i}" for i in range(8)]
    job = start_external(buffer, ids=(*quick, *slow), max_weight_version_lag=1)

    def write_member(name: str, member: int, version: int) -> None:
        said = {"generations": [{"prompt_ids": [1], "output_ids": [2], "weight_version": str(version)}]}
        item = written(f"{name}-{member}", name, reward=member, extra_info={"success": True, "turns": 3}, **said)
        assert write(buffer, job, item) == ["stored"]

    for name in slow:
        write_member(name, 0, 1)
    for version, name in enumerate(quick, 1):
        write_member(name, 0, version)
        clock.advance(1 + version / 100)
        write_member(name, 1, version)
        assert poll(buffer, job, weight_version=version) is not None
    clock.advance(100)
    for name in slow:
        write_member(name, 1, 24)
    assert poll(buffer, job, weight_version=24) is None

    described = describe_job(buffer.store, job)
    rows = {(row.by, row.name): row for row in described["bias"]}
    slowest, solved = rows["duration", "slowest quarter"], rows["success", "solved"]
    assert (slowest.submitted, slowest.trained) == (16, 8)
    assert (solved.submitted, solved.trained, solved.given_up) == (64, 48, 0)
    assert described["measures"]["bias"]["slowest"] == pytest.approx(2 / 3)
    assert described["measures"]["bias"]["duration"] == pytest.approx(1 / 12)
    assert job_metrics(described)["rollout/bias/duration"] == described["measures"]["bias"]["duration"]
    said = Views(buffer.store, "supervisor", clock=clock).explanation(job.job_id)["explanation"]
    sentences = {one.code: one.message for one in said}
    assert sentences["slow_tasks_lost"].startswith("Slow tasks are trained less: 0% of the slowest quarter")
