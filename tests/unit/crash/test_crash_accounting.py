"""The crash test's own judgement: it must find what it looks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item
from tests.crash import accounting as checks
from tests.crash.accounting import StoreView
from tests.crash.run import _plan
from tests.crash.workload import SESSIONS_JOB, WRITTEN_JOB, Journal, Plan, requests_of_writer
from tests.support import delivered_items, polled_delivery, start_external, uids


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    small = replace(_plan(tmp_path, 1, kills=0, seed=0), written_groups=4, writers=2)
    small.save()
    return small


@pytest.fixture
def view(plan: Plan) -> Iterator[StoreView]:
    """A run without any kill: everything was written, leased and acknowledged."""
    buffer = Buffer(Store(plan.path("data")))
    job = start_external(buffer, n=plan.written_size, job_id=WRITTEN_JOB)
    for number in range(plan.writers):
        journal = Journal(plan.path(f"writer-{number}.jsonl"))
        for items in requests_of_writer(plan, number):
            decoded = [decode_written_item(item) for item in items]
            _, results = buffer.write_items(WRITTEN_JOB, decoded)
            journal.note(statuses={result.uid: result.status for result in results})
    trainer = Journal(plan.path("leasing-a0.jsonl"))
    for number in range(plan.written_groups):
        trainer.note(asked=f"poll{number}")
        delivery = polled_delivery(buffer, job, lease_s=60, max_groups=1)
        group = next(delivered_items(buffer, delivery))[0]["group_index"]
        trainer.note(got=delivery.delivery_id, groups={str(group): "digest"}, uids=uids(buffer, delivery))
        trainer.note(acked=buffer.acknowledge([delivery.delivery_id])["acked"], expired=[])
    buffer.store.close()
    found = StoreView(plan, {WRITTEN_JOB: ["a0"]})
    yield found
    found.close()


def tamper(view: StoreView, query: str, *values: object) -> None:
    connection = sqlite3.connect(view.plan.path("data", "buffer.sqlite3"))
    with connection:
        connection.execute(query, values)
    connection.close()


@pytest.mark.parametrize(
    ("query", "check", "says"),
    [
        ("DELETE FROM trajectories WHERE uid = 'g1.s2'", checks.every_answered_item_is_stored_once, "LOST: g1.s2"),
        ("UPDATE trajectories SET uid = 'x' WHERE uid = 'g1.s2'", checks.every_answered_item_is_stored_once, "LOST"),
        ("UPDATE groups SET state = 'ready' WHERE key = 2", checks.every_group_is_in_one_state, "still ready"),
        ("DELETE FROM members WHERE group_key = 1 AND ordinal = 0", checks.every_group_is_in_one_state, "3 members"),
        ("UPDATE members SET source_uid = 'g1.s0'", checks.no_trajectory_is_in_two_places, "g1.s0 is a member"),
        ("DELETE FROM members WHERE source_uid = 'g1.s0'", checks.no_stored_trajectory_is_forgotten, "LOST: g1.s0"),
        ("UPDATE trajectories SET slot = 0", checks.no_trajectory_is_in_two_places, "holds 4"),
        ("UPDATE groups SET state = 'failed', cause = 'x' WHERE key = 1", checks.only_what_must_fail_failed, "failed"),
        ("UPDATE images SET place = '99:0:1:'", checks.bytes_and_rows_agree, "image"),
        ("INSERT INTO attempts (group_key, slot, attempt, fence, state, started_at) VALUES (1, 9, 1, 1, 'finished', 0)",
         checks.attempts_and_trajectories_agree, "has no trajectory"),
        ("INSERT INTO attempts (group_key, slot, attempt, fence, state, started_at) VALUES (1, 9, 1, 1, 'running', 0)",
         checks.attempts_and_trajectories_agree, "still counts as running"),
    ],
)  # fmt: skip
def test_what_is_lost_doubled_or_astray_is_found(
    view: StoreView, query: str, check: Callable[[StoreView], Iterator[str]], says: str
) -> None:
    tamper(view, query)
    assert any(says in sentence for sentence in check(view))


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([{"asked": "p"}, {"got": "d", "groups": {"1": "digest"}}], "came again in d after"),
        ([{"asked": "p"}, {"got": "d", "groups": {"1": "digest"}}, {"acked": ["d"]}], "DOUBLED: group 1 is in 2"),
        ([{"asked": "p"}, {"got": "d", "groups": {"1": "other"}}], "was not the same"),
    ],
)
def test_a_delivery_that_comes_again_is_found(view: StoreView, events: list[dict[str, object]], says: str) -> None:
    journal = Journal(view.plan.path("leasing-a0.jsonl"))
    for event in events:
        journal.note(**event)
    assert any(says in sentence for sentence in checks.acknowledged_once_and_never_again(view))


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("UPDATE groups SET state = 'failed', cause = 'slots failed' WHERE key = 1", "is failed: slots failed"),
        ("UPDATE trajectories SET reward = 0", "earned 0.0 in slot 1"),
    ],
)
def test_a_failure_of_engine_gateway_or_ray_that_costs_a_group_or_a_reward_is_found(
    view: StoreView, query: str, says: str
) -> None:
    tamper(view, "UPDATE jobs SET job_id = ?", SESSIONS_JOB)
    tamper(view, "UPDATE trajectories SET reward = slot % 2")
    assert list(checks.no_fault_failed_a_session_or_device_group(view)) == []
    tamper(view, query)
    assert any(says in sentence for sentence in checks.no_fault_failed_a_session_or_device_group(view))
