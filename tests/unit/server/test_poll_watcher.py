"""Polls that wait: woken by commits alone, each by what concerns it, and by no thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.server import poll_watcher
from slime_plugins.rollout_buffer.server.poll_watcher import PollWatcher
from tests.waiting import until


class Database:
    """A version that the test moves on, and what each poll finds then."""

    def __init__(self) -> None:
        self.version = 1
        self.looks: list[str] = []
        self.found: dict[str, bool | None] = {}

    def data_version(self) -> int:
        return self.version

    def commit(self, **found: bool | None) -> None:
        self.found.update(found)
        self.version += 1

    async def wait(self, watcher: PollWatcher, name: str, limit_s: float = 20.0) -> bool:
        def look() -> bool | None:
            self.looks.append(name)
            return self.found.get(name)

        return await watcher.wait(look, limit_s)


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def watcher(database: Database) -> Iterator[PollWatcher]:
    found = PollWatcher(database.data_version)
    yield found
    found.close()


async def test_a_commit_wakes_whom_it_concerns(watcher: PollWatcher, database: Database) -> None:
    one, other = (asyncio.create_task(database.wait(watcher, name)) for name in ("one", "other"))
    await until(lambda: {"one", "other"} <= set(database.looks))
    database.commit(one=True)
    assert await one is True
    assert not other.done()
    database.commit(other=False)
    assert await other is False


async def test_nobody_looks_while_nothing_is_committed(watcher: PollWatcher, database: Database) -> None:
    waiting = asyncio.create_task(database.wait(watcher, "poll"))
    await until(lambda: database.looks)
    await asyncio.sleep(0.05)
    looks = len(database.looks)
    await asyncio.sleep(0.1)
    assert len(database.looks) == looks
    database.commit(poll=True)
    assert await waiting is True


async def test_the_longer_a_poll_waits_the_less_often_the_database_is_read_for_it(
    watcher: PollWatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_watcher, "INTERVAL_SHARE", 1e6)
    monkeypatch.setattr(poll_watcher, "MAX_INTERVAL_S", 60.0)  # its first look is then its last for a minute
    old = asyncio.create_task(database.wait(watcher, "old"))
    await until(lambda: database.looks)
    database.commit(old=True)
    await asyncio.sleep(0.1)
    assert database.looks == ["old"]
    old.cancel()


async def test_what_was_committed_before_it_began_to_wait_is_found(watcher: PollWatcher, database: Database) -> None:
    database.commit(poll=True)
    assert await database.wait(watcher, "poll") is True
    assert await database.wait(watcher, "poll") is True  # and again, without a further commit


async def test_a_wait_ends_with_its_time(watcher: PollWatcher, database: Database) -> None:
    assert await database.wait(watcher, "poll", 0.03) is False
    assert await database.wait(watcher, "poll", -1.0) is False


async def test_hundreds_of_polls_wait_in_one_thread(watcher: PollWatcher, database: Database) -> None:
    before = threading.active_count()
    waiting = [asyncio.create_task(database.wait(watcher, f"poll{number}")) for number in range(200)]
    await until(lambda: len(set(database.looks)) == 200)
    assert threading.active_count() <= before + 1
    database.commit(**{f"poll{number}": True for number in range(200)})
    assert await asyncio.gather(*waiting) == [True] * 200


async def test_no_more_polls_than_the_limit_have_room(
    watcher: PollWatcher, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_watcher, "MAX_WAITING", 1)
    assert watcher.has_room()
    waiting = asyncio.create_task(database.wait(watcher, "poll"))
    await until(lambda: database.looks)
    assert not watcher.has_room()
    database.commit(poll=True)
    await waiting
    assert watcher.has_room()


async def test_when_the_database_cannot_be_read_polls_find_out_for_themselves() -> None:
    def broken() -> int:
        raise UnavailableError("the store is busy")

    watcher = PollWatcher(broken)
    assert await watcher.wait(lambda: None, 20.0) is True
    watcher.close()
