"""The sums of rewards that deliveries report: kept up to date by each write, and always those of the rows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from tests.support import poll, polled_delivery, start_external, write, written


def sums_and_rows(buffer: Buffer) -> tuple[list[Any], list[Any]]:
    """The stored sums, and the same sums computed from the rows."""
    columns = "job_key, portion, outcome, count(*), total(reward), total(reward * reward), min(reward), max(reward)"
    groups = "SELECT job_key, portion, count(DISTINCT group_key) FROM trajectories GROUP BY 1, 2"
    sums = "job_key, portion, outcome, samples, total, square_total, low, high"
    with buffer.store.read() as connection:
        stored = connection.execute(f"SELECT {sums} FROM portion_sums ORDER BY 1, 2, 3")
        computed = connection.execute(f"SELECT {columns} FROM trajectories GROUP BY 1, 2, 3 ORDER BY 1, 2, 3")
        stored_groups = connection.execute("SELECT job_key, portion, sum(groups) FROM portion_sums GROUP BY 1, 2")
        return (
            [tuple(row) for row in (*stored, *stored_groups)],
            [tuple(row) for row in (*computed, *connection.execute(groups))],
        )


def attach(buffer: Buffer, job: JobRecord, skip: list[str]) -> None:
    """Starts the same job again, as a trainer that comes back does."""
    body = {"task_type": "external", "num_repeat_per_sample": 2, "job_id": job.job_id, "skip_instance_ids": skip}
    buffer.start_job(parse(StartPayload, body), [])


@pytest.mark.parametrize("seed", range(6))
def test_the_sums_are_those_of_the_rows_whatever_happens(buffer: Buffer, clock: SettableClock, seed: int) -> None:
    chance = random.Random(seed)
    job = start_external(buffer, 2)
    polled = 0
    for step in range(60):
        what = chance.choice(["write", "write", "write", "poll", "pop", "lapse", "back"])
        if what == "write":
            outcome = chance.choice(["completed", "truncated"])
            item = written(
                f"u{step}", f"i{chance.randrange(12)}", chance.choice([-1.0, 0.0, 0.25, 3.0]), outcome=outcome
            )
            write(buffer, job, item)
        elif what == "lapse":
            clock.now += 100
            buffer.expire_leases()
        elif what == "back":
            attach(buffer, job, [f"i{number}" for number in range(12) if chance.random() < 0.4])
        else:
            lease = {} if what == "pop" else {"lease_s": 50, "consumer_id": "c", "poll_id": str(step)}
            if poll(buffer, job, max_groups=chance.choice([1, 2, 100]), **lease) is not None:
                polled += 1
        stored, computed = sums_and_rows(buffer)
        assert stored == computed
    assert polled


def test_a_group_whose_members_were_reported_apart_counts_once_when_they_are_reported_together(
    buffer: Buffer, clock: SettableClock
) -> None:
    job = start_external(buffer, 2)
    for name in ("a", "d"):
        write(buffer, job, written(f"{name}1", name), written(f"{name}2", name, 0.0))
    write(buffer, job, written("b1", "b", 0.0))
    first = polled_delivery(buffer, job, lease_s=10)
    assert (first.meta_info["total_samples"], first.meta_info["num_groups"]) == (5, 3)
    write(buffer, job, written("b2", "b"), written("c1", "c"), written("c2", "c", 0.0))
    clock.now += 20
    buffer.expire_leases()
    part = poll(buffer, job, max_groups=1)  # the first delivery does not come back whole
    assert part is not None
    assert (part.meta_info["total_samples"], part.meta_info["num_groups"]) == (8, 4)
    assert part.meta_info["outcomes"] == {"completed": 8}
    rest = polled_delivery(buffer, job)
    assert (rest.meta_info["total_samples"], rest.meta_info["num_groups"]) == (0, 0)
