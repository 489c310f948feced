"""A job that gives the trainer nothing says so: it fails with the commonest error, stops early, and can begin again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import DeviceError, EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.causes import CountedCause, Shortfall, not_valid, too_short
from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS
from slime_plugins.rollout_buffer.rules.job_states import ending_of
from slime_plugins.rollout_buffer.runner import job_runner
from slime_plugins.rollout_buffer.types import EpisodeRequest, GroupState, JobState
from tests.support import slot_counts
from tests.unit.runner.test_runner import ScriptedGenerator, by_slot, run, start


@pytest.fixture
def quick(real_time_buffer: Buffer) -> Buffer:
    return real_time_buffer


def explanation(buffer: Buffer, job_id: str) -> dict[str, str]:
    return {one.code: one.message for one in Views(buffer.store, "supervisor").explanation(job_id)["explanation"]}


def no_label(episode: EpisodeRequest) -> Exception:
    return ValueError("the item has no label")


async def test_a_job_of_which_every_attempt_failed_is_failed_and_says_with_what(quick: Buffer) -> None:
    job = start(quick, count=3, num_repeat_per_sample=4, stop_after_failures=0)
    await run(quick, job, ScriptedGenerator(no_label))
    found = quick.job(job.job_id)
    assert found.state is JobState.FAILED
    assert re.fullmatch(r"36 of 36 attempts failed: .*, line \d+: ValueError: the item has no label", found.cause)
    assert slot_counts(quick, job)["failed"] == 12
    assert found.cause in explanation(quick, job.job_id)["failed"]


@pytest.mark.parametrize("error", [ValueError("no label"), DeviceError("gone")])
async def test_sixteen_failures_of_one_kind_stop_a_job(quick: Buffer, error: Exception) -> None:
    job = start(quick, count=50, num_repeat_per_sample=4, num_process=4)
    generator = ScriptedGenerator(lambda episode: error)
    await run(quick, job, generator)
    found = quick.job(job.job_id)
    assert found.state is JobState.FAILED
    assert str(error) in found.cause
    assert "stopped after 16 failures of one kind in a row (stop_after_failures)" in found.cause
    assert 16 <= len(generator.requests) < 16 + 4
    assert "running" not in describe_job(quick.store, job)["attempts"]
    assert slot_counts(quick, job)["open"] > 100, "what was not tried stays open"


async def test_a_success_between_failures_lets_the_job_go_on(quick: Buffer) -> None:
    job = start(quick, count=20, num_process=1, max_attempts=2, min_timeout_group_size_ratio=0)
    generator = ScriptedGenerator(lambda e: DeviceError("gone") if e.slot else 1.0)
    await run(quick, job, generator)
    assert quick.job(job.job_id).state is JobState.FINISHED
    assert len(generator.requests) == 60


@pytest.mark.parametrize("results", [True, False])
async def test_an_evaluation_stops_only_while_it_has_no_result(quick: Buffer, results: bool) -> None:
    job = start(quick, count=20, num_process=1, evaluation=True, max_attempts=1)
    generator = ScriptedGenerator(lambda e: 1.0 if results and e.instance.instance_id == "i0" else DeviceError("gone"))
    await run(quick, job, generator)
    found = quick.job(job.job_id)
    assert found.state is (JobState.FINISHED if results else JobState.FAILED)
    assert len(generator.requests) == (40 if results else 16)


async def test_one_instance_alone_does_not_stop_a_job(quick: Buffer) -> None:
    job = start(quick, count=2, num_repeat_per_sample=8, num_process=1)
    generator = ScriptedGenerator(lambda e: DeviceError("gone") if e.instance.instance_id == "i0" else by_slot(e))
    await run(quick, job, generator)
    assert quick.job(job.job_id).state is JobState.FINISHED
    assert (slot_counts(quick, job)["failed"], slot_counts(quick, job)["ready"]) == (8, 8)


async def test_failures_of_different_kinds_are_no_streak(quick: Buffer) -> None:
    errors = [DeviceError("gone"), EnvironmentSetupError("no such task")]
    job = start(quick, count=10, num_process=1)
    generator = ScriptedGenerator(lambda e: errors[len(generator.requests) % 2])
    await run(quick, job, generator)
    assert len(generator.requests) == 60
    cause = quick.job(job.job_id).cause
    assert cause.startswith("60 of 60 attempts failed, 30 of them with ")


async def test_starting_a_failed_job_again_begins_anew_with_what_failed(quick: Buffer) -> None:
    job = start(quick, count=3, stop_after_failures=0)
    await run(quick, job, ScriptedGenerator(no_label))
    again = start(quick, count=3, stop_after_failures=0)
    assert (again.key, again.state, again.cause) == (job.key, JobState.RUNNING, "")
    generator = ScriptedGenerator(by_slot)
    await run(quick, again, generator)
    assert quick.job(job.job_id).state is JobState.FINISHED
    assert (len(generator.requests), slot_counts(quick, job)["ready"]) == (6, 6)


async def test_a_job_that_was_started_again_names_only_the_failures_since(quick: Buffer) -> None:
    job = start(quick, count=3, stop_after_failures=0)
    await run(quick, job, ScriptedGenerator(no_label))
    start(quick, count=3, stop_after_failures=0)
    assert not [code for code in explanation(quick, job.job_id) if code.startswith("failing_")]
    await run(quick, job, ScriptedGenerator(lambda episode: KeyError("a second bug") if episode.slot else 1.0))
    assert re.fullmatch(r"9 of 12 attempts failed: .* KeyError: 'a second bug'", quick.job(job.job_id).cause)


async def test_a_plain_generator_that_writes_nothing_fails_its_job(quick: Buffer, tmp_path: Path) -> None:
    job = start(quick, count=2)
    plugin = Plugin(
        task_type="scripted", source=Path("scripted.py"), needs_ray=False, reward_range=None,
        functions=DEFAULT_FUNCTIONS, run_rollout=lambda data: None,
    )  # fmt: skip
    await job_runner.JobRunner(quick, job.key, plugin, buffer_url="http://127.0.0.1:9").run()
    found = quick.job(job.job_id)
    assert found.state is JobState.FAILED
    assert found.cause == f"none of 2 groups could be delivered: {too_short(0, 2, Shortfall.NOT_WRITTEN).message}"


async def test_a_job_whose_groups_were_all_filtered_says_so(quick: Buffer) -> None:
    job = start(quick, count=3)
    await run(quick, job, ScriptedGenerator(lambda episode: 1.0))
    found = quick.job(job.job_id)
    assert found.state is JobState.FINISHED
    assert found.cause == f"all 3 groups were filtered: {not_valid([1.0, 1.0], is_custom=False).message}"
    told = explanation(quick, job.job_id)["nothing_delivered"]
    assert "no group could be delivered: all 3 groups were filtered" in told


@pytest.mark.parametrize(
    ("groups", "count", "told"),
    [
        (3, 3, "all 3 groups were filtered"),
        (3, 2, "all 3 groups were filtered, 2 of them"),
        (1, 1, "the only group was filtered"),
    ],
)
def test_a_job_names_the_commonest_cause_and_of_how_many_groups_it_is(groups: int, count: int, told: str) -> None:
    most = CountedCause(not_valid([1.0, 1.0], is_custom=False), count)
    _, cause = ending_of({GroupState.FILTERED: groups}, {GroupState.FILTERED: most}, None)
    assert cause.message == f"{told}: {most.cause.message}"
