"""What is to be done with a device that came back from an episode. Pure: no clock, no worker, nothing waits here.

    without a fault ───────────▶ lend it again; after ``recycle_after_episodes`` of them, a fresh worker
    a fault ───────────────────▶ lend it again
    ``max_consecutive_faults`` ▶ quarantine: rest, then a probe; well → on probation, else a new worker
    a fault on probation ──────▶ a new worker
    hung or died ──────────────▶ a new worker
    the new worker fails, too ─▶ the same, with a rest before it that doubles every time

One episode without a failure makes everything good. At most half of the devices rest at the same time: when more than
that go wrong, the cause is hardly the devices, and a farm that rests as a whole helps nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from slime_plugins.rollout_buffer.devices.leased_device import DIED, HUNG, LeaseReport
from slime_plugins.rollout_buffer.rules.backoff import backoff_s

_MAX_REST = 16


class DeviceState(StrEnum):
    """What a device is at."""

    PREPARING = "preparing"  # what it needs on its host is being made, as the files of an emulator
    BOOTING = "booting"  # a worker is being started for it, for the first time or in place of a failed one
    READY = "ready"  # it can be lent
    LEASED = "leased"  # an episode has it
    CHECKING = "checking"  # it came back, and is asked whether it is well
    QUARANTINED = "quarantined"  # it failed repeatedly and rests before it is tried again
    RECYCLING = "recycling"  # it has served its number of episodes and gets a fresh worker


class HealthAction(StrEnum):
    """What a device needs."""

    LEND = "lend"  # nothing
    QUARANTINE = "quarantine"  # rest, and then a probe
    RECYCLE = "recycle"  # a fresh worker, because of its age alone
    REPLACE = "replace"  # a new worker, because this one is no good


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRecord:
    """How a device has done so far.

    ``episodes`` are those of the present worker; ``replacements`` are new workers because of faults since the last
    episode without a failure.
    """

    episodes: int = 0
    faults_in_a_row: int = 0
    replacements: int = 0
    on_probation: bool = False
    gone: bool = False

    def after(self, report: LeaseReport) -> HealthRecord:
        """Returns the record with one more lease. A lease under which nothing was called changes nothing."""
        if not report.called:
            return self
        if report.fault is not None:
            return replace(
                self,
                episodes=self.episodes + 1,
                faults_in_a_row=self.faults_in_a_row + 1,
                gone=report.fault in (HUNG, DIED),
            )
        if report.failures:  # a task that could not be set up tells nothing about the device
            return replace(self, episodes=self.episodes + 1)
        return HealthRecord(episodes=self.episodes + 1)

    def after_rest(self) -> HealthRecord:
        """Returns the record of a device that has rested and is well: the next fault is one too many."""
        return replace(self, on_probation=True, faults_in_a_row=0)

    def with_new_worker(self, *, because_of_trouble: bool) -> HealthRecord:
        """Returns the record of a device that gets a new worker."""
        return HealthRecord(replacements=self.replacements + because_of_trouble)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthPolicy:
    """When a device is looked after. ``recycle_after_episodes`` None is never; ``quarantine_s`` is the first rest."""

    max_consecutive_faults: int
    quarantine_s: float
    recycle_after_episodes: int | None

    def decide(self, record: HealthRecord, *, may_rest: bool, may_recycle: bool) -> HealthAction:
        """Returns what a device with this record needs; ``may_…`` say whether there are devices enough beside it."""
        if record.gone or (record.on_probation and record.faults_in_a_row > 0):
            return HealthAction.REPLACE
        if record.faults_in_a_row >= self.max_consecutive_faults:
            return HealthAction.QUARANTINE if may_rest and record.replacements == 0 else HealthAction.REPLACE
        limit = self.recycle_after_episodes
        if limit is not None and record.episodes >= limit and may_recycle:
            return HealthAction.RECYCLE
        return HealthAction.LEND

    def rest_before_new_worker_s(self, record: HealthRecord) -> float:
        """Returns how long a device rests before its next worker: not at all the first time, then doubling to a cap."""
        return backoff_s(record.replacements, first_s=self.quarantine_s, longest_s=self.quarantine_s * _MAX_REST)


def may_rest(resting: int, devices: int) -> bool:
    """Returns True if one more device may rest: at most half of them do."""
    return resting < devices // 2


def may_recycle(recycling: int, spare_devices: int) -> bool:
    """Returns True if one more device may be recycled: as many at a time as spares stand in for, at least one."""
    return recycling < max(spare_devices, 1)
