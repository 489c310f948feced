"""The remote rollout protocol's trainer side, as the gateway mounts it: a ``rollout_id`` in the body decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import GatewayUnderTest, gateway_on, start_session_job, tokenizer
from tests.support import poll, start_external, uids, write, written

USER = {"role": "user", "content": "What is 2 + 2?"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    async with gateway_on(tmp_path, FakeEngine(lambda request: "Four.", tokenizer=tokenizer)) as found:
        yield found


async def test_a_rollout_id_makes_a_turn_of_the_protocol_and_its_end_a_trajectory(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=1)
    opened = await gateway.call("POST", "/rollouts", {"rollout_id": "r1", "job_id": job.job_id, "instance_id": "a"})
    assert opened.status == 200, opened.body
    asked = {"rollout_id": "r1", "messages": [USER], "response_mask": None}
    turn = await gateway.call("POST", "/v1/chat/completions", asked)
    assert turn.status == 200, turn.body
    assert turn.body["choices"][0]["message"]["content"] == "Four."
    ended = await gateway.call("POST", "/rollouts/r1/end", {"reward": 1})
    assert ended.status == 200, ended.body
    assert uids(gateway.buffer, poll(gateway.buffer, job)) == ["r1"]


@pytest.mark.parametrize("instance", [{"instance_id": "a"}, {}])
async def test_an_open_rollout_holds_the_clock_of_the_groups_that_it_may_be_of(
    gateway: GatewayUnderTest, instance: dict[str, str]
) -> None:
    job = start_session_job(gateway.buffer, n=2, ids=("a", "b"), group_timeout_seconds=0.01)
    opened = await gateway.call("POST", "/rollouts", {"rollout_id": "r1", "job_id": job.job_id, **instance})
    assert opened.status == 200, opened.body
    await gateway.gateway.reconcile()
    write(gateway.buffer, job, written("u", "a"), written("v", "b"))
    await asyncio.sleep(0.05)
    assert gateway.buffer.close_timed_out_groups() == len(instance), "of b, where it is said that the rollout is of a"


async def test_an_unknown_rollout_and_a_job_without_an_engine_are_refused(gateway: GatewayUnderTest) -> None:
    unknown = await gateway.call("POST", "/v1/chat/completions", {"rollout_id": "r9", "messages": [USER]})
    assert unknown.status == 404
    job = start_external(gateway.buffer, n=1, ids=("a",))
    refused = await gateway.call("POST", "/rollouts", {"rollout_id": "r2", "job_id": job.job_id, "instance_id": "a"})
    assert refused.status == 409
    unnamed = await gateway.call("POST", "/rollouts", {"rollout_id": "r3"})
    assert (unnamed.status, "job_id" in unnamed.body["error"]["message"]) == (400, True)
