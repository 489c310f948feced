"""The life of a session: opened on a slot, talked in, closed or given up; and what is left of one that is over."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from slime.utils.mask_rows import ROUTED_EXPERTS, RecordBytes, TokenRecords
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.errors import ConfigError, ConflictError
from slime_plugins.rollout_buffer.gateway import app
from slime_plugins.rollout_buffer.gateway.session_bodies import CloseBody
from slime_plugins.rollout_buffer.gateway.sessions import SessionKeys
from slime_plugins.rollout_buffer.gateway.settings import GatewaySettings
from slime_plugins.rollout_buffer.http_serving import serving
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.serve_settings import build_settings
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import (
    USER,
    GatewayUnderTest,
    HeldEngine,
    age_sessions,
    counting_engine,
    gateway_on,
    message_of,
    start_session_job,
    tokenizer,
)
from tests.support import Claims, poll, refuse_room, slot_counts, start_external, start_played, uids, write, written
from tests.waiting import until


def engine_of_four() -> FakeEngine:
    """An engine that replies "Four." to everything."""
    return FakeEngine(lambda request: "Four.", tokenizer=tokenizer)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    async with gateway_on(tmp_path, engine_of_four()) as found:
        yield found


async def test_token_records_of_the_engine_are_stored_and_count_towards_the_bytes_of_a_session(tmp_path: Path) -> None:
    asked = {"return_routed_experts": True}
    records = TokenRecords(start=1, values=bytes(8), itemsize=1, width=2)
    reply = GenerateReply(
        output_ids=(500,), output_log_probs=(-1.0,), finish_reason="stop", records={ROUTED_EXPERTS: records}
    )
    encoded = RecordBytes.of(records)
    assert encoded.data is not None
    engine = FakeEngine(lambda request: reply)
    async with gateway_on(tmp_path, engine, max_session_image_bytes=len(encoded.data) + 1) as gateway:
        job = start_session_job(gateway.buffer, sampling_params=asked)
        opened = await gateway.open(job)
        answers = [await gateway.chat(opened, [{"role": "user", "content": str(turn)}]) for turn in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 410]
        assert "bytes of images and token records" in answers[2].body["error"]["message"]
        assert engine.requests[0].sampling_params.extra == asked
        assert (await gateway.close(opened, reward=1.0)).status == 200
        generations = gateway.generations(job, opened["session_id"])
        assert [generation.records for generation in generations] == [{ROUTED_EXPERTS: encoded}] * 2
        assert gateway.buffer.payloads.image(encoded.sha256) == encoded.data


# --- opening ---------------------------------------------------------------------------------------------------------


async def test_sessions_take_the_slots_in_order_and_no_more_than_there_are(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=2, ids=("a", "b"))
    opened = [await gateway.open(job) for _ in range(4)]
    assert [(one["instance_id"], one["slot"]) for one in opened] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert opened[0]["instance"] == {"instance_id": "a", "question": "of a", "answer": "5"}
    fifth = await gateway.call("POST", "/sessions", {"job_id": job.job_id})
    assert (fifth.status, fifth.body["error"]["code"]) == (429, "busy")


async def test_a_job_without_input_learns_its_instances_from_its_sessions(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=1, ids=())
    unnamed = await gateway.call("POST", "/sessions", {"job_id": job.job_id})
    assert (unnamed.status, "instance_id" in unnamed.body["error"]["message"]) == (409, True)
    opened = await gateway.open(job, instance_id="new")
    await gateway.chat(opened, [USER])
    assert (await gateway.close(opened, reward=1)).body["status"] == "stored"
    assert slot_counts(gateway.buffer, job)["ready"] == 1


async def test_a_job_without_an_engine_and_an_unknown_one_are_refused_with_a_sentence(
    gateway: GatewayUnderTest,
) -> None:
    job = start_external(gateway.buffer, n=1, ids=("a",))
    plain = await gateway.call("POST", "/sessions", {"job_id": job.job_id})
    assert (plain.status, "remote_engine_url" in plain.body["error"]["message"]) == (409, True)
    assert (await gateway.call("POST", "/sessions", {"job_id": "no such"})).status == 404
    assert (await gateway.call("POST", "/sessions", {"job": "x"})).status == 400
    assert slot_counts(gateway.buffer, job)["open"] == 1


async def test_a_job_with_a_runner_takes_no_sessions_no_rollouts_and_no_claims(gateway: GatewayUnderTest) -> None:
    job_id = start_played(gateway.buffer).job_id
    for path, name in (("/sessions", {}), ("/rollouts", {"rollout_id": "r"})):
        refused = await gateway.call("POST", path, {"job_id": job_id, **name})
        assert (refused.status, "played by a runner" in refused.body["error"]["message"]) == (409, True)
    with pytest.raises(ConflictError, match="played by a runner"):
        Claims(gateway.buffer).take(job_id)


async def test_a_tokenizer_that_loads_for_long_and_in_vain_holds_up_no_other_job(tmp_path: Path) -> None:
    may_fail, asked = threading.Event(), threading.Event()

    def load(path: str) -> Any:
        if path == str(DEMO_TOKENIZER_PATH):
            return tokenizer
        asked.set()
        assert may_fail.wait(60)
        raise ConfigError("the hub cannot be asked")

    async with gateway_on(tmp_path, engine_of_four(), load=load) as gateway:
        slow = start_session_job(gateway.buffer, job_id="slow", tokenizer_path="our/model")
        opening = [asyncio.create_task(gateway.call("POST", "/sessions", {"job_id": slow.job_id})) for _ in range(3)]
        assert await asyncio.to_thread(asked.wait, 60)
        opened = await gateway.open(start_session_job(gateway.buffer, job_id="quick"))
        assert (await gateway.chat(opened, [USER])).status == 200
        may_fail.set()
        refused = await asyncio.gather(*opening)
        assert {reply.status for reply in refused} == {409}
        assert "takes no sessions: the hub cannot be asked" in refused[0].body["error"]["message"]


async def test_paused_and_cancelled_jobs_hand_out_no_slots(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer)
    gateway.buffer.change_job(job.job_id, "pause")
    assert (await gateway.call("POST", "/sessions", {"job_id": job.job_id})).status == 503
    gateway.buffer.change_job(job.job_id, "cancel")
    assert (await gateway.call("POST", "/sessions", {"job_id": job.job_id})).status == 409


async def test_sessions_that_open_are_abandoned_or_expire_at_once_share_their_fsyncs(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_count, store = 40, gateway.buffer.store
    job = start_session_job(gateway.buffer, n=session_count)
    transaction, transaction_count = store.write, 0

    def counted() -> Any:
        nonlocal transaction_count
        transaction_count += 1
        return transaction()

    await gateway.abandon(await gateway.open(job))  # loads the tokenizer and connects to the engine
    monkeypatch.setattr(store, "write", counted)
    opened = await asyncio.gather(*(gateway.open(job) for _ in range(session_count)))
    assert len({one["session_id"] for one in opened}) == session_count
    assert transaction_count < session_count / 4
    transaction_count = 0
    await asyncio.gather(*map(gateway.abandon, opened))
    assert transaction_count < session_count / 4
    await asyncio.gather(*(gateway.open(job, idle_timeout_s=60) for _ in range(session_count)))
    age_sessions(gateway, 61)
    transaction_count = 0
    await gateway.gateway.reconcile()
    assert transaction_count < session_count / 4
    assert slot_counts(gateway.buffer, job)["open"] == session_count
    assert gateway.gateway.claims.count_open() == 0


async def test_sessions_can_be_opened_and_abandoned_on_a_full_disk(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_session_job(gateway.buffer)
    refuse_room(gateway.buffer, monkeypatch)
    abandoned = await gateway.abandon(await gateway.open(job))
    assert abandoned.status == 200


async def test_groups_that_wait_for_the_trainer_hold_new_sessions_back(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=1, ids=("a", "b"), max_groups_ahead=1)
    opened = await gateway.open(job)
    await gateway.chat(opened, [USER])
    await gateway.close(opened, reward=1)
    assert (await gateway.call("POST", "/sessions", {"job_id": job.job_id})).status == 429
    assert uids(gateway.buffer, poll(gateway.buffer, job)) == [opened["session_id"]]
    await gateway.open(job)


async def test_turns_that_were_continued_are_a_measure_of_their_job(tmp_path: Path) -> None:
    reply = GenerateReply(output_ids=(500,), output_log_probs=(-1.0,), finish_reason="stop")
    script = [reply, *(replace(reply, breaks=breaks) for breaks in (1, 2))]
    async with gateway_on(tmp_path, FakeEngine(script)) as gateway:
        opened = await gateway.open(job := start_session_job(gateway.buffer))
        measured = []
        for turn in range(3):
            await gateway.chat(opened, [{"role": "user", "content": str(turn)}])
            measured.append(describe_job(gateway.buffer.store, job)["measures"].get("continued_turns"))
        assert measured == [None, {"sum": 1.0}, {"sum": 2.0}]


async def test_the_forks_of_closed_sessions_are_a_measure_of_their_job(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer)
    assert "forks" not in describe_job(gateway.buffer.store, job)["measures"]
    for forks in (1, 2):
        opened = await gateway.open(job)
        for number in range(forks + 1):
            await gateway.chat(opened, [{"role": "user", "content": f"Question {number}?"}])
        assert (await gateway.close(opened, reward=1)).status == 200
    assert describe_job(gateway.buffer.store, job)["measures"]["forks"] == {"sum": 3.0}


# --- closing ---------------------------------------------------------------------------------------------------------


async def test_closing_twice_is_closing_once(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=1)
    opened = await gateway.open(job)
    await gateway.chat(opened, [USER])
    both = await asyncio.gather(gateway.close(opened, reward=0.5), gateway.close(opened, reward=0.5))
    third = await gateway.close(opened, reward=0.9)
    assert sorted(reply.body["status"] for reply in (*both, third)) == ["duplicate", "duplicate", "stored"]
    assert third.body["reward"] == 0.5
    assert gateway.buffer.count_trajectories(job.key) == 1


async def test_a_client_that_hangs_up_while_its_session_is_closed_may_go_on(
    gateway: GatewayUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer))
    first = message_of(await gateway.chat(opened, [USER]))
    storing = asyncio.Event()

    async def held(*_: Any) -> Any:
        storing.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patched:
        patched.setattr(gateway.gateway, "_store_trajectory", held)
        closing = asyncio.create_task(gateway.gateway.close(opened["session_id"], CloseBody(reward=1.0), held))
        await storing.wait()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
    assert (await gateway.chat(opened, [USER, first, USER])).status == 200


async def test_a_session_whose_group_was_closed_gets_410_with_the_reason_at_its_next_turn_and_at_its_close(
    gateway: GatewayUnderTest,
) -> None:
    job = start_session_job(gateway.buffer, n=2, ids=("a", "b"))
    talking, closing = await gateway.open(job), await gateway.open(job)
    assert (await gateway.chat(talking, [USER])).status == 200
    assert (await gateway.chat(closing, [USER])).status == 200
    assert write(gateway.buffer, job, written("x", "a", reward=0), written("y", "a")) == ["stored", "stored"]
    for reply in (await gateway.chat(talking, [USER]), await gateway.close(closing, reward=1)):
        assert (reply.status, "its group is ready" in reply.body["error"]["message"]) == (410, True)
    await gateway.gateway.reconcile()
    assert describe_job(gateway.buffer.store, job)["attempts"] == {"given_up": 2, "given_up:group_closed": 2}
    assert gateway.gateway.claims.count_open() == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reward": 1, "scoring_url": "http://h/"},
        {"scoring_url": "http://h/", "turn_rewards": [1]},
        {"scoring_url": "http://h/", "token_rewards": [None]},
        {"reward": "nan"},
        {"reward": 1, "outcome": "failed"},
        {"reward": 0, "outcome": "aborted"},
        {"score": 1},
    ],
)
async def test_a_close_without_exactly_one_valid_reward_is_refused_and_changes_nothing(
    gateway: GatewayUnderTest, body: dict[str, Any]
) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer))
    await gateway.chat(opened, [USER])
    assert (await gateway.close(opened, **body)).status == 400
    assert (await gateway.chat(opened, [USER])).status == 200


async def test_rewards_of_turns_come_with_the_close_and_are_held_to_the_turns(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=1)
    opened = await gateway.open(job)
    first = await gateway.chat(opened, [USER])
    second = await gateway.chat(opened, [USER, first.body["choices"][0]["message"], USER])
    for wrong in ([1.0], [1.0, "x"], [1.0, None], [1.0, 2.0, 3.0]):
        refused = await gateway.close(opened, reward=1, turn_rewards=wrong)
        assert (refused.status, "turn_rewards" in str(refused.body)) == (400, True)
    refused = await gateway.close(opened, reward=1, turn_rewards=[0, 1], token_rewards=[None])
    assert (refused.status, "token_rewards" in str(refused.body)) == (400, True)
    of_tokens = [None, [0.5] * second.body["usage"]["completion_tokens"]]
    closed = await gateway.close(opened, reward=1, turn_rewards=[-0.25, 1], token_rewards=of_tokens)
    assert closed.status == 200
    item = gateway.item(job, opened["session_id"])
    assert (item["turn_rewards"], item["token_rewards"]) == ([-0.25, 1.0], of_tokens)


@pytest.mark.parametrize(("limit", "stop_reason"), [("max_turns", "max_turns"), ("max_tokens_total", "max_context")])
async def test_a_session_at_a_limit_of_its_job_takes_no_turn_and_is_closed_as_cut_by_it(
    gateway: GatewayUnderTest, limit: str, stop_reason: str
) -> None:
    limits: dict[str, Any] = {limit: 1}
    opened = await gateway.open(start_session_job(gateway.buffer, n=1, **limits))
    assert (await gateway.chat(opened, [USER])).status == 200
    refused = await gateway.chat(opened, [USER])
    assert (refused.status, "1 is the limit: close it" in refused.body["error"]["message"]) == (410, True)
    assert (await gateway.close(opened, reward=1)).body["turns"] == 1
    with gateway.buffer.store.read() as connection:
        stored = connection.execute("SELECT outcome, stop_reason FROM trajectories").fetchall()
    assert [tuple(row) for row in stored] == [("truncated", stop_reason)]


async def test_a_job_with_a_wrong_limit_takes_no_sessions(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, max_turns="many")
    refused = await gateway.call("POST", "/sessions", {"job_id": job.job_id})
    assert (refused.status, "max_turns must be a whole number" in refused.body["error"]["message"]) == (409, True)


async def test_a_turn_under_way_ends_with_its_session_and_is_not_recorded(tmp_path: Path) -> None:
    engine = HeldEngine()
    async with gateway_on(tmp_path, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer, n=1))
        engine.may_answer.set()
        await gateway.chat(opened, [USER])
        engine.may_answer.clear()
        engine.asked.clear()
        asking = asyncio.ensure_future(gateway.chat(opened, [USER]))
        await engine.asked.wait()
        closed = await gateway.close(opened, reward=1)
        assert (await asking).status == 410
        assert (closed.body["turns"], engine.given_up) == (1, 1)


# --- scoring ---------------------------------------------------------------------------------------------------------


class ScoringService:
    """Answers what the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: web.Response = web.json_response({"reward": 0.75, "extra_info": {"judge": "me"}})

    async def score(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return self.answer


@pytest.fixture
async def scoring() -> AsyncIterator[tuple[ScoringService, str]]:
    service = ScoringService()
    app = web.Application()
    app.router.add_post("/score", service.score)
    async with serving(app) as url:
        yield service, f"{url}/score"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.0/8"])
async def test_an_allowed_callback_gives_the_reward(
    tmp_path: Path, scoring: tuple[ScoringService, str], host: str
) -> None:
    service, url = scoring
    async with gateway_on(tmp_path, engine_of_four(), scoring_hosts=(host,)) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        await gateway.chat(opened, [USER])
        assert (await gateway.close(opened, scoring_url=url)).body["reward"] == 0.75
        assert service.asked[0]["instance"]["question"] == "of a"
        assert service.asked[0]["messages"][-1] == {"role": "assistant", "content": "Four."}
        assert gateway.item(job, opened["session_id"])["extra_info"]["judge"] == "me"


async def test_a_turn_that_is_sampled_during_the_callback_has_no_reward_of_it(tmp_path: Path) -> None:
    came, may_answer = asyncio.Event(), asyncio.Event()

    async def score(_request: web.Request) -> web.Response:
        came.set()
        await may_answer.wait()
        return web.json_response({"reward": 1.0})

    app = web.Application()
    app.router.add_post("/score", score)
    async with (
        serving(app) as url,
        gateway_on(tmp_path, counting_engine(), scoring_hosts=("127.0.0.1",)) as gateway,
    ):
        opened = await gateway.open(start_session_job(gateway.buffer, n=1))
        first = message_of(await gateway.chat(opened, [USER]))
        closing = asyncio.create_task(gateway.close(opened, scoring_url=f"{url}/score"))
        await came.wait()
        assert (await gateway.chat(opened, [USER, first, USER])).status == 200
        may_answer.set()
        refused = await closing
        assert (refused.status, "a turn was sampled" in refused.body["error"]["message"]) == (503, True)
        assert (await gateway.close(opened, scoring_url=f"{url}/score")).body["turns"] == 2


async def test_a_reward_that_no_trainer_would_get_leaves_the_session_open(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, engine_of_four()) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer, n=1, job_id="j", reward_range=[0, 1]))
        await gateway.chat(opened, [USER])
        for reward, status in ((5.0, 422), (1e39, 400)):
            assert (await gateway.close(opened, reward=reward)).status == status
        start_session_job(gateway.buffer, n=1, job_id="j", reward_range=[0, 0.5], skip_instance_ids=[])
        assert (await gateway.close(opened, reward=0.75)).status == 422
        assert (await gateway.close(opened, reward=0.5)).body["status"] == "stored"


async def test_a_callback_elsewhere_is_refused_before_it_is_asked(
    tmp_path: Path, scoring: tuple[ScoringService, str]
) -> None:
    service, url = scoring
    async with gateway_on(tmp_path, engine_of_four(), scoring_hosts=("judge.example",)) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))
        await gateway.chat(opened, [USER])
        refused = await gateway.close(opened, scoring_url=url)
        assert (refused.status, "--scoring-host" in refused.body["error"]["message"]) == (400, True)
        assert service.asked == []


def test_a_scoring_host_that_is_a_url_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"'http://judge:80' must be host, host:port"):
        build_settings(GatewaySettings, {"scoring_hosts": ("http://judge:80",)})


@pytest.mark.parametrize(
    "answer",
    [
        {"body": b"no json"},
        {"body": b'{"reward": "high"}'},
        {"body": b'{"reward": NaN}'},
        {"body": b"{}", "status": 500},
        {"body": b"", "status": 302, "headers": {"Location": "http://169.254.169.254/"}},
        {"body": b'{"reward": 1, "pad": "' + b"x" * 2_000_000 + b'"}'},
        {"body": b'{"reward": 1, "turn_rewards": 1}'},
        {"body": b'{"reward": 1, "turn_rewards": [1, 2]}'},
        {"body": b'{"reward": 1, "turn_rewards": [null]}'},
        {"body": b'{"reward": 1, "token_rewards": [[1, 2, 3, 4, 5, 6, 7]]}'},
    ],
)
async def test_a_callback_that_answers_nonsense_leaves_the_session_open(
    tmp_path: Path, scoring: tuple[ScoringService, str], answer: dict[str, Any]
) -> None:
    service, url = scoring
    service.answer = web.Response(**answer)
    async with gateway_on(tmp_path, engine_of_four(), scoring_hosts=("127.0.0.1",)) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer, n=1))
        await gateway.chat(opened, [USER])
        refused = await gateway.close(opened, scoring_url=url)
        assert (refused.status, refused.body["error"]["code"]) == (503, "unavailable")
        assert "the session stays open, close it again" in refused.body["error"]["message"]
        assert (await gateway.close(opened, reward=1)).body["status"] == "stored"


# --- expiry, cancelling, starting again ------------------------------------------------------------------------------


async def test_an_idle_session_expires_without_a_reward_and_its_slot_is_open_again(gateway: GatewayUnderTest) -> None:
    job = start_session_job(gateway.buffer, n=1)
    opened = await gateway.open(job, idle_timeout_s=60)
    await gateway.chat(opened, [USER])
    age_sessions(gateway, 61)
    await gateway.gateway.reconcile()
    after = await gateway.chat(opened, [USER])
    assert (after.status, "session_expired" in after.body["error"]["message"]) == (410, True)
    assert (await gateway.close(opened, reward=1)).status == 410
    assert gateway.buffer.count_trajectories(job.key) == 0
    assert slot_counts(gateway.buffer, job)["open"] == 1
    assert (await gateway.open(job))["attempt"] == 2


async def test_a_time_without_a_gateway_does_not_count_as_idle(gateway: GatewayUnderTest) -> None:
    opened = await gateway.open(start_session_job(gateway.buffer, n=1), idle_timeout_s=60)
    age_sessions(gateway, 61)
    gateway.buffer.resume_sessions()
    await gateway.gateway.reconcile()
    assert (await gateway.chat(opened, [USER])).status == 200


async def test_a_session_does_not_expire_while_a_turn_is_sampled(tmp_path: Path) -> None:
    engine = HeldEngine()
    async with gateway_on(tmp_path, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer), idle_timeout_s=60)
        asking = asyncio.ensure_future(gateway.chat(opened, [USER]))
        await engine.asked.wait()
        age_sessions(gateway, 61)
        await gateway.gateway.reconcile()
        engine.may_answer.set()
        assert (await asking).status == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_session_that_is_open_for_too_long_ends_also_while_a_turn_is_sampled(
    tmp_path: Path, streamed: bool
) -> None:
    engine = HeldEngine()
    async with gateway_on(tmp_path, engine, session_timeout_s=600) as gateway:
        job = start_session_job(gateway.buffer, n=1)
        opened = await gateway.open(job)
        asking = asyncio.ensure_future(gateway.chat(opened, [USER], stream=streamed))
        await engine.asked.wait()
        clock = gateway.buffer.clock
        gateway.buffer.clock = lambda: clock() + 601
        await gateway.gateway.reconcile()
        reply = await asking
        assert (reply.status, reply.body["error"]["code"], engine.given_up) == (410, "gone", 1)
        assert "was open for more than 600 s" in reply.body["error"]["message"]
        assert slot_counts(gateway.buffer, job)["open"] == 1


# --- clients that go away --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_ends_the_engines_work_and_leaves_no_turn(tmp_path: Path, streamed: bool) -> None:
    engine = HeldEngine()
    async with gateway_on(tmp_path, engine) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))
        asking = asyncio.ensure_future(gateway.chat(opened, [USER], stream=streamed))
        await engine.asked.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: engine.given_up == 1)
        assert (await gateway.call("GET", f"/sessions/{opened['session_id']}")).body["turns"] == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_is_gone_at_the_end_of_its_answer_leaves_no_turn_and_no_traceback(
    tmp_path: Path, streamed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_gone = app._is_gone

    def hang_up(request: web.Request) -> bool:
        if request.transport is not None:
            request.transport.abort()
        return is_gone(request)

    monkeypatch.setattr(app, "_is_gone", hang_up)
    async with gateway_on(tmp_path, FakeEngine(["Yes."], tokenizer=tokenizer)) as gateway:
        opened = await gateway.open(start_session_job(gateway.buffer))
        with contextlib.suppress(aiohttp.ClientError):
            await gateway.chat(opened, [USER], stream=streamed)
        assert (await gateway.call("GET", f"/sessions/{opened['session_id']}")).body["turns"] == 0
    assert [record.message for record in caplog.records if record.exc_info] == []


# --- who may ask -----------------------------------------------------------------------------------------------------


async def test_with_a_token_only_its_holder_opens_and_only_a_key_talks(tmp_path: Path) -> None:
    token = "a-token-of-sixteen-characters"
    (tmp_path / "token").write_text(token)
    async with gateway_on(
        tmp_path, engine_of_four(), token_file=tmp_path / "token", public_url="http://agents.lan/"
    ) as gateway:
        job = start_session_job(gateway.buffer)
        body = {"job_id": job.job_id}
        assert (await gateway.call("POST", "/sessions", body)).status == 401
        first, second = [(await gateway.call("POST", "/sessions", body, bearer=token)).body for _ in range(2)]
        assert first["openai_base_url"] == "http://agents.lan/v1"
        plain = "/v1/chat/completions"
        by_id, by_key = (f"/sessions/{name}{plain}" for name in (first["session_id"], first["api_key"]))
        asked = {"messages": [USER]}
        for path, bearer, status in (
            (by_id, None, 401),
            (by_id, second["api_key"], 401),
            (by_id, first["api_key"], 200),
            (by_id, token, 200),
            (by_key, None, 200),
            (plain, first["api_key"], 200),
        ):
            assert (await gateway.call("POST", path, asked, bearer=bearer)).status == status, (path, bearer)
        forged = first["api_key"][:-1] + ("0" if first["api_key"][-1] != "0" else "1")
        refused = await gateway.call("POST", plain, asked, bearer=forged)
        assert (refused.status, refused.body["error"]["type"]) == (401, "authentication_error")
        assert "api_key that POST /sessions gave" in refused.body["error"]["message"]
        assert "***" not in refused.body["error"]["message"]
        close = f"/sessions/{first['session_id']}/close"
        assert (await gateway.call("POST", close, {"reward": 1})).status == 401
        assert (await gateway.call("POST", close, {"reward": 1}, bearer=first["api_key"])).status == 200
        assert (await gateway.call("GET", "/health")).status == 200


@pytest.mark.parametrize("left_by_a_crash", [False, True])
def test_processes_that_start_at_once_share_one_secret_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_by_a_crash: bool
) -> None:
    if left_by_a_crash:
        (tmp_path / "gateway_secret").touch(mode=0o600)
    waits, lock, generate = threading.Event(), fcntl.flock, secrets.token_hex
    others: list[SessionKeys] = []
    refused: list[int] = []
    other = threading.Thread(target=lambda: others.append(SessionKeys.load(tmp_path)))

    def flock(file: Any, kind: int) -> None:
        if threading.current_thread() is other:
            try:
                lock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(kind)
            waits.set()
        lock(file, kind)

    def token(size: int) -> str:
        if not other.ident:
            other.start()
            assert waits.wait(60)
        return generate(size)

    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(secrets, "token_hex", token)
    key = SessionKeys.load(tmp_path).key_of("1.0.0.0.1")
    other.join()
    assert others[0].verify(key) == "1.0.0.0.1"
    assert refused == [fcntl.LOCK_EX]
    assert [(one.name, one.stat().st_mode & 0o777) for one in tmp_path.iterdir()] == [("gateway_secret", 0o600)]
    assert len((tmp_path / "gateway_secret").read_bytes()) == 64


async def test_without_a_token_a_gateway_answers_for_names_of_this_machine_alone(tmp_path: Path) -> None:
    async with (
        gateway_on(
            tmp_path, engine_of_four(), public_url="http://agents.lan:8890", allowed_hosts=("proxy.lan",)
        ) as gateway,
        aiohttp.ClientSession() as session,
    ):
        for host, status in (("evil.example", 403), ("agents.lan:8890", 200), ("proxy.lan", 200), ("localhost", 200)):
            async with session.get(f"{gateway.url}/health", headers={"Host": host}) as reply:
                assert reply.status == status, host


async def test_without_a_token_no_page_of_another_site_makes_a_browser_open_sessions(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, engine_of_four()) as gateway, aiohttp.ClientSession() as session:
        for origin, status in (("http://evil.example", 403), ("http://[", 403), (gateway.url, 400)):
            async with session.post(f"{gateway.url}/sessions", data="{}", headers={"Origin": origin}) as reply:
                assert reply.status == status, origin
