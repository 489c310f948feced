"""Pure: why a job or a group has its state, as a stable code for programs and a message for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

MAX_MESSAGE = 2000


class CauseCode(StrEnum):
    """Stored with each cause, and part of HTTP replies: codes may be added, never renamed."""

    NONE = ""

    # of groups
    NOT_VALID = "not_valid"  # is_valid_group rejected it
    ITEMS_FILTERED = "items_filtered"  # filter_item left too few members
    GROUP_FUNCTION = "group_function"  # a group function raised or returned an invalid value
    TIMED_OUT = "timed_out"  # too few members within group_timeout_seconds
    SLOTS_FAILED = "slots_failed"  # too many slots used up their attempts
    NOT_WRITTEN = "not_written"  # its generator returned before it had written enough members
    STALE = "stale"  # its weights were too old at delivery
    DAMAGED = "damaged"  # too few of its members could be read at delivery
    SKIP_LIST = "skip_list"  # the trainer's skip list names it

    # of jobs, and of the groups that ended with them
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"  # a fresh start took the job's id

    # of jobs
    IDLE = "idle"  # paused: no trainer polls it
    STOPPED = "stopped"  # paused: drained without waiting for running attempts
    ENGINE_AWAY = "engine_away"  # paused: its engine does not answer
    ENGINE_REFUSES = "engine_refuses"  # failed: its engine rejects its requests
    ATTEMPTS_FAILED = "attempts_failed"
    NO_GROUP_READY = "no_group_ready"  # all its groups failed or were filtered
    NOT_PLAYED = "not_played"  # its generator cannot be loaded, started or continued, or its runner crashes repeatedly

    @classmethod
    def _missing_(cls, value: object) -> CauseCode:
        """A code of a later version is read as none; its message is shown."""
        return cls.NONE


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a job or a group has its state. ``code`` is stable; ``message`` may be reworded."""

    code: CauseCode
    message: str

    def columns(self) -> dict[str, str]:
        """Returns the cause as columns of a row."""
        return {"cause": self.message[:MAX_MESSAGE], "cause_code": self.code.value}


@dataclass(frozen=True, slots=True)
class CountedCause:
    """A cause and the number of groups that have it."""

    cause: Cause
    count: int


NO_CAUSE = Cause(CauseCode.NONE, "")
STALE = Cause(CauseCode.STALE, "stale (sampled by weights more than max_weight_version_lag versions old)")
DAMAGED = Cause(CauseCode.DAMAGED, "damaged (too few of its members could be read when it was to be delivered)")
IN_SKIP_LIST = Cause(CauseCode.SKIP_LIST, "in the skip list (the trainer had consumed it in an earlier run)")
CANCELLED = Cause(CauseCode.CANCELLED, "cancelled by request")
SUPERSEDED = Cause(CauseCode.SUPERSEDED, "a fresh start took its id")
IDLE = Cause(CauseCode.IDLE, "no trainer polls it; the next poll resumes it")
STOPPED = Cause(CauseCode.STOPPED, "drained at once: running attempts were given up, and are played again on resume")


def not_valid(rewards: Sequence[float | None], *, is_custom: bool) -> Cause:
    """Returns the cause of a group of ``rewards`` that ``is_valid_group`` rejected.

    ``is_custom`` is True if the generator defines that function.
    """
    alike = f"all {len(rewards)} members earned the same reward"
    if not is_custom:
        return Cause(CauseCode.NOT_VALID, f"{alike}, so GRPO would learn nothing from them")
    note = f" ({alike})" if len(set(rewards)) == 1 else ""
    return Cause(CauseCode.NOT_VALID, f"the generator's own is_valid_group refused it{note}")


def items_filtered(kept: int, group_size: int, reward_range: tuple[float, float] | None, *, is_custom: bool) -> Cause:
    """Returns the cause of a group in which ``filter_item`` left too few members; ``is_custom`` as in ``not_valid``."""
    message = f"filter_item kept {kept} of {group_size} members"
    if is_custom:
        return Cause(CauseCode.ITEMS_FILTERED, f"the generator's own {message}")
    wrong = "are no finite numbers" if reward_range is None else "lie outside of {:g} to {:g}".format(*reward_range)
    return Cause(CauseCode.ITEMS_FILTERED, f"{message} (the other rewards {wrong})")


class Shortfall(Enum):
    """Why a group lacks members."""

    SLOTS_FAILED = Cause(CauseCode.SLOTS_FAILED, "slots failed ({}, too many slots used up their max_attempts)")
    TIMED_OUT = Cause(CauseCode.TIMED_OUT, "timed out ({} within group_timeout_seconds)")
    NOT_WRITTEN = Cause(CauseCode.NOT_WRITTEN, "not written ({} before run_rollout returned)")


def too_short(count: int, group_size: int, shortfall: Shortfall) -> Cause:
    """Returns the cause of a group that failed with ``count`` members, and not ``group_size``."""
    return Cause(shortfall.value.code, shortfall.value.message.format(f"{count} of {group_size} members came"))


def engine_away(refusal: str) -> Cause:
    """Returns the cause of a pause while the engine does not answer; ``refusal`` continues a sentence that begins with
    "it"."""
    away = "the engine is away; the job resumes when it answers again"
    return Cause(CauseCode.ENGINE_AWAY, f"{away}: it {refusal}"[:1000])
