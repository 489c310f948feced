"""The remote rollout protocol's trainer side, as the gateway mounts it: a ``rollout_id`` in the body decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.gateway.remote_rollout_adapter import RemoteRolloutAdapter
from slime_plugins.rollout_buffer.gateway.rollout_log import RolloutLog
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.session_log import StoredSession
from slime_plugins.rollout_buffer.remote_rollout.trainer_side.trainer import TrainerSide
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import USER, GatewayUnderTest, counting_engine, gateway_on, start_session_job, tokenizer
from tests.support import poll, start_external, uids, write, written


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


async def test_a_rollout_of_an_instance_that_the_job_lacks_is_refused_when_it_is_opened(
    gateway: GatewayUnderTest,
) -> None:
    job = start_session_job(gateway.buffer, n=1)
    body = {"rollout_id": "r1", "job_id": job.job_id, "instance_id": "b"}
    refused = await gateway.call("POST", "/rollouts", body)
    assert (refused.status, "has no instance 'b'" in refused.body["error"]["message"]) == (409, True)
    bringing = start_session_job(gateway.buffer, n=1, ids=())
    assert (await gateway.call("POST", "/rollouts", {**body, "job_id": bringing.job_id})).status == 200


async def test_a_rollout_id_of_null_is_none(gateway: GatewayUnderTest) -> None:
    session = await gateway.open(start_session_job(gateway.buffer, n=1))
    body = {"rollout_id": None, "messages": [USER]}
    turn = await gateway.call("POST", "/v1/chat/completions", body, bearer=session["api_key"])
    assert turn.status == 200, turn.body
    assert (await gateway.close(session, reward=1)).body["turns"] == 1


async def opened(gateway: GatewayUnderTest, **options: Any) -> str:
    """Opens a rollout in a job of its own; returns the job's id."""
    job = start_session_job(gateway.buffer, n=1)
    body = {"rollout_id": "r1", "job_id": job.job_id, "instance_id": "a", **options}
    answer = await gateway.call("POST", "/rollouts", body)
    assert answer.status == 200, answer.body
    return job.job_id


async def turn(gateway: GatewayUnderTest, messages: list[Any], number: int, *, entered: int = 0, **options: Any) -> Any:
    """A turn with a mask for as many tokens as entered, or else as the gateway expects."""
    options["headers"] = {"X-Rollout-Turn": str(number)}
    body = {"rollout_id": "r1", "messages": messages, "response_mask": [0] * entered or None}
    answer = await gateway.call("POST", "/v1/chat/completions", body, **options)
    if answer.status == 422:
        return await turn(gateway, messages, number, entered=answer.body["error"]["detail"]["expected"], **options)
    assert answer.status == 200, answer.body
    return answer.body


def grown(messages: list[Any], answer: dict[str, Any]) -> list[Any]:
    return [*messages, answer["choices"][0]["message"], USER]


async def test_a_killed_gateways_rollout_goes_on_where_it_was_and_samples_no_turn_again(tmp_path: Path) -> None:
    first, second = counting_engine(), counting_engine()
    async with gateway_on(tmp_path, first) as gateway:
        job_id = await opened(gateway, api_key="key-of-the-rollout")
        one = await turn(gateway, [USER], 1, bearer="key-of-the-rollout")
        history = grown([USER], one)
        two = await turn(gateway, history, 2, bearer="key-of-the-rollout")
    async with gateway_on(tmp_path, second) as gateway:
        stranger = await gateway.call("GET", "/rollouts/r1")
        assert stranger.status == 401
        assert await turn(gateway, history, 2, entered=two["entered_tokens"], bearer="key-of-the-rollout") == two
        assert second.requests == []
        three = await turn(gateway, grown(history, two), 3, bearer="key-of-the-rollout")
        assert three["prompt_token_ids"][: len(two["prompt_token_ids"])] == two["prompt_token_ids"]
        shown = (await gateway.call("GET", "/rollouts/r1", bearer="key-of-the-rollout")).body
        assert (shown["turns"], shown["continued"], len(shown["rows"])) == (3, 2, 1)
        ended = await gateway.call("POST", "/rollouts/r1/end", {"reward": 1}, bearer="key-of-the-rollout")
        assert (ended.status, ended.body["turns"]) == (200, 3)
        job = gateway.buffer.job(job_id)
        told = gateway.item(job, "r1")["extra_info"]["remote_rollout"]
        assert (told["emission_order"], told["parents"], told["forks"]) == ([1, 2, 3], [0, 1, 2], [])
        generations = gateway.generations(job, "r1")
        assert [list(one.output_ids) for one in generations] == [one["token_ids"] for one in (one, two, three)]
        assert [list(one.prompt_ids) for one in generations] == [one["prompt_token_ids"] for one in (one, two, three)]
        assert [list(one.output_log_probs or ()) for one in generations] == [
            one["logprobs"] for one in (one, two, three)
        ]


async def test_any_process_of_a_gateway_continues_and_ends_a_rollout(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engines = [counting_engine(), counting_engine()]
        here, there = [
            await stack.enter_async_context(gateway_on(tmp_path, engine, worker=worker, workers=2))
            for worker, engine in enumerate(engines, 1)
        ]
        await opened(here)
        one = await turn(here, [USER], 1)
        two = await turn(there, grown([USER], one), 2)
        three = await turn(here, grown(grown([USER], one), two), 3)
        assert [one["turn"] for one in (one, two, three)] == [1, 2, 3]
        assert [len(engine.requests) for engine in engines] == [2, 1]
        listed = (await there.call("GET", "/rollouts")).body["rollouts"]
        assert [(one["rollout_id"], one["turns"]) for one in listed] == [("r1", 3)]
        assert listed == (await here.call("GET", "/rollouts")).body["rollouts"]
        ended = await there.call("POST", "/rollouts/r1/end", {"reward": 1})
        again = await here.call("POST", "/rollouts/r1/end", {"reward": 1})
        assert (ended.status, ended.body) == (again.status, again.body)
        other = await here.call("POST", "/rollouts/r1/end", {"reward": 0})
        late = await here.call("POST", "/v1/chat/completions", {"rollout_id": "r1", "messages": [USER]})
        assert (other.status, late.status) == (409, 409)


class NotingLog(RolloutLog):
    """Notes after which turn each session is read: 0 if no turn of it is in memory."""

    def __init__(self, gateway: GatewayUnderTest) -> None:
        super().__init__(gateway.gateway, keep_ended_s=900.0)
        self.read_after: list[int] = []

    async def find(self, rollout_id: str, *, after: int) -> StoredSession | None:
        self.read_after.append(after)
        return await super().find(rollout_id, after=after)


async def test_a_rollout_without_a_call_is_in_the_memory_of_a_process_for_two_minutes_and_then_read_again(
    gateway: GatewayUnderTest,
) -> None:
    await opened(gateway)
    await turn(gateway, [USER], 1)
    clock, log = SettableClock(), NotingLog(gateway)
    process = TrainerSide(RemoteRolloutAdapter(gateway.gateway, "").policy_of, log=log, clock=clock)
    for state in ("open", "ended"):
        if state == "ended":
            assert (await gateway.call("POST", "/rollouts/r1/end", {"reward": 1.0})).status == 200
        for seconds in (0, 100, 100, 121):
            clock.advance(seconds)
            await process.refresh("r1")
            assert process.get_session("r1").state == state
    assert log.read_after == [0, 1, 1, 0, 1, 1, 1, 0]
    clock.advance(121)
    assert await process.rollout_ids() == ["r1"]


async def test_an_ended_rollout_that_is_read_again_and_again_keeps_no_other_in_memory(
    gateway: GatewayUnderTest,
) -> None:
    clock, log = SettableClock(), NotingLog(gateway)
    process = TrainerSide(RemoteRolloutAdapter(gateway.gateway, "").policy_of, log=log, clock=clock)
    for name in ("r1", "r2"):
        await opened(gateway, rollout_id=name)
        sampled = await gateway.call("POST", "/v1/chat/completions", {"rollout_id": name, "messages": [USER]})
        ended = await gateway.call("POST", f"/rollouts/{name}/end", {"reward": 1.0})
        assert (sampled.status, ended.status) == (200, 200)
        await process.refresh(name)
    for name in ("r1", "r1", "r2"):
        clock.advance(100 if name == "r1" else 0)
        await process.refresh(name)
    assert log.read_after == [0, 0, 1, 1, 0]


async def test_two_processes_that_are_asked_for_one_turn_give_one_answer(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        slow = [FakeEngine([text], tokenizer=tokenizer, delay_s=0.2) for text in ("Four.", "Five.")]
        here, there = [
            await stack.enter_async_context(gateway_on(tmp_path, engine, worker=worker, workers=2))
            for worker, engine in enumerate(slow, 1)
        ]
        await opened(here)
        one, other = await asyncio.gather(turn(here, [USER], 1), turn(there, [USER], 1))
        assert one == other
        shown = (await here.call("GET", "/rollouts/r1")).body
        assert (shown["turns"], shown["response_ids"]) == (1, one["token_ids"])


async def test_a_rollout_that_nobody_continues_expires_for_every_process(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, counting_engine(), idle_timeout_s=0.05) as gateway:
        job_id = await opened(gateway)
        await turn(gateway, [USER], 1)
    async with gateway_on(tmp_path, counting_engine(), idle_timeout_s=0.05) as gateway:
        await asyncio.sleep(0.1)
        late = await gateway.call("POST", "/v1/chat/completions", {"rollout_id": "r1", "messages": [USER]})
        assert (late.status, "is expired" in late.body["error"]["message"]) == (409, True)
        again = await gateway.call("POST", "/rollouts", {"rollout_id": "r1", "job_id": job_id})
        assert again.status == 409
