"""What charts and filters know of an episode is what it said of itself, and nothing made up."""

from __future__ import annotations

from typing import Any

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.rules.trajectory_stats import facts_of, mean_of_known
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Generation
from tests.support import poll, start_external, write, written


def test_all_facts_of_an_android_world_episode_are_known() -> None:
    generations = [Generation([1, 2], [3, 4, 5]), Generation([1], [2])]
    extra_info = {"turns": 7, "success": False, "reward_breakdown": {"success": 0.25}}
    facts = facts_of(extra_info, {"acquire": 9.0, "reset": 1.0, "generate": 2.5, "act": 0.5}, generations)
    assert facts._asdict() == {
        "success": 0.25,
        "turns": 7,
        "sampled_tokens": 4,
        "generate_s": 2.5,
        "played_s": 4.0,
    }


@pytest.mark.parametrize(
    ("told", "success"),
    [
        ({}, None),
        ({"success": True}, 1.0),
        ({"success": False}, 0.0),
        ({"success": 0.5}, 0.5),
        ({"success": 7}, None),
        ({"success": "yes"}, None),
        ({"success": float("nan")}, None),
        ({"success": True, "reward_breakdown": {"success": None}}, 1.0),
        ({"reward_breakdown": ["success"]}, None),
    ],
)
def test_success_is_what_was_said_or_unknown(told: dict[str, Any], success: float | None) -> None:
    assert facts_of(told, {}, []).success == success


def test_what_makes_no_sense_is_unknown() -> None:
    facts = facts_of({"turns": -1}, {"generate": "long", "act": float("inf"), "wait": 10**400}, [])
    assert set(facts) == {None}
    assert facts_of({}, {"reset": 1e308, "act": 1e308}, []).played_s is None


def test_a_mean_leaves_out_what_is_unknown() -> None:
    assert mean_of_known([1.0, None, 2.0]) == 1.5
    assert mean_of_known([None]) is None


def test_a_written_item_keeps_its_facts(buffer: Buffer) -> None:
    job = start_external(buffer, 2)
    generation = {"prompt_ids": [1], "output_ids": [2, 3], "weight_version": "4"}
    write(buffer, job, written("a", extra_info={"success": True}, generations=[{**generation, "weight_version": "6"}]))
    write(buffer, job, written("b", timings_s={"generate": 2, "act": 1}, generations=[generation]))
    with buffer.store.read() as connection:
        query = "SELECT success, turns, sampled_tokens, generate_s, played_s, versions_behind FROM trajectories"
        rows = [tuple(row) for row in connection.execute(f"{query} ORDER BY uid")]
    assert rows == [(1.0, 1, 2, None, None, 0), (None, 1, 2, 2.0, 3.0, 2)]


def test_a_delivery_knows_how_long_its_trainer_had_polled(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, 1)
    buffer.note_poll(job)
    buffer.note_empty_poll(job)
    clock.advance(12.0)
    buffer.note_empty_poll(buffer.job(job.job_id))
    write(buffer, job, written("a"))
    assert poll(buffer, job) is not None
    write(buffer, job, written("b", "j"))
    assert poll(buffer, job) is not None
    with buffer.store.read() as connection:
        waited = [row[0] for row in connection.execute("SELECT waited_s FROM deliveries ORDER BY key")]
    assert waited == [12.0, 0.0]


def test_a_trainer_that_polls_again_after_an_hour_begins_to_wait_anew(buffer: Buffer, clock: SettableClock) -> None:
    job = start_external(buffer, 1)
    buffer.note_poll(job)
    buffer.note_empty_poll(job)
    clock.advance(3600.0)
    buffer.note_empty_poll(buffer.job(job.job_id))
    assert buffer.job(job.job_id).waiting_since == clock.now
