"""A turn is stored before it is answered: what is sampled once is neither lost nor sampled again, whoever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime.utils.mask_rows import ROUTED_EXPERTS, RecordBytes, TokenRecords
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.storage.retention import purge, would_purge
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import (
    LOOK,
    RETRY,
    USER,
    GatewayUnderTest,
    HeldEngine,
    counting_engine,
    gateway_on,
    message_of,
    start_session_job,
)
from tests.support import PNG, poll, refuse_room, uids


def stored_turns(gateway: GatewayUnderTest) -> int:
    with gateway.buffer.store.read() as connection:
        return int(connection.execute("SELECT count(*) FROM turns").fetchone()[0])


async def test_a_killed_gateways_session_goes_on_where_it_was_with_its_exact_ids_and_pictures(tmp_path: Path) -> None:
    first, second = counting_engine(), counting_engine()
    async with gateway_on(tmp_path, first) as gateway:
        job = start_session_job(gateway.buffer, n=1, message_matching="role_content_only")
        opened = await gateway.open(job, idle_timeout_s=1234)
        one = message_of(await gateway.chat(opened, [USER]))
        two = message_of(await gateway.chat(opened, [USER, one, LOOK]))
    async with gateway_on(tmp_path, second) as gateway:
        shown = (await gateway.call("GET", f"/sessions/{opened['session_id']}")).body
        assert (shown["turns"], shown["branches"], shown["idle_timeout_s"]) == (2, 1, 1234)
        reminded = {**USER, "content": USER["content"] + "<system-reminder>It is Friday.</system-reminder>"}
        message_of(await gateway.chat(opened, [reminded, one, LOOK, two, USER]))
        (asked,) = second.requests
        before = tuple(first.requests[1].input_ids)
        assert tuple(asked.input_ids[: len(before)]) == before
        assert [image.data for image in asked.images] == [PNG]
        assert (await gateway.close(opened, reward=1, turn_rewards=[0, 0, 1])).body["turns"] == 3
        generations = gateway.generations(job, opened["session_id"])
        assert [tuple(one.prompt_ids) for one in generations] == [
            tuple(request.input_ids) for request in (*first.requests, asked)
        ]
        assert all(len(one.output_log_probs or ()) == len(one.output_ids) for one in generations)
        item = gateway.item(job, opened["session_id"])
        assert [message["role"] for message in item["messages"]] == ["user", "assistant"] * 3
        assert item["extra_info"]["gateway"]["tolerated"] == {"additions": 1}, "the job's rule holds after a restart"
        assert stored_turns(gateway) == 0, "they go with the trajectory"


async def test_token_records_of_a_killed_gateways_turns_are_in_the_trajectory(tmp_path: Path) -> None:
    records = TokenRecords(start=1, values=bytes(8), itemsize=1, width=2)
    reply = GenerateReply(
        output_ids=(500,), output_log_probs=(-1.0,), finish_reason="stop", records={ROUTED_EXPERTS: records}
    )
    async with gateway_on(tmp_path, FakeEngine([reply])) as gateway:
        job = start_session_job(gateway.buffer, n=1, sampling_params={"return_routed_experts": True})
        opened = await gateway.open(job)
        message_of(await gateway.chat(opened, [USER]))
    async with gateway_on(tmp_path, counting_engine()) as gateway:
        assert (await gateway.close(opened, reward=1)).status == 200
        (generation,) = gateway.generations(job, opened["session_id"])
        assert generation.records == {ROUTED_EXPERTS: RecordBytes.of(records)}
        assert gateway.buffer.payloads.image(generation.records[ROUTED_EXPERTS].sha256) == records.encode()


async def test_a_request_whose_answer_was_lost_with_the_gateway_gets_the_stored_turn(tmp_path: Path) -> None:
    engine = counting_engine()
    async with gateway_on(tmp_path, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))
        one = message_of(await gateway.chat(opened, [USER]))
        lost = await gateway.chat(opened, [USER, one, USER])
    async with gateway_on(tmp_path, engine) as gateway:
        assert (await gateway.chat(opened, [USER, one, USER])).body == lost.body
        assert len(engine.requests) == 2
        again = await gateway.chat(opened, [USER, one, USER])
        assert message_of(again) != message_of(lost), "who asks a second time wants a second sample"
        retried = await gateway.chat(opened, [USER, one, USER], headers=RETRY)
        assert retried.body == again.body
        assert len(engine.requests) == 3


async def test_two_retries_at_once_get_one_turn_and_two_requests_get_two(tmp_path: Path) -> None:
    engine = HeldEngine()
    async with gateway_on(tmp_path, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))
        asking = [asyncio.ensure_future(gateway.chat(opened, [USER], headers=RETRY)) for _ in range(3)]
        await engine.asked.wait()
        engine.may_answer.set()
        answers = [message_of(one)["content"] for one in await asyncio.gather(*asking)]
        assert (answers, len(engine.requests)) == (["Answer 1."] * 3, 1)
        await asyncio.gather(*(gateway.chat(opened, [USER]) for _ in range(2)))
        assert (len(engine.requests), stored_turns(gateway)) == (3, 3)


async def test_a_turn_that_could_not_be_stored_is_not_answered_and_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = counting_engine()
    async with gateway_on(tmp_path, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))

        with monkeypatch.context() as patch:
            refuse_room(gateway.buffer, patch)
            refused = await gateway.chat(opened, [USER])
            assert (refused.status, refused.body["error"]["code"]) == (507, "storage_full")
            assert refused.retry_after == "1"
        assert stored_turns(gateway) == 0
        assert message_of(await gateway.chat(opened, [USER], headers=RETRY))["content"] == "Answer 2."
        assert (await gateway.close(opened, reward=1)).body["turns"] == 1


async def test_a_client_that_hangs_up_while_its_turn_is_stored_gets_it_on_its_retry_and_trains_nothing_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = counting_engine()
    storing, may_store, stored = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with gateway_on(tmp_path, engine) as gateway:
        job = start_session_job(gateway.buffer)
        write = gateway.gateway.turns.write

        async def held(turn: Any) -> bool:
            storing.set()
            await may_store.wait()
            try:
                return await write(turn)
            finally:
                stored.set()

        monkeypatch.setattr(gateway.gateway.turns, "write", held)
        opened = await gateway.open(job)
        asking = asyncio.ensure_future(gateway.chat(opened, [USER]))
        await storing.wait()
        asking.cancel()
        await asyncio.sleep(0.1)  # the gateway sees it
        may_store.set()
        await stored.wait()
        assert (await gateway.call("GET", f"/sessions/{opened['session_id']}")).body["turns"] == 0
        assert (await gateway.close(opened, reward=1)).status == 400, "there is no turn to train"
        assert message_of(await gateway.chat(opened, [USER]))["content"] == "Answer 1."
        assert len(engine.requests) == 1
        assert (await gateway.close(opened, reward=1)).body["turns"] == 1


async def test_turns_of_a_session_that_is_given_up_are_deleted(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, counting_engine()) as gateway:
        job = start_session_job(gateway.buffer, n=2)
        abandoned, cancelled = [await gateway.open(job) for _ in range(2)]
        for opened in (abandoned, cancelled):
            message_of(await gateway.chat(opened, [USER]))
        await gateway.call("POST", f"/sessions/{abandoned['session_id']}/abandon", {})
        assert stored_turns(gateway) == 1
        gateway.buffer.change_job(job.job_id, "cancel")
        assert stored_turns(gateway) == 0


async def test_pictures_of_an_open_session_outlive_the_retention(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, counting_engine()) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        one = message_of(await gateway.chat(opened, [LOOK]))
        later = gateway.buffer.clock() + 1000
        assert would_purge(gateway.buffer.store, now=later, retain_s=10).images == 0
        assert purge(gateway.buffer.store, now=later, retain_s=10).images == 0
    async with gateway_on(tmp_path, counting_engine()) as gateway:
        message_of(await gateway.chat(opened, [LOOK, one, USER]))
        await gateway.close(opened, reward=1)
        assert purge(gateway.buffer.store, now=later, retain_s=10).images == 0, "its trajectory is not delivered yet"
        assert uids(gateway.buffer, poll(gateway.buffer, job)) == [opened["session_id"]]
