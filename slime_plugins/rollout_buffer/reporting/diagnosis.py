"""Explains why a job does not progress and what to do, and why a group was dropped. Pure functions.

``explain_job`` reads a ``JobSnapshot`` and returns sentences, the most urgent first, for the dashboard and
``rollout-buffer status``. Each sentence has a stable ``code`` for programs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from slime_plugins.rollout_buffer.reporting.job_snapshot import JobSnapshot
from slime_plugins.rollout_buffer.rules.causes import Cause, CauseCode
from slime_plugins.rollout_buffer.rules.groups import GROUP_TIMEOUT_NOTE
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES
from slime_plugins.rollout_buffer.rules.prompt_receipts import MAX_EXTRA_SHARE
from slime_plugins.rollout_buffer.rules.selection_bias import MissingMembers
from slime_plugins.rollout_buffer.rules.stuck_weights import StuckCounter, StuckWeights
from slime_plugins.rollout_buffer.types import EngineTrouble, GroupState, JobState
from slime_plugins.rollout_buffer.wire.job_replies import Explanation, Severity

_TASK_TYPE_OF_DOCTOR = "android_world"
"""The task type whose devices ``rollout-buffer doctor`` examines."""
QUIET_AFTER_S = 60.0
"""A job counts as progressing if its newest trajectory is younger, a trainer as polling if its last poll is."""
START_TIMEOUT_S = 120.0
"""Time that a runner may take from the last change of its job's state to its first episode."""
LONG_EPISODE_S = 600.0
MIN_REPORTED_FAILURES = 3
LITTLE_DISK_BYTES = 2_000_000_000


def explain_job(snapshot: JobSnapshot) -> list[Explanation]:
    """Returns at least one explanation, the most urgent first; for a job that has ended, how it ended comes first.

    Among equally urgent explanations, "all attempts fail" comes first.
    """
    on_data = [*_data_quality(snapshot), *_prompts(snapshot)]
    if ended := list(_ended(snapshot)):
        return _with_names([*ended, *on_data, *_dropped(snapshot)], snapshot)
    explanations = [*_all_fail(snapshot), *_halted(snapshot), *_troubles(snapshot), *on_data]
    if not any(each.severity in (Severity.STOPPED, Severity.WAIT) for each in explanations):
        explanations += _at_work(snapshot)
    explanations += _dropped(snapshot)
    order = [Severity.STOPPED, Severity.WAIT, Severity.ATTENTION, Severity.ENDED, Severity.OK]
    return _with_names(sorted(explanations, key=lambda each: order.index(each.severity)), snapshot)


def _with_names(explanations: Sequence[Explanation], job: JobSnapshot) -> list[Explanation]:
    """Replaces JOB and LOG in the advice by the job's id and log, so that the commands can be pasted."""
    names = {"JOB": shlex.quote(job.job_id), "LOG": job.log}
    advices = [re.sub(r"\bJOB\b|\bLOG\b", lambda name: names[name[0]], each.advice) for each in explanations]
    return [replace(each, advice=advice) for each, advice in zip(explanations, advices, strict=True)]


def explain_service(supervisor_age_s: float | None, broken_generators: Mapping[str, str]) -> list[Explanation]:
    """Returns explanations of the whole buffer; none if it is healthy."""
    explanations = [_no_supervisor(supervisor_age_s)] if SUPERVISOR.is_silent(supervisor_age_s) else []
    return explanations + [
        Explanation(
            code="broken_generator",
            severity=Severity.ATTENTION,
            message=f"The generator file {name} does not load: {reason.splitlines()[0]}.",
            advice="Its task types cannot be started until the file is fixed: the next start of a job reads it again.",
        )
        for name, reason in sorted(broken_generators.items())
    ]


# --- a job that has ended ---------------------------------------------------------------------------------------------


def _ended(job: JobSnapshot) -> Iterator[Explanation]:
    waiting = job.count(GroupState.READY, GroupState.LEASED)
    left = f" {_waiting(waiting)} to be fetched or acknowledged." if waiting else ""
    if job.state is JobState.FINISHED and job.cause.message:
        yield Explanation(
            code="nothing_delivered",
            severity=Severity.STOPPED,
            message=f"The job has ended, and no group could be delivered: {_text(job.cause)}.",
            advice=_why_dropped(job, GroupState.FILTERED),
        )
    elif job.state is JobState.FINISHED:
        yield Explanation(
            code="finished",
            severity=Severity.OK,
            message=f"All done: every group is closed, {_final_counts(job)}.{left}",
            advice="" if waiting else "Nothing more will come. Start another job, or this one with fresh: true.",
        )
    elif job.state is JobState.CANCELLED:
        again = (
            "" if job.cause.code is CauseCode.SUPERSEDED else " Starting the same job with fresh: true begins again."
        )
        yield Explanation(
            code="cancelled",
            severity=Severity.ENDED,
            message=f"The job was {_cancelled(job.cause)}. Its groups: {_final_counts(job)}.{left}",
            advice=f"Its trajectories are kept.{again}",
        )
    elif job.state is JobState.FAILED:
        yield Explanation(
            code="failed",
            severity=Severity.STOPPED,
            message=f"The job failed{_because(job.cause)}.{left}",
            advice="Fix the cause, then start the same job again: it continues, and its failed groups are open again."
            + _where_shown(job),
        )


def _where_shown(job: JobSnapshot) -> str:
    if job.cause.code is CauseCode.ATTEMPTS_FAILED:
        return f" {_WHERE_ERRORS_ARE}"
    return " The log is LOG." if job.has_runner else ""


def _cancelled(cause: Cause) -> str:
    return _text(cause) if cause.code is CauseCode.CANCELLED else f"cancelled{_because(cause)}"


def _final_counts(job: JobSnapshot) -> str:
    """Counts groups by their final state."""
    return _joined([f"{job.count(state)} {state.value}" for state in _FINAL if state is _FINAL[0] or job.count(state)])


_FINAL = (GroupState.DELIVERED, GroupState.FILTERED, GroupState.FAILED, GroupState.SKIPPED)


# --- a job that stands still -----------------------------------------------------------------------------------------


def _halted(job: JobSnapshot) -> Iterator[Explanation]:
    if SUPERVISOR.is_silent(job.supervisor_age_s):
        yield _no_supervisor(job.supervisor_age_s)
    if job.state is JobState.PAUSED:
        yield _paused(job)
    elif not job.count(GroupState.OPEN):
        yield from _nothing_open(job)
    elif not job.has_runner and (job.running_attempts or _recent(job.trajectory_age_s)):
        return
    elif (limit := _limit_reached(job)) is not None:
        yield Explanation(
            code="backpressure",
            severity=Severity.WAIT,
            message=f"{'No new group begins' if job.has_runner else 'The gateway begins no new group'}: {limit}.",
            advice=_poll_advice(job),
        )
    elif not job.has_runner and job.engine.code is EngineTrouble.NONE:
        yield _external_waits(job)


def _paused(job: JobSnapshot) -> Explanation:
    if job.cause.code is CauseCode.IDLE:
        idle = f" for {_span(job.pause_when_idle_s)}" if job.pause_when_idle_s else ""
        return Explanation(
            code="paused_idle",
            severity=Severity.STOPPED,
            message=f"The job paused itself: groups were ready and no trainer asked for them{idle}.",
            advice="The trainer's next poll resumes it. Is the trainer still running?",
        )
    if job.cause.code is CauseCode.ENGINE_AWAY:
        return Explanation(
            code="paused_engine",
            severity=Severity.STOPPED,
            message=f"The job paused itself: {_text(job.cause)}. Its engine is {job.engine_url}.",
            advice=_CHECK_ADDRESS,
        )
    return Explanation(
        code="paused",
        severity=Severity.STOPPED,
        message=f"The job was paused by request{_because(job.cause)}: no new episode starts.",
        advice="rollout-buffer resume JOB, or Resume on its page of the dashboard, continues it.",
    )


def _nothing_open(job: JobSnapshot) -> Iterator[Explanation]:
    waiting = job.count(GroupState.READY, GroupState.LEASED)
    if waiting:
        yield Explanation(
            code="all_played",
            severity=Severity.WAIT,
            message=f"Everything is played; {_waiting(waiting)} to be fetched or acknowledged by the trainer.",
            advice=_poll_advice(job),
        )
    elif not job.has_input:
        yield _external_waits(job)
    else:
        yield Explanation(
            code="closing", severity=Severity.OK, message="Every group is closed; the job is about to end."
        )


def _external_waits(job: JobSnapshot) -> Explanation:
    groups = f" {_waiting(open_groups)} for items." if (open_groups := job.count(GroupState.OPEN)) else ""
    refused = f": {_were(job.refused_items, 'item')} refused" if job.refused_items else ""
    age_s = job.trajectory_age_s
    last = f"no item was stored yet{refused}" if age_s is None else f"the last item was stored {_span(age_s)} ago"
    return Explanation(
        code="external_waits",
        severity=Severity.WAIT,
        message=f"Programs fill this job, and {last}.{groups}",
        advice="Look at the program that writes to /buffer/write. If nothing more comes, cancel the job.",
    )


def _limit_reached(job: JobSnapshot) -> str | None:
    """Returns what prevents new groups until the trainer takes ready groups or trains; None if nothing does."""
    ready, waiting = job.count(GroupState.READY), job.count(GroupState.READY, GroupState.LEASED)
    if job.max_groups_ready is not None and ready >= job.max_groups_ready:
        return f"{_waiting(ready)} for the trainer, and max_groups_ready is {job.max_groups_ready}"
    if job.max_groups_ahead is not None and waiting >= job.max_groups_ahead:
        return f"{_waiting(waiting)} to be fetched or acknowledged, and max_groups_ahead is {job.max_groups_ahead}"
    held = job.lag_reached and not job.running_attempts
    return f"it would be trained with a lag of more than {job.max_weight_version_lag} weight versions" if held else None


def _poll_advice(job: JobSnapshot) -> str:
    if job.poll_age_s is None:
        return "No trainer has ever polled this job: start it, or check its --rollout-buffer-url and job id."
    if job.poll_age_s > QUIET_AFTER_S:
        return f"The trainer last polled {_span(job.poll_age_s)} ago: it trains, or it has stopped. Look at its log."
    return "The trainer polls; it will take them when it needs them."


# --- dropped and failed groups ----------------------------------------------------------------------------------------


def _data_quality(job: JobSnapshot) -> Iterator[Explanation]:
    if job.stale_groups:
        newest = f", which is {job.weight_version} in the trainer's run {job.trainer_run}" if job.weight_version else ""
        yield Explanation(
            code="stale_groups",
            severity=Severity.ATTENTION,
            message=f"{_were(job.stale_groups, 'group')} dropped as stale: the weights were more than "
            f"{job.max_weight_version_lag} versions behind the newest{newest}.",
            advice="With staleness_policy: admit, a runner begins no group that would become too old, and none is "
            "dropped; flag only names them in meta_info. A larger max_weight_version_lag needs fresh: true.",
        )
    if job.gives_up_slow_members:
        yield Explanation(
            code="group_timeout_set",
            severity=Severity.ATTENTION,
            message=f"{GROUP_TIMEOUT_NOTE}.",
            advice="Start the same job without group_timeout_seconds: the call attaches to it and ends the limit.",
        )
    if (slow := job.slow_loss) is not None:
        yield Explanation(
            code="slow_tasks_lost",
            severity=Severity.ATTENTION,
            message=f"Slow tasks are trained less: {slow.trained_share_of_slowest:.0%} of the slowest quarter of "
            f"groups, {slow.trained_share:.0%} of all ({slow.lost} were lost; Mann-Whitney, p = {slow.p_value:.1g}).",
            advice="The causes of the groups say why: too old (staleness_policy: admit drops none), timed out "
            "(group_timeout_seconds), or attempts that fail late.",
        )
    if job.missing_members is not None:
        yield _missing_members(job.missing_members)
    if job.stuck_weights is not None:
        yield _stuck_weights(job, job.stuck_weights)
    if job.outlier_versions:
        yield Explanation(
            code="outlier_versions",
            severity=Severity.ATTENTION,
            message=f"{_were(job.outlier_versions, 'reported weight version')} far beyond the others; the last was "
            f"{job.outlier_version}. They are ignored: no group is stale because of them.",
            advice="A weight version counts the trainer's updates. Is it a timestamp?",
        )
    if job.refused_items:
        outside = "reward_out_of_range" in job.last_refusal
        wider = ", or start the job with a wider reward_range and fresh: true" if outside else ""
        yield Explanation(
            code="refused_items",
            severity=Severity.STOPPED if _only_refused(job) else Severity.ATTENTION,
            message=f"{_were(job.refused_items, 'item')} refused. The last was answered {job.last_refusal[:300]}",
            advice=f"Fix the program that writes the items{wider}.",
        )


def _only_refused(job: JobSnapshot) -> bool:
    """Returns True for a running job of a generator without any trajectory: all its writes were refused."""
    return job.state is JobState.RUNNING and job.has_runner and job.trajectory_age_s is None


def _missing_members(missing: MissingMembers) -> Explanation:
    """Describes the missing members of closed groups, and whether they were slower than the trained members."""
    return Explanation(
        code="members_missing",
        severity=Severity.ATTENTION,
        message=f"{missing.trained} of {missing.submitted} members were delivered; {missing.given_up} were given up "
        f"when their group was closed, {missing.failed} failed for good, and {missing.dummies} are replaced by dummies "
        f"or copies.{_how_long_they_took(missing)}{_what_they_earned(missing)}",
        advice="Given up: leave group_timeout_seconds out, or have the program write in time. Failed: rollout-buffer "
        "attempts JOB says why; where they are only slow, raise attempt_timeout_seconds.",
    )


def _how_long_they_took(missing: MissingMembers) -> str:
    if missing.seconds is None or missing.seconds_of_trained is None:
        return ""
    slow = f" (p = {missing.p_value:.1g}): the slow are trained less" if missing.are_slow else ""
    mean, mean_of_delivered = missing.seconds, missing.seconds_of_trained
    return f" On average the missing had played {mean:.3g} s, the delivered {mean_of_delivered:.3g} s{slow}."


def _what_they_earned(missing: MissingMembers) -> str:
    if missing.reward_of_trained is None or missing.reward_of_known is None:
        return ""
    known = f"of all members whose reward is known {missing.reward_of_known:.3f}"
    return f" Mean reward: of the delivered {missing.reward_of_trained:.3f}, {known}."


def _prompts(job: JobSnapshot) -> Iterator[Explanation]:
    """Describes how the engine changed prompts, and the effect on training rows."""
    for finding in job.prompt_findings:
        yield Explanation(
            code="prompts_changed",
            severity=Severity.ATTENTION,
            message=f"The engine {finding}.",
            advice="Turns are trained on the prompts that the engine ran, where it reports them. exact_prompts: "
            "require refuses such an engine.",
        )
    counts = job.prompts
    if counts.untrained:
        turns = counts.equal + counts.differing + counts.unknown
        yield Explanation(
            code="prompts_unknown",
            severity=Severity.ATTENTION,
            message=f"{_were(counts.untrained, 'turn')} not trained, of {turns}: the ids that the engine ran are "
            "unknown or do not fit.",
            advice="SGLang 0.5.13 or later reports them (return_prompt_token_ids). untrained_because of a "
            "generation's prompt_receipt says why its turn is not trained.",
        )
    if counts.extra_tokens > MAX_EXTRA_SHARE * counts.row_tokens:
        share = counts.extra_tokens / counts.row_tokens
        yield Explanation(
            code="prompts_forked",
            severity=Severity.ATTENTION,
            message=f"{share:.0%} of all tokens in training rows are repeated: the engine ran other prompts than it "
            f"was sent, and {_were(counts.forked, 'more row')} made.",
            advice="Engines that keep ids avoid it: SGLang 0.5.13 or later without slime's patch (THUDM/slime#2388).",
        )


def _stuck_weights(job: JobSnapshot, stuck: StuckWeights) -> Explanation:
    bound = job.max_weight_version_lag
    effect = "cannot be met by new episodes" if stuck.who is StuckCounter.ENGINE else "has no effect"
    of_limit = "" if bound is None else f" The job's limit of {bound} versions of lag {effect}."
    if stuck.who is StuckCounter.ENGINE:
        message = (
            f"The engine's weight version stands still: the trainer is at {stuck.trainers_version}, and {stuck.count} "
            f"of the newest {stuck.examined} episodes were sampled by {stuck.version} or older, though they began "
            "later."
        )
        advice = (
            "Does the trainer push its weights to this engine, and to each worker behind its router? Does the push "
            "name the version (weight_version of the engine's update calls)? GET /model_info of the engine says what "
            "it has."
        )
    elif stuck.who is StuckCounter.TRAINER:
        message = (
            f"The trainer's weight version stands still: it polled for groups {stuck.count} times after training, "
            f"and the only version is {stuck.version}."
        )
        advice = "Does it send weight_version with its polls, and name it when it pushes its weights to the engine?"
    else:
        message = f"The age of the tokens is unknown: none of the newest {stuck.examined} episodes names a version."
        advice = "Does the engine report weight_version in the meta_info of its replies, as SGLang does?"
    return Explanation(
        code="weights_stand_still", severity=Severity.ATTENTION, message=f"{message}{of_limit}", advice=advice
    )


def _dropped(job: JobSnapshot) -> Iterator[Explanation]:
    """Describes the groups that failed or were filtered; ``_data_quality`` describes stale groups."""
    if job.cause.code in (CauseCode.ATTEMPTS_FAILED, CauseCode.NO_GROUP_READY):
        return  # the explanation of the ended job says it already
    if _nothing_kept(job):
        state = max(GroupState.FILTERED, GroupState.FAILED, key=job.count)
        yield Explanation(
            code="nothing_kept",
            severity=Severity.STOPPED,
            message=f"Nothing reaches the trainer: {_final_counts(job)}.{_most_frequent_cause(job, state)}",
            advice=_why_dropped(job, state),
        )
        return
    if failed := job.count(GroupState.FAILED):
        yield Explanation(
            code="failed_groups",
            severity=Severity.ATTENTION,
            message=f"{_were(failed, 'group')} given up as failed.{_most_frequent_cause(job, GroupState.FAILED)}",
            advice=f"{_why_dropped(job, GroupState.FAILED)} Starting the same job again does not play them, unless the "
            "job itself has failed; retry_given_up: true does for an evaluation.",
        )
    played = sum(job.count(state) for state in GroupState if state not in (GroupState.OPEN, GroupState.SKIPPED))
    if (filtered := job.count(GroupState.FILTERED)) > job.stale_groups:
        most = filtered * 2 > played
        yield Explanation(
            code="filtered_groups",
            severity=Severity.ATTENTION if most else Severity.OK,
            message=f"{_were(filtered, 'group')} filtered, of {played} that were played."
            f"{_most_frequent_cause(job, GroupState.FILTERED)}",
            advice=_why_dropped(job, GroupState.FILTERED) if most else "",
        )


def _why_dropped(job: JobSnapshot, state: GroupState) -> str:
    most = job.most_frequent_causes.get(state)
    of_rewards = most is not None and most.cause.code is CauseCode.NOT_VALID
    question = " Is the input too easy, or too hard, for this policy?" if of_rewards else ""
    return f"rollout-buffer groups JOB --state {state.value} says why for each.{question}"


def _nothing_kept(job: JobSnapshot) -> bool:
    """Returns True if all closed groups of an open job, and more than a few, were dropped (staleness aside)."""
    dropped = job.count(GroupState.FILTERED, GroupState.FAILED)
    usable = job.count(GroupState.READY, GroupState.LEASED, GroupState.DELIVERED)
    return job.state in OPEN_STATES and not usable and dropped - job.stale_groups >= MIN_REPORTED_FAILURES


def _most_frequent_cause(job: JobSnapshot, state: GroupState) -> str:
    most = job.most_frequent_causes.get(state)
    return "" if most is None else f" The most frequent cause ({most.count} of them): {_text(most.cause)}."


# --- a job that should move ------------------------------------------------------------------------------------------


def _troubles(job: JobSnapshot) -> Iterator[Explanation]:
    """Explains what prevents episodes from ending, or makes them fail."""
    if job.state is not JobState.RUNNING or not job.count(GroupState.OPEN):
        return
    yield from _engine_trouble(job)
    if job.has_runner:
        yield from _device_trouble(job)
        yield from _failures(job)
    if job.disk_free_bytes is not None and job.disk_free_bytes < LITTLE_DISK_BYTES:
        yield Explanation(
            code="disk",
            severity=Severity.ATTENTION,
            message=f"Only {job.disk_free_bytes / 1e9:.1f} GB are free on the disk of the data directory.",
            advice="Make room, or purge what was delivered with --retain-delivered-s. Writes stop on a full disk.",
        )


def _all_fail(job: JobSnapshot) -> Iterator[Explanation]:
    failed = job.all_failed
    if failed is not None and failed.failed >= MIN_REPORTED_FAILURES and job.count(GroupState.OPEN):
        yield Explanation(
            code=f"failing_{failed.code}",
            severity=Severity.ATTENTION if _most_wait_for_engine(job, failed.failed) else Severity.STOPPED,
            message=f"Nothing succeeds: {failed.sentence()[:500]}.",
            advice=_failure_advice(job, failed.code),
        )


def _engine_trouble(job: JobSnapshot) -> Iterator[Explanation]:
    engine = job.engine
    if engine.code is EngineTrouble.NONE:
        return
    requests = "request is" if engine.waiting == 1 else "requests are"
    held = f", {engine.waiting} {requests} held" if engine.waiting else ""
    if job.has_runner and 0 < engine.waiting <= job.running_attempts:
        held = f", {engine.waiting} of {job.running_attempts} episodes wait for it"
    for_long = f" for {_span(engine.since_s)}" if engine.since_s is not None else ""
    if engine.code is EngineTrouble.UPDATING:
        yield Explanation(
            code="weights",
            severity=Severity.WAIT,
            message=f"The engine has been updating its weights{for_long}{held}.",
            advice="Episodes continue from their partial tokens after the update. Nothing to do.",
        )
        return
    long = (engine.since_s or 0.0) > QUIET_AFTER_S
    away = _AWAY if job.has_runner else _AWAY_FROM_GATEWAY
    standing = Severity.STOPPED if long else Severity.WAIT
    yield Explanation(
        code="no_engine",
        severity=Severity.ATTENTION if _recent(job.trajectory_age_s) else standing,
        message=f"The engine at {engine.url} {engine.message}{for_long}{held}.",
        advice=_SILENT if engine.code is EngineTrouble.SILENT else away,
    )


def _most_wait_for_engine(job: JobSnapshot, failures: int) -> bool:
    """Returns True if more episodes wait for an engine in trouble than have failed, so that the engine is the cause."""
    return job.engine.code is not EngineTrouble.NONE and job.engine.waiting > failures


_CHECK_ADDRESS = "Is it up, and is the address right as seen from the buffer host?"
_AWAY = f"{_CHECK_ADDRESS} Episodes wait for it, none is lost."
_AWAY_FROM_GATEWAY = (
    f"{_CHECK_ADDRESS} Turns of open sessions wait for it; an agent that gives up sooner may ask again in its session."
)
_SILENT = (
    "An engine holds requests while its weights are updated. If it takes minutes, look at its log. No episode is lost."
)


def _device_trouble(job: JobSnapshot) -> Iterator[Explanation]:
    if why := job.devices.get("unreachable"):
        yield Explanation(
            code="devices_unreachable",
            severity=Severity.WAIT,
            message=f"No device can be reached: {why.partition(chr(10))[0][:300]}",
            advice="Is the head of Ray up, at this address? The runner tries again for boot_timeout_s; LOG has more.",
        )
    total = job.devices.get("total")
    if total is None:
        return
    broken, starting = job.devices.get("broken") or 0, job.devices.get("starting") or 0
    usable = total - broken - starting
    if usable > 0 and broken:
        yield Explanation(
            code="devices_broken",
            severity=Severity.ATTENTION,
            message=f"{broken} of {total} devices are broken.",
            advice="They are replaced automatically. If they stay broken, look at the runner's log, LOG.",
        )
    elif usable <= 0:
        how = f"{starting} are starting, {broken} are broken" if total else "the pool has none"
        yield Explanation(
            code="no_device",
            severity=Severity.WAIT if starting else Severity.STOPPED,
            message=f"No device can be used: {how}.",
            advice=_doctor(job) + "The runner's log, LOG, says why a device does not start.",
        )


def _failures(job: JobSnapshot) -> Iterator[Explanation]:
    total = sum(job.recent_failures.values())
    if total < MIN_REPORTED_FAILURES or job.all_failed is not None:
        return
    code, count = max(job.recent_failures.items(), key=lambda entry: entry[1])
    last = f" The last one said: {job.last_failure[:300]}" if job.last_failure else ""
    yield Explanation(
        code=f"failing_{code}",
        severity=Severity.ATTENTION
        if _recent(job.trajectory_age_s) or _most_wait_for_engine(job, total)
        else Severity.STOPPED,
        message=f"{total} attempts failed in the last ten minutes, {count} of them with {code}.{last}",
        advice=_failure_advice(job, code),
    )


def _doctor(job: JobSnapshot) -> str:
    return "rollout-buffer doctor says what this machine lacks. " if job.task_type == _TASK_TYPE_OF_DOCTOR else ""


def _failure_advice(job: JobSnapshot, code: str) -> str:
    """Returns the advice for an error code: its meaning for this task type, then where the attempts are listed."""
    first = _doctor(job) if code == "device" else _FAILURE_ADVICE.get(code, "")
    if code == "environment_setup" and job.task_type in _TASKS_BY_NAME:
        first = "Is the task's name and params_idx in the input right?"
    return f"{first.strip()} {_WHERE_ERRORS_ARE}".strip()


_WHERE_ERRORS_ARE = "rollout-buffer attempts JOB shows each error, its traceback and what was said; the log is LOG."
_TASKS_BY_NAME = ("android_world", "miniwob")
_FAILURE_ADVICE = {
    "attempt_timeout": "Does play() hang? Where episodes really take this long, raise attempt_timeout_seconds.",
    "engine": "Ask the engine itself: its log says why it refuses.",
    "environment_setup": "The input line, or what it names, cannot be played: correct the input.",
    "judge": "The judge crashed or did not answer, so there is no reward. Is the memory used up?",
    "generator": "Fix the generator's file, then start the job with fresh: true: a job in play does not read it again.",
}


def _at_work(job: JobSnapshot) -> Iterator[Explanation]:
    playing = f"{job.running_attempts} {'episode is' if job.running_attempts == 1 else 'episodes are'} being played"
    if _recent(job.trajectory_age_s) and not (job.has_runner and job.running_attempts == 0):
        last = f"{playing}, the last ended" if job.has_runner or job.running_attempts else "the last item was written"
        yield Explanation(
            code="moving",
            severity=Severity.OK,
            message=f"The job progresses: {last} {_span(job.trajectory_age_s)} ago.{_waits(job)}",
        )
    elif job.running_attempts == 0:
        yield _starting(job)
    else:
        oldest = job.oldest_running_s or 0.0
        last = "yet" if job.trajectory_age_s is None else f"for {_span(job.trajectory_age_s)}"
        long = oldest > LONG_EPISODE_S
        yield Explanation(
            code="slow" if long else "playing",
            severity=Severity.ATTENTION if long else Severity.OK,
            message=f"{playing.capitalize()}, the oldest for {_span(oldest)}; no trajectory {last}.{_waits(job)}",
            advice=_WHY_SLOW[job.has_runner] if long else "",
        )


_WHY_SLOW = {
    True: "Do they wait for a device or for the engine? The runner's log, LOG, says so.",
    False: "They are sessions of the gateway: does their agent still run? GET /sessions/ID shows their turns.",
}


def _starting(job: JobSnapshot) -> Explanation:
    if _recent(job.trajectory_age_s):
        return Explanation(
            code="between_episodes",
            severity=Severity.WAIT,
            message=f"No episode is being played just now; the last one ended {_span(job.trajectory_age_s)} ago.",
            advice="The runner starts the next ones, or is being started again after it died: its log is LOG.",
        )
    if job.began_s < START_TIMEOUT_S:
        return Explanation(
            code="starting",
            severity=Severity.WAIT,
            message=f"The job began {_span(job.began_s)} ago; its runner is starting: tokenizer, engine, devices.",
            advice="Give it two minutes.",
        )
    return Explanation(
        code="no_runner",
        severity=Severity.STOPPED,
        message="No episode is being played, though groups are open: the job's runner is not at work.",
        advice="The supervisor restarts a runner that died, after a longer delay each time. Its log is LOG.",
    )


def _waits(job: JobSnapshot) -> str:
    return "" if job.trainer_waits_s is None else f" The trainer has waited for {_span(job.trainer_waits_s)}."


def _no_supervisor(age_s: float | None) -> Explanation:
    seen = "there is none, or it was stopped normally" if age_s is None else f"it was last seen {_span(age_s)} ago"
    return Explanation(
        code="no_supervisor",
        severity=Severity.STOPPED,
        message=f"The supervisor is not alive ({seen}): no episodes are played, and new jobs are refused.",
        advice="Start rollout-buffer serve on the same --data-dir: it continues where it was.",
    )


def _recent(age_s: float | None) -> bool:
    return age_s is not None and age_s < QUIET_AFTER_S


# --- groups ----------------------------------------------------------------------------------------------------------


def explain_group(state: GroupState, cause: Cause) -> str:
    """Returns a sentence on a group's outcome and its cause."""
    if state in _OUTCOMES:
        return f"{_OUTCOMES[state]}: {text}." if (text := _text(cause)) else f"{_OUTCOMES[state]}."
    return _STATES[state]


_OUTCOMES = {GroupState.FILTERED: "Dropped", GroupState.FAILED: "Failed", GroupState.SKIPPED: "Skipped"}
_STATES = {
    GroupState.OPEN: "Open: some of its members are still to come.",
    GroupState.READY: "Ready: complete and valid, it waits for the trainer's next poll.",
    GroupState.LEASED: "Leased: a trainer has it. If it does not acknowledge it in time, the group is ready again.",
    GroupState.DELIVERED: "Delivered to the trainer.",
}


# --- sentences --------------------------------------------------------------------------------------------------------


def _text(cause: Cause) -> str:
    """Returns the first line of a cause, without its traceback."""
    return cause.message.strip().partition("\n")[0][:500]


def _because(cause: Cause) -> str:
    return f" ({text})" if (text := _text(cause)) else ""


def _joined(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _were(count: int, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count} {what}s were"


def _waiting(count: int) -> str:
    return f"{count} group waits" if count == 1 else f"{count} groups wait"


def _span(seconds: float | None) -> str:
    """Formats a duration: 40 s, 12 min, 3 h, 2 d."""
    value = max(0.0, seconds or 0.0)
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"
