"""Weight versions are ordered within one run of the trainer: one that resumes counts from 0 again."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.causes import STALE
from slime_plugins.rollout_buffer.rules.weight_versions import MAX_STEP, KnownVersions, VersionOrigin, origin_of
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Generation
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload
from slime_plugins.rollout_buffer.wire.request_fields import parse
from tests.support import poll, start_external, start_played, trajectory, uids, write, written

TIMESTAMP = 1_763_800_000


def start(buffer: Buffer, **changes: Any) -> JobRecord:
    return start_external(buffer, job_id="j", max_weight_version_lag=2, **changes)


def write_group(buffer: Buffer, job: JobRecord, name: str, *versions: int | str) -> None:
    """One group with two members, sampled by these versions in turn."""
    for i in (0, 1):
        version = versions[i % len(versions)]
        generation = {"prompt_ids": [1], "output_ids": [2], "finish_reason": "stop", "weight_version": version}
        write(buffer, job, written(f"{name}{i}", name, reward=i, generations=[generation]))


def explanation_codes(buffer: Buffer) -> dict[str, str]:
    views = Views(buffer.store, "supervisor")
    return {one.code: one.message for one in views.explanation("j")["explanation"]}


def test_within_the_new_run_old_weights_are_stale_as_ever(buffer: Buffer, clock: SettableClock) -> None:
    job = start(buffer)
    write_group(buffer, job, "old", 50)
    clock.advance(1)
    start(buffer)
    write_group(buffer, job, "a", 0)
    write_group(buffer, job, "b", 3)
    assert uids(buffer, poll(buffer, job)) == ["b0", "b1"]
    causes = describe_job(buffer.store, job)["causes"]["filtered"]
    assert causes == {STALE.message: 2}, "the group of the run before is at least as old as this run"
    assert (
        "more than 2 versions behind the newest, which is 3 in the trainer's run 2"
        in explanation_codes(buffer)["stale_groups"]
    )


def test_a_straggler_of_the_last_run_does_not_make_the_new_one_stale(buffer: Buffer, clock: SettableClock) -> None:
    job = start(buffer)
    write_group(buffer, job, "old", 50)
    clock.advance(1)
    start(buffer)
    write_group(buffer, job, "late", 50)
    write_group(buffer, job, "a", 0)
    write_group(buffer, job, "later", 49)
    assert uids(buffer, poll(buffer, job)) == ["old0", "old1", "late0", "late1", "a0", "a1", "later0", "later1"]
    assert buffer.job("j").weight_version == 0


def test_an_attempt_that_began_before_the_trainer_resumed_belongs_to_the_run_before(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_played(buffer, job_id="j", max_weight_version_lag=1)
    fence = buffer.begin_running(job.key)
    (group,) = buffer.open_groups(job.key, after=(-1, -1), limit=9)
    attempt = buffer.begin_attempt(fence, group, 0)
    assert attempt == 1
    clock.advance(1)
    start_played(buffer, job_id="j", max_weight_version_lag=1)
    turn = Generation([1], [2], finish_reason="stop", weight_version="5")
    buffer.add_trajectory(fence, group, 0, attempt, trajectory("u", generations=[turn]))
    assert buffer.job("j").weight_version is None


def test_a_poll_with_a_timestamp_as_version_counts_alone(buffer: Buffer) -> None:
    job = start(buffer)
    write_group(buffer, job, "a", 3)
    for _ in range(3):
        buffer.take(job, parse(PollPayload, {"weight_version": TIMESTAMP, "lease_s": 1}))
    assert buffer.job("j").weight_version == 3
    assert (buffer.job("j").lone_versions, buffer.job("j").lone_version) == (1, TIMESTAMP)
    assert describe_job(buffer.store, job)["slots"]["filtered"] == 0


def test_a_run_may_begin_at_the_number_of_its_last_step(buffer: Buffer) -> None:
    job = start(buffer)
    write_group(buffer, job, "a", 250_000)
    write_group(buffer, job, "b", 250_000 + MAX_STEP)
    assert uids(buffer, poll(buffer, job)) == ["b0", "b1"]


@given(
    known=st.builds(
        KnownVersions,
        trainer_run=st.just(2),
        began_at=st.none() | st.just(100.0),
        newest=st.none() | st.integers(0, 2000),
        newest_before=st.none() | st.integers(0, 2000),
    ),
    version=st.integers(0, 2**62),
    attempt_began_at=st.none() | st.floats(0, 200),
)
def test_no_version_raises_the_newest_by_more_than_a_step(
    known: KnownVersions, version: int, attempt_began_at: float | None
) -> None:
    standing = origin_of(version, known, attempt_began_at=attempt_began_at)
    if standing is VersionOrigin.OF_THIS_RUN and known.newest is not None:
        assert version <= known.newest + MAX_STEP
    if version in (0, 1) and attempt_began_at is None:
        assert standing is VersionOrigin.OF_THIS_RUN, "a trainer that resumes is believed"
