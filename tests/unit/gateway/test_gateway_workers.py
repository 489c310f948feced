"""Several processes of one gateway: any of them continues any session, and two never continue one turn."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.engine.base import GenerateReply, GenerateRequest
from slime_plugins.rollout_buffer.engine.http_engine import HttpEngine
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.testing.fake_engine import FakeEngine
from tests.gateway_support import (
    LOOK,
    RETRY,
    USER,
    GatewayUnderTest,
    gateway_on,
    message_of,
    start_session_job,
    tokenizer,
)
from tests.support import PNG


class QueueingEngine(FakeEngine):
    """Replies "Answer 1.", "Answer 2." … While it ``holds``, each request waits for its event in ``held``."""

    def __init__(self) -> None:
        self.count = itertools.count(1)
        super().__init__(lambda request: f"Answer {next(self.count)}.", tokenizer=tokenizer)
        self.held: list[asyncio.Event] = []
        self.asked = asyncio.Event()
        self.holds = self.fails = False

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self.fails:
            raise EngineError("the engine is gone")
        if self.holds:
            self.held.append(asyncio.Event())
            self.asked.set()
            await self.held[-1].wait()
        return await super().generate(request)

    async def until_held(self, count: int) -> None:
        while len(self.held) < count:
            self.asked.clear()
            await self.asked.wait()


@dataclass(frozen=True, slots=True)
class Workers:
    first: GatewayUnderTest
    second: GatewayUnderTest
    engine: QueueingEngine

    async def opened(self, **options: Any) -> dict[str, Any]:
        return await self.first.open(start_session_job(self.first.buffer, n=1), **options)


@asynccontextmanager
async def two_workers(folder: Path, **settings: Any) -> AsyncIterator[Workers]:
    engine = QueueingEngine()
    async with (
        gateway_on(folder, engine, workers=2, **settings) as first,
        gateway_on(folder, engine, workers=2, worker=2, **settings) as second,
    ):
        yield Workers(first, second, engine)


class ProbedEngine(HttpEngine):
    """Notes that it is probed."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url)
        self.probed = asyncio.Event()

    async def probe_prompts(self) -> None:
        self.probed.set()


async def test_a_process_loads_tokenizer_and_probes_engine_for_sessions_of_another_before_their_turns(
    tmp_path: Path,
) -> None:
    """Its sessions are touched and its heartbeats sent while a tokenizer loads."""
    engine, may_load = ProbedEngine("http://127.0.0.1:9"), threading.Event()

    def load(path: str) -> Any:
        may_load.wait(20)
        return tokenizer

    async with (
        gateway_on(tmp_path, QueueingEngine(), workers=2) as first,
        gateway_on(tmp_path, engine, load=load, workers=2, worker=2) as second,
    ):
        await first.open(start_session_job(first.buffer, n=1))
        async with asyncio.timeout(10):
            await second.gateway.reconcile()
            assert not engine.probed.is_set()
            may_load.set()
            await engine.probed.wait()


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with two_workers(tmp_path) as found:
        yield found


def numbers(gateway: GatewayUnderTest) -> list[tuple[int, int | None]]:
    """Number and parent of each stored turn."""
    with gateway.buffer.store.read() as connection:
        return [tuple(row) for row in connection.execute("SELECT number, parent FROM turns ORDER BY number")]


async def played_alternately(workers: Workers, opened: dict[str, Any], asked: Sequence[Any]) -> list[Any]:
    messages: list[Any] = []
    for at, one in enumerate(asked):
        messages.append(one)
        messages.append(message_of(await (workers.second, workers.first)[at % 2].chat(opened, messages)))
    return messages


async def test_a_session_goes_on_at_another_worker_with_its_exact_ids_and_pictures(workers: Workers) -> None:
    opened = await workers.opened()
    await played_alternately(workers, opened, [USER, LOOK, USER, USER])
    requests = workers.engine.requests
    for before, after in itertools.pairwise(requests):
        assert tuple(after.input_ids[: len(before.input_ids)]) == tuple(before.input_ids)
    assert [image.data for image in requests[3].images] == [PNG]
    shown = (await workers.second.call("GET", f"/sessions/{opened['session_id']}")).body
    assert (shown["turns"], shown["branches"]) == (4, 1)
    assert (await workers.second.close(opened, reward=1, turn_rewards=[0, 0, 0, 1])).body["turns"] == 4
    job = workers.first.buffer.job(opened["job_id"])
    generations = workers.first.generations(job, opened["session_id"])
    assert [tuple(one.prompt_ids) for one in generations] == [tuple(one.input_ids) for one in requests]
    assert (await workers.first.close(opened, reward=1)).body["status"] == "duplicate"


async def test_branches_sampled_at_two_workers_at_once_are_both_recorded(workers: Workers) -> None:
    opened = await workers.opened()
    one = message_of(await workers.first.chat(opened, [USER]))
    workers.engine.holds = True
    asking = [
        asyncio.ensure_future(gateway.chat(opened, [USER, one, {"role": "user", "content": name}]))
        for gateway, name in ((workers.first, "left"), (workers.second, "right"))
    ]
    await workers.engine.until_held(2)
    for event in workers.engine.held:
        event.set()
    assert {message_of(reply)["content"] for reply in await asyncio.gather(*asking)} == {"Answer 2.", "Answer 3."}
    assert numbers(workers.first) == [(1, None), (2, 1), (3, 1)]
    closed = await workers.first.close(opened, reward=1)
    assert (closed.body["turns"], closed.body["branches"]) == (3, 2)


async def test_of_a_request_and_its_retry_at_another_worker_the_turn_that_is_stored_first_answers_the_retry(
    workers: Workers,
) -> None:
    opened = await workers.opened()
    workers.engine.holds = True
    asking = asyncio.ensure_future(workers.first.chat(opened, [USER]))
    await workers.engine.until_held(1)
    retrying = asyncio.ensure_future(workers.second.chat(opened, [USER], headers=RETRY))
    await workers.engine.until_held(2)
    workers.engine.held[0].set()
    first = message_of(await asking)
    workers.engine.held[1].set()
    assert message_of(await retrying) == first
    assert numbers(workers.first) == [(1, None)]
    assert message_of(await workers.second.chat(opened, [USER], headers=RETRY)) == first, "also later"


async def test_a_repeated_request_at_another_worker_is_another_sample_unless_its_answer_was_lost(
    workers: Workers,
) -> None:
    opened = await workers.opened()
    first = message_of(await workers.first.chat(opened, [USER]))
    second = message_of(await workers.second.chat(opened, [USER]))
    assert first != second
    workers.engine.holds = True
    asking = asyncio.ensure_future(workers.first.chat(opened, [LOOK]))
    await workers.engine.until_held(1)
    registry = workers.first.gateway.registry
    lost = asyncio.get_running_loop().create_future()
    unsent = registry.turns.note_sent

    def noted(*arguments: Any, **options: Any) -> None:
        unsent(*arguments, **options)
        lost.get_loop().call_soon_threadsafe(lost.set_result, None)

    registry.turns.note_sent = noted  # type: ignore[method-assign]
    write = registry.turns.write

    async def written(turn: Any) -> bool:
        asking.cancel()
        await asyncio.sleep(0.1)  # the gateway sees it
        return await write(turn)

    registry.turns.write = written  # type: ignore[method-assign]
    workers.engine.held[0].set()
    await lost
    workers.engine.holds = False
    assert len(workers.engine.requests) == 3
    assert message_of(await workers.second.chat(opened, [LOOK]))["content"] == "Answer 3."
    assert len(workers.engine.requests) == 3
    assert (await workers.first.close(opened, reward=1)).body["turns"] == 3


async def test_a_client_that_leaves_cancels_no_note_for_which_others_wait(workers: Workers) -> None:
    registry = workers.first.gateway.registry
    job = start_session_job(workers.first.buffer, n=2)
    first, second = [await workers.first.open(job) for _ in range(2)]
    message_of(await workers.first.chat(first, [USER]))
    leaving_session, staying_session = [await registry.session(opened["session_id"]) for opened in (first, second)]
    assert leaving_session.turns is not None
    may_note, note_sent = threading.Event(), registry.turns.note_sent

    def noted(*arguments: Any, **options: Any) -> None:
        may_note.wait(10)
        note_sent(*arguments, **options)

    registry.turns.note_sent = noted  # type: ignore[method-assign]
    registry.note_sent(leaving_session, leaving_session.turns.by_number[1], sent=False)
    leaving, staying = [asyncio.create_task(registry.refresh(one)) for one in (leaving_session, staying_session)]
    await asyncio.sleep(0.05)  # both wait for the note
    leaving.cancel()
    await asyncio.sleep(0)
    may_note.set()
    assert await staying is None


async def test_a_turn_whose_session_another_worker_closes_is_refused_and_not_recorded(workers: Workers) -> None:
    opened = await workers.opened()
    message_of(await workers.second.chat(opened, [USER]))
    workers.engine.holds = True
    asking = asyncio.ensure_future(workers.second.chat(opened, [LOOK]))
    await workers.engine.until_held(1)
    assert (await workers.first.close(opened, reward=1)).body["turns"] == 1
    workers.engine.held[0].set()
    for refused in (await asking, await workers.first.chat(opened, [USER]), await workers.second.chat(opened, [USER])):
        assert (refused.status, "is closed, with the reward 1" in refused.body["error"]["message"]) == (410, True)
    assert numbers(workers.first) == []


async def test_a_close_while_another_worker_stores_a_turn_has_that_turn_or_refuses_it(workers: Workers) -> None:
    opened = await workers.opened()
    message_of(await workers.first.chat(opened, [USER]))
    finish = workers.first.gateway.claims.finish
    loop = asyncio.get_running_loop()

    def finished(*arguments: Any, **options: Any) -> Any:
        workers.first.gateway.claims.finish = finish  # type: ignore[method-assign]
        asyncio.run_coroutine_threadsafe(workers.second.chat(opened, [LOOK]), loop).result(30)
        return finish(*arguments, **options)

    workers.first.gateway.claims.finish = finished  # type: ignore[method-assign]
    assert (await workers.first.close(opened, reward=1)).body["turns"] == 2


async def test_what_ends_a_session_at_one_worker_is_said_by_the_other(workers: Workers) -> None:
    job = start_session_job(workers.first.buffer, n=2)
    opened = [await workers.first.open(job) for _ in range(2)]
    for one in opened:
        message_of(await workers.second.chat(one, [USER]))
    await workers.second.call("POST", f"/sessions/{opened[0]['session_id']}/abandon", {"reason": "enough"})
    refused = await workers.first.chat(opened[0], [USER])
    assert (refused.status, "was abandoned: enough" in refused.body["error"]["message"]) == (410, True)
    workers.first.buffer.change_job(job.job_id, "cancel")
    assert (await workers.second.chat(opened[1], [USER])).status == 410
    assert describe_job(workers.first.buffer.store, job)["attempts"]["given_up"] == 1


async def test_no_worker_expires_a_session_that_another_one_uses_and_any_expires_an_idle_one(
    workers: Workers,
) -> None:
    opened = await workers.opened(idle_timeout_s=60)
    workers.engine.holds = True
    asking = asyncio.ensure_future(workers.first.chat(opened, [USER]))
    await workers.engine.until_held(1)

    def pass_seconds(seconds: float) -> None:
        with workers.first.buffer.store.write() as connection:
            connection.execute("UPDATE attempts SET used_at = coalesce(used_at, started_at) - ?", (seconds,))
        for session in workers.first.gateway.registry._sessions.values():
            session.touched_at -= seconds

    pass_seconds(61)
    await workers.first.gateway.reconcile()
    await workers.second.gateway.reconcile()
    workers.engine.held[0].set()
    message_of(await asking)
    await workers.first.gateway.reconcile()
    (session,) = workers.first.gateway.registry._sessions.values()
    session.was_used = False
    async with session.closing:  # while its reward is computed
        pass_seconds(68)
        await workers.first.gateway.reconcile()
        await workers.second.gateway.reconcile()
    assert (await workers.first.call("GET", f"/sessions/{opened['session_id']}")).status == 200
    pass_seconds(68)
    await workers.second.gateway.reconcile()
    refused = await workers.first.chat(opened, [USER])
    assert (refused.status, "session_expired" in refused.body["error"]["message"]) == (410, True)


async def test_an_engine_failure_and_a_limit_at_one_worker_count_at_the_close_of_another(tmp_path: Path) -> None:
    async with two_workers(tmp_path, max_turns=2) as workers:
        opened = await workers.opened()
        first = message_of(await workers.first.chat(opened, [USER]))
        workers.engine.fails = True
        assert (await workers.first.chat(opened, [USER, first, USER])).status == 503
        refused = await workers.second.close(opened, reward=1)
        assert (refused.status, "the engine is gone" in refused.body["error"]["message"]) == (409, True)
        workers.engine.fails = False
        message_of(await workers.second.chat(opened, [USER, first, USER]))
        assert (await workers.first.chat(opened, [LOOK])).status == 410
        assert (await workers.second.close(opened, reward=1)).status == 200
        with workers.first.buffer.store.read() as connection:
            stored = connection.execute("SELECT outcome, stop_reason FROM trajectories").fetchall()
        assert [tuple(row) for row in stored] == [("truncated", "max_turns")]


async def test_the_limit_of_sessions_and_health_count_those_of_all_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path, max_sessions=2) as workers:
        job = start_session_job(workers.first.buffer, n=4)
        for gateway in (workers.first, workers.second):
            opened = await gateway.open(job)
        for gateway in (workers.first, workers.second):
            assert (await gateway.call("POST", "/sessions", {"job_id": job.job_id})).status == 429
            assert (await gateway.call("GET", "/health")).body["sessions"] == 2
        await workers.first.abandon(opened)
        await workers.second.open(job)


async def test_before_it_serves_a_process_loads_the_tokenizers_of_open_sessions_alone(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load(path: str) -> Any:
        loaded.append(path)
        return tokenizer

    engine = FakeEngine([], tokenizer=tokenizer)
    async with gateway_on(tmp_path, engine, workers=2) as first:
        job = start_session_job(first.buffer, n=1)
        async with gateway_on(tmp_path, engine, workers=2, worker=2, load=load):
            assert loaded == []
        await first.open(job)
        async with gateway_on(tmp_path, engine, workers=2, worker=2, load=load):
            assert loaded == [job.settings.tokenizer_path]


async def test_a_process_that_cannot_load_a_tokenizer_logs_it_once_and_pauses_before_it_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def load(path: str) -> Any:
        tried.append(path)
        raise OSError("no such folder")

    async with gateway_on(tmp_path, FakeEngine([]), workers=2) as first:
        opened = await first.open(start_session_job(first.buffer, n=1))
        async with gateway_on(tmp_path, FakeEngine([]), workers=2, worker=2, load=load) as second:
            for _ in range(3):
                await second.gateway.reconcile()
            assert len(tried) == 1
            assert (await second.chat(opened, [USER])).status == 409
    assert len(tried) == 2
    assert [one.levelname for one in caplog.records if "no such folder" in one.message] == ["WARNING"]


async def test_the_limit_of_sessions_counts_the_rollouts_of_all_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path, max_sessions=2) as workers:
        job = start_session_job(workers.first.buffer, n=4)
        body = {"job_id": job.job_id, "instance_id": "a"}
        for name, gateway in (("r1", workers.first), ("r2", workers.second)):
            assert (await gateway.call("POST", "/rollouts", {"rollout_id": name, **body})).status == 200
        for gateway in (workers.first, workers.second):
            refused = await gateway.call("POST", "/rollouts", {"rollout_id": "r3", **body})
            assert (refused.status, "2 sessions are open" in refused.body["error"]["message"]) == (503, True)
            again = await gateway.call("POST", "/rollouts", {"rollout_id": "r1", **body})
            assert again.status == 200, "it is open already"
        assert (await workers.first.call("POST", "/rollouts/r2/end", {"status": "ERROR"})).status == 200
        assert (await workers.second.call("POST", "/rollouts", {"rollout_id": "r3", **body})).status == 200


async def test_a_turn_whose_rollout_another_process_ends_is_refused_and_not_shown(workers: Workers) -> None:
    job = start_session_job(workers.first.buffer, n=1)
    await workers.first.call("POST", "/rollouts", {"rollout_id": "r1", "job_id": job.job_id, "instance_id": "a"})
    workers.engine.holds = True
    body = {"rollout_id": "r1", "messages": [USER]}
    asking = asyncio.ensure_future(workers.first.call("POST", "/v1/chat/completions", body))
    await workers.engine.until_held(1)
    assert (await workers.second.call("POST", "/rollouts/r1/end", {"status": "ERROR"})).status == 200
    workers.engine.held[0].set()
    refused = await asking
    assert (refused.status, "is failed" in refused.body["error"]["message"]) == (409, True)
    assert (await workers.first.call("GET", "/rollouts/r1")).body["turns"] == 0
