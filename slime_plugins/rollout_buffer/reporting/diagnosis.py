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
"""A job counts as progressing if its newest trajectory is younger than this."""
START_TIMEOUT_S = 120.0
"""Time that a runner may take from the last change of its job's state to its first episode."""
LONG_EPISODE_S = 600.0
MIN_REPORTED_FAILURES = 3
LITTLE_DISK_BYTES = 2_000_000_000


def explain_job(snapshot: JobSnapshot) -> list[Explanation]:
    """Returns at least one explanation, the most urgent first.

    Among equally urgent explanations, the one that all attempts fail is the first.
    """
    aside = [*_left_out(snapshot), *_prompts(snapshot)]
    if over := list(_over(snapshot)):
        return _named([*over, *aside, *_dropped(snapshot)], at=snapshot)
    found = [*_all_fail(snapshot), *_halted(snapshot), *_troubles(snapshot), *aside]
    if not any(one.severity in (Severity.STOPPED, Severity.WAIT) for one in found):
        found += _at_work(snapshot)
    found += _dropped(snapshot)
    order = [Severity.STOPPED, Severity.WAIT, Severity.ATTENTION, Severity.ENDED, Severity.OK]
    return _named(sorted(found, key=lambda one: order.index(one.severity)), at=snapshot)


def _named(found: Sequence[Explanation], *, at: JobSnapshot) -> list[Explanation]:
    """Replaces JOB and LOG in the advice by the job's id and log, so that the commands can be pasted."""
    names = {"JOB": shlex.quote(at.job_id), "LOG": at.log}
    return [replace(one, advice=re.sub(r"\bJOB\b|\bLOG\b", lambda name: names[name[0]], one.advice)) for one in found]


def explain_service(supervisor_age_s: float | None, broken_generators: Mapping[str, str]) -> list[Explanation]:
    """Returns explanations of the whole buffer; none if it is healthy."""
    found = [] if _lives(supervisor_age_s) else [_no_supervisor(supervisor_age_s)]
    return found + [
        Explanation(
            code="broken_generator",
            severity=Severity.ATTENTION,
            message=f"The generator file {name} does not load: {reason.splitlines()[0]}.",
            advice="Its task types cannot be started until the file is fixed: the next start of a job reads it again.",
        )
        for name, reason in sorted(broken_generators.items())
    ]


# --- a job that is over ----------------------------------------------------------------------------------------------


def _over(at: JobSnapshot) -> Iterator[Explanation]:
    waiting = at.count(GroupState.READY, GroupState.LEASED)
    left = f" {_wait(waiting)} to be fetched or acknowledged." if waiting else ""
    if at.state is JobState.FINISHED and at.cause.message:
        yield Explanation(
            code="nothing_delivered",
            severity=Severity.STOPPED,
            message=f"The job is over and gave nothing to train on: {_text(at.cause)}.",
            advice=_WHY_FILTERED,
        )
    elif at.state is JobState.FINISHED:
        yield Explanation(
            code="finished",
            severity=Severity.OK,
            message=f"All done: every group is closed, {_ends(at)}.{left}",
            advice="" if waiting else "Nothing more will come. Start another job, or this one with fresh: true.",
        )
    elif at.state is JobState.CANCELLED:
        yield Explanation(
            code="cancelled",
            severity=Severity.ENDED,
            message=f"The job was {_cancelled(at.cause)}: {_ends(at)}.{left}",
            advice="What was finished is kept. Starting the same job with fresh: true begins again.",
        )
    elif at.state is JobState.FAILED:
        yield Explanation(
            code="failed",
            severity=Severity.STOPPED,
            message=f"The job failed{_because(at.cause)}.{left}",
            advice="Fix the cause, then start the same job again: it begins again with what failed and what is open."
            + _where_shown(at),
        )


def _where_shown(at: JobSnapshot) -> str:
    if at.cause.code is CauseCode.ATTEMPTS_FAILED:
        return f" {_SHOWN}"
    return " The log is LOG." if at.has_runner else ""


def _cancelled(cause: Cause) -> str:
    return _text(cause) if cause.code is CauseCode.CANCELLED else f"cancelled{_because(cause)}"


def _ends(at: JobSnapshot) -> str:
    """Counts groups by their final state."""
    return _and([f"{at.count(state)} {state.value}" for state in _ENDS if state is _ENDS[0] or at.count(state)])


_ENDS = (GroupState.DELIVERED, GroupState.FILTERED, GroupState.FAILED, GroupState.SKIPPED)


# --- a job that stands still -----------------------------------------------------------------------------------------


def _halted(at: JobSnapshot) -> Iterator[Explanation]:
    if not _lives(at.supervisor_age_s):
        yield _no_supervisor(at.supervisor_age_s)
    if at.state is JobState.PAUSED:
        yield _paused(at)
    elif not at.count(GroupState.OPEN):
        yield from _nothing_open(at)
    elif not at.has_runner:
        yield from _external(at)
    elif (limit := _limit_reached(at)) is not None:
        yield _backpressure(at, limit)


def _paused(at: JobSnapshot) -> Explanation:
    if at.cause.code is CauseCode.IDLE:
        idle = f" for {_span(at.pause_when_idle_s)}" if at.pause_when_idle_s else ""
        return Explanation(
            code="paused_idle",
            severity=Severity.STOPPED,
            message=f"The job paused itself: groups were ready and no trainer asked for them{idle}.",
            advice="The trainer's next poll resumes it. Is the trainer still running?",
        )
    if at.cause.code is CauseCode.ENGINE_AWAY:
        return Explanation(
            code="paused_engine",
            severity=Severity.STOPPED,
            message=f"The job paused itself: {_text(at.cause)}. Its engine is {at.engine_url}.",
            advice=_AWAY_IS,
        )
    return Explanation(
        code="paused",
        severity=Severity.STOPPED,
        message=f"The job was paused by request{_because(at.cause)}: no new episode starts.",
        advice="rollout-buffer resume JOB, or Resume on its page of the dashboard, continues it.",
    )


def _nothing_open(at: JobSnapshot) -> Iterator[Explanation]:
    waiting = at.count(GroupState.READY, GroupState.LEASED)
    if waiting:
        yield Explanation(
            code="all_played",
            severity=Severity.WAIT,
            message=f"Everything is played; {_wait(waiting)} to be fetched or acknowledged by the trainer.",
            advice=_poll_advice(at),
        )
    elif not at.has_input:
        yield Explanation(
            code="external_waits",
            severity=Severity.WAIT,
            message=f"The job is filled from outside, and {_last_item(at)}.",
            advice="Post items to /buffer/write, or cancel the job when nothing more comes.",
        )
    else:
        yield Explanation(
            code="closing", severity=Severity.OK, message="Every group is closed; the job is about to end."
        )


def _external(at: JobSnapshot) -> Iterator[Explanation]:
    if not (at.running_attempts or _recent(at.trajectory_age_s)) and at.engine.code is EngineTrouble.NONE:
        yield Explanation(
            code="external_waits",
            severity=Severity.WAIT,
            message=f"The job is filled from outside: {_wait(at.count(GroupState.OPEN))} for items, {_last_item(at)}.",
            advice="Look at the program that writes to /buffer/write.",
        )


def _last_item(at: JobSnapshot) -> str:
    if at.trajectory_age_s is None:
        refused = f": {_many(at.refused_items, 'item')} refused" if at.refused_items else ""
        return f"nothing was written yet{refused}"
    return f"its last item came {_span(at.trajectory_age_s)} ago"


def _limit_reached(at: JobSnapshot) -> str | None:
    """Returns the setting that prevents new groups until the trainer takes some."""
    ready, waiting = at.count(GroupState.READY), at.count(GroupState.READY, GroupState.LEASED)
    if at.max_groups_ready is not None and ready >= at.max_groups_ready:
        return "max_groups_ready"
    return "max_groups_ahead" if at.max_groups_ahead is not None and waiting >= at.max_groups_ahead else None


def _backpressure(at: JobSnapshot, limit: str) -> Explanation:
    return Explanation(
        code="backpressure",
        severity=Severity.WAIT,
        message=f"{_wait(at.count(GroupState.READY, GroupState.LEASED))} for the trainer, as many as {limit} allows: "
        "no new group begins.",
        advice=_poll_advice(at),
    )


def _poll_advice(at: JobSnapshot) -> str:
    if at.poll_age_s is None:
        return "No trainer has ever polled this job: start it, or check its --rollout-buffer-url and job id."
    if at.poll_age_s > QUIET_AFTER_S:
        return f"The trainer last polled {_span(at.poll_age_s)} ago: it trains, or it has stopped. Look at its log."
    return "The trainer polls; it will take them when it needs them."


# --- dropped and failed groups ----------------------------------------------------------------------------------------


def _left_out(at: JobSnapshot) -> Iterator[Explanation]:
    if at.stale_groups:
        newest = f", which is {at.weight_version} in run {at.trainer_run} of the trainer" if at.weight_version else ""
        yield Explanation(
            code="stale_groups",
            severity=Severity.ATTENTION,
            message=f"{_many(at.stale_groups, 'group')} dropped as stale: the weights were more than "
            f"{at.max_weight_version_lag} versions behind the newest{newest}.",
            advice="staleness_policy: admit begins nothing that would be too old and drops nothing. Else let less "
            "wait with max_groups_ready, or raise max_weight_version_lag.",
        )
    if at.gives_up_slow_members:
        yield Explanation(
            code="group_timeout_set",
            severity=Severity.ATTENTION,
            message=f"{GROUP_TIMEOUT_NOTE}.",
            advice="Start it without group_timeout_seconds: the same job attaches, and has no such limit.",
        )
    if (slow := at.slow_loss) is not None:
        yield Explanation(
            code="slow_tasks_lost",
            severity=Severity.ATTENTION,
            message=f"Slow tasks are trained less: {slow.trained_share_of_slowest:.0%} of the slowest quarter of "
            f"groups, {slow.trained_share:.0%} of all ({slow.lost} were lost; Mann-Whitney, p = {slow.p_value:.1g}).",
            advice="The causes of the groups say why: too old (staleness_policy: admit drops none), timed out "
            "(group_timeout_seconds), or attempts that fail late.",
        )
    if at.missing_members is not None:
        yield _missing_members(at.missing_members)
    if at.stuck_weights is not None:
        yield _stuck_weights(at, at.stuck_weights)
    if at.outlier_versions:
        yield Explanation(
            code="outlier_versions",
            severity=Severity.ATTENTION,
            message=f"{_many(at.outlier_versions, 'weight version')} far beyond the others, the last was "
            f"{at.outlier_version}: that counts for nothing, and no group is stale because of it.",
            advice="A weight version counts the trainer's updates. Is it a timestamp?",
        )
    if at.refused_items:
        yield Explanation(
            code="refused_items",
            severity=Severity.STOPPED if _only_refused(at) else Severity.ATTENTION,
            message=f"{_many(at.refused_items, 'item')} refused. The last was answered {at.last_refusal[:300]}",
            advice="Fix the program that writes the items"
            + (", or start the job with a wider reward_range." if "reward_out_of_range" in at.last_refusal else "."),
        )


def _only_refused(at: JobSnapshot) -> bool:
    """Returns True for a running job of a generator without any trajectory: all its writes were refused."""
    return at.state is JobState.RUNNING and at.has_runner and at.trajectory_age_s is None


def _missing_members(found: MissingMembers) -> Explanation:
    """Describes the missing members of closed groups, and whether they were slower than the trained members."""
    return Explanation(
        code="members_missing",
        severity=Severity.ATTENTION,
        message=f"{found.trained} of {found.submitted} members are trained: {found.given_up} were given up when their "
        f"group was closed, {found.failed} failed for good; {found.dummies} dummies stand for members."
        f"{_how_long_they_took(found)}{_what_they_earned(found)}",
        advice="Given up: leave group_timeout_seconds out, or have the program write in time. Failed: rollout-buffer "
        "attempts JOB says why; where they are only slow, raise attempt_timeout_seconds.",
    )


def _how_long_they_took(found: MissingMembers) -> str:
    if found.seconds is None or found.seconds_of_trained is None:
        return ""
    slow = f" (p = {found.p_value:.1g}): the slow are trained less" if found.are_slow else ""
    return f" The missing had played for {found.seconds:.3g} s, the trained for {found.seconds_of_trained:.3g} s{slow}."


def _what_they_earned(found: MissingMembers) -> str:
    if found.reward_of_trained is None or found.reward_of_known is None:
        return ""
    known = f"of all whose reward is known {found.reward_of_known:.3f}, of the missing it is unknown"
    return f" Mean reward: of the trained {found.reward_of_trained:.3f}, {known}."


def _prompts(at: JobSnapshot) -> Iterator[Explanation]:
    """Describes how the engine changed prompts, and the effect on training rows."""
    for finding in at.prompt_findings:
        yield Explanation(
            code="prompts_changed",
            severity=Severity.ATTENTION,
            message=f"The engine {finding}.",
            advice="Turns are trained after what was run, as far as the engine says it. exact_prompts: require refuses "
            "such an engine.",
        )
    counts = at.prompts
    if counts.untrained:
        turns = counts.equal + counts.differing + counts.unknown
        yield Explanation(
            code="prompts_unknown",
            severity=Severity.ATTENTION,
            message=f"{_many(counts.untrained, 'turn')} not trained, of {turns}: it is unknown what the engine ran.",
            advice="SGLang tells it from 0.5.13 on (return_prompt_token_ids). untrained_because of a generation's "
            "prompt_receipt says why of each.",
        )
    if counts.extra_tokens > MAX_EXTRA_SHARE * counts.row_tokens:
        share = counts.extra_tokens / counts.row_tokens
        yield Explanation(
            code="prompts_forked",
            severity=Severity.ATTENTION,
            message=f"{share:.0%} of all tokens in training rows are read again: the engine ran other prompts than it "
            f"was sent, and {_many(counts.forked, 'more row')} made.",
            advice="An engine that keeps ids saves them: SGLang 0.5.13 or later, without what THUDM/slime#2388 names.",
        )


def _stuck_weights(at: JobSnapshot, stuck: StuckWeights) -> Explanation:
    bound = at.max_weight_version_lag
    kept = "" if bound is None else f" The lag of {bound} that the job asks for is not kept."
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
        code="weights_stand_still", severity=Severity.ATTENTION, message=f"{message}{kept}", advice=advice
    )


def _dropped(at: JobSnapshot) -> Iterator[Explanation]:
    """Describes the groups that failed or were filtered; ``_left_out`` describes stale groups."""
    if at.cause.code in (CauseCode.ATTEMPTS_FAILED, CauseCode.NO_GROUP_READY):
        return  # the explanation of the ended job says it already
    if _nothing_kept(at):
        yield Explanation(
            code="nothing_kept",
            severity=Severity.STOPPED,
            message=f"Nothing reaches the trainer: of {_closed(at)} closed groups {_given_up(at)}."
            f"{_commonest(at, max(GroupState.FILTERED, GroupState.FAILED, key=at.count))}",
            advice=_WHY_FILTERED,
        )
        return
    if failed := at.count(GroupState.FAILED):
        yield Explanation(
            code="failed_groups",
            severity=Severity.ATTENTION,
            message=f"{_many(failed, 'group')} given up as failed.{_commonest(at, GroupState.FAILED)}",
            advice="rollout-buffer groups JOB --state failed says of each why. Starting the same job again does not "
            "play them; a job that failed as a whole begins again with them.",
        )
    closed = _closed(at)
    if (filtered := at.count(GroupState.FILTERED)) > at.stale_groups:
        most = filtered * 2 > closed
        yield Explanation(
            code="filtered_groups",
            severity=Severity.ATTENTION if most else Severity.OK,
            message=f"{_many(filtered, 'group')} filtered, of {closed} that are closed."
            f"{_commonest(at, GroupState.FILTERED)}",
            advice=_WHY_FILTERED if most else "",
        )


_WHY_FILTERED = "rollout-buffer groups JOB says of each why. Is the input too easy, or too hard, for this policy?"


def _nothing_kept(at: JobSnapshot) -> bool:
    """Returns True if all closed groups of an open job, and more than a few, were dropped (staleness aside)."""
    dropped = at.count(GroupState.FILTERED, GroupState.FAILED)
    kept = at.count(GroupState.READY, GroupState.LEASED, GroupState.DELIVERED)
    return at.state in OPEN_STATES and not kept and dropped - at.stale_groups >= MIN_REPORTED_FAILURES


def _closed(at: JobSnapshot) -> int:
    return sum(at.count(state) for state in GroupState if state is not GroupState.OPEN)


def _given_up(at: JobSnapshot) -> str:
    states = (GroupState.FILTERED, GroupState.FAILED)
    return _and([f"{at.count(state)} {state.value}" for state in states if at.count(state)])


def _commonest(at: JobSnapshot, state: GroupState) -> str:
    most = at.most_frequent_causes.get(state)
    return "" if most is None else f" The commonest cause, of {most.count}: {_text(most.cause)}."


# --- a job that should move ------------------------------------------------------------------------------------------


def _troubles(at: JobSnapshot) -> Iterator[Explanation]:
    """Explains what prevents episodes from ending, or makes them fail."""
    if at.state is not JobState.RUNNING or not at.count(GroupState.OPEN):
        return
    yield from _engine_trouble(at)
    if not at.has_runner:
        return
    yield from _device_trouble(at)
    yield from _failures(at)
    if at.disk_free_bytes is not None and at.disk_free_bytes < LITTLE_DISK_BYTES:
        yield Explanation(
            code="disk",
            severity=Severity.ATTENTION,
            message=f"Only {at.disk_free_bytes / 1e9:.1f} GB are free on the disk of the data directory.",
            advice="Make room, or purge what was delivered with --retain-delivered-s. Writes stop on a full disk.",
        )


def _all_fail(at: JobSnapshot) -> Iterator[Explanation]:
    failed = at.all_failed
    if failed is not None and failed.failed >= MIN_REPORTED_FAILURES and at.count(GroupState.OPEN):
        yield Explanation(
            code=f"failing_{failed.code}",
            severity=Severity.ATTENTION if _most_wait_for_engine(at, failed.failed) else Severity.STOPPED,
            message=f"Nothing succeeds: {failed.sentence()[:500]}.",
            advice=_failure_advice(at, failed.code),
        )


def _engine_trouble(at: JobSnapshot) -> Iterator[Explanation]:
    engine = at.engine
    if engine.code is EngineTrouble.NONE:
        return
    requests = "request is" if engine.waiting == 1 else "requests are"
    held = f", {engine.waiting} {requests} held" if engine.waiting else ""
    if at.has_runner and 0 < engine.waiting <= at.running_attempts:
        held = f", {engine.waiting} of {at.running_attempts} episodes wait for it"
    for_long = f" for {_span(engine.since_s)}" if engine.since_s is not None else ""
    if engine.code is EngineTrouble.UPDATING:
        yield Explanation(
            code="weights",
            severity=Severity.WAIT,
            message=f"The engine has been updating its weights{for_long}{held}.",
            advice="Episodes go on from their partial tokens when it is through. Nothing to do.",
        )
        return
    long = (engine.since_s or 0.0) > QUIET_AFTER_S
    away = _AWAY if at.has_runner else _AWAY_FROM_GATEWAY
    standing = Severity.STOPPED if long else Severity.WAIT
    yield Explanation(
        code="no_engine",
        severity=Severity.ATTENTION if _recent(at.trajectory_age_s) else standing,
        message=f"The engine at {engine.url} {engine.message}{for_long}{held}.",
        advice=_SILENT if engine.code is EngineTrouble.SILENT else away,
    )


def _most_wait_for_engine(at: JobSnapshot, failures: int) -> bool:
    """Returns True if more episodes wait for an engine in trouble than have failed, so that the engine is the cause."""
    return at.engine.code is not EngineTrouble.NONE and at.engine.waiting > failures


_AWAY_IS = "Is it up, and is the address right as seen from the buffer host?"
_AWAY = f"{_AWAY_IS} Episodes wait for it, none is lost."
_AWAY_FROM_GATEWAY = (
    f"{_AWAY_IS} Turns of open sessions wait for it; an agent that gives up sooner may ask again in its session."
)
_SILENT = (
    "It holds requests while its weights are updated. When that takes minutes, look at its log. No episode is lost."
)


def _device_trouble(at: JobSnapshot) -> Iterator[Explanation]:
    if why := at.devices.get("unreachable"):
        yield Explanation(
            code="devices_unreachable",
            severity=Severity.WAIT,
            message=f"No device can be reached: {why.partition(chr(10))[0][:300]}",
            advice="Is the head of Ray up, at this address? The runner tries again for boot_timeout_s; LOG has more.",
        )
    total = at.devices.get("total")
    if total is None:
        return
    broken, starting = at.devices.get("broken") or 0, at.devices.get("starting") or 0
    usable = total - broken - starting
    if usable > 0 and broken:
        yield Explanation(
            code="devices_broken",
            severity=Severity.ATTENTION,
            message=f"{broken} of {total} devices are broken.",
            advice="They are replaced by themselves; look at the runner's log, LOG, when they stay broken.",
        )
    elif usable <= 0:
        how = f"{starting} are starting, {broken} are broken" if total else "the pool has none"
        yield Explanation(
            code="no_device",
            severity=Severity.WAIT if starting else Severity.STOPPED,
            message=f"No device can be used: {how}.",
            advice=_doctor(at) + "The runner's log, LOG, says why a device does not start.",
        )


def _failures(at: JobSnapshot) -> Iterator[Explanation]:
    total = sum(at.recent_failures.values())
    if total < MIN_REPORTED_FAILURES or at.all_failed is not None:
        return
    code, count = max(at.recent_failures.items(), key=lambda entry: entry[1])
    last = f" The last one said: {at.last_failure[:300]}" if at.last_failure else ""
    yield Explanation(
        code=f"failing_{code}",
        severity=Severity.ATTENTION
        if _recent(at.trajectory_age_s) or _most_wait_for_engine(at, total)
        else Severity.STOPPED,
        message=f"{total} attempts failed in the last ten minutes, {count} of them with {code}.{last}",
        advice=_failure_advice(at, code),
    )


def _doctor(at: JobSnapshot) -> str:
    return "rollout-buffer doctor says what this machine lacks. " if at.task_type == _TASK_TYPE_OF_DOCTOR else ""


def _failure_advice(at: JobSnapshot, code: str) -> str:
    """Returns the advice for an error code: its meaning for this task type, then where the attempts are listed."""
    first = _doctor(at) if code == "device" else _FAILURE_ADVICE.get(code, "")
    if code == "environment_setup" and at.task_type in _TASKS_BY_NAME:
        first = "Is the task's name and params_idx in the input right?"
    return f"{first.strip()} {_SHOWN}".strip()


_SHOWN = "rollout-buffer attempts JOB shows each error, its traceback and what was said; the log is LOG."
_TASKS_BY_NAME = ("android_world", "miniwob")
_FAILURE_ADVICE = {
    "attempt_timeout": "Does play() hang? Where episodes really take this long, raise attempt_timeout_seconds.",
    "engine_away": _AWAY,
    "engine": "Ask the engine itself: its log says why it refuses.",
    "environment_setup": "The input line, or what it names, cannot be played: correct the input.",
    "judge": "The judge crashed or did not answer, so there is no reward. Is the memory used up?",
    "generator": "Fix the generator's file and start the job again: it is read again.",
}


def _at_work(at: JobSnapshot) -> Iterator[Explanation]:
    playing = f"{at.running_attempts} {'episode is' if at.running_attempts == 1 else 'episodes are'} being played"
    if _recent(at.trajectory_age_s) and not (at.has_runner and at.running_attempts == 0):
        last = f"{playing}, the last one ended" if at.has_runner or at.running_attempts else "the last item was written"
        yield Explanation(
            code="moving",
            severity=Severity.OK,
            message=f"It moves: {last} {_span(at.trajectory_age_s)} ago.{_waits(at)}",
        )
    elif at.running_attempts == 0:
        yield _starting(at)
    else:
        oldest = at.oldest_running_s or 0.0
        last = "yet" if at.trajectory_age_s is None else f"for {_span(at.trajectory_age_s)}"
        long = oldest > LONG_EPISODE_S
        yield Explanation(
            code="slow" if long else "playing",
            severity=Severity.ATTENTION if long else Severity.OK,
            message=f"{playing.capitalize()}, the oldest for {_span(oldest)}; no trajectory {last}.{_waits(at)}",
            advice=_WHY_SLOW[at.has_runner] if long else "",
        )


_WHY_SLOW = {
    True: "Do they wait for a device or for the engine? The runner's log, LOG, says so.",
    False: "They are sessions of the gateway: does their agent still run? GET /sessions/ID shows their turns.",
}


def _starting(at: JobSnapshot) -> Explanation:
    if _recent(at.trajectory_age_s):
        return Explanation(
            code="between_episodes",
            severity=Severity.WAIT,
            message=f"No episode is being played just now; the last one ended {_span(at.trajectory_age_s)} ago.",
            advice="The runner starts the next ones, or is being started again after it died: its log is LOG.",
        )
    if at.began_s < START_TIMEOUT_S:
        return Explanation(
            code="starting",
            severity=Severity.WAIT,
            message=f"The job began {_span(at.began_s)} ago; its runner is loading the tokenizer and finding devices.",
            advice="Give it two minutes.",
        )
    return Explanation(
        code="no_runner",
        severity=Severity.STOPPED,
        message="No episode is being played, though groups are open: the job's runner is not at work.",
        advice="The supervisor restarts a runner that died, later each time. Its log is LOG.",
    )


def _waits(at: JobSnapshot) -> str:
    return "" if at.trainer_waits_s is None else f" The trainer has waited for {_span(at.trainer_waits_s)}."


def _no_supervisor(age_s: float | None) -> Explanation:
    seen = "there is none, or it ended in order" if age_s is None else f"it was last seen {_span(age_s)} ago"
    return Explanation(
        code="no_supervisor",
        severity=Severity.STOPPED,
        message=f"The supervisor is not alive ({seen}): no episodes are played, and new jobs are refused.",
        advice="Start rollout-buffer serve on the same --data-dir: it continues where it was.",
    )


def _lives(age_s: float | None) -> bool:
    return not SUPERVISOR.is_silent(age_s)


def _recent(age_s: float | None) -> bool:
    return age_s is not None and age_s < QUIET_AFTER_S


# --- groups ----------------------------------------------------------------------------------------------------------


def explain_group(state: GroupState, cause: Cause) -> str:
    """Returns a sentence on a group's outcome and its cause."""
    if state in _ENDED:
        return f"{_ENDED[state]}: {text}." if (text := _text(cause)) else f"{_ENDED[state]}."
    return _ALIVE[state]


_ENDED = {GroupState.FILTERED: "Dropped", GroupState.FAILED: "Failed", GroupState.SKIPPED: "Skipped"}
_ALIVE = {
    GroupState.OPEN: "Open: some of its members are still to come.",
    GroupState.READY: "Ready: complete and valid, it waits for the trainer's next poll.",
    GroupState.LEASED: "Leased: a trainer has it and has not acknowledged it yet; otherwise it comes back.",
    GroupState.DELIVERED: "Delivered to the trainer.",
}


# --- sentences --------------------------------------------------------------------------------------------------------


def _text(cause: Cause) -> str:
    """Returns the first line of a cause, without its traceback."""
    return cause.message.strip().partition("\n")[0][:500]


def _because(cause: Cause) -> str:
    return f" ({text})" if (text := _text(cause)) else ""


def _and(words: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _many(count: int, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count} {what}s were"


def _wait(count: int) -> str:
    return f"{count} group waits" if count == 1 else f"{count} groups wait"


def _span(seconds: float | None) -> str:
    """Formats a duration: 40 s, 12 min, 3 h, 2 d."""
    value = max(0.0, seconds or 0.0)
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"
