"""A job's event loop with a scripted generator: what goes right, what breaks, and what others do to the job."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from rollout_buffer_lab.scripted_engine import server as scripted_engine
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import DamagedError, DeviceError, InvalidPayloadError, JudgeError
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.reporting.failed_attempts import failed_attempts
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.causes import Shortfall, too_short
from slime_plugins.rollout_buffer.runner import (
    attempt_timeout,
    concurrency,
    main,
    played_job,
)
from slime_plugins.rollout_buffer.runner import job_runner as runner
from slime_plugins.rollout_buffer.runner.job_runner import JobRunner
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.state.runner_reports import store_concurrency
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, JobState, Outcome, Trajectory
from slime_plugins.rollout_buffer.wire.query_params import AttemptPageQuery
from tests import support
from tests.support import (
    begun_attempt,
    delivered_items,
    poll,
    polled_delivery,
    slot_counts,
    start_played,
    trajectory,
    uids,
    write,
    written,
)
from tests.waiting import until

Play = Callable[[EpisodeRequest], Any]


class ScriptedGenerator:
    """Plays what a function says: a reward, an exception to raise, or a trajectory. Counts what is asked of it."""

    def __init__(self, play: Play, *, start_error: Exception | None = None) -> None:
        self._play = play
        self._start_error = start_error
        self.requests: list[EpisodeRequest] = []
        self.tokenizers: list[Any] = []
        self.input: list[Instance] = []
        self.running = 0
        self.most_at_once = 0
        self.closed = 0

    async def start(self, context: GeneratorContext) -> None:
        self.tokenizers.append(context.tokenizer)
        self.input = await asyncio.to_thread(lambda: list(context.read_instances()))
        if self._start_error is not None:
            raise self._start_error

    async def play(self, episode: EpisodeRequest) -> Trajectory:
        self.requests.append(episode)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            answer = self._play(episode)
            if asyncio.iscoroutine(answer):
                answer = await answer
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Trajectory) else trajectory_for(episode, answer)

    async def close(self) -> None:
        self.closed += 1


def trajectory_for(episode: EpisodeRequest, reward: float) -> Trajectory:
    return trajectory(episode.uid, episode.instance.instance_id, reward)


def start(buffer: Buffer, count: int = 2, **changes: Any) -> JobRecord:
    return start_played(buffer, [f"i{number}" for number in range(count)], **{"task_type": "scripted", **changes})


def plugin_of(generator: ScriptedGenerator, **changes: Any) -> Plugin:
    plugin = support.plugin_of("scripted", lambda: generator, reward_range=(0.0, 1.0))
    return dataclasses.replace(plugin, **changes)


async def run(buffer: Buffer, job: JobRecord, generator: ScriptedGenerator, **changes: Any) -> None:
    job_runner = JobRunner(buffer, job.key, plugin_of(generator, **changes), buffer_url="http://127.0.0.1:9")
    await asyncio.wait_for(job_runner.run(), 50)


def by_slot(episode: EpisodeRequest) -> float:
    return float(episode.slot % 2)


async def test_with_automatic_concurrency_every_slot_is_played_once_and_the_limit_is_reported(
    real_time_buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "SAMPLE_INTERVAL_S", 0.01)
    monkeypatch.setattr(concurrency, "MIN_WINDOW_S", 0.02)
    job = start(real_time_buffer, count=60, num_process="auto", num_process_max=40)
    generator = ScriptedGenerator(lambda episode: _after(0.01, by_slot(episode)))
    said = []

    def keep(store: Store, job_key: int, pid: int, **more: Any) -> None:
        said.append(more["limit"])
        store_concurrency(store, job_key, pid, **more)

    monkeypatch.setattr(runner, "store_concurrency", keep)
    await run(real_time_buffer, job, generator)
    assert len(generator.requests) == len({request.uid for request in generator.requests}) == 120
    assert [instance.instance_id for instance in generator.input] == [f"i{number}" for number in range(60)]
    assert generator.most_at_once <= 40
    assert said
    assert all(2 <= limit <= 40 for limit in said)


async def _after(seconds: float, reward: float) -> float:
    await asyncio.sleep(seconds)
    return reward


async def test_messages_of_a_failed_attempt_can_be_read_and_are_never_trained(
    real_time_buffer: Buffer,
) -> None:
    def play(episode: EpisodeRequest) -> Any:
        episode.transcript.append({"role": "user", "content": f"try {episode.attempt}"})
        failures = {1: DeviceError("hung"), 2: KeyError("x")}
        return failures.get(episode.attempt, by_slot(episode))

    job = start(real_time_buffer, count=1, num_repeat_per_sample=1)
    await run(real_time_buffer, job, ScriptedGenerator(play))
    page: Any = failed_attempts(real_time_buffer.store, job.job_id, AttemptPageQuery(transcripts=True))
    told = [(one["attempt"], one["error_code"], one["messages"][0]["content"]) for one in page["attempts"]]
    assert told == [(2, "generator", "try 2"), (1, "device", "try 1")]
    raised, broke = (one["traceback"] for one in page["attempts"])
    assert raised.startswith("Traceback (most recent call last):\n  File")
    assert raised.endswith("KeyError: 'x'")
    assert "episode_runner.py" not in raised
    assert broke is None
    assert re.fullmatch(r".*\.py, line \d+: KeyError: 'x'", page["attempts"][0]["error_message"])
    assert page["log"] == f"{real_time_buffer.store.data_dir}/logs/runner-{job.key}.log"
    assert len(uids(real_time_buffer, poll(real_time_buffer, job))) == 1


async def test_an_episode_that_was_aborted_or_not_judged_has_no_reward_and_is_tried_again(
    real_time_buffer: Buffer,
) -> None:
    job = start(real_time_buffer, count=1)

    def play(episode: EpisodeRequest) -> Any:
        if episode.attempt > 1:
            return by_slot(episode)
        aborted = dataclasses.replace(trajectory_for(episode, 0.0), outcome=Outcome.ABORTED)
        return JudgeError("it was killed") if episode.slot else aborted

    await run(real_time_buffer, job, ScriptedGenerator(play))
    described = describe_job(real_time_buffer.store, job)
    assert described["attempts"] == {"failed": 2, "failed:episode": 1, "failed:judge": 1, "finished": 2}
    assert described["outcomes"] == {"completed": 2}
    delivered = delivered_items(real_time_buffer, polled_delivery(real_time_buffer, job))
    assert [light["reward"] for light, _ in delivered] == [0.0, 1.0]


async def test_what_a_play_changes_in_its_input_line_is_not_seen_by_another_play(real_time_buffer: Buffer) -> None:
    seen = []

    def play(episode: EpisodeRequest) -> float | Exception:
        seen.append(cast("dict[str, Any]", episode.instance.data).pop("instance_id", None))
        return DeviceError("once") if episode.attempt == 1 else by_slot(episode)

    await run(real_time_buffer, start(real_time_buffer, count=1), ScriptedGenerator(play))
    assert seen == ["i0"] * 4


async def test_rewards_of_numpy_are_stored_as_numbers(real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer, count=1)
    half: Any = np.float32(0.5)
    await run(
        real_time_buffer, job, ScriptedGenerator(lambda e: trajectory(e.uid, "i0", e.slot * half, raw_reward=half))
    )
    delivered = delivered_items(real_time_buffer, polled_delivery(real_time_buffer, job))
    assert [(light["reward"], light["raw_reward"]) for light, _ in delivered] == [(0.0, 0.5), (0.5, 0.5)]


async def test_a_slot_that_always_fails_is_given_up_and_the_group_fails_or_is_padded(real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer, count=2, num_repeat_per_sample=4, max_attempts=2, min_timeout_group_size_ratio=0.7)
    bad = {("i0", 0), ("i1", 0), ("i1", 1)}
    generator = ScriptedGenerator(
        lambda e: DeviceError("dead") if (e.instance.instance_id, e.slot) in bad else by_slot(e)
    )
    await run(real_time_buffer, job, generator)
    accounting = slot_counts(real_time_buffer, job)
    assert (accounting["ready"], accounting["failed"]) == (4, 4)
    assert describe_job(real_time_buffer.store, job)["causes"] == {
        "failed": {too_short(2, 4, Shortfall.SLOTS_FAILED).message: 1}
    }
    delivered = delivered_items(real_time_buffer, polled_delivery(real_time_buffer, job))
    assert [light["remove_sample"] for light, _ in delivered] == [False, False, False, True]


@pytest.mark.parametrize("stop", [True, False])
async def test_a_group_that_fails_whatever_still_comes_is_given_up_when_asked_to(
    real_time_buffer: Buffer, stop: bool
) -> None:
    """Two of four slots are given up and three are needed: the others need not come to their end."""
    release = asyncio.Event()

    async def play(episode: EpisodeRequest) -> Any:
        if episode.slot < 2:
            return DeviceError("broken")
        await release.wait()
        return 1.0

    options = {"num_repeat_per_sample": 4, "max_attempts": 1, "stop_hopeless_groups": stop}
    job = start(real_time_buffer, count=1, **options)
    running = asyncio.create_task(run(real_time_buffer, job, ScriptedGenerator(play)))
    await until(lambda: describe_job(real_time_buffer.store, job)["attempts"].get("failed", 0) == 2)
    if not stop:
        await asyncio.sleep(0.1)
        assert not running.done()
        release.set()
    await running
    assert list(describe_job(real_time_buffer.store, job)["causes"]["failed"]) == [
        too_short(0 if stop else 2, 4, Shortfall.SLOTS_FAILED).message
    ]
    assert describe_job(real_time_buffer.store, job)["attempts"].get("given_up", 0) == (2 if stop else 0)


async def test_a_slot_that_is_given_up_before_it_began_holds_no_place(
    real_time_buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 1 ends, slot 2 gets its place, and in the same moment slot 0 makes the group hopeless."""
    limiter = concurrency.ConcurrencyLimiter(2)
    monkeypatch.setattr(runner, "ConcurrencyLimiter", lambda limit: limiter)

    async def at_once(job: played_job.PlayedJob, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(played_job.PlayedJob, "call_store", at_once)
    ends = [asyncio.Event(), asyncio.Event(), asyncio.Event()]

    async def play(episode: EpisodeRequest) -> Any:
        await ends[episode.slot].wait()
        return 1.0 if episode.slot else DeviceError("broken")

    options = {"num_repeat_per_sample": 3, "max_attempts": 1, "stop_hopeless_groups": True, "num_process": 2}
    generator = ScriptedGenerator(play)
    running = asyncio.create_task(run(real_time_buffer, start(real_time_buffer, count=1, **options), generator))
    await until(lambda: generator.running == 2)
    ends[1].set()
    ends[0].set()
    await running
    assert (len(generator.requests), limiter.taken) == (2, 0)


async def test_slots_that_an_earlier_runner_filled_do_not_count_as_given_up(real_time_buffer: Buffer) -> None:
    options = {"num_repeat_per_sample": 4, "max_attempts": 1, "min_timeout_group_size_ratio": 0.7}
    job = start(real_time_buffer, count=1, stop_hopeless_groups=True, **options)

    async def fill_two(episode: EpisodeRequest) -> Any:
        return 1.0 if episode.slot < 2 else await asyncio.Event().wait()

    stopped = asyncio.create_task(run(real_time_buffer, job, ScriptedGenerator(fill_two)))
    await until(lambda: describe_job(real_time_buffer.store, job)["outcomes"] == {"completed": 2})
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)

    async def fill_one_of_two(episode: EpisodeRequest) -> Any:
        if episode.slot == 2:
            return DeviceError("broken")
        await until(lambda: describe_job(real_time_buffer.store, job)["attempts"].get("failed", 0) == 1)
        return 1.0

    await run(real_time_buffer, job, ScriptedGenerator(fill_one_of_two))
    assert slot_counts(real_time_buffer, job)["ready"] == 4


@pytest.mark.parametrize(
    "answer",
    [
        ZeroDivisionError("a defect"),
        ValueError("half of a pair: \ud800"),
        float("nan"),
        lambda e: trajectory_for(e, cast("float", None)),
        lambda e: _awaits_what_it_cancelled(),
        lambda e: _exits(),
        lambda e: dataclasses.replace(trajectory_for(e, 1.0), uid="somebody else's"),
        lambda e: dataclasses.replace(trajectory_for(e, 1.0), extra_info={"not JSON": object()}),
    ],
)
async def test_a_generator_that_breaks_its_contract_costs_its_attempts_and_nothing_else(
    real_time_buffer: Buffer, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)  # xdist cannot send captured lines with half of a pair
    job = start(real_time_buffer, count=2, max_attempts=2)

    def play(episode: EpisodeRequest) -> Any:
        if episode.instance.instance_id == "i1":
            return by_slot(episode)
        return answer(episode) if callable(answer) else answer

    await run(real_time_buffer, job, ScriptedGenerator(play))
    accounting = slot_counts(real_time_buffer, job)
    assert (accounting["ready"], accounting["failed"]) == (2, 2)
    assert describe_job(real_time_buffer.store, job)["attempts"]["failed:generator"] == 4


async def _awaits_what_it_cancelled() -> None:
    own = asyncio.create_task(asyncio.sleep(3600))
    own.cancel()
    await own


async def _exits() -> None:
    exec("raise SystemExit(0)")  # the program that a model wrote


async def test_a_generator_that_does_not_start_fails_the_job_with_its_reason_and_is_closed(
    real_time_buffer: Buffer,
) -> None:
    job = start(real_time_buffer)
    generator = ScriptedGenerator(by_slot, start_error=RuntimeError("no phones here"))
    await run(real_time_buffer, job, generator)
    failed = real_time_buffer.job(job.job_id)
    assert failed.state.value == "failed"
    assert "no phones here" in failed.cause
    assert generator.closed == 1


async def test_an_engine_that_does_not_tell_what_is_replayed_fails_the_job_before_anything_is_played(
    real_time_buffer: Buffer,
) -> None:
    asked = {"max_tokens": 8, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    generator = ScriptedGenerator(by_slot)
    async with scripted_engine.running(ScriptedEngineSettings(port=0)) as url:
        job = start(real_time_buffer, remote_engine_url=url, sampling_params=asked)
        await run(real_time_buffer, job, generator)
    failed = real_time_buffer.job(job.job_id)
    assert failed.state.value == "failed"
    assert "does not return the ids kept by top_p" in failed.cause
    assert (generator.tokenizers, generator.requests) == ([], [])


async def test_a_slow_member_is_waited_for_however_long_its_siblings_are_through(real_time_buffer: Buffer) -> None:
    clock = SettableClock()
    buffer = Buffer(real_time_buffer.store, clock=clock)
    job = start(buffer, count=1)
    may_end = asyncio.Event()

    async def slow() -> float:
        await may_end.wait()
        return 0.0

    running = asyncio.create_task(run(buffer, job, ScriptedGenerator(lambda e: slow() if e.slot == 1 else 1.0)))
    await until(lambda: describe_job(buffer.store, job)["outcomes"] == {"completed": 1})
    clock.advance(100_000)
    await asyncio.sleep(0.2)
    may_end.set()
    await running
    assert describe_job(buffer.store, job)["attempts"] == {"finished": 2}
    assert slot_counts(buffer, job)["ready"] == 2


async def test_a_limit_that_was_set_for_groups_gives_up_the_member_that_is_waited_for(
    real_time_buffer: Buffer,
) -> None:
    options = {"group_timeout_seconds": 0.2, "min_timeout_group_size_ratio": 0.5}
    job = start(real_time_buffer, count=1, **options)

    async def hang() -> float:
        await asyncio.sleep(3600)
        return 0.0

    generator = ScriptedGenerator(lambda e: hang() if e.slot == 1 else 1.0)
    await run(real_time_buffer, job, generator)
    delivered = uids(real_time_buffer, poll(real_time_buffer, job))
    assert len(delivered) == 2
    assert delivered[1].endswith("+dummy0")
    assert describe_job(real_time_buffer.store, job)["attempts"] == {
        "finished": 1,
        "given_up": 1,
        "given_up:aborted": 1,
    }


async def test_a_member_that_filter_item_took_out_counts_as_filtered_and_a_dummy_stands_for_it(
    real_time_buffer: Buffer,
) -> None:
    job = start(real_time_buffer, count=2, num_repeat_per_sample=8)
    await run(real_time_buffer, job, ScriptedGenerator(lambda e: 2.0 if e.slot == 7 else by_slot(e)))
    assert poll(real_time_buffer, job) is not None
    described = describe_job(real_time_buffer.store, job)
    (task, *_) = [row for row in described["bias"] if row.by == "task"]
    assert (task.submitted, task.trained, task.filtered, task.given_up) == (8, 7, 1, 0)
    assert described["measures"]["bias"]["dummies"] == 0.125


async def test_a_replaced_runner_stops_and_writes_nothing_more(real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer, count=1)
    release = asyncio.Event()

    async def wait_for_release() -> float:
        await release.wait()
        return 1.0

    old = ScriptedGenerator(lambda e: wait_for_release())
    old_run = asyncio.create_task(run(real_time_buffer, job, old))
    await until(lambda: old.running == 2)
    new = ScriptedGenerator(by_slot)
    new_run = asyncio.create_task(run(real_time_buffer, job, new))
    await until(lambda: real_time_buffer.job_by_key(job.key).fence == 2)
    release.set()
    await asyncio.gather(old_run, new_run)
    assert describe_job(real_time_buffer.store, job)["outcomes"] == {"completed": 2}
    assert {request.attempt for request in new.requests} == {2}


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("broken"), asyncio.CancelledError("broken")])
async def test_a_plain_generator_that_raises_fails_its_job(real_time_buffer: Buffer, error: BaseException) -> None:
    def run_rollout(data: dict[str, Any]) -> None:
        raise error

    job = start(real_time_buffer, count=1)
    await run(real_time_buffer, job, ScriptedGenerator(by_slot), create_generator=None, run_rollout=run_rollout)
    assert "broken" in real_time_buffer.job_by_key(job.key).cause


async def test_a_plain_generator_that_begins_again_is_told_to_skip_what_is_closed(real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer)
    real_time_buffer.begin_running(job.key, takes_items=True)
    (first, _) = real_time_buffer.open_groups(job.key, after=(-1, -1), limit=2)
    write(real_time_buffer, job, written("u0", "i0", 0.0), written("u1", "i0", 1.0))
    real_time_buffer.judge_and_close(first, group_policy(job, None))
    told: list[Any] = []
    plain = {"create_generator": None, "run_rollout": told.append}
    await run(real_time_buffer, job, ScriptedGenerator(by_slot), **plain)
    assert [data["skip_instance_ids"] for data in told] == [["i0"]]


@pytest.mark.parametrize("taken_over", [True, False])
async def test_a_plain_generator_that_still_runs_changes_nothing_in_a_job_that_another_took_over_or_ended(
    real_time_buffer: Buffer, taken_over: bool
) -> None:
    job = start(real_time_buffer, count=1)
    release = threading.Event()
    plain = {"create_generator": None, "run_rollout": lambda data: release.wait(60)}
    running = asyncio.create_task(run(real_time_buffer, job, ScriptedGenerator(by_slot), **plain))
    await until(lambda: real_time_buffer.job_by_key(job.key).fence == 1)
    if taken_over:
        real_time_buffer.begin_running(job.key)
    else:
        real_time_buffer.fail_job(job.key, "by another")
    await running
    release.set()
    after = real_time_buffer.job_by_key(job.key)
    assert (after.state.value, after.cause) == (("running", "") if taken_over else ("failed", "by another"))
    assert slot_counts(real_time_buffer, job)["open"] == 2


async def test_a_plain_generator_that_raises_after_another_runner_took_over_fails_nothing(
    real_time_buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_job, "WATCH_INTERVAL_S", 60)
    job = start(real_time_buffer, count=1)

    def run_rollout(data: dict[str, Any]) -> None:
        real_time_buffer.begin_running(job.key)
        raise ValueError("of the replaced runner")

    await run(real_time_buffer, job, ScriptedGenerator(by_slot), create_generator=None, run_rollout=run_rollout)
    assert real_time_buffer.job_by_key(job.key).state is JobState.RUNNING


async def test_an_error_of_the_store_is_not_blamed_on_a_plain_generator(
    real_time_buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(real_time_buffer, count=1)
    monkeypatch.setattr(real_time_buffer, "open_groups_with_items", Mock(side_effect=DamagedError("a torn page")))
    plain = {"create_generator": None, "run_rollout": lambda data: None}
    with pytest.raises(DamagedError):
        await run(real_time_buffer, job, ScriptedGenerator(by_slot), **plain)
    assert real_time_buffer.job_by_key(job.key).state is JobState.RUNNING


@pytest.mark.parametrize("limit", ["max_groups_ahead", "max_groups_ready"])
async def test_new_groups_wait_while_the_trainer_is_behind(real_time_buffer: Buffer, limit: str) -> None:
    job = start(real_time_buffer, count=6, num_process=2, **{limit: 2})
    generator = ScriptedGenerator(by_slot)
    running = asyncio.create_task(run(real_time_buffer, job, generator))
    await until(lambda: slot_counts(real_time_buffer, job)["ready"] >= 4)
    await asyncio.sleep(0.2)
    assert slot_counts(real_time_buffer, job)["ready"] <= 6
    while not running.done():
        poll(real_time_buffer, job)
        await asyncio.sleep(0.02)
    await running
    poll(real_time_buffer, job)
    assert slot_counts(real_time_buffer, job)["delivered"] == 12


async def test_with_a_lag_no_group_begins_that_the_trainer_would_get_too_late(real_time_buffer: Buffer) -> None:
    """A trainer that takes two groups a version, and a lag of 1: four groups, in all states together, and no more."""
    job = start(real_time_buffer, count=20, num_process=40, max_weight_version_lag=1)
    generator = ScriptedGenerator(by_slot)
    for version in (1, 2):  # two versions, so that the trainer's pace is known
        fence = real_time_buffer.begin_running(job.key)
        for group in real_time_buffer.open_groups(job.key, after=(-1, -1), limit=2):
            _play(real_time_buffer, fence, group)
        assert poll(real_time_buffer, job, weight_version=version) is not None
    running = asyncio.create_task(run(real_time_buffer, job, generator))
    for version in range(3, 9):
        await until(lambda: slot_counts(real_time_buffer, job)["ready"] >= 4)
        await asyncio.sleep(0.1)
        assert slot_counts(real_time_buffer, job)["ready"] == 4
        assert poll(real_time_buffer, job, weight_version=version, max_groups=2) is not None
    while not running.done():
        poll(real_time_buffer, job, weight_version=9)
        real_time_buffer.note_empty_poll(real_time_buffer.job(job.job_id))
        await asyncio.sleep(0.02)
    await running
    poll(real_time_buffer, job)
    assert slot_counts(real_time_buffer, job)["delivered"] == 40
    assert slot_counts(real_time_buffer, job)["filtered"] == 0


async def test_groups_that_another_runner_began_go_on_although_there_is_room_for_no_more(
    real_time_buffer: Buffer,
) -> None:
    job = start(real_time_buffer, count=4, max_weight_version_lag=0)
    fence = real_time_buffer.begin_running(job.key)
    groups = real_time_buffer.open_groups(job.key, after=(-1, -1), limit=4)
    for version in (1, 2):
        _play(real_time_buffer, fence, groups[version - 1])
        assert poll(real_time_buffer, job, weight_version=version) is not None
    real_time_buffer.begin_attempt(fence, groups[3], 0)  # begun out of turn, and its runner dies
    running = asyncio.create_task(run(real_time_buffer, job, ScriptedGenerator(by_slot)))
    await until(lambda: slot_counts(real_time_buffer, job)["ready"] == 2)
    assert real_time_buffer.open_groups(job.key, after=(-1, -1), limit=4) == [groups[2]]
    assert poll(real_time_buffer, job, weight_version=3) is not None
    assert poll(real_time_buffer, job, weight_version=4) is None
    real_time_buffer.note_empty_poll(real_time_buffer.job(job.job_id))
    await running


def _play(buffer: Buffer, fence: int, group: GroupRecord) -> None:
    for slot in (0, 1):
        attempt = begun_attempt(buffer, fence, group, slot)
        uid = group.attempt_uid(slot, attempt)
        buffer.add_trajectory(fence, group, slot, attempt, trajectory(uid, group.instance_id, float(slot)))
    assert buffer.judge_and_close(group, group_policy(buffer.job_by_key(group.job_key))) is not None


async def test_a_drained_job_lets_what_runs_end_and_begins_nothing(real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer, count=4, num_process=2)
    release = asyncio.Event()

    async def held(episode: EpisodeRequest) -> float:
        await release.wait()
        return by_slot(episode)

    generator = ScriptedGenerator(lambda e: held(e))
    running = asyncio.create_task(run(real_time_buffer, job, generator))
    await until(lambda: generator.running == 2)
    real_time_buffer.drain_job(job.job_id)
    assert describe_job(real_time_buffer.store, job)["attempts"]["running"] == 2
    release.set()
    await until(
        lambda: "running" not in describe_job(real_time_buffer.store, real_time_buffer.job(job.job_id))["attempts"]
    )
    await asyncio.sleep(0.2)
    assert len(generator.requests) == 2, "nothing begins before it is resumed"

    real_time_buffer.change_job(job.job_id, "resume")
    await running
    assert describe_job(real_time_buffer.store, job)["outcomes"] == {"completed": 8}


@pytest.mark.parametrize("ignores_cancellation", [False, True])
async def test_a_job_drained_at_once_gives_up_what_runs_and_plays_it_again(
    real_time_buffer: Buffer, monkeypatch: pytest.MonkeyPatch, ignores_cancellation: bool
) -> None:
    monkeypatch.setattr(attempt_timeout, "STOP_TIMEOUT_S", 1.0)
    job = start(real_time_buffer, count=1, num_process=2, max_attempts=1)
    release, abandoned = asyncio.Event(), asyncio.Event()
    cleaned_up = []

    async def held(episode: EpisodeRequest) -> float:
        try:
            await release.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(3 * played_job.WATCH_INTERVAL_S)  # its cleanup: a second cancellation would end it
            cleaned_up.append(episode.slot)
            if not ignores_cancellation:
                raise
            await abandoned.wait()
        return by_slot(episode)

    generator = ScriptedGenerator(held)
    running = asyncio.create_task(run(real_time_buffer, job, generator))
    await until(lambda: generator.running == 2)
    real_time_buffer.drain_job(job.job_id, stop=True)
    await until(
        lambda: "running" not in describe_job(real_time_buffer.store, real_time_buffer.job(job.job_id))["attempts"]
    )
    assert sorted(cleaned_up) == [0, 1]
    release.set()
    real_time_buffer.change_job(job.job_id, "resume")
    await running
    assert describe_job(real_time_buffer.store, job)["outcomes"] == {"completed": 2}
    assert [request.attempt for request in generator.requests] == [1, 1, 2, 2], "given up is not failed"
    abandoned.set()


async def test_a_second_sigterm_does_not_interrupt_the_cleanup_of_a_runner() -> None:
    begun, cleaned_up = asyncio.Event(), asyncio.Event()

    async def play() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(20):
                await asyncio.sleep(0)  # the loop sees the signal
            cleaned_up.set()

    stopping = asyncio.create_task(main._run_until_stopped(cast("JobRunner", Mock(run=play)), None))
    await begun.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await stopping
    assert cleaned_up.is_set()


async def test_settled_slots_of_a_group_that_was_never_closed_are_closed_by_the_next_runner(
    real_time_buffer: Buffer,
) -> None:
    job = start(real_time_buffer, count=1)
    fence = real_time_buffer.begin_running(job.key)
    group = real_time_buffer.open_groups(job.key, after=(-1, -1), limit=1)[0]
    for slot in (0, 1):
        attempt = begun_attempt(real_time_buffer, fence, group, slot)
        real_time_buffer.add_trajectory(fence, group, slot, attempt, trajectory(f"t{slot}", "i0", slot))
    generator = ScriptedGenerator(by_slot)
    await run(real_time_buffer, job, generator)
    assert generator.requests == []
    assert slot_counts(real_time_buffer, job)["ready"] == 2


async def test_each_slot_samples_with_a_seed_of_its_own_that_a_repeated_attempt_keeps(real_time_buffer: Buffer) -> None:
    failed: set[tuple[str, int]] = set()

    def play(episode: EpisodeRequest) -> float | Exception:
        slot = (episode.instance.instance_id, episode.slot)
        if slot not in failed:
            failed.add(slot)
            return DeviceError("once")
        return 1.0

    seeds: list[dict[tuple[str, int], set[int]]] = []
    for job in ("a", "b"):
        failed.clear()
        generator = ScriptedGenerator(play)
        record = start(real_time_buffer, evaluation=True, sampling_seed=5, job_id=job)
        await run(real_time_buffer, record, generator)
        found: dict[tuple[str, int], set[int]] = {}
        for request in generator.requests:
            slot = (request.instance.instance_id, request.slot)
            found.setdefault(slot, set()).add(request.sampling_params.extra["sampling_seed"])
        assert len(generator.requests) == 8
        seeds.append(found)
    assert seeds[0] == seeds[1]
    assert all(len(own) == 1 for own in seeds[0].values())
    assert len({seed for own in seeds[0].values() for seed in own}) == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine_api": "openai", "engine_model": "m"}, "evaluation: true"),
        ({"engine_api": "openai", "evaluation": True}, "engine_model is missing"),
        ({"engine_api": "openai", "evaluation": True, "engine_model": "m", "task_type": "external"}, "evaluation"),
        ({"engine_api": "vertex"}, "engine_api"),
        (
            {"engine_api": "openai", "evaluation": True, "engine_model": "m", "exact_prompts": "require"},
            "exact_prompts: require needs",
        ),
        ({"exact_prompts": "require"}, "exact_prompts: require needs"),
    ],
)
def test_an_engine_without_token_ids_is_for_evaluations_alone(
    real_time_buffer: Buffer, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidPayloadError, match=says):
        start(real_time_buffer, **changes)


# --- what was given up, once more ------------------------------------------------------------------------------------


EVALUATION = {"evaluation": True, "max_attempts": 2, "min_timeout_group_size_ratio": 0.5}


def broken_in_slot_1(episode: EpisodeRequest) -> Any:
    return DeviceError("it hangs") if episode.slot == 1 else 1.0


async def test_slots_that_were_given_up_stay_so_until_somebody_asks_for_them(real_time_buffer: Buffer) -> None:
    job = start(real_time_buffer, count=2, job_id="j", **EVALUATION)
    await run(real_time_buffer, job, ScriptedGenerator(broken_in_slot_1))
    first = describe_job(real_time_buffer.store, job)
    assert (first["attempts"]["failed"], first["outcomes"]) == (4, {"completed": 2})
    assert start(real_time_buffer, count=2, job_id="j", **EVALUATION).state.value == "finished"

    again = start(real_time_buffer, count=2, job_id="j", retry_given_up=True, **EVALUATION)
    assert again.state.value == "running"
    assert slot_counts(real_time_buffer, job)["open"] == 4
    still_broken = ScriptedGenerator(broken_in_slot_1)
    await run(real_time_buffer, again, still_broken)
    assert sorted((request.slot, request.attempt) for request in still_broken.requests) == [(1, 3)] * 2 + [(1, 4)] * 2

    mended = ScriptedGenerator(by_slot)
    await run(real_time_buffer, start(real_time_buffer, count=2, job_id="j", retry_given_up=True, **EVALUATION), mended)
    assert [(request.slot, request.attempt) for request in mended.requests] == [(1, 5)] * 2
    after = describe_job(real_time_buffer.store, job)
    assert (after["state"], after["outcomes"], after["attempts"]["failed"]) == ("finished", {"completed": 4}, 8)
    delivered = uids(real_time_buffer, poll(real_time_buffer, job))
    assert (len(delivered), any("dummy" in uid for uid in delivered)) == (4, False)
