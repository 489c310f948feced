"""The feed of a trainer of one's own, against the scripted buffer on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slime.utils.mask_utils import WeightVersionSpan
from slime_plugins.rollout_buffer import InputExhaustedError, JobEndedError, RolloutFeed, RolloutRow
from slime_plugins.rollout_buffer.errors import ConfigError, GeneratorError
from slime_plugins.rollout_buffer.trainer import job_feed
from slime_plugins.rollout_buffer.trainer.job_feed import JobStalledError, RetriesUsedUpError
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport
from tests.loopback_buffer import LoopbackBuffer, ScriptedReply

SAMPLES = 2
PAYLOAD = {"job_id": "job", "task_type": "probe", "num_epoch": 1, "num_repeat_per_sample": SAMPLES}


@pytest.fixture
def buffer() -> Iterator[LoopbackBuffer]:
    with LoopbackBuffer([f"task-{number}" for number in range(5)]) as running:
        yield running


def feed_of(buffer: LoopbackBuffer, **options: Any) -> RolloutFeed:
    return RolloutFeed(buffer.url, PAYLOAD, wait_s=0.02, **options)


@pytest.fixture
def feed(buffer: LoopbackBuffer) -> Iterator[RolloutFeed]:
    """One that has started its job."""
    with feed_of(buffer) as started:
        started.start()
        yield started


def states(buffer: LoopbackBuffer) -> list[str]:
    return [group.state for group in buffer.only_job().groups]


def test_a_row_says_what_is_trained_and_whose_it_is(feed: RolloutFeed) -> None:
    batch = feed.next_batch(1)

    first, second = batch.rows
    assert first == RolloutRow(
        uid="task-0.0.0",
        group_index=1,
        number=0,
        token_ids=[1, 2, 3, 10, 4, 5, 6, 20, 21, 4],
        loss_mask=[0, 0, 0, 1, 1, 0, 0, 1, 1, 1],
        log_probs=[0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -0.125],
        response_start=3,
        reward=0.0,
        weight_versions=("1", "1"),
        version_spans=(WeightVersionSpan("1", 3, 5), WeightVersionSpan("1", 7, 10)),
    )
    assert (second.uid, second.reward, second.response_length, second.trained_tokens) == ("task-0.0.1", 1.0, 7, 5)


def test_nothing_is_acknowledged_before_the_trainer_says_so(buffer: LoopbackBuffer, feed: RolloutFeed) -> None:
    first, second = feed.next_batch(2), feed.next_batch(2)
    before = states(buffer)
    lost = feed.ack(first)
    between = states(buffer)
    feed.ack(second)

    assert before == ["leased"] * 4 + ["ready"]
    assert (between, lost) == (["delivered"] * 2 + ["leased"] * 2 + ["ready"], frozenset())
    assert states(buffer) == ["delivered"] * 4 + ["ready"]


def test_the_last_batch_is_short_and_then_the_input_is_used_up(feed: RolloutFeed) -> None:
    """A trainer that has acknowledged nothing yet would wait for its own groups for ever."""
    sizes = [len(feed.next_batch(3)), len(feed.next_batch(3))]
    with pytest.raises(InputExhaustedError):
        feed.next_batch(3)

    assert sizes == [3, 2]


def test_a_job_without_input_is_waited_for_until_it_ends(buffer: LoopbackBuffer) -> None:
    """Its writers may bring further groups when the trainer holds all that there are."""
    buffer.has_input = False

    def write_or_cancel(path: str, body: dict[str, Any]) -> None:
        polls = len(buffer.bodies("/get_rollout_data"))
        if path == "/get_rollout_data" and polls == 3:
            job.groups.append(late)
        if path == "/get_rollout_data" and polls == 6:
            job.state = "cancelled"

    with feed_of(buffer) as feed:
        feed.start()
        job = buffer.only_job()
        late = job.groups.pop()
        buffer.on_request = write_or_cancel
        batch = feed.next_batch(5)
        with pytest.raises(JobEndedError):
            feed.next_batch(1)

    assert len(batch) == 5


def test_what_was_consumed_is_skipped_by_the_next_run(buffer: LoopbackBuffer) -> None:
    buffer.also_finished = {100: "task-4"}
    with feed_of(buffer) as feed:
        feed.start()
        consumed = feed.next_batch(2).consumed
    with feed_of(buffer) as feed:
        feed.start(skip=consumed, fresh=True)
        rest = [group.instance_id for group in feed.next_batch(5)]

    assert sorted(consumed) == ["task-0", "task-1", "task-4"]
    assert rest == ["task-2", "task-3"]


def test_a_lost_reply_costs_no_group_and_doubles_none(buffer: LoopbackBuffer, feed: RolloutFeed) -> None:
    buffer.script("/get_rollout_data", ScriptedReply(lost=True), ScriptedReply(status=503, body=b"{}"))
    groups = [group.instance_id for group in feed.next_batch(5)]

    assert sorted(groups) == sorted({f"task-{number}" for number in range(5)})


@pytest.fixture
def second_poll_fails(buffer: LoopbackBuffer) -> None:
    buffer.most_groups_of_a_poll = 1

    def fail_once(path: str, body: dict[str, Any]) -> None:
        if path == "/get_rollout_data" and len(buffer.bodies(path)) == 2:
            buffer.script(path, ScriptedReply(status=503, body=b"{}"))

    buffer.on_request = fail_once


@pytest.mark.usefixtures("second_poll_fails")
def test_after_an_error_the_next_batch_has_what_was_got_before_it(buffer: LoopbackBuffer) -> None:
    with feed_of(buffer, max_failures=0) as feed:
        feed.start()
        with pytest.raises(RetriesUsedUpError):
            feed.next_batch(2)
        batch = feed.next_batch(2)

    assert [group.instance_id for group in batch] == ["task-0", "task-1"]


@pytest.mark.usefixtures("second_poll_fails")
def test_groups_got_before_an_error_are_masked_by_the_version_of_the_batch_that_they_are_in(
    buffer: LoopbackBuffer,
) -> None:
    rows = RowSettings(
        samples_per_group=SAMPLES,
        masks=MaskSettings(tokenizer_path=None, loss_mask_type="qwen", source=None),
        max_token_lag=1,
    )
    with feed_of(buffer, max_failures=0, rows=rows) as feed:
        feed.start()
        with pytest.raises(RetriesUsedUpError):
            feed.next_batch(2, weight_version=2)
        with pytest.raises(GeneratorError, match="more than 1 weight versions older"):
            feed.next_batch(2, weight_version=3)


def test_a_delivery_that_could_not_be_converted_comes_again(feed: RolloutFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RowBuilder, "groups", out_of_memory)
        with pytest.raises(MemoryError):
            feed.next_batch(2)
    batch = feed.next_batch(2)

    assert [group.instance_id for group in batch] == ["task-0", "task-1"]


def test_the_payload_is_read_as_the_buffer_reads_it(buffer: LoopbackBuffer) -> None:
    short = {"job_id": 7, "task_type": "probe", "num_epoch": 1, "samples": "2", "tokenizer": "none"}
    with RolloutFeed(buffer.url, short, wait_s=0.02) as feed:
        feed.start()
        assert [len(group.trajectories) for group in feed.next_batch(2)] == [2, 2]
    with pytest.raises(ConfigError, match="max_groups_ahead is 'few'; it must be a whole number"):
        RolloutFeed(buffer.url, {**PAYLOAD, "max_groups_ahead": "few"})


def test_groups_that_come_again_are_trained_once(buffer: LoopbackBuffer, feed: RolloutFeed) -> None:
    buffer.also_finished = {100: "filtered"}
    first = feed.next_batch(2)
    for group in buffer.only_job().groups[:2]:
        group.state = "ready"  # as after the end of their lease
    buffer.also_finished = {100: "filtered"}  # the report of their first delivery is repeated
    second = feed.next_batch(3)
    feed.ack(first)
    feed.ack(second)

    assert [group.instance_id for group in first] == ["task-0", "task-1"]
    assert [group.instance_id for group in second] == ["task-2", "task-3", "task-4"]
    assert first.consumed == ["filtered", "task-0", "task-1"]
    assert second.consumed == ["task-2", "task-3", "task-4"]
    assert states(buffer) == ["delivered"] * 5


def test_a_filtered_group_that_a_delivery_of_other_groups_names_again_is_consumed_once(
    buffer: LoopbackBuffer, feed: RolloutFeed
) -> None:
    buffer.also_finished = {100: "filtered"}
    first = feed.next_batch(2)
    buffer.also_finished = {100: "filtered", 101: "filtered"}  # another consumer had a part of the first delivery
    second = feed.next_batch(3)

    assert first.consumed == ["filtered", "task-0", "task-1"]
    assert second.consumed == ["filtered", "task-2", "task-3", "task-4"]


def test_a_trained_group_that_another_consumer_did_not_acknowledge_is_acknowledged_when_it_comes_back(
    buffer: LoopbackBuffer, feed: RolloutFeed
) -> None:
    first = feed.next_batch(2)
    groups = buffer.only_job().groups[:2]
    for group in groups:
        group.delivery_id = "of another consumer"
    lost = feed.ack(first)
    for group in groups:
        group.state = "ready"  # its lease has ended too
    buffer.most_groups_of_a_poll = 1
    second = feed.next_batch(3)
    feed.ack(second)

    assert lost == {1, 2}
    assert [group.instance_id for group in second] == ["task-2", "task-3", "task-4"]
    assert states(buffer) == ["delivered"] * 5


def test_a_group_without_any_row_is_consumed_and_left_out(buffer: LoopbackBuffer, feed: RolloutFeed) -> None:
    spoil(buffer, "task-1")
    batch = feed.next_batch(2)
    feed.ack(batch)

    assert [group.instance_id for group in batch] == ["task-0", "task-2"]
    assert sorted(batch.consumed) == ["task-0", "task-1", "task-2"]
    assert states(buffer)[:3] == ["delivered"] * 3


def test_where_nothing_can_be_trained_it_says_why_instead_of_going_on(
    buffer: LoopbackBuffer, feed: RolloutFeed
) -> None:
    for number in range(5):
        spoil(buffer, f"task-{number}")
    with pytest.raises(GeneratorError, match="of 2 groups can be trained: 4 x its outcome is aborted"):
        feed.next_batch(2)


def test_more_groups_than_the_job_plays_ahead_are_released_on_the_way(buffer: LoopbackBuffer) -> None:
    """A job that counts what is leased would never begin the third group."""
    buffer.most_groups_of_a_poll = 1
    feed = RolloutFeed(buffer.url, {**PAYLOAD, "max_groups_ahead": "2"}, wait_s=0.02)
    with feed:
        feed.start()
        batch = feed.next_batch(4)

    acknowledged = [len(poll.get("ack", ())) for poll in buffer.bodies("/get_rollout_data")]
    assert len(batch) == 4
    assert acknowledged == [0, 0, 2, 0]


def test_attempts_that_were_given_up_and_do_not_end_are_an_error(
    buffer: LoopbackBuffer, feed: RolloutFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_feed, "MAX_STANDSTILL_S", -1.0)
    running = ScriptedReply(body=b'{"state": "paused", "attempts": {"running": 2}}')
    buffer.script("/jobs/job/drain", running, running)
    feed.drain()  # they may be as long as an attempt
    buffer.script("/jobs/job/drain", running)
    with pytest.raises(JobStalledError, match="2 attempts of job job were given up and do not end"):
        feed.drain(stop=True)


def test_what_the_trainer_computed_is_reported_of_its_job_before_the_feed_closes(buffer: LoopbackBuffer) -> None:
    with feed_of(buffer) as feed:
        feed.start()
        (row, _) = feed.next_batch(1).rows
        sent = feed.report([RowReport(uid=row.uid, row=row.number, log_probs=[-0.5], advantage=1.0)], step=3)

    (body,) = buffer.bodies("/jobs/job/trainer_rows")
    assert sent
    assert body["step"] == 3
    assert body["rows"] == [{"uid": "task-0.0.0", "row": 0, "log_probs": [-0.5], "advantage": 1.0}]


def spoil(buffer: LoopbackBuffer, instance_id: str) -> None:
    """Makes a group's members such that no token of them may be trained."""
    (group,) = (group for group in buffer.only_job().groups if group.instance_id == instance_id)
    group.items = [{**item, "outcome": "aborted"} for item in group.items]
