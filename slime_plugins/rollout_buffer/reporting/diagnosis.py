"""Pure: why nothing moves, in words, and what to do; why a group was dropped.

``explain_job`` reads a ``JobSnapshot``, which is plain numbers, and returns sentences with the most pressing one first.
The dashboard and ``rollout-buffer status`` show the same ones. A sentence has a stable ``code`` for programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slime_plugins.rollout_buffer.types import ENGINE_AWAY_CAUSE, GroupState, JobState

__all__ = ["Explanation", "JobSnapshot", "Severity", "explain_group", "explain_job", "explain_service"]

SUPERVISOR_PATIENCE_S = 15.0
QUIET_AFTER_S = 60.0
"""A job whose last trajectory is younger moves, whatever else is to be said of it."""
START_PATIENCE_S = 120.0
LONG_EPISODE_S = 600.0
FAILURES_WORTH_SAYING = 3
LITTLE_DISK_BYTES = 2_000_000_000


class Severity(StrEnum):
    """How much it matters."""

    OK = "ok"  # it moves, or it is done
    WAIT = "wait"  # it stands still for a reason that ends by itself
    ATTENTION = "attention"  # it moves, but somebody should look
    STOPPED = "stopped"  # it stands still until somebody does something


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One sentence of what is, and one of what to do (empty when there is nothing to do)."""

    code: str
    severity: Severity
    says: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        """Returns it as JSON has it."""
        return {"code": self.code, "severity": self.severity.value, "says": self.says, "advice": self.advice}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """What is known of a job at one moment. Ages are in seconds; None means that it never happened or is not known.

    ``devices`` has ``total`` and, where known, ``busy``, ``broken``, ``starting`` and ``waiting`` (episodes that wait
    for one). ``engine`` has ``url`` and, where known, ``says``: what it last answered instead of tokens, ``since_s``:
    for how long, and ``waiting``: requests that are held. Both are empty when nobody told.
    """

    state: JobState
    cause: str = ""
    has_runner: bool = True
    has_input: bool = True
    group_size: int = 1
    engine_url: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    supervisor_age_s: float | None = None
    began_s: float = 0.0
    """Since the job was started or resumed, or its present runner began."""
    running_attempts: int = 0
    oldest_running_s: float | None = None
    trajectory_age_s: float | None = None
    recent_failures: Mapping[str, int] = field(default_factory=dict)
    """Failed attempts of the last ten minutes, by error code."""
    last_failure: str = ""
    poll_age_s: float | None = None
    trainer_waits_s: float | None = None
    """How long a trainer has polled in vain; None when none waits."""
    max_groups_ahead: int | None = None
    pause_when_idle_s: float | None = None
    disk_free_bytes: int | None = None
    devices: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    stale_groups: int = 0
    """Groups that were dropped because their weights were too old."""
    max_weight_version_lag: int | None = None
    trainer_run: int = 1
    weight_version: int | None = None
    lone_versions: int = 0
    """How often a weight version was named that is absurdly far ahead; ``lone_version`` is the last of them."""
    lone_version: int | None = None
    refused_items: int = 0
    """Written items that the job's ``reward_range`` refused; ``last_refusal`` says it of the last."""
    last_refusal: str = ""

    def count(self, *states: GroupState) -> int:
        """Counts groups in the states."""
        return sum(self.groups.get(state.value, 0) for state in states)


def explain_job(snapshot: JobSnapshot) -> list[Explanation]:
    """Returns at least one sentence: why the job stands still, or that it moves. The most pressing comes first."""
    if over := list(_over(snapshot)):
        return [*over, *_left_out(snapshot)]
    found = [*_halted(snapshot), *_troubles(snapshot), *_left_out(snapshot)]
    if not any(one.severity in (Severity.STOPPED, Severity.WAIT) for one in found):
        found += _at_work(snapshot)
    order = [Severity.STOPPED, Severity.WAIT, Severity.ATTENTION, Severity.OK]
    return sorted(found, key=lambda one: order.index(one.severity))


def explain_service(supervisor_age_s: float | None, broken_generators: Mapping[str, str]) -> list[Explanation]:
    """Returns what is to be said of the whole buffer; nothing when it is well."""
    found = [] if _lives(supervisor_age_s) else [_no_supervisor(supervisor_age_s)]
    return found + [
        Explanation(
            code="broken_generator",
            severity=Severity.ATTENTION,
            says=f"The generator file {name} does not load: its task types cannot be started.",
            advice="The supervisor's log has the traceback. Mend the file and restart rollout-buffer serve.",
        )
        for name in sorted(broken_generators)
    ]


# --- a job that is over ----------------------------------------------------------------------------------------------


def _over(at: JobSnapshot) -> Iterator[Explanation]:
    waiting = at.count(GroupState.READY, GroupState.LEASED)
    left = f" {_wait(waiting)} to be fetched or acknowledged." if waiting else ""
    if at.state is JobState.FINISHED and at.cause:
        yield Explanation(
            code="nothing_delivered",
            severity=Severity.ATTENTION,
            says=f"The job is over and gave nothing to train on: {at.cause.strip()[:500]}.",
            advice="The groups' own pages say why. Is the input too easy, or too hard, for this policy?",
        )
    elif at.state is JobState.FINISHED:
        delivered = at.count(GroupState.DELIVERED)
        yield Explanation(
            code="finished",
            severity=Severity.OK,
            says=f"All done: every group is closed, {delivered} of them delivered.{left}",
            advice="" if waiting else "Nothing more will come. Start another job, or this one with fresh: true.",
        )
    elif at.state is JobState.CANCELLED:
        yield Explanation(
            code="cancelled",
            severity=Severity.OK,
            says=f"The job was cancelled{_because(at.cause)}.{left}",
            advice="What was finished is kept. Starting the same job with fresh: true begins anew.",
        )
    elif at.state is JobState.FAILED:
        yield Explanation(
            code="failed",
            severity=Severity.STOPPED,
            says=f"The job failed{_because(at.cause)}.{left}",
            advice="Mend the cause, then start the same job again: it begins anew with what failed and what is open.",
        )


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
    elif (ahead := at.count(GroupState.READY, GroupState.LEASED)) and _is_full(at, ahead):
        yield _backpressure(at, ahead)


def _paused(at: JobSnapshot) -> Explanation:
    if "nobody polls" in at.cause:
        patience = f" for {_span(at.pause_when_idle_s)}" if at.pause_when_idle_s else ""
        return Explanation(
            code="paused_idle",
            severity=Severity.STOPPED,
            says=f"The job paused itself: groups were ready and no trainer asked for them{patience}.",
            advice="It goes on by itself at the trainer's next poll. Is the trainer still running?",
        )
    if at.cause.startswith(ENGINE_AWAY_CAUSE):
        why = at.cause.removeprefix(ENGINE_AWAY_CAUSE)
        return Explanation(
            code="paused_engine",
            severity=Severity.STOPPED,
            says=f"The job paused itself, because the engine at {at.engine_url} gives no tokens{why}.",
            advice=f"It goes on by itself when the engine answers again. {_AWAY_IS}",
        )
    return Explanation(
        code="paused",
        severity=Severity.STOPPED,
        says=f"Somebody paused the job{_because(at.cause)}: no new episode starts.",
        advice="Resume it here, or with: rollout-buffer resume JOB.",
    )


def _nothing_open(at: JobSnapshot) -> Iterator[Explanation]:
    waiting = at.count(GroupState.READY, GroupState.LEASED)
    if waiting:
        yield Explanation(
            code="all_played",
            severity=Severity.WAIT,
            says=f"Everything is played; {_wait(waiting)} to be fetched or acknowledged by the trainer.",
            advice=_poll_advice(at),
        )
    elif not at.has_input:
        yield Explanation(
            code="external_waits",
            severity=Severity.WAIT,
            says=f"The job is filled from outside, and {_last_item(at)}.",
            advice="Post items to /buffer/write, or cancel the job when nothing more comes.",
        )
    else:
        yield Explanation(code="closing", severity=Severity.OK, says="Every group is closed; the job is about to end.")


def _external(at: JobSnapshot) -> Iterator[Explanation]:
    if not _recent(at.trajectory_age_s):
        yield Explanation(
            code="external_waits",
            severity=Severity.WAIT,
            says=f"The job is filled from outside: {_wait(at.count(GroupState.OPEN))} for items, {_last_item(at)}.",
            advice="Look at the program that writes to /buffer/write.",
        )


def _last_item(at: JobSnapshot) -> str:
    if at.trajectory_age_s is None:
        refused = f": {_many(at.refused_items, 'item')} refused" if at.refused_items else ""
        return f"nothing was written yet{refused}"
    return f"its last item came {_span(at.trajectory_age_s)} ago"


def _is_full(at: JobSnapshot, ahead: int) -> bool:
    return at.max_groups_ahead is not None and ahead >= at.max_groups_ahead


def _backpressure(at: JobSnapshot, ahead: int) -> Explanation:
    return Explanation(
        code="backpressure",
        severity=Severity.WAIT,
        says=f"{_wait(ahead)} for the trainer, as many as max_groups_ahead allows: no new group begins.",
        advice=_poll_advice(at),
    )


def _poll_advice(at: JobSnapshot) -> str:
    if at.poll_age_s is None:
        return "No trainer has ever polled this job: start it, or check its --rollout-buffer-url and job id."
    if at.poll_age_s > QUIET_AFTER_S:
        return f"The trainer last polled {_span(at.poll_age_s)} ago: it trains, or it has stopped. Look at its log."
    return "The trainer polls; it will take them when it needs them."


# --- what does not reach the trainer ---------------------------------------------------------------------------------


def _left_out(at: JobSnapshot) -> Iterator[Explanation]:
    if at.stale_groups:
        newest = f", which is {at.weight_version} in run {at.trainer_run} of the trainer" if at.weight_version else ""
        yield Explanation(
            code="stale_groups",
            severity=Severity.ATTENTION,
            says=f"{_many(at.stale_groups, 'group')} dropped as stale: the weights were more than "
            f"{at.max_weight_version_lag} versions behind the newest{newest}.",
            advice="Let less wait with max_groups_ahead, raise max_weight_version_lag, or take them with "
            "stale_groups: flag.",
        )
    if at.lone_versions:
        yield Explanation(
            code="lone_versions",
            severity=Severity.ATTENTION,
            says=f"{_many(at.lone_versions, 'weight version')} far beyond the others, the last was "
            f"{at.lone_version}: that counts for nothing, and no group is stale because of it.",
            advice="A weight version counts the trainer's updates. Is it a timestamp?",
        )
    if at.refused_items:
        yield Explanation(
            code="refused_items",
            severity=Severity.ATTENTION,
            says=f"{_many(at.refused_items, 'item')} refused because of the reward. The last: {at.last_refusal[:300]}.",
            advice="Start the job with a reward_range that holds every reward, or without one.",
        )


# --- a job that should move ------------------------------------------------------------------------------------------


def _troubles(at: JobSnapshot) -> Iterator[Explanation]:
    """What keeps episodes from ending, or makes them fail."""
    if at.state is not JobState.RUNNING or not at.has_runner or not at.count(GroupState.OPEN):
        return
    yield from _engine_trouble(at)
    yield from _device_trouble(at)
    yield from _failures(at)
    if at.disk_free_bytes is not None and at.disk_free_bytes < LITTLE_DISK_BYTES:
        yield Explanation(
            code="disk",
            severity=Severity.ATTENTION,
            says=f"Only {at.disk_free_bytes / 1e9:.1f} GB are free on the disk of the data directory.",
            advice="Make room, or forget what was delivered with --retain-delivered-s. Writes stop on a full disk.",
        )


def _engine_trouble(at: JobSnapshot) -> Iterator[Explanation]:
    says = str(at.engine.get("says") or "")
    if not says:
        return
    held = f", {at.engine['waiting']} requests are held" if at.engine.get("waiting") else ""
    for_long = f" for {_span(at.engine['since_s'])}" if at.engine.get("since_s") is not None else ""
    if at.engine.get("updating") or "abort" in says:
        yield Explanation(
            code="weights",
            severity=Severity.WAIT,
            says=f"The engine has been updating its weights{for_long}{held}.",
            advice="Episodes go on from their partial tokens when it is through. Nothing to do.",
        )
        return
    long = (at.engine.get("since_s") or 0.0) > QUIET_AFTER_S
    standing = Severity.STOPPED if long else Severity.WAIT
    yield Explanation(
        code="no_engine",
        severity=Severity.ATTENTION if _recent(at.trajectory_age_s) else standing,
        says=f"The engine at {at.engine.get('url')} {says.split(' (')[0]}{for_long}{held}.",
        advice=_SILENT if "answered no request" in says else _AWAY,
    )


_AWAY_IS = "Is it up, and is the address right as seen from the buffer host?"
_AWAY = f"{_AWAY_IS} Episodes wait for it, none is lost."
_SILENT = (
    "It holds requests while its weights are updated. When that takes minutes, look at its log. No episode is lost."
)


def _device_trouble(at: JobSnapshot) -> Iterator[Explanation]:
    total = at.devices.get("total")
    if total is None:
        return
    broken, starting = at.devices.get("broken") or 0, at.devices.get("starting") or 0
    usable = total - broken - starting
    if usable > 0 and broken:
        yield Explanation(
            code="devices_broken",
            severity=Severity.ATTENTION,
            says=f"{broken} of {total} devices are broken.",
            advice="They are replaced by themselves; look at the runner's log when they stay broken.",
        )
    elif usable <= 0:
        how = f"{starting} are starting, {broken} are broken" if total else "the pool has none"
        yield Explanation(
            code="no_device",
            severity=Severity.WAIT if starting else Severity.STOPPED,
            says=f"No device can be used: {how}.",
            advice="rollout-buffer doctor says what this machine lacks, the runner's log why a device does not start.",
        )


def _failures(at: JobSnapshot) -> Iterator[Explanation]:
    total = sum(at.recent_failures.values())
    if total < FAILURES_WORTH_SAYING:
        return
    code, count = max(at.recent_failures.items(), key=lambda entry: entry[1])
    last = f" The last one said: {at.last_failure[:300]}" if at.last_failure else ""
    yield Explanation(
        code=f"failing_{code}",
        severity=Severity.ATTENTION if _recent(at.trajectory_age_s) else Severity.STOPPED,
        says=f"{total} attempts failed in the last ten minutes, {count} of them with {code}.{last}",
        advice=_FAILURE_ADVICE.get(code, "The runner's log under DATA_DIR/logs has the details."),
    )


_FAILURE_ADVICE = {
    "device": "rollout-buffer doctor says what this machine lacks. A failure costs an attempt, never a reward.",
    "engine_away": _AWAY,
    "engine": "Ask the engine itself: its log says why it refuses.",
    "environment_setup": "The task's set-up does not work: is its name and params_idx in the input right?",
    "judge": "What scores the answers died or fell silent, and no verdict is no reward. Is the memory used up?",
    "generator": "The generator raised: its traceback is in the runner's log under DATA_DIR/logs.",
}


def _at_work(at: JobSnapshot) -> Iterator[Explanation]:
    playing = f"{at.running_attempts} {'episode is' if at.running_attempts == 1 else 'episodes are'} being played"
    if _recent(at.trajectory_age_s):
        last = f"{playing}, the last one ended" if at.has_runner or at.running_attempts else "the last item was written"
        yield Explanation(
            code="moving",
            severity=Severity.OK,
            says=f"It moves: {last} {_span(at.trajectory_age_s)} ago.{_waits(at)}",
        )
    elif at.running_attempts == 0:
        yield _starting(at)
    else:
        oldest = at.oldest_running_s or 0.0
        ended = "none has ended yet" if at.trajectory_age_s is None else f"none ended for {_span(at.trajectory_age_s)}"
        long = oldest > LONG_EPISODE_S
        yield Explanation(
            code="slow" if long else "playing",
            severity=Severity.ATTENTION if long else Severity.OK,
            says=f"{playing.capitalize()}, the oldest for {_span(oldest)}; {ended}.{_waits(at)}",
            advice="Do they wait for a device or for the engine? The runner's log says so." if long else "",
        )


def _starting(at: JobSnapshot) -> Explanation:
    if at.began_s < START_PATIENCE_S:
        return Explanation(
            code="starting",
            severity=Severity.WAIT,
            says=f"The job began {_span(at.began_s)} ago; its runner is loading the tokenizer and finding devices.",
            advice="Give it two minutes.",
        )
    return Explanation(
        code="no_runner",
        severity=Severity.STOPPED,
        says="No episode is being played, though groups are open: the job's runner is not at work.",
        advice="The supervisor restarts a runner that died, later each time. Its log is under DATA_DIR/logs.",
    )


def _waits(at: JobSnapshot) -> str:
    return "" if at.trainer_waits_s is None else f" The trainer has waited for {_span(at.trainer_waits_s)}."


def _no_supervisor(age_s: float | None) -> Explanation:
    seen = "there is none, or it ended in order" if age_s is None else f"it was last seen {_span(age_s)} ago"
    return Explanation(
        code="no_supervisor",
        severity=Severity.STOPPED,
        says=f"The supervisor is not alive ({seen}): nobody plays episodes, and new jobs are refused.",
        advice="Start rollout-buffer serve on the same --data-dir: it goes on where it was.",
    )


def _lives(age_s: float | None) -> bool:
    return age_s is not None and age_s <= SUPERVISOR_PATIENCE_S


def _recent(age_s: float | None) -> bool:
    return age_s is not None and age_s < QUIET_AFTER_S


# --- groups ----------------------------------------------------------------------------------------------------------


def explain_group(
    state: GroupState, cause: str, *, rewards: Sequence[float], group_size: int, reward_range: Sequence[float] | None
) -> str:
    """Returns in one or two sentences what became of a group and why.

    ``rewards`` are those that came back; ``reward_range`` is the job's own, None when the generator's holds.
    """
    if state not in (GroupState.FILTERED, GroupState.FAILED, GroupState.SKIPPED):
        return _ALIVE[state]
    if cause.startswith("is_valid_group"):
        return _not_valid(rewards, group_size)
    if match := re.fullmatch(r"filter_item kept (\d+) of (\d+) members", cause):
        return _items_filtered(int(match[1]), int(match[2]), rewards, reward_range)
    if match := re.fullmatch(r"(timed out|slots failed): (\d+) of (\d+) members came", cause):
        return _too_short(match[1], match[2], match[3])
    if cause.startswith("stale"):
        return "Dropped: it waited so long that its weights are more versions old than max_weight_version_lag allows."
    if cause == "in the skip list":
        return "Skipped: the trainer said at its start that it has trained this one already."
    if state is GroupState.SKIPPED:
        return f"Skipped{_because(cause)}."
    return f"{'Dropped' if state is GroupState.FILTERED else 'Failed'}{_because(cause)}."


_ALIVE = {
    GroupState.OPEN: "Open: some of its members are still to come.",
    GroupState.READY: "Ready: complete and valid, it waits for the trainer's next poll.",
    GroupState.LEASED: "Leased: a trainer has it and has not acknowledged it yet; otherwise it comes back.",
    GroupState.DELIVERED: "Delivered to the trainer.",
}


def _not_valid(rewards: Sequence[float], group_size: int) -> str:
    if rewards and len(set(rewards)) == 1:
        return (
            f"Dropped: all {len(rewards)} members earned the same reward, {rewards[0]:+.3f}. Against equals nothing is "
            "better or worse, so GRPO would learn nothing from it."
        )
    if len(rewards) < group_size:
        return f"Dropped: only {len(rewards)} of {group_size} members came, fewer than a valid group must have."
    return "Dropped: the generator's own is_valid_group refused it."


def _items_filtered(kept: int, size: int, rewards: Sequence[float], reward_range: Sequence[float] | None) -> str:
    why = "their rewards lie outside of the valid range, or the generator's own filter_item refused them"
    if reward_range is not None:
        low, high = reward_range
        outside = sum(not low <= reward <= high for reward in rewards)
        if outside:
            why = f"{outside} rewards lie outside of the valid range {low:g} to {high:g}"
    return f"Dropped: only {kept} of {size} members passed the filter ({why})."


def _too_short(why: str, came: str, size: str) -> str:
    if why == "timed out":
        return f"Failed: {came} of {size} members came before its time ran out (group_timeout_seconds)."
    return f"Failed: {came} of {size} members came; the other slots were given up after max_attempts failed attempts."


# --- words -----------------------------------------------------------------------------------------------------------


def _because(cause: str) -> str:
    return f" ({cause.strip()[:500]})" if cause.strip() else ""


def _many(count: int, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count} {what}s were"


def _wait(count: int) -> str:
    return f"{count} group waits" if count == 1 else f"{count} groups wait"


def _span(seconds: float | None) -> str:
    """Says a length of time as people do: 40 s, 12 min, 3 h, 2 d."""
    value = max(0.0, seconds or 0.0)
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"
