"""Why nothing moves, in words: each situation has its sentence, and the most pressing one comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.reporting.diagnosis import (
    JobSnapshot,
    Severity,
    explain_group,
    explain_job,
    explain_service,
)
from slime_plugins.rollout_buffer.types import ENGINE_AWAY_CAUSE, GroupState, JobState

AT_WORK = JobSnapshot(
    state=JobState.RUNNING,
    group_size=4,
    groups={"open": 10, "ready": 2},
    supervisor_age_s=1.0,
    began_s=600.0,
    running_attempts=8,
    oldest_running_s=30.0,
    trajectory_age_s=3.0,
    poll_age_s=5.0,
    max_groups_ahead=256,
)

SITUATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"has_runner": False, "running_attempts": 0}, "moving", "It moves: the last item was written 3 s ago"),
    ({}, "moving", "8 episodes are being played, the last one ended 3 s ago"),
    ({"trainer_waits_s": 40.0}, "moving", "The trainer has waited for 40 s"),
    ({"trajectory_age_s": None}, "playing", "the oldest for 30 s; none has ended yet"),
    ({"trajectory_age_s": 700.0, "oldest_running_s": 900.0}, "slow", "the oldest for 15 min"),
    ({"running_attempts": 0, "trajectory_age_s": None, "began_s": 12.0}, "starting", "began 12 s ago"),
    ({"running_attempts": 0, "trajectory_age_s": None}, "no_runner", "runner is not at work"),
    ({"supervisor_age_s": None}, "no_supervisor", "nobody plays episodes"),
    ({"supervisor_age_s": 300.0}, "no_supervisor", "last seen 5 min ago"),
    ({"state": JobState.PAUSED}, "paused", "Somebody paused the job"),
    (
        {"state": JobState.PAUSED, "cause": "nobody polls it; the next poll resumes it", "pause_when_idle_s": 3600.0},
        "paused_idle",
        "no trainer asked for them for 60 min",
    ),
    (
        {"state": JobState.PAUSED, "cause": f"{ENGINE_AWAY_CAUSE}: it answers HTTP 404: x", "engine_url": "http://e"},
        "paused_engine",
        "the engine at http://e gives no tokens: it answers HTTP 404: x",
    ),
    ({"max_groups_ahead": 2}, "backpressure", "2 groups wait for the trainer"),
    ({"groups": {"open": 0, "ready": 1}}, "all_played", "1 group waits to be fetched"),
    ({"has_runner": False, "trajectory_age_s": None}, "external_waits", "nothing was written yet"),
    ({"has_runner": False, "has_input": False, "groups": {}}, "external_waits", "filled from outside"),
    ({"state": JobState.FINISHED, "groups": {"delivered": 7}}, "finished", "7 of them delivered"),
    ({"state": JobState.CANCELLED, "cause": "by request"}, "cancelled", "(by request)"),
    ({"state": JobState.FAILED, "cause": "no tokenizer"}, "failed", "(no tokenizer)"),
    (
        {
            "engine": {"url": "http://e", "says": "cannot be reached (OSError: x)", "since_s": 20.0, "waiting": 8},
            "trajectory_age_s": 90.0,
        },
        "no_engine",
        "The engine at http://e cannot be reached for 20 s, 8 requests are held",
    ),
    ({"engine": {"says": "aborted the request", "updating": True}}, "weights", "updating its weights"),
    ({"devices": {"total": 4, "broken": 4}}, "no_device", "No device can be used: 0 are starting, 4 are broken"),
    ({"devices": {"total": 4, "starting": 4}}, "no_device", "4 are starting"),
    ({"devices": {"total": 0}}, "no_device", "the pool has none"),
    (
        {"recent_failures": {"device": 5, "engine": 1}, "last_failure": "adb is gone", "trajectory_age_s": None},
        "failing_device",
        "6 attempts failed in the last ten minutes, 5 of them with device. The last one said: adb is gone",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "words"), SITUATIONS)
def test_each_situation_has_its_sentence(changes: dict[str, Any], code: str, words: str) -> None:
    first = explain_job(replace(AT_WORK, **changes))[0]
    assert (first.code, words in first.says) == (code, True), first.says


@pytest.mark.parametrize("changes", [changes for changes, _, _ in SITUATIONS])
def test_who_stands_still_is_told_what_to_do(changes: dict[str, Any]) -> None:
    for one in explain_job(replace(AT_WORK, **changes)):
        assert one.advice or one.severity is Severity.OK


def test_a_job_that_is_over_says_nothing_else() -> None:
    over = replace(AT_WORK, state=JobState.FINISHED, running_attempts=0, supervisor_age_s=None)
    assert [one.code for one in explain_job(over)] == ["finished"]


def test_trouble_does_not_hide_that_it_moves() -> None:
    codes = [one.code for one in explain_job(replace(AT_WORK, recent_failures={"device": 9}))]
    assert codes == ["failing_device", "moving"]


def test_backpressure_says_whether_anybody_ever_polled() -> None:
    full = replace(AT_WORK, max_groups_ahead=1)
    assert "No trainer has ever polled" in explain_job(replace(full, poll_age_s=None))[0].advice
    assert "last polled 10 min ago" in explain_job(replace(full, poll_age_s=600.0))[0].advice


def test_little_disk_is_said_beside_the_rest() -> None:
    assert "disk" in [one.code for one in explain_job(replace(AT_WORK, disk_free_bytes=10**9))]


@given(
    state=st.sampled_from(JobState),
    groups=st.dictionaries(st.sampled_from([state.value for state in GroupState]), st.integers(0, 10)),
    ages=st.tuples(*[st.none() | st.floats(0, 1e7)] * 4),
    flags=st.tuples(st.booleans(), st.booleans()),
    devices=st.dictionaries(st.sampled_from(["total", "broken", "starting"]), st.integers(0, 4)),
)
def test_there_is_always_a_sentence(
    state: JobState,
    groups: dict[str, int],
    ages: tuple[float | None, ...],
    flags: tuple[bool, bool],
    devices: dict[str, int],
) -> None:
    snapshot = JobSnapshot(
        state=state, groups=groups, supervisor_age_s=ages[0], trajectory_age_s=ages[1], poll_age_s=ages[2],
        oldest_running_s=ages[3], has_runner=flags[0], has_input=flags[1], devices=devices,
    )  # fmt: skip
    found = explain_job(snapshot)
    assert found
    assert all(one.says.strip() for one in found)


@pytest.mark.parametrize(
    ("state", "cause", "rewards", "words"),
    [
        ("filtered", "is_valid_group refused it", [0.5, 0.5, 0.5], "all 3 members earned the same reward, +0.500"),
        ("filtered", "is_valid_group refused it", [0.5, 0.7], "only 2 of 4 members came"),
        ("filtered", "is_valid_group refused it", [0.1, 0.2, 0.3, 0.4], "own is_valid_group refused it"),
        ("filtered", "filter_item kept 1 of 4 members", [0.5, 7, 8, 9], "3 rewards lie outside of the valid range 0"),
        ("filtered", "stale: sampled by weights", [0.5], "max_weight_version_lag"),
        ("failed", "timed out: 1 of 4 members came", [0.5], "1 of 4 members came before its time ran out"),
        ("failed", "slots failed: 1 of 4 members came", [0.5], "after max_attempts failed attempts"),
        ("failed", "pad_group_data raised KeyError: 'x'", [0.5], "Failed (pad_group_data raised KeyError: 'x')."),
        ("skipped", "in the skip list", [], "has trained this one already"),
        ("skipped", "cancelled by request", [], "Skipped (cancelled by request)."),
        ("ready", "", [0.5], "waits for the trainer's next poll"),
    ],
)  # fmt: skip
def test_a_group_says_why_it_was_dropped(state: str, cause: str, rewards: list[float], words: str) -> None:
    says = explain_group(GroupState(state), cause, rewards=rewards, group_size=4, reward_range=[0.0, 1.0])
    assert words in says


def test_a_buffer_without_supervisor_says_so_first() -> None:
    found = explain_service(None, {"mine.py": "SyntaxError"})
    assert [one.code for one in found] == ["no_supervisor", "broken_generator"]
    assert explain_service(1.0, {}) == []
