"""A rollout from its start to its acknowledgement, over real HTTP against a scripted buffer on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_buffer_lab.mock_trainer import CheckpointDataSource, MockTrainer, RolloutRecord, trainer_args
from slime.rollout import agent_rollout, agent_rollout_eval
from slime.rollout.agent_rollout import (
    generate_agent_rollout,
    generate_rollout,
    get_rollout_data,
    log_raw_info,
    reset_jobs,
    start_rollout,
)
from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import ConfigError, DamagedError, GeneratorError, RequestError
from slime_plugins.rollout_buffer.trainer import job_feed
from slime_plugins.rollout_buffer.trainer.image_fetch import ImageFetcher
from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError, JobEndedError, RetriesUsedUpError
from tests.loopback_buffer import LoopbackBuffer, ScriptedReply, probe_item
from tests.wandb_runs import logged_in, offline_run

TOO_MANY = ScriptedReply(status=429, body=b"<html>429 Too Many Requests</html>")
UNAVAILABLE = ScriptedReply(status=503, body=b'{"error": {"code": "unavailable", "message": "not now", "detail": {}}}')


@pytest.fixture
def buffer() -> Iterator[LoopbackBuffer]:
    with LoopbackBuffer([f"task-{number}" for number in range(8)]) as running:
        yield running


def trainer_of(buffer: LoopbackBuffer, *, start: int = 0, **changes: Any) -> MockTrainer:
    return MockTrainer(buffer.trainer_args(**changes), start_rollout_id=start)


def instances(records: list[RolloutRecord]) -> list[str]:
    return [group[0].metadata["instance_id"] for record in records for group in record.groups]


# --- without trouble -------------------------------------------------------------------------------------------------


def test_the_job_is_started_once_and_freshly_and_asked_for_exactly_the_missing_groups(buffer: LoopbackBuffer) -> None:
    trainer_of(buffer).train(3)

    (start,) = buffer.bodies("/start_rollout")
    assert (start["fresh"], start["skip_instance_ids"]) == (True, [])
    assert start["start_id"]
    for poll in buffer.bodies("/get_rollout_data"):
        assert (poll["max_groups"], poll["lease_s"], poll["images"], poll["job_id"]) == (
            2,
            600.0,
            "hash",
            start["job_id"],
        )
        assert poll["consumer_id"]


def test_groups_that_come_one_by_one_are_collected_and_acknowledged_on_the_way(buffer: LoopbackBuffer) -> None:
    buffer.most_groups_of_a_poll = 1
    (record,) = trainer_of(buffer).train(1)
    polls = buffer.bodies("/get_rollout_data")

    assert instances([record]) == ["task-0", "task-1"]
    assert [poll["max_groups"] for poll in polls] == [2, 1]
    assert len(polls[1]["ack"]) == 1
    assert len({poll["poll_id"] for poll in polls}) == 2
    assert [group.state for group in buffer.only_job().groups[:2]] == ["delivered", "delivered"]


def test_consumed_ids_are_written_down_before_they_are_acknowledged(buffer: LoopbackBuffer) -> None:
    seen: list[tuple[str, list[str]]] = []
    trainer = trainer_of(buffer)
    buffer.on_request = lambda path, body: seen.append((path, list(trainer.data_source.get_metadata().get("0", []))))
    buffer.most_groups_of_a_poll = 1
    trainer.train(1)
    second_poll = [consumed for path, consumed in seen if path == "/get_rollout_data"][1]

    assert second_poll == ["task-0"]
    assert [consumed for path, consumed in seen if path == "/ack"] == [["task-0", "task-1"]]


async def test_a_rollout_runs_where_an_event_loop_is_running_already(buffer: LoopbackBuffer) -> None:
    args = buffer.trainer_args()
    output = generate_rollout(args, 0, CheckpointDataSource(args))
    again: Any = await generate_agent_rollout(args, 1, CheckpointDataSource(args))

    assert len(output.samples) == len(again.samples) == 2


# --- trouble on the way ----------------------------------------------------------------------------------------------


def test_used_up_retries_are_a_clear_error(buffer: LoopbackBuffer) -> None:
    buffer.script("/get_rollout_data", *[UNAVAILABLE] * 3)

    with pytest.raises(RetriesUsedUpError, match=r"get_rollout_data failed 3 times.*not now"):
        trainer_of(buffer, fetch_trajectory_retry_times=2).train(1)


def test_what_a_proxy_in_front_refuses_for_its_load_is_tried_again(buffer: LoopbackBuffer) -> None:
    for path in ("/start_rollout", "/get_rollout_data", "/ack"):
        buffer.script(path, TOO_MANY)

    assert len(trainer_of(buffer).train(1)) == 1


def test_what_the_buffer_refuses_is_not_tried_again(buffer: LoopbackBuffer) -> None:
    refusal = {"error": {"code": "input_file", "message": "tasks.jsonl is not there", "detail": {}}}
    buffer.script("/start_rollout", ScriptedReply(status=400, body=json.dumps(refusal).encode()))

    with pytest.raises(RequestError, match=r"tasks\.jsonl is not there"):
        trainer_of(buffer).train(1)
    assert len(buffer.requests) == 1


@pytest.mark.parametrize("most_of_a_poll", [None, 1])
def test_groups_acknowledged_too_late_are_left_to_who_has_them_now(
    buffer: LoopbackBuffer, most_of_a_poll: int | None
) -> None:
    """Whether the last call or the next poll acknowledges: the batch is filled up with others."""
    buffer.most_groups_of_a_poll = most_of_a_poll
    late: list[str] = []

    def answer_too_late_once(path: str, body: dict[str, Any]) -> None:
        ids = body.get("ack") or body.get("delivery_ids") or []
        if not ids or late:
            return
        late.extend(ids)
        reply = {"acked": [], "expired": ids, "unknown": []}
        if path == "/get_rollout_data":
            empty = {"data": [], "meta_info": {"acknowledged": reply}}
            buffer.script(path, ScriptedReply(body=json.dumps({"success": False, "data": empty}).encode()))
        else:
            buffer.script(path, ScriptedReply(body=json.dumps(reply).encode()))

    buffer.on_request = answer_too_late_once
    trainer = trainer_of(buffer)
    (record,) = trainer.train(1)

    expected = ["task-2", "task-3"] if most_of_a_poll is None else ["task-1", "task-2"]
    assert instances([record]) == expected
    assert trainer.data_source.get_metadata()["0"] == expected
    assert len(late) == 1


def test_a_buffer_that_forgot_the_job_is_told_again(buffer: LoopbackBuffer) -> None:
    """Its new groups have the numbers of old ones: the evaluation had the first eight."""
    trainer = trainer_of(buffer, num_epoch=2, eval_prompt_data=["held-out", "eval.jsonl"], n_samples_per_eval_prompt=2)
    trainer.evaluate(0)
    first = trainer.train(1)
    buffer.lose_everything()
    second = trainer.train(4)

    assert instances(first + second) == [f"task-{number % 8}" for number in range(10)]
    assert buffer.bodies("/start_rollout")[-1]["fresh"] is False


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_a_job_that_ended_ends_the_wait_with_its_cause_and_is_started_again_by_the_next_call(
    buffer: LoopbackBuffer, state: str
) -> None:
    trainer = trainer_of(buffer)
    trainer.train(1)
    job = buffer.only_job()
    job.state, job.cause = state, "somebody said so"
    with pytest.raises(JobEndedError, match=f"is {state}: somebody said so"):
        trainer.train(1)
    job.state = "running"

    assert instances(trainer.train(1)) == ["task-2", "task-3"]
    assert len(buffer.bodies("/start_rollout")) == 2


NO_ENGINE = {
    "code": "no_engine",
    "severity": "stopped",
    "message": "The engine at http://e:3 cannot be reached for 2 min.",
    "advice": "Is it up?",
}


def test_a_wait_is_noted_in_the_buffers_own_sentence(
    buffer: LoopbackBuffer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_feed, "LOG_INTERVAL_S", 0.0)
    buffer.empty_polls = 2
    explained = ScriptedReply(body=json.dumps({"explanation": [NO_ENGINE, {}]}).encode())
    buffer.script("/jobs/mine/explanation", explained)
    with caplog.at_level(logging.INFO, logger=job_feed.__name__):
        trainer_of(buffer, rollout_buffer_job_id="mine").train(1)

    said = [re.sub(r"waited \d+ s", "waited 0 s", record.getMessage()) for record in caplog.records]
    assert [sentence for sentence in said if "waited" in sentence] == [
        "waited 0 s for 2 more groups of job mine: The engine at http://e:3 cannot be reached for 2 min. Is it up?",
        "waited 0 s for 2 more groups of job mine: it is running",  # the buffer did not explain itself that time
    ]


def test_a_buffer_that_is_out_of_reach_is_an_error_after_a_while_without_any_number_set() -> None:
    now = 0.0
    tally = job_feed.FailureTally("start_rollout", None, clock=lambda: now)
    pauses = [tally.pause_after(ConnectionRefusedError(111, "refused")) for _ in range(200)]
    now = job_feed.MAX_OUTAGE_S + 1

    assert max(pauses) <= job_feed.MAX_POLL_PAUSE_S
    with pytest.raises(
        RetriesUsedUpError, match=r"start_rollout failed 201 times, .* no answer from the buffer: Connection refused$"
    ):
        tally.pause_after(ConnectionRefusedError(111, "refused"))


def test_stored_bytes_that_are_damaged_are_not_asked_for_again() -> None:
    with pytest.raises(DamagedError):
        job_feed.FailureTally("trajectory", 20).pause_after(DamagedError("its bytes differ"))


# --- the end of the input --------------------------------------------------------------------------------------------


def test_used_up_input_is_a_clear_error_and_never_fewer_groups(buffer: LoopbackBuffer) -> None:
    trainer = trainer_of(buffer, rollout_batch_size=3)
    trainer.train(2)

    with pytest.raises(InputExhaustedError, match=r"rollout 2 has 2 of 3 groups .* raise --num-epoch"):
        trainer.train(1)


def test_input_of_which_nothing_could_be_trained_is_said_with_its_cause() -> None:
    with LoopbackBuffer([]) as empty:
        trainer = trainer_of(empty)
        cause = "all 3 groups were filtered, 2 of them: the generator's own is_valid_group refused it"

        def say_why(path: str, body: dict[str, Any]) -> None:
            for job in empty.jobs.values():
                job.cause = cause

        empty.on_request = say_why
        with pytest.raises(InputExhaustedError, match=r"no group could be trained: all 3 groups were filtered"):
            trainer.train(1)


def test_a_job_that_is_about_to_fail_is_heard_out_before_more_epochs_are_advised() -> None:
    with LoopbackBuffer([]) as empty:
        empty.looks_before_end = 100
        looks: list[str] = []

        def fail_late(path: str, body: dict[str, Any]) -> None:
            looks.extend([path] if path.startswith("/jobs/") else [])
            for job in empty.jobs.values():
                if len(looks) > 4:  # its last group closes some time before the job itself
                    job.state, job.cause = "failed", "8 of 8 attempts failed: the phone is wet"

        empty.on_request = fail_late
        with pytest.raises(JobEndedError, match="8 of 8 attempts failed: the phone is wet"):
            trainer_of(empty).train(1)


def test_used_up_input_is_repeated_on_request(buffer: LoopbackBuffer, tmp_path: Path) -> None:
    choices: dict[str, Any] = {"rollout_batch_size": 3, "rollout_buffer_on_exhausted": "repeat", "save": str(tmp_path)}
    records = trainer_of(buffer, **choices).train(4)

    expected = [f"task-{number % 8}" for number in range(12)]
    assert instances(records) == expected
    assert [{group.state for group in job.groups[:4]} for job in buffer.jobs.values()] == [{"delivered"}] * 2
    reset_jobs()
    resumed = trainer_of(buffer, start=4, load=str(tmp_path), **choices)
    assert instances(resumed.train(1)) == ["task-4", "task-5", "task-6"]
    assert buffer.bodies("/start_rollout")[-1]["job_id"].endswith("-pass-1")


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_resumed_trainer_gets_the_rest_and_nothing_twice(buffer: LoopbackBuffer, tmp_path: Path) -> None:
    paths: dict[str, Any] = {"save": str(tmp_path), "load": str(tmp_path)}
    first = trainer_of(buffer, **paths).train(2)
    reset_jobs()
    resumed = trainer_of(buffer, start=2, **paths).train(2)
    start = buffer.bodies("/start_rollout")[-1]

    assert instances(first + resumed) == [f"task-{number}" for number in range(8)]
    assert (start["fresh"], start["skip_instance_ids"]) == (False, [f"task-{number}" for number in range(4)])


def test_ids_of_a_rollout_generated_ahead_are_not_skipped(buffer: LoopbackBuffer, tmp_path: Path) -> None:
    """slime's async trainer generates rollout 1 before it saves rollout 0."""
    paths: dict[str, Any] = {"save": str(tmp_path), "load": str(tmp_path)}
    ahead = trainer_of(buffer, **paths)
    ahead.train(2, save_interval=None)
    ahead.data_source.save(0)
    reset_jobs()

    assert instances(trainer_of(buffer, start=1, **paths).train(1)) == ["task-2", "task-3"]


def test_surplus_in_the_data_buffer_is_used_first_and_counted_when_used(buffer: LoopbackBuffer) -> None:
    trainer = trainer_of(buffer)
    buffer.least_groups_of_a_poll = 3
    trainer.train(1)
    assert trainer.data_source.get_metadata() == {"0": ["task-0", "task-1"]}

    buffer.least_groups_of_a_poll = 0
    assert instances(trainer.train(1)) == ["task-2", "task-3"]
    assert buffer.bodies("/get_rollout_data")[-1]["max_groups"] == 1
    assert trainer.data_source.get_metadata()["1"] == ["task-2", "task-3"]


def only_even_tasks(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """A buffer filter that drops groups: the rest has to be fetched."""
    even = [group for group in buffer if int(group[0].metadata["instance_id"][-1]) % 2 == 0]
    buffer.clear()
    return even[:num_samples]


def the_best_of_four(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """A buffer filter that wants a choice before it takes anything."""
    if len(buffer) < 4:
        return []
    taken = buffer[-num_samples:]
    buffer.clear()
    return taken


@pytest.mark.parametrize(
    ("name", "expected"), [("only_even_tasks", ["task-0", "task-2"]), ("the_best_of_four", ["task-2", "task-3"])]
)
def test_a_buffer_filter_means_what_it_means_in_slime(buffer: LoopbackBuffer, name: str, expected: list[str]) -> None:
    records = trainer_of(buffer, buffer_filter_path=f"{__name__}.{name}").train(1)

    assert instances(records) == expected


# --- bad records -----------------------------------------------------------------------------------------------------


def broken_everywhere(instance_id: str, **place: int) -> dict[str, Any]:
    return probe_item(instance_id, **place) | {"generations": [{"keep": 9, "prompt_ids": [], "output_ids": []}]}


def test_a_batch_without_anything_to_train_is_an_error_that_says_why() -> None:
    with (
        LoopbackBuffer(["a", "b"], make_item=broken_everywhere) as buffer,
        pytest.raises(GeneratorError, match=r"no trajectory .* can be trained: .*keep is 9"),
    ):
        trainer_of(buffer).train(1)


# --- offload ---------------------------------------------------------------------------------------------------------


def test_an_offloaded_engine_is_left_alone_between_rollouts(buffer: LoopbackBuffer) -> None:
    trainer = trainer_of(buffer, offload_rollout=True)
    trainer.train(1)
    assert buffer.only_job().state == "paused"

    trainer.train(1)
    verbs = [path.rpartition("/")[2] for path, _ in buffer.requests if path.endswith(("/pause", "/resume"))]
    assert verbs == ["pause", "resume", "pause"]


# --- on-policy -------------------------------------------------------------------------------------------------------


def test_an_on_policy_rollout_plays_its_groups_and_is_drained_before_they_are_acknowledged(
    buffer: LoopbackBuffer,
) -> None:
    buffer.most_groups_of_a_poll = 1
    records = trainer_of(buffer, rollout_buffer_on_policy=True).train(2)

    said = [path.rpartition("/")[2] for path, _ in buffer.requests if path.endswith(("/drain", "/resume", "/ack"))]
    assert instances(records) == [f"task-{number}" for number in range(4)]
    assert buffer.bodies("/start_rollout")[0]["max_groups_ahead"] == 2
    assert said == ["drain", "ack", "resume", "drain", "ack"]
    assert not any(poll.get("ack") for poll in buffer.bodies("/get_rollout_data"))
    assert buffer.only_job().state == "paused"


@pytest.mark.parametrize(("goes_to_another", "trained"), [(False, ["task-0", "task-1"]), (True, ["task-1", "task-2"])])
def test_an_on_policy_rollout_keeps_groups_that_it_gets_again_after_their_lease(
    buffer: LoopbackBuffer, goes_to_another: bool, trained: list[str]
) -> None:
    """It acknowledges nothing before its last episode ends, which may take longer than a lease."""
    buffer.most_groups_of_a_poll = 1

    def end_leases(path: str, body: dict[str, Any]) -> None:
        first = buffer.only_job().groups[0] if buffer.jobs else None
        if first and path == "/get_rollout_data" and len(buffer.bodies(path)) == 2:
            first.state = "ready"
        if first and path.endswith("/drain") and goes_to_another:
            first.delivery_id = "of another consumer"

    buffer.on_request = end_leases
    trainer = trainer_of(buffer, rollout_buffer_on_policy=True)
    (record,) = trainer.train(1)

    assert instances([record]) == trainer.data_source.get_metadata()["0"] == trained
    assert buffer.only_job().groups[3].state == "ready"
    assert not any(poll.get("ack") for poll in buffer.bodies("/get_rollout_data")[:3])


@pytest.mark.parametrize(
    ("options", "ready"), [({}, 2), ({"max_groups_ready": 5}, 5), ({"max_groups_ready": None}, None)]
)
def test_an_asynchronous_rollout_lets_as_many_groups_wait_as_it_trains_unless_told_otherwise(
    buffer: LoopbackBuffer, options: dict[str, Any], ready: int | None
) -> None:
    trainer_of(buffer, rollout_buffer_options=options).train(1)

    start = buffer.bodies("/start_rollout")[0]
    assert start["max_groups_ready"] == ready
    assert "max_groups_ahead" not in start


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_buffer_on_policy": "yes"}, "must be true or false"),
        (
            {"rollout_buffer_on_policy": True, "rollout_buffer_options": {"max_groups_ahead": 9}},
            "leave max_groups_ahead",
        ),
    ],
)
def test_on_policy_settings_that_contradict_are_refused(
    buffer: LoopbackBuffer, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer_of(buffer, **changes).train(1)


def test_each_poll_says_the_version_that_the_engine_samples_with(
    buffer: LoopbackBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def version(url: str | None) -> int | None:
        asked.append(url)
        return len(asked) - 1

    monkeypatch.setattr(agent_rollout, "weight_version_of", version)
    trainer_of(buffer, sglang_router_ip="10.0.0.9", sglang_router_port=30000).train(2)

    assert asked == ["http://10.0.0.9:30000"] * 2
    assert [poll["weight_version"] for poll in buffer.bodies("/get_rollout_data")] == [0, 1]


# --- evaluation ------------------------------------------------------------------------------------------------------


def one_failed(instance_id: str, **place: int) -> dict[str, Any]:
    failed = {"remove_sample": True, "reward": 0.0, "generations": [], "outcome": "failed"}
    return probe_item(instance_id, **place) | (failed if (instance_id, place["slot"]) == ("task-0", 1) else {})


def test_an_evaluation_plays_its_file_once_and_keeps_out_of_the_training() -> None:
    with LoopbackBuffer(["task-0", "task-1"], make_item=one_failed) as buffer:
        trainer = trainer_of(buffer, eval_prompt_data=["held-out", "eval.jsonl"], n_samples_per_eval_prompt=2)
        trainer.train(1)
        data = trainer.evaluate(7)
        evaluation = buffer.bodies("/start_rollout")[-1]

        assert {group.state for group in buffer.jobs[evaluation["job_id"]].groups} == {"delivered"}
        assert data["held-out"]["rewards"] == [0.0, 0.0, 1.0]
        assert data["held-out"]["truncated"] == [False] * 3
        assert [sample.prompt for sample in data["held-out"]["samples"]] == ["task-0.0.0", "task-1.0.0", "task-1.0.1"]
        assert (evaluation["evaluation"], evaluation["num_epoch"], evaluation["input_file"]) == (True, 1, "eval.jsonl")
        assert evaluation["job_id"].endswith("-eval-held-out-7")
        assert trainer.data_source.get_metadata() == {"0": ["task-0", "task-1"]}


def test_an_evaluation_whose_start_was_not_answered_is_cancelled(buffer: LoopbackBuffer) -> None:
    buffer.script("/start_rollout", ScriptedReply(lost=True))
    trainer = trainer_of(buffer, eval_prompt_data=["held-out", "eval.jsonl"], fetch_trajectory_retry_times=0)

    with pytest.raises(RetriesUsedUpError):
        trainer.evaluate(0)
    assert buffer.only_job().state == "cancelled"


async def test_an_evaluation_that_is_cancelled_during_its_start_leaves_no_running_job(
    buffer: LoopbackBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = threading.Event(), threading.Event()

    def slow_start(*arguments: Any) -> Any:
        begun.set()
        released.wait(60)
        return job_feed.send_start(*arguments)

    monkeypatch.setattr(agent_rollout_eval, "send_start", slow_start)
    args = buffer.trainer_args(eval_prompt_data=["held-out", "eval.jsonl"])
    evaluation = asyncio.create_task(generate_agent_rollout(args, 0, CheckpointDataSource(args), evaluation=True))
    await asyncio.to_thread(begun.wait, 60)
    evaluation.cancel()
    asyncio.get_running_loop().call_later(0.1, released.set)
    await asyncio.gather(evaluation, return_exceptions=True)
    assert buffer.only_job().state == "cancelled"


# --- the functions for loops of one's own -----------------------------------------------------------------------------


async def test_get_rollout_data_returns_items_and_meta_information(buffer: LoopbackBuffer) -> None:
    start_rollout(buffer.url, buffer.trainer_args(), {"0": ["task-0"]}, job_id="own")
    items, meta_info = await get_rollout_data(buffer.url, timeout=40.0)

    assert {item["instance_id"] for item in items} == {f"task-{number}" for number in range(1, 8)}
    assert meta_info["total_samples"] == 14
    assert {group.state for group in buffer.only_job().groups} == {"skipped", "delivered"}


async def test_get_rollout_data_raises_what_it_documents(buffer: LoopbackBuffer, unused_tcp_port: int) -> None:
    start_rollout(buffer.url, buffer.trainer_args(), {}, job_id="own")
    buffer.script("/get_rollout_data", ScriptedReply(body=b'{"success": true, "data": 5}'))
    with pytest.raises(ValueError, match=r"reply\.data must be an object, not 5"):
        await get_rollout_data(buffer.url)
    item = json.dumps({"success": True, "data": {"data": [{"uid": "u", "reward": 1.0}], "meta_info": {}}})
    buffer.script("/get_rollout_data", ScriptedReply(body=item.encode()))
    with pytest.raises(ValueError, match="item u of the buffer's reply has no extra_info, instance_id, messages"):
        await get_rollout_data(buffer.url)
    buffer.empty_polls = 1000
    with pytest.raises(asyncio.TimeoutError, match=r"no group came within 0\.2 s: nothing is ready"):
        await get_rollout_data(buffer.url, timeout=0.2)
    with pytest.raises(aiohttp.ClientError):
        await get_rollout_data(f"http://127.0.0.1:{unused_tcp_port}")


# --- logging ---------------------------------------------------------------------------------------------------------


META_INFO: list[dict[str, Any]] = [
    {"total_samples": 10, "avg_reward": 1.0},
    {"total_samples": 30, "avg_reward": 0.0},
    {"total_samples": 0, "avg_reward": None},
    {},
]


def test_log_raw_info_weighs_rewards_by_samples(tmp_path: Path) -> None:
    args = trainer_args(use_wandb=True)
    train_steps = trainer_args(use_wandb=True, wandb_always_use_train_step=True, global_batch_size=8)
    with offline_run(tmp_path):
        log_raw_info(args, META_INFO, 3)
        log_raw_info(train_steps, META_INFO, 3)
        log_raw_info(args, [], 4)

    first, second = logged_in(tmp_path)
    assert {key: value for key, value in first.items() if key.startswith("rollout/")} == {
        "rollout/no_filter/total_samples": 40,
        "rollout/no_filter/avg_reward": 0.25,
        "rollout/step": 3,
    }
    assert second["rollout/step"] == 6


def with_a_screenshot(instance_id: str, **place: int) -> dict[str, Any]:
    return probe_item(instance_id, **place) | {"images": ["0" * 64]}


async def _never() -> Any:
    await asyncio.sleep(600)


async def _broken() -> Any:
    raise RetriesUsedUpError("the buffer is away")


@pytest.mark.parametrize("away", [_never, _broken])
def test_a_buffer_that_goes_away_after_the_last_group_costs_numbers_and_never_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: Callable[[], Awaitable[Any]]
) -> None:
    """The batch is acknowledged by then: an error would lose it."""
    tell_job = AsyncRolloutBufferClient.job

    async def job(self: AsyncRolloutBufferClient, job_id: str) -> Any:
        return await (away() if loopback.bodies("/ack") else tell_job(self, job_id))

    monkeypatch.setattr(agent_rollout, "LOGGING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(AsyncRolloutBufferClient, "job", job)
    monkeypatch.setattr(ImageFetcher, "fetch", lambda *_: away())
    file = tmp_path / "metrics.jsonl"

    options: dict[str, Any] = {"rollout_buffer_metrics_file": str(file), "rollout_buffer_example_interval": 1}
    with LoopbackBuffer(["task-0", "task-1"], make_item=with_a_screenshot) as loopback:
        (record,) = trainer_of(loopback, **options).train(1)

    assert len(record.groups) == 2
    metrics, examples = map(json.loads, file.read_text().splitlines())
    assert metrics["rollout/buffer/rows"] == 4
    assert len(examples["rollout/examples"]) == 3


# --- places that were not played -------------------------------------------------------------------------------------

OWN_REWARDS: dict[str, Any] = {"custom_reward_post_process_path": "slime.rollout.agent_rollout.post_process_rewards"}


def broken_in(*names: str, slots: tuple[int, ...] = (1,)) -> Callable[..., dict[str, Any]]:
    """Items of which these could not be played."""

    def item(instance_id: str, **place: Any) -> dict[str, Any]:
        made = probe_item(instance_id, **place)
        if instance_id in names and place["slot"] in slots:
            made |= {"remove_sample": True, "reward": None, "raw_reward": None, "generations": [], "outcome": "failed"}
        return made

    return item


def shapes(record: RolloutRecord) -> list[tuple[str, int]]:
    return [(group[0].metadata["instance_id"], len(group)) for group in record.groups]


def test_a_place_that_was_not_played_is_taken_by_a_member_of_the_next_group() -> None:
    with LoopbackBuffer([f"task-{number}" for number in range(8)], make_item=broken_in("task-0")) as buffer:
        first, second = trainer_of(buffer, n_samples_per_prompt=4, use_kl_loss=True, **OWN_REWARDS).train(2)

        names, sizes = zip(*shapes(first), strict=True)
        assert (names, sorted(sizes)) == (("task-0", "task-1", "task-2"), [2, 3, 3])
        assert not any(sample.remove_sample for sample in first.samples)
        left_out = [record.metrics["rollout/buffer/left_out_trajectories"] for record in (first, second)]
        assert left_out == [3, 0]
        assert [record.metrics["rollout/buffer/short_groups"] for record in (first, second)] == [1, 0]
        assert shapes(second) == [("task-3", 4), ("task-4", 4)]
        assert all(group.state == "delivered" for group in buffer.only_job().groups[:5])


def test_an_estimator_that_takes_no_dummies_gets_none() -> None:
    with LoopbackBuffer(["task-0", "task-1"], make_item=broken_in("task-0")) as buffer:
        changes: dict[str, Any] = {
            "n_samples_per_prompt": 4,
            "num_epoch": 1,
            "advantage_estimator": "reinforce_plus_plus",
        }
        with pytest.raises(InputExhaustedError, match="supports no dummies"):
            trainer_of(buffer, **changes).train(1)


def test_a_generator_that_always_fails_is_stopped_at_the_first_batch() -> None:
    names = [f"task-{number}" for number in range(40)]
    with LoopbackBuffer(names, make_item=broken_in(*names, slots=(0, 1))) as buffer:
        with pytest.raises(GeneratorError, match="no trajectory of this rollout"):
            trainer_of(buffer, **OWN_REWARDS).train(1)
        assert len([group for group in buffer.only_job().groups if group.state != "ready"]) == 2
