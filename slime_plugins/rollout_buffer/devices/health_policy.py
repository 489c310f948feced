"""Decides what to do with a device that an episode has returned. Pure: it has no clock and no worker.

    no fault ──────────────────▶ lease it again; after ``recycle_after_episodes`` episodes, a new worker
    a fault ───────────────────▶ lease it again
    ``max_consecutive_faults`` ▶ quarantine, then a probe; healthy → on probation, else a new worker
    a fault on probation ──────▶ a new worker
    not restored ──────────────▶ quarantine at once
    hung or died ──────────────▶ a new worker
    the new worker fails, too ─▶ the same after a quarantine, which doubles every time

Boots that fail lead to no quarantine: after ``boot_attempts`` of them a device is broken (``boot_schedule``).

One episode without a failure resets the record. At most half of the devices are quarantined at the same time: if more
fail, the cause is probably not the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from slime_plugins.rollout_buffer.devices.leased_device import DIED, HUNG, NOT_RESTORED, LeaseReport
from slime_plugins.rollout_buffer.rules.backoff import backoff_s

_MAX_QUARANTINE_FACTOR = 16


class DeviceState(StrEnum):
    PREPARING = "preparing"  # its files on the host are being made, such as those of an emulator
    BOOTING = "booting"  # a worker is started for it, for the first time or in place of a failed one
    READY = "ready"  # it can be leased
    LEASED = "leased"  # an episode has it
    CHECKING = "checking"  # it was returned and its health is checked
    QUARANTINED = "quarantined"  # it failed repeatedly and pauses before it is tried again
    RECYCLING = "recycling"  # it has served its number of episodes and gets a new worker


class HealthAction(StrEnum):
    LEND = "lend"  # lease it again
    QUARANTINE = "quarantine"  # wait, then probe
    RECYCLE = "recycle"  # a new worker, because of its age alone
    REPLACE = "replace"  # a new worker, because this one failed or runs under earlier settings


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRecord:
    """Fault history of a device.

    ``episodes`` counts the episodes of the present worker; ``replacements`` counts the workers that were replaced after
    faults since the last episode without a failure. ``gone`` is True after a device hung or died, ``spoiled`` after its
    state was not restored.
    """

    episodes: int = 0
    faults_in_a_row: int = 0
    replacements: int = 0
    on_probation: bool = False
    gone: bool = False
    spoiled: bool = False

    def after(self, report: LeaseReport) -> HealthRecord:
        """Returns the record with one more lease; a lease without a call changes nothing."""
        if not report.called:
            return self
        if report.fault is not None:
            return replace(
                self,
                episodes=self.episodes + 1,
                faults_in_a_row=self.faults_in_a_row + 1,
                gone=report.fault in (HUNG, DIED),
                spoiled=report.fault == NOT_RESTORED,
            )
        # A task that could not be set up says nothing about the device: its record of faults stays as it is.
        if report.failures.keys() - {NOT_RESTORED}:
            return replace(self, episodes=self.episodes + 1)
        return HealthRecord(episodes=self.episodes + 1)

    def after_quarantine(self) -> HealthRecord:
        """Returns the record of a healthy device after its quarantine: the next fault replaces the worker."""
        return replace(self, on_probation=True, faults_in_a_row=0, spoiled=False)

    def with_new_worker(self, *, after_failure: bool) -> HealthRecord:
        return HealthRecord(replacements=self.replacements + after_failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthPolicy:
    """Limits of the policy. ``recycle_after_episodes`` None recycles none. ``quarantine_s`` is the first quarantine."""

    max_consecutive_faults: int
    quarantine_s: float
    recycle_after_episodes: int | None

    def decide(self, record: HealthRecord, *, may_quarantine: bool, may_recycle: bool) -> HealthAction:
        """Returns what a device with this record needs; ``may_…`` state whether enough other devices are available."""
        if record.gone or (record.on_probation and record.faults_in_a_row > 0):
            return HealthAction.REPLACE
        if record.spoiled or record.faults_in_a_row >= self.max_consecutive_faults:
            return HealthAction.QUARANTINE if may_quarantine and record.replacements == 0 else HealthAction.REPLACE
        limit = self.recycle_after_episodes
        if limit is not None and record.episodes >= limit and may_recycle:
            return HealthAction.RECYCLE
        return HealthAction.LEND

    def quarantine_before_new_worker_s(self, record: HealthRecord) -> float:
        """Returns the quarantine before the next worker: none the first time, then doubling up to a limit."""
        return backoff_s(
            record.replacements, first_s=self.quarantine_s, longest_s=self.quarantine_s * _MAX_QUARANTINE_FACTOR
        )


def may_quarantine(quarantined: int, devices: int) -> bool:
    """Returns True if one more device may be quarantined: at most half of the devices at the same time."""
    return quarantined < devices // 2


def may_recycle(recycling: int, spare_devices: int) -> bool:
    """Returns True if one more device may be recycled: as many at the same time as there are spares, at least one."""
    return recycling < max(spare_devices, 1)
