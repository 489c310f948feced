"""Stores a report of the runner's devices every few seconds and logs changes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from slime_plugins.rollout_buffer.devices.leased_device import DIED
from slime_plugins.rollout_buffer.errors import DeviceError
from slime_plugins.rollout_buffer.generator.base_generator import Generator, ReportsDevices
from slime_plugins.rollout_buffer.rules.heartbeats import DEVICES

logger = logging.getLogger(__name__)

SUMMARY_INTERVAL_S = 60.0
REPORT_TIMEOUT_S = 15.0
_LOGGED_STATES = ("quarantined", "recycling")


class DeviceWatch:
    """Watches the devices of one generator. ``keep`` stores a report."""

    def __init__(self, generator: Generator, job_id: str, keep: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
        self._generator = generator
        self._job_id = job_id
        self._keep = keep
        self._last: dict[str, Mapping[str, Any]] = {}
        self._since_summary_s = SUMMARY_INTERVAL_S
        self.newest: Mapping[str, Any] = {}
        """The latest report of devices that answered; {} before the first."""

    async def watch(self) -> None:
        """Reports until cancelled; returns at once if the generator has no devices."""
        while isinstance(self._generator, ReportsDevices):
            await self.report()
            await asyncio.sleep(DEVICES.beats_every_s)
            self._since_summary_s += DEVICES.beats_every_s

    async def report(self) -> None:
        """Stores one report; skips it if the devices do not answer."""
        if not isinstance(self._generator, ReportsDevices):
            return
        try:
            report = await self._ask(self._generator)
            await self._keep(report)
            if "unreachable" not in report:
                self.newest = report
                self._log_report(report)
        except (DeviceError, TimeoutError) as error:
            logger.debug("job %s: the devices do not answer: %s", self._job_id, error)
        except Exception:
            # An error of the generator's report must not fail the job.
            logger.exception("job %s: the generator's device report is invalid", self._job_id)

    async def _ask(self, generator: ReportsDevices) -> Mapping[str, Any]:
        """Returns the generator's report; if the devices died, a report with the reason under ``unreachable``."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                return await generator.devices()
        except DeviceError as error:
            if error.detail.get("fault") != DIED:
                raise
            return {"pool": "", "devices": [], "unreachable": error.message}

    def _log_report(self, report: Mapping[str, Any]) -> None:
        devices = {str(device["device_id"]): device for device in report["devices"]}
        for name, device in devices.items():
            if name in self._last:
                self._log_changes(name, device, self._last[name])
        self._last = devices
        if self._since_summary_s >= SUMMARY_INTERVAL_S:
            self._since_summary_s = 0.0
            logger.info("job %s: devices of %s: %s", self._job_id, report["pool"], _summary(report))

    def _log_changes(self, name: str, device: Mapping[str, Any], before: Mapping[str, Any]) -> None:
        if device["state"] != before["state"] and device["state"] in _LOGGED_STATES:
            logger.warning("job %s: %s is %s: %s", self._job_id, name, device["state"], device["last_error"] or "old")
        if device["replacements"] > before["replacements"]:
            logger.warning("job %s: %s has a new worker: %s", self._job_id, name, device["last_error"])


def _summary(report: Mapping[str, Any]) -> str:
    devices = report["devices"]
    states = ", ".join(f"{count} {state}" for state, count in sorted(Counter(d["state"] for d in devices).items()))
    played = sum(device["episodes"] for device in devices)
    failures: Counter[str] = Counter()
    for device in devices:
        failures.update(device["failures"])
    failed = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items())) or "no failure"
    return f"{states}; {played} episodes, {failed}"
