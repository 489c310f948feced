"""Pure: why a job or a group got where it is: a stable code for programs, and a sentence for people. All are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

MAX_MESSAGE = 2000


class CauseCode(StrEnum):
    """Stored with each cause, and part of HTTP replies: a code may be added, none is ever respelled."""

    NONE = ""

    # of groups
    NOT_VALID = "not_valid"  # is_valid_group said no
    ITEMS_FILTERED = "items_filtered"  # filter_item left too few members
    GROUP_FUNCTION = "group_function"  # a group function raised, or gave nonsense
    TIMED_OUT = "timed_out"  # too few members came before its time ran out
    SLOTS_FAILED = "slots_failed"  # too many of its slots were given up
    NOT_WRITTEN = "not_written"  # its generator ended before it had written enough of them
    STALE = "stale"  # its weights were too old when it was to be delivered
    DAMAGED = "damaged"  # too few of its members could be read when it was to be delivered
    SKIP_LIST = "skip_list"  # the trainer's skip list names it

    # of jobs, and of the groups that ended with them
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"  # a fresh start took the job's id

    # of jobs
    IDLE = "idle"  # paused: nobody polls it
    STOPPED = "stopped"  # paused: it was drained at once
    ENGINE_AWAY = "engine_away"  # paused: its engine answers nobody
    ENGINE_REFUSES = "engine_refuses"  # failed: its engine will not serve it as it is
    ATTEMPTS_FAILED = "attempts_failed"  # its attempts failed
    NO_GROUP_READY = "no_group_ready"  # its groups failed or were filtered
    NOT_PLAYED = "not_played"  # its generator does not load, start or go on, or its runner keeps dying

    @classmethod
    def _missing_(cls, value: object) -> CauseCode:
        """A code of a later version says nothing here; its message does."""
        return cls.NONE


@dataclass(frozen=True, slots=True)
class Cause:
    """Why something got where it is. Programs go by ``code``; ``message`` is for people and may be reworded."""

    code: CauseCode
    message: str

    def columns(self) -> dict[str, str]:
        """Returns it as the columns of a row."""
        return {"cause": self.message[:MAX_MESSAGE], "cause_code": self.code.value}


@dataclass(frozen=True, slots=True)
class CountedCause:
    """A cause, and how many groups have it."""

    cause: Cause
    count: int


NO_CAUSE = Cause(CauseCode.NONE, "")
STALE = Cause(CauseCode.STALE, "stale (sampled by weights more than max_weight_version_lag versions old)")
DAMAGED = Cause(CauseCode.DAMAGED, "damaged (too few of its members could be read when it was to be delivered)")
IN_SKIP_LIST = Cause(CauseCode.SKIP_LIST, "in the skip list (the trainer had trained it before it started)")
CANCELLED = Cause(CauseCode.CANCELLED, "cancelled by request")
SUPERSEDED = Cause(CauseCode.SUPERSEDED, "a fresh start took its id")
IDLE = Cause(CauseCode.IDLE, "nobody polls it; the next poll resumes it")
STOPPED = Cause(CauseCode.STOPPED, "drained at once: what ran was given up, and is played again when it is resumed")


def not_valid(rewards: Sequence[float | None], *, own: bool) -> Cause:
    """``is_valid_group`` said no to a group of ``rewards``; ``own`` when the generator brought that function."""
    alike = f"all {len(rewards)} members earned the same reward"
    if not own:
        return Cause(CauseCode.NOT_VALID, f"{alike}, so GRPO would learn nothing from them")
    note = f" ({alike})" if len(set(rewards)) == 1 else ""
    return Cause(CauseCode.NOT_VALID, f"the generator's own is_valid_group refused it{note}")


def items_filtered(kept: int, group_size: int, reward_range: tuple[float, float] | None, *, own: bool) -> Cause:
    """``filter_item`` left too few members; ``own`` when the generator brought that function."""
    message = f"filter_item kept {kept} of {group_size} members"
    if own:
        return Cause(CauseCode.ITEMS_FILTERED, f"the generator's own {message}")
    wrong = "are no finite numbers" if reward_range is None else "lie outside of {:g} to {:g}".format(*reward_range)
    return Cause(CauseCode.ITEMS_FILTERED, f"{message} (the other rewards {wrong})")


class Shortfall(Enum):
    """Why the members that a group lacks did not come."""

    SLOTS_FAILED = Cause(CauseCode.SLOTS_FAILED, "slots failed ({}, too many slots used up their max_attempts)")
    TIMED_OUT = Cause(CauseCode.TIMED_OUT, "timed out ({} within group_timeout_seconds)")
    NOT_WRITTEN = Cause(CauseCode.NOT_WRITTEN, "not written ({} before run_rollout returned)")


def too_short(came: int, group_size: int, shortfall: Shortfall) -> Cause:
    """Too few members came."""
    return Cause(shortfall.value.code, shortfall.value.message.format(f"{came} of {group_size} members came"))


def engine_away(refusal: str) -> Cause:
    """An engine answers nobody; ``refusal`` is what it does, said behind "the engine"."""
    away = "the engine is away; the job goes on by itself when it answers again"
    return Cause(CauseCode.ENGINE_AWAY, f"{away}: it {refusal}"[:1000])
