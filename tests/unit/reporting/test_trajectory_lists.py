"""Lists of trajectories: sorted, summed up, with previews; a text in their messages; neighbours and trees of turns."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.mask_rows import Generation
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.reporting import text_search
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.reporting.message_texts import preview_of
from slime_plugins.rollout_buffer.reporting.text_search import TextSearch
from slime_plugins.rollout_buffer.reporting.turn_tree import describe_turn_tree
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.wire.query_params import SearchQuery, TrajectoryPageQuery
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.trajectory_replies import SearchPage
from tests.example_counts import examples
from tests.support import start_external, write, written

REWARDS = (0.5, -1.0, 0.5, 2.0, 0.0)


@pytest.fixture
def inspection(buffer: Buffer) -> Inspection:
    return Inspection(buffer.store)


@pytest.fixture
def job(buffer: Buffer) -> JobRecord:
    """Five trajectories; every second one has two replies."""
    found = start_external(buffer, 1, job_id="run/1", reward_range=[-5, 5])
    for at, reward in enumerate(REWARDS):
        messages = [{"role": "user", "content": f"What is {at}?"}]
        messages += [{"role": "assistant", "content": f"It is number {at}."}] * (1 + at % 2)
        write(buffer, found, written(f"t{at}", f"i{at}", reward, messages=messages, extra_info={"success": reward > 0}))
    return found


def listed(inspection: Inspection, **query: Any) -> list[dict[str, Any]]:
    """All pages of a list."""
    found: list[dict[str, Any]] = []
    cursor: int | None = None
    while True:
        more = {} if cursor is None else {"cursor": cursor}
        page = inspection.trajectories(parse(TrajectoryPageQuery, {**query, **more}))
        found += ({**one} for one in page["trajectories"])
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def found_by(search: TextSearch, **query: Any) -> SearchPage:
    return search.page(parse(SearchQuery, query))


# --- sorting ---------------------------------------------------------------------------------------------------------


@examples(30)
@given(
    rewards=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), max_size=9),
    limit=st.integers(1, 4),
    sort=st.sampled_from(["created_at", "reward", "turns", "sampled_tokens"]),
    order=st.sampled_from(["descending", "ascending"]),
)
def test_pages_of_a_sorted_list_hold_everything_once_in_order(
    rewards: list[float], limit: int, sort: str, order: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        buffer = Buffer(Store(Path(folder)), clock=SettableClock(1_000.0))
        job = start_external(buffer, 1)
        for at, reward in enumerate(rewards):
            write(buffer, job, written(f"t{at}", f"i{at}", reward))
        found = listed(Inspection(buffer.store), sort=sort, order=order, limit=limit)
        buffer.store.close()
    assert sorted(one["uid"] for one in found) == sorted(f"t{at}" for at in range(len(rewards)))
    values = [-1e300 if one[sort] is None else one[sort] for one in found]
    assert values == sorted(values, reverse=order == "descending")


# --- previews --------------------------------------------------------------------------------------------------------


def test_a_list_has_a_line_of_question_and_answer_when_asked(inspection: Inspection, job: JobRecord) -> None:
    (newest, *_) = listed(inspection, job_id=job.job_id, previews=True)
    assert (newest["goal"], newest["answer"]) == ("What is 4?", "It is number 4.")
    assert "goal" not in listed(inspection, job_id=job.job_id)[0]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<think>so 5?</think>It is 4.", "It is 4."),
        ("so 5?</think>It is 4.", "It is 4."),
        ('<tool_call>{"name": "tap"}</tool_call><conclusion>Tapped.</conclusion>', "Tapped."),
        ('<tool_call>{"name": "tap"}</tool_call>', '{"name": "tap"}'),
        ("<think>" * 60_000, "…"),
    ],
)
def test_an_answer_is_what_was_said_after_thinking(said: str, answer: str) -> None:
    payload = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": said}]}
    _, found = preview_of(payload)
    assert found is not None
    assert found.endswith(answer)


# --- searching -------------------------------------------------------------------------------------------------------


def test_a_text_is_found_in_messages_thoughts_and_calls_with_its_turn(buffer: Buffer, inspection: Inspection) -> None:
    call = {"function": {"name": "look_up", "arguments": '{"city": "Zürich"}'}}
    read = {"function": {"name": "go", "arguments": {"to": 'the "Alps"', "by": 2}}}
    spoken = {"function": {"name": "say", "arguments": "good night"}}
    listed = {"function": {"name": "add", "arguments": [1, {"a": 2}]}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Where is the ÄRA?"}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm, Basel?",
            "tool_calls": [call, read, spoken, listed],
        },
        {"role": "tool", "content": 'It says "far away"\nfrom here'},
        {"role": "assistant", "content": "Far AWAY."},
    ]
    write(buffer, start_external(buffer, 1), written("a", messages=messages))
    search = TextSearch(inspection)
    places = {"ära": (1, "user"), "basel": (1, "assistant"), "zürich": (1, "assistant"), 'says "far': (2, "tool")}
    across = ['"the \\"alps\\"","by":2', 'go {"to', "say good night", 'add [1,{"a"', "ay g"]
    places |= dict.fromkeys(across, (1, "assistant"))
    for text, place in places.items():
        (hit,) = found_by(search, text=text)["hits"]
        assert (hit["turn"], hit["role"]) == place
        assert hit["found"].lower() == text
    (hit,) = found_by(search, text="far away")["hits"]
    assert hit["places"] == 2
    assert found_by(search, text="nowhere")["hits"] == []


def test_a_search_ends_when_its_time_is_up_and_goes_on_from_there(inspection: Inspection, job: JobRecord) -> None:
    ticks = itertools.count(0.0, text_search.PAGE_TIME_LIMIT_S / 2)
    search = TextSearch(inspection, clock=lambda: next(ticks))
    seen: list[str] = []
    cursor: int | None = None
    for _ in range(20):
        page = found_by(search, text="number", **({} if cursor is None else {"cursor": cursor}))
        seen += [hit["uid"] for hit in page["hits"]]
        cursor = page["next_cursor"]
        assert page["out_of_time"] is (cursor is not None)
        assert page["searched"] < len(REWARDS)
        if cursor is None:
            break
    assert seen == ["t4", "t3", "t2", "t1", "t0"]


# --- around one trajectory -------------------------------------------------------------------------------------------


def sampled(prompt: list[int], output: list[int]) -> Generation:
    return Generation(prompt_ids=prompt, output_ids=output, output_log_probs=[-0.5] * len(output))


def test_a_turn_stands_on_the_one_that_its_prompt_continues_exactly() -> None:
    """Two turns continue the first, a third continues one of these, and the last has a prompt of its own."""
    turns = [
        sampled([1, 2], [3]),
        sampled([1, 2, 3, 4], [5]),
        sampled([1, 2, 3, 4, 5, 6], [7]),
        sampled([1, 2, 3, 8], [9]),
        sampled([1, 9], [9]),
    ]
    found = describe_turn_tree(turns, [1, 2, 4, 3, 5], None)
    assert [one["parent"] for one in found] == [None, 0, 1, 0, None]
    assert [one["new_tokens"] for one in found] == [2, 1, 1, 1, 2]
    assert [one["sampled_as"] for one in found] == [1, 2, 4, 3, 5]
    assert found[0]["context"] is None


def test_a_tree_is_told_over_http_whatever_the_generator_noted(client: FlaskClient) -> None:
    client.post("/start_rollout", json={"task_type": "external", "job_id": "j", "num_repeat_per_sample": 1})
    generations = [{"prompt_ids": [1], "output_ids": [2]}, {"prompt_ids": [1, 2, 3], "output_ids": [4]}]
    odd = {"gateway": {"emission_order": "never"}}
    client.post("/buffer/write", json=written("a", generations=generations, extra_info=odd))
    found = client.get("/turn_tree/a").get_json()
    assert [one["parent"] for one in found["turns"]] == [None, 0]
    assert found["turns"][0]["sampled_as"] is None
    assert found["why_no_texts"]
