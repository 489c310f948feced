"""What the dashboard asks for: series, groups, trajectories, explanations, tokens; filtered, sorted and in pages."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.reporting.dashboard_views import Views
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.wire.query_params import (
    GroupPageQuery,
    OverviewQuery,
    SeriesQuery,
    TrajectoryPageQuery,
)
from slime_plugins.rollout_buffer.wire.request_fields import parse
from tests.example_counts import examples
from tests.support import poll, start_external, write, written

SUPERVISOR = "supervisor"


@pytest.fixture
def views(buffer: Buffer, clock: SettableClock) -> Views:
    return Views(buffer.store, SUPERVISOR, clock=clock)


@pytest.fixture
def job(buffer: Buffer, clock: SettableClock) -> JobRecord:
    """Ten groups of two, one closed every 30 s; every third has equal rewards. The last is open."""
    clock.now = 1_000_020.0
    ids = tuple(f"Task{at % 2}-{at}" for at in range(10))
    found = start_external(buffer, 2, ids, job_id="run/1")
    for at, name in enumerate(ids):
        clock.advance(30.0)
        second = 0.1 if at % 3 == 0 else 0.9
        generation = {"prompt_ids": [1], "output_ids": [2, 3, 4], "weight_version": str(at)}
        truncated = {"outcome": "truncated", "stop_reason": "max_tokens"} if at == 4 else {}
        first = written(f"{name}/a", name, 0.1, generations=[generation], extra_info={"success": False}, **truncated)
        write(buffer, found, first)
        if at < 9:
            write(buffer, found, written(f"{name}/b", name, second, extra_info={"success": second > 0.5}))
    return found


def asked(**query: Any) -> SeriesQuery:
    return parse(SeriesQuery, query)


# --- series ----------------------------------------------------------------------------------------------------------


def test_a_series_counts_what_happened(views: Views, job: JobRecord) -> None:
    columns: Any = views.series(job.job_id, asked(width_s=60))["columns"]
    assert sum(columns["episodes"]) == 19
    assert (sum(columns["completed"]), sum(columns["truncated"])) == (18, 1)
    assert (sum(columns["groups_valid"]), sum(columns["groups_filtered"])) == (6, 3)
    assert max(value for value in columns["reward_max"] if value is not None) == 0.9
    assert {len(values) for values in columns.values()} == {len(columns["t"])}


@pytest.mark.parametrize("width_s", [10, 60])
def test_seconds_that_no_episode_told_are_not_zero(views: Views, job: JobRecord, width_s: int) -> None:
    columns: Any = views.series(job.job_id, asked(width_s=width_s))["columns"]
    assert set(columns["playing"]) == set(columns["generating"]) == {None}


@examples(15)
@given(seed=st.integers(0, 10_000))
def test_the_sums_by_the_minute_are_those_of_the_rows(seed: int) -> None:
    """Compares what the trigger summed with plain SQL over the rows."""
    chance = random.Random(seed)
    clock = SettableClock(1_000_000.0)
    with tempfile.TemporaryDirectory() as folder:
        buffer = Buffer(Store(Path(folder)), clock=clock)
        found = start_external(buffer, 2)
        for at in range(6):
            clock.advance(chance.uniform(0, 50))
            told = chance.choice([{}, {"success": True}, {"success": 0.5}])
            version = [] if chance.random() < 0.5 else [{"prompt_ids": [], "output_ids": [1], "weight_version": "3"}]
            item = written(f"{at}", f"{at % 2}", chance.uniform(-1, 1), extra_info=told, generations=version)
            write(buffer, found, item)
        query = (
            "SELECT count(*), total(reward), min(reward), max(reward), count(success), coalesce(sum(success >= 1), 0), "
            "count(versions_behind), max(versions_behind), count(sampled_tokens), total(sampled_tokens) "
            "FROM trajectories WHERE late = 0"
        )
        sums = (
            "SELECT sum(episodes), total(reward_total), min(reward_min), max(reward_max), sum(judged), sum(succeeded), "
            "sum(versioned), max(behind_max), sum(sampled_known), total(sampled_total) FROM trajectory_minutes"
        )
        with buffer.store.read() as connection:
            rows, minutes = tuple(connection.execute(query).fetchone()), tuple(connection.execute(sums).fetchone())
        buffer.store.close()
    assert minutes == pytest.approx(rows)


# --- groups ----------------------------------------------------------------------------------------------------------


def group_ids(views: Views, **query: Any) -> list[str]:
    page = views.groups("run/1", parse(GroupPageQuery, query))
    return [group["instance_id"] for group in page["groups"]]


def test_groups_come_the_last_touched_first_and_are_filtered(views: Views, job: JobRecord) -> None:
    assert group_ids(views)[:2] == ["Task1-9", "Task0-8"]
    assert group_ids(views, state="filtered") == ["Task0-6", "Task1-3", "Task0-0"]
    assert group_ids(views, search="task1") == ["Task1-9", "Task1-7", "Task1-5", "Task1-3", "Task1-1"]
    assert group_ids(views, cause="same reward", search="0-") == ["Task0-6", "Task0-0"]
    assert group_ids(views, search="%") == []
    assert group_ids(views, search="_-") == []


def test_groups_are_sorted_by_instance_by_mean_reward_and_by_time(buffer: Buffer, views: Views) -> None:
    """A late trajectory, which no trainer gets, counts for no mean."""
    found = start_external(buffer, 2, ("b", "a", "c", "none"), job_id="run/1")
    buffer.open_groups(found.key, after=(-1, -1), limit=4)
    for name, rewards in {"c": (0.2, 0.4), "a": (0.0, 1.0), "b": (0.1, 0.3)}.items():
        for at, reward in enumerate(rewards):
            write(buffer, found, written(f"{name}/{at}", name, reward))
    with buffer.store.write() as connection:
        connection.execute("UPDATE trajectories SET late = 1 WHERE uid = 'a/1'")

    assert group_ids(views, sort="instance_id", order="ascending") == ["a", "b", "c", "none"]
    assert group_ids(views, sort="reward_mean") == ["c", "b", "a", "none"]
    for sort in ("updated_at", "instance_id", "reward_mean"):
        assert group_ids(views, sort=sort, order="ascending") == group_ids(views, sort=sort)[::-1]


@pytest.mark.parametrize("limit", [1, 3, 4, 10])
@pytest.mark.parametrize("sort", ["updated_at", "instance_id", "reward_mean"])
@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_pages_of_groups_hold_each_group_once(views: Views, job: JobRecord, limit: int, sort: str, order: str) -> None:
    seen: list[str] = []
    cursor = None
    while True:
        query = {"limit": limit, "sort": sort, "order": order, **({"cursor": cursor} if cursor else {})}
        page = views.groups(job.job_id, parse(GroupPageQuery, query))
        seen += [group["instance_id"] for group in page["groups"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == group_ids(views, sort=sort, order=order)
    assert len(set(seen)) == 10


def test_a_group_shows_its_members_and_why_it_was_dropped(views: Views, job: JobRecord) -> None:
    page = views.groups(job.job_id, parse(GroupPageQuery, {"state": "filtered", "limit": 1}))
    group = views.group(page["groups"][0]["group_index"])
    assert [member["uid"] for member in group["members"]] == ["Task0-6/a", "Task0-6/b"]
    assert "all 2 members earned the same reward" in group["message"]
    assert group["instance"] == {"instance_id": "Task0-6"}


def test_what_was_delivered_stands_beside_what_was_earned(views: Views, buffer: Buffer, job: JobRecord) -> None:
    assert poll(buffer, job, max_groups=1) is not None
    delivered = views.groups(job.job_id, parse(GroupPageQuery, {"state": "delivered"}))["groups"]
    group = views.group(delivered[0]["group_index"])
    assert [one["uid"] for one in group["delivered"]] == ["Task1-1/a", "Task1-1/b"]
    assert group["delivery_id"] is not None


# --- trajectories ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({}, 19),
        ({"search": "task0"}, 10),
        ({"search": "-9/A"}, 1),
        ({"success": True}, 6),
        ({"success": False}, 13),
        ({"min_version": 8}, 2),
        ({"min_version": 2, "max_version": 3}, 2),
        ({"outcome": "truncated", "stop_reason": "max_tokens"}, 1),
        ({"min_reward": 0.5, "search": "Task1"}, 3),
    ],
)
def test_filters_find_what_they_say(buffer: Buffer, job: JobRecord, query: dict[str, Any], count: int) -> None:
    page = parse(TrajectoryPageQuery, {"job_id": job.job_id, **query})
    assert len(Inspection(buffer.store).trajectories(page)["trajectories"]) == count


# --- explanations ----------------------------------------------------------------------------------------------------


def test_an_overview_has_every_job_with_its_accounting_and_why(views: Views, buffer: Buffer, job: JobRecord) -> None:
    overview = views.overview(parse(OverviewQuery, {}))
    (entry,) = overview["jobs"]
    assert entry["slots"] == describe_job(buffer.store, job)["slots"]
    assert overview["explanation"][0].code == "no_supervisor"
    assert entry["explanation"][0].code == "no_supervisor"
    assert entry["newest"]["episodes"] == 19


# --- over HTTP -------------------------------------------------------------------------------------------------------


def test_the_routes_answer_for_ids_with_slashes(client: FlaskClient) -> None:
    client.post("/start_rollout", json={"task_type": "external", "job_id": "a/b", "num_repeat_per_sample": 1})
    client.post("/buffer/write", json={**written("x/y", "i", 0.5), "job_id": "a/b"})
    for path in ("explanation", "series?range_s=60", "groups?search=i"):
        assert client.get(f"/jobs/a/b/{path}").status_code == 200, path
    group = client.get("/jobs/a/b/groups").get_json()["groups"][0]
    assert client.get(f"/groups/{group['group_index']}").get_json()["job_id"] == "a/b"
    assert client.get("/token_rows/x/y").get_json()["contexts"] == []
    assert client.get("/overview").get_json()["jobs"][0]["job_id"] == "a/b"


@pytest.mark.parametrize(
    "path",
    [
        "/jobs/j/groups?cursor=x",
        "/jobs/j/groups?cursor=1.2.3:1",
        "/jobs/j/attempts?cursor=1.2.3:1:1:1",
        "/jobs/j/groups?state=odd",
        "/jobs/j/series?range_s=0",
        "/overview?limit=0",
        "/groups/7",
    ],
)
def test_a_wrong_question_is_answered_with_a_sentence(client: FlaskClient, path: str) -> None:
    client.post("/start_rollout", json={"task_type": "external", "job_id": "j"})
    reply = client.get(path)
    assert reply.status_code in (400, 404)
    assert reply.get_json()["error"]["message"]


def test_tokens_come_with_texts_of_the_jobs_tokenizer(
    make_client: Callable[..., FlaskClient],
) -> None:
    client = make_client()
    start = {"task_type": "external", "job_id": "j", "tokenizer_path": str(DEMO_TOKENIZER_PATH)}
    assert client.post("/start_rollout", json=start).status_code == 200
    generation = {"prompt_ids": [5, 6, 7], "output_ids": [8, 9], "output_log_probs": [-0.5, -2.0]}
    edited = {"prompt_ids": [5, 9], "output_ids": [7], "output_log_probs": [-0.1]}
    item = written("u", "i", 1.0, generations=[generation, edited])
    assert client.post("/buffer/write", data=json.dumps(item)).status_code == 200
    found = client.get("/token_rows/u").get_json()
    assert [one["dropped_tokens"] for one in found["contexts"]] == [0, 4]
    assert [row["trained"] for row in found["rows"]] == [2, 1]
    assert found["why_no_texts"] == ""
    assert sum(piece["count"] for piece in found["pieces"]) == 5
    trained = [piece for piece in found["pieces"] if "ids" in piece]
    assert [value for piece in trained for value in piece["log_probs"]] == [-0.5, -2.0]
    assert all(isinstance(piece["text"], str) for piece in found["pieces"])
    assert client.get("/token_rows/u?row=1").get_json()["row"] == 1
    assert client.get("/token_rows/u?row=7").get_json()["pieces"] == []
