"""A delivery whose lease ran out: who may still acknowledge it, and who has its groups now."""

from __future__ import annotations

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.support import poll, polled_delivery, start_external, uids, write, written


def ready_job(buffer: Buffer, **changes: object) -> JobRecord:
    job = start_external(buffer, **changes)  # type: ignore[arg-type]  # settings of the payload
    write(buffer, job, *(written(f"{name}{i}", name, reward=i) for name in "ab" for i in (0, 1)))
    return job


def leased_to(buffer: Buffer, job: JobRecord, who: str, number: int = 1, **options: object) -> Delivery:
    return polled_delivery(buffer, job, **{"lease_s": 10, "consumer_id": who, "poll_id": str(number), **options})


def test_what_neither_of_two_acknowledged_comes_back_to_a_third(buffer: Buffer, clock: SettableClock) -> None:
    job = ready_job(buffer)
    first = leased_to(buffer, job, "a")
    clock.advance(11)
    second = leased_to(buffer, job, "b")
    clock.advance(11)
    assert buffer.acknowledge([first.delivery_id])["expired"] == [first.delivery_id]
    third = leased_to(buffer, job, "c")
    assert uids(buffer, third) == uids(buffer, first)
    assert buffer.acknowledge([second.delivery_id])["expired"] == [second.delivery_id]
    assert buffer.acknowledge([third.delivery_id])["acked"] == [third.delivery_id]


def test_a_repeated_poll_keeps_its_delivery_while_nobody_else_got_it(buffer: Buffer, clock: SettableClock) -> None:
    job = ready_job(buffer)
    first = leased_to(buffer, job, "a")
    clock.advance(11)
    assert leased_to(buffer, job, "a") == first
    clock.advance(11)
    other = leased_to(buffer, job, "b")
    assert poll(buffer, job, lease_s=10, consumer_id="a", poll_id="1") is None
    assert leased_to(buffer, job, "b") == other


def test_a_group_that_went_stale_while_it_waited_again_is_reported(buffer: Buffer, clock: SettableClock) -> None:
    """Its delivery will not come back whole, so what the delivery had reported is reported again."""
    job = start_external(buffer, max_weight_version_lag=0)
    for name, version in (("a", 1), ("b", 2)):
        generations = [{"prompt_ids": [1], "output_ids": [2], "finish_reason": "stop", "weight_version": version}]
        write(buffer, job, *(written(f"{name}{i}", name, reward=i, generations=generations) for i in (0, 1)))
        if name == "a":
            leased_to(buffer, job, "a")
            clock.advance(11)
    after = leased_to(buffer, job, "b")
    assert after.meta_info["finished_groups"] == ["a", "b"]
    assert after.meta_info["total_samples"] == 4
