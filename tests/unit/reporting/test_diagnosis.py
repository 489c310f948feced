"""Why nothing moves, in words: each situation has its sentence, and the most pressing one comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.reporting.diagnosis import explain_group, explain_job, explain_service
from slime_plugins.rollout_buffer.reporting.job_snapshot import JobSnapshot
from slime_plugins.rollout_buffer.rules import causes
from slime_plugins.rollout_buffer.rules.causes import Cause, CauseCode, CountedCause, Shortfall
from slime_plugins.rollout_buffer.rules.job_states import FailedAttempts
from slime_plugins.rollout_buffer.rules.prompt_receipts import PromptCounts
from slime_plugins.rollout_buffer.rules.selection_bias import MissingMembers
from slime_plugins.rollout_buffer.rules.stuck_weights import StuckCounter, StuckWeights
from slime_plugins.rollout_buffer.types import EngineReport, EngineTrouble, GroupState, JobState
from slime_plugins.rollout_buffer.wire.job_replies import Severity

AT_WORK = JobSnapshot(
    state=JobState.RUNNING,
    groups={"open": 10, "ready": 2},
    supervisor_age_s=1.0,
    began_s=600.0,
    running_attempts=8,
    oldest_running_s=30.0,
    trajectory_age_s=3.0,
    poll_age_s=5.0,
    max_groups_ahead=256,
)

ALL_FAILED = FailedAttempts(failed=9, ended=9, code="device", of_code=5, message="adb is gone")
ALL_FAILED_TEXT = "Nothing succeeds: 9 of 9 attempts failed, 5 of them with device: adb is gone."
COMMONEST = {
    GroupState.FAILED: CountedCause(causes.too_short(0, 4, Shortfall.TIMED_OUT), 2),
    GroupState.FILTERED: CountedCause(causes.not_valid([0.0, 1.0], is_custom=True), 4),
}
SITUATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"has_runner": False, "running_attempts": 0}, "moving", "The job progresses: the last item was written 3 s ago"),
    ({"running_attempts": 0, "oldest_running_s": None}, "between_episodes", "No episode is being played just now"),
    ({}, "moving", "8 episodes are being played, the last ended 3 s ago"),
    ({"prompt_findings": ["drops the system prompt"]}, "prompts_changed", "The engine drops the system prompt."),
    (
        {"prompts": PromptCounts(equal=3, unknown=2, untrained=1, row_tokens=9)},
        "prompts_unknown",
        "1 turn was not trained, of 5: the ids that the engine ran are unknown or do not fit.",
    ),
    (
        {"prompts": PromptCounts(differing=9, forked=9, extra_tokens=21, row_tokens=100)},
        "prompts_forked",
        "21% of all tokens in training rows are repeated: the engine ran other prompts than it was sent, and 9 more",
    ),
    ({"trainer_waits_s": 40.0}, "moving", "The trainer has waited for 40 s"),
    ({"trajectory_age_s": None}, "playing", "the oldest for 30 s; no trajectory yet"),
    ({"trajectory_age_s": 700.0, "oldest_running_s": 900.0}, "slow", "the oldest for 15 min"),
    ({"running_attempts": 0, "trajectory_age_s": None, "began_s": 12.0}, "starting", "began 12 s ago"),
    ({"running_attempts": 0, "trajectory_age_s": None}, "no_runner", "runner is not at work"),
    ({"supervisor_age_s": None}, "no_supervisor", "no episodes are played"),
    ({"supervisor_age_s": 300.0}, "no_supervisor", "last seen 5 min ago"),
    ({"state": JobState.PAUSED}, "paused", "The job was paused by request"),
    (
        {"state": JobState.PAUSED, "cause": causes.IDLE, "pause_when_idle_s": 3600.0},
        "paused_idle",
        "no trainer asked for them for 60 min",
    ),
    (
        {"state": JobState.PAUSED, "cause": causes.engine_away("answers HTTP 404: x"), "engine_url": "http://e"},
        "paused_engine",
        "when it answers again: it answers HTTP 404: x. Its engine is http://e",
    ),
    (
        {"max_groups_ahead": 3, "groups": {"open": 10, "ready": 2, "leased": 3}},
        "backpressure",
        "No new group begins: 5 groups wait to be fetched or acknowledged, and max_groups_ahead is 3.",
    ),
    (
        {"max_groups_ready": 1, "groups": {"open": 10, "ready": 2, "leased": 3}},
        "backpressure",
        "No new group begins: 2 groups wait for the trainer, and max_groups_ready is 1.",
    ),
    (
        {"lag_reached": True, "max_weight_version_lag": 1, "running_attempts": 0, "trajectory_age_s": 700.0},
        "backpressure",
        "No new group begins: it would be trained with a lag of more than 1 weight versions.",
    ),
    ({"lag_reached": True, "max_weight_version_lag": 1}, "moving", "8 episodes are being played"),
    (
        {"has_runner": False, "max_groups_ready": 2, "running_attempts": 0, "trajectory_age_s": 700.0},
        "backpressure",
        "The gateway begins no new group: 2 groups wait for the trainer, and max_groups_ready is 2.",
    ),
    ({"has_runner": False, "max_groups_ready": 2, "running_attempts": 0}, "moving", "the last item was written 3 s"),
    ({"groups": {"open": 0, "ready": 1}}, "all_played", "1 group waits to be fetched"),
    (
        {"has_runner": False, "trajectory_age_s": None, "running_attempts": 0},
        "external_waits",
        "Programs fill this job, and no item was stored yet. 10 groups wait for items.",
    ),
    ({"has_runner": False, "trajectory_age_s": None}, "playing", "8 episodes are being played, the oldest for 30 s"),
    ({"has_runner": False, "trajectory_age_s": 700.0, "oldest_running_s": 900.0}, "slow", "the oldest for 15 min"),
    ({"has_runner": False, "has_input": False, "groups": {}}, "external_waits", "the last item was stored 3 s ago."),
    ({"state": JobState.FINISHED, "groups": {"delivered": 7}}, "finished", "every group is closed, 7 delivered."),
    (
        {"state": JobState.CANCELLED, "cause": causes.CANCELLED, "groups": {"ready": 1, "delivered": 4, "skipped": 7}},
        "cancelled",
        "The job was cancelled by request. Its groups: 4 delivered and 7 skipped. 1 group waits to be fetched",
    ),
    ({"state": JobState.CANCELLED, "cause": causes.SUPERSEDED}, "cancelled", "cancelled (a fresh start took its id)"),
    ({"state": JobState.FAILED, "cause": Cause(CauseCode.NOT_PLAYED, "no tokenizer")}, "failed", "(no tokenizer)"),
    (
        {
            "engine": EngineReport(
                url="http://e", code=EngineTrouble.REFUSES, message="cannot be reached", since_s=20.0, waiting=8
            ),
            "trajectory_age_s": 90.0,
        },
        "no_engine",
        "The engine at http://e cannot be reached for 20 s, 8 of 8 episodes wait for it",
    ),
    ({"engine": EngineReport(code=EngineTrouble.UPDATING)}, "weights", "updating its weights"),
    ({"has_runner": False, "disk_free_bytes": 10**9}, "disk", "Only 1.0 GB are free on the disk"),
    ({"devices": {"total": 4, "broken": 4}}, "no_device", "No device can be used: 0 are starting, 4 are broken"),
    ({"devices": {"total": 4, "starting": 4}}, "no_device", "4 are starting"),
    ({"devices": {"total": 0}}, "no_device", "the pool has none"),
    ({"devices": {"unreachable": "no head\nat"}}, "devices_unreachable", "No device can be reached: no head"),
    (
        {"recent_failures": {"device": 5, "engine": 1}, "last_failure": "adb is gone", "trajectory_age_s": None},
        "failing_device",
        "6 attempts failed in the last ten minutes, 5 of them with device. The last one said: adb is gone",
    ),
    ({"all_failed": ALL_FAILED, "trajectory_age_s": None}, "failing_device", ALL_FAILED_TEXT),
    ({"all_failed": ALL_FAILED, "state": JobState.PAUSED}, "failing_device", ALL_FAILED_TEXT),
    ({"all_failed": ALL_FAILED, "max_groups_ahead": 2}, "failing_device", ALL_FAILED_TEXT),
    ({"all_failed": ALL_FAILED, "supervisor_age_s": None}, "failing_device", ALL_FAILED_TEXT),
    (
        {"groups": {"open": 10, "filtered": 3, "failed": 1, "skipped": 2}, "most_frequent_causes": COMMONEST},
        "nothing_kept",
        "0 delivered, 3 filtered, 1 failed and 2 skipped. The most frequent cause (4 of them): the generator's",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "words"), SITUATIONS)
def test_each_situation_has_its_sentence(changes: dict[str, Any], code: str, words: str) -> None:
    first = explain_job(replace(AT_WORK, **changes))[0]
    assert (first.code, words in first.message) == (code, True), first.message


@pytest.mark.parametrize("changes", [changes for changes, _, _ in SITUATIONS])
def test_each_explanation_that_is_not_ok_has_advice(changes: dict[str, Any]) -> None:
    for one in explain_job(replace(AT_WORK, **changes)):
        assert one.advice or one.severity is Severity.OK


DROPPED = {"delivered": 1, "failed": 3, "filtered": 4, "skipped": 90}


def test_a_finished_job_says_what_became_of_all_its_groups() -> None:
    over = replace(AT_WORK, state=JobState.FINISHED, groups=DROPPED, most_frequent_causes=COMMONEST)
    found = {one.code: one for one in explain_job(over)}
    assert list(found) == ["finished", "failed_groups", "filtered_groups"]
    assert "1 delivered, 4 filtered, 3 failed and 90 skipped." in found["finished"].message
    assert "3 groups were given up as failed" in found["failed_groups"].message
    assert (
        "The most frequent cause (2 of them): timed out (0 of 4 members came within" in found["failed_groups"].message
    )
    assert "4 groups were filtered, of 8 that were played" in found["filtered_groups"].message
    assert found["filtered_groups"].message.endswith("(4 of them): the generator's own is_valid_group refused it.")


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.FINISHED])
def test_a_job_whose_groups_are_all_filtered_is_stopped_in_its_explanation(state: JobState) -> None:
    nothing = Cause(CauseCode.NO_GROUP_READY, "all 3 groups were filtered")
    cause = nothing if state is JobState.FINISHED else causes.NO_CAUSE
    vain = replace(AT_WORK, state=state, cause=cause, groups={"filtered": 3})
    assert explain_job(vain)[0].severity is Severity.STOPPED


@pytest.mark.parametrize(
    ("cause", "asks"), [(causes.not_valid([0.0, 0.0], is_custom=False), True), (causes.STALE, False)]
)
def test_only_where_rewards_were_equal_the_input_may_be_too_easy_or_too_hard(cause: Cause, asks: bool) -> None:
    dropped = {GroupState.FILTERED: CountedCause(cause, 9)}
    job = replace(AT_WORK, groups={"filtered": 9}, most_frequent_causes=dropped)
    assert ("too easy" in explain_job(job)[0].advice) == asks


def test_a_wider_reward_range_is_a_new_job() -> None:
    refused = replace(AT_WORK, refused_items=1, last_refusal="422 reward_out_of_range: 5.0 is outside of 0 to 1")
    assert "with a wider reward_range and fresh: true" in explain_job(refused)[0].advice


def test_missing_members_are_counted_beside_those_filtered() -> None:
    missing = MissingMembers(
        submitted=20, trained=10, given_up=3, failed=2, dummies=4, seconds=9.0, seconds_of_trained=3.0,
        reward_of_trained=0.5, reward_of_known=0.25, p_value=0.001,
    )  # fmt: skip
    assert explain_job(replace(AT_WORK, missing_members=missing))[0].message == (
        "10 of 20 members were delivered; 3 were given up when their group was closed, 2 failed for good, and 4 are "
        "replaced by dummies or copies. On average the missing had played 9 s, the delivered 3 s (p = 0.001): the slow "
        "are trained less. Mean reward: of the delivered 0.500, of all members whose reward is known 0.250."
    )


def test_backpressure_says_whether_anybody_ever_polled() -> None:
    full = replace(AT_WORK, max_groups_ahead=1)
    assert "No trainer has ever polled" in explain_job(replace(full, poll_age_s=None))[0].advice
    assert "last polled 10 min ago" in explain_job(replace(full, poll_age_s=600.0))[0].advice


@pytest.mark.parametrize(
    ("who", "words", "effect"),
    [
        (
            StuckCounter.ENGINE,
            "the trainer is at 9, and 12 of the newest 16 episodes were sampled by 1 or older",
            "cannot be met by new episodes",
        ),
        (
            StuckCounter.TRAINER,
            "it polled for groups 12 times after training, and the only version is 1",
            "has no effect",
        ),
        (StuckCounter.UNKNOWN, "none of the newest 16 episodes names a version", "has no effect"),
    ],
)
def test_weights_that_stand_still_are_said_beside_what_moves(who: StuckCounter, words: str, effect: str) -> None:
    stuck = StuckWeights(who=who, count=12, examined=16, version=1, trainers_version=9)
    found = explain_job(replace(AT_WORK, stuck_weights=stuck, max_weight_version_lag=4))
    assert [one.code for one in found] == ["weights_stand_still", "moving"]
    assert words in found[0].message
    assert found[0].message.endswith(f"The job's limit of 4 versions of lag {effect}.")
    assert found[0].advice


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
    assert all(one.message.strip() for one in found)


@pytest.mark.parametrize(
    ("state", "cause", "message"),
    [
        ("filtered", causes.STALE, f"Dropped: {causes.STALE.message}."),
        ("failed", Cause(CauseCode.GROUP_FUNCTION, "pad_group_data raised"), "Failed: pad_group_data raised."),
        ("skipped", causes.IN_SKIP_LIST, f"Skipped: {causes.IN_SKIP_LIST.message}."),
        ("skipped", causes.NO_CAUSE, "Skipped."),
        ("ready", causes.NO_CAUSE, "Ready: complete and valid, it waits for the trainer's next poll."),
    ],
)
def test_a_group_says_its_cause_in_the_words_that_jobs_have_too(state: str, cause: Cause, message: str) -> None:
    assert explain_group(GroupState(state), cause) == message
    job = replace(AT_WORK, groups={"filtered": 9}, most_frequent_causes={GroupState.FILTERED: CountedCause(cause, 9)})
    assert f"The most frequent cause (9 of them): {cause.message}." in explain_job(job)[0].message


@pytest.mark.parametrize("succeeded", [True, False])
def test_an_engine_that_most_episodes_wait_for_is_said_before_the_few_that_failed(succeeded: bool) -> None:
    failed = FailedAttempts(failed=4, ended=4, code="environment_setup", of_code=4, message="line g5 has no secret")
    engine = EngineReport(
        url="http://e", code=EngineTrouble.REFUSES, message="cannot be reached", since_s=20.0, waiting=44
    )
    waits = replace(
        AT_WORK,
        engine=engine,
        running_attempts=48,
        recent_failures={"environment_setup": 4},
        all_failed=None if succeeded else failed,
        trajectory_age_s=90.0 if succeeded else None,
    )
    first, second = explain_job(waits)[:2]
    assert (first.code, second.code) == ("no_engine", "failing_environment_setup")
    assert "44 of 48 episodes wait for it" in first.message


@pytest.mark.parametrize(
    ("task_type", "code", "advice"),
    [
        ("android_world", "device", "rollout-buffer doctor says what this machine lacks. rollout-buffer attempts"),
        ("mine", "device", "rollout-buffer attempts 'a b' shows each error"),
        ("miniwob", "environment_setup", "Is the task's name and params_idx in the input right?"),
        ("mine", "environment_setup", "The input line, or what it names, cannot be played"),
        ("mine", "generator", "Fix the generator's file, then start the job with fresh: true"),
    ],
)
def test_what_to_do_fits_the_task_and_can_be_pasted(task_type: str, code: str, advice: str) -> None:
    failed = FailedAttempts(failed=9, ended=9, code=code, of_code=9, message="x")
    job = replace(AT_WORK, all_failed=failed, job_id="a b", task_type=task_type, log="/data/logs/runner-1.log")
    told = explain_job(job)[0].advice
    assert told.startswith(advice)
    assert told.endswith("the log is /data/logs/runner-1.log.")


def test_a_job_whose_generator_raised_names_its_log() -> None:
    cause = Cause(CauseCode.NOT_PLAYED, "run_rollout raised: x")
    job = replace(AT_WORK, state=JobState.FAILED, cause=cause, log="/data/logs/runner-1.log")
    assert explain_job(job)[0].advice.endswith("The log is /data/logs/runner-1.log.")
    assert "log" not in explain_job(replace(job, has_runner=False))[0].advice


def test_a_buffer_without_supervisor_says_so_first() -> None:
    found = explain_service(None, {"mine.py": "mine.py, line 3: SyntaxError\nTraceback"})
    assert [one.code for one in found] == ["no_supervisor", "broken_generator"]
    assert found[1].message == "The generator file mine.py does not load: mine.py, line 3: SyntaxError."
    assert explain_service(1.0, {}) == []
