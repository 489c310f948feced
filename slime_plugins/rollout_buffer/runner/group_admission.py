"""Decides which group of a job begins next, and when: in input order, at the pace of the trainer."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from slime_plugins.rollout_buffer.buffer import Buffer, WaitingGroups
from slime_plugins.rollout_buffer.rules.admission import GroupTimes, should_defer
from slime_plugins.rollout_buffer.state.staleness import AdmissionState
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import Instance

GROUPS_READ_AHEAD = 64
MAX_PASSED_OVER = 32
"""Largest number of later groups that may begin before a deferred group."""
POLL_INTERVAL_S = 0.5

CallStore = Callable[..., Awaitable[Any]]


class GroupAdmission:
    """Yields the open groups of one job, each when it may begin.

    ``max_groups_ahead`` and ``max_groups_ready`` hold for every job. With ``staleness_policy: admit``,
    ``rules.admission`` also limits how many groups may begin, and may defer slow groups. Groups that had begun before
    a restart of the runner continue without these limits.
    """

    def __init__(self, buffer: Buffer, job: JobRecord, call_store: CallStore, count_played: Callable[[], int]) -> None:
        """``call_store`` calls the buffer off the event loop; ``count_played`` returns the number of groups in play."""
        self._buffer = buffer
        self._job = job
        self._call_store = call_store
        self._count_played = count_played
        self._next: deque[GroupRecord] = deque()
        self._after = (-1, -1)
        self._passed_over: Counter[int] = Counter()
        self._times = GroupTimes(group_size=job.group_size)

    def episode_took(self, instance: Instance, seconds: float) -> None:
        """Records the duration of an episode."""
        self._times.add(instance.instance_id, instance.task, seconds)

    async def groups(self) -> AsyncIterator[GroupRecord]:
        """Yields open groups until none is left; the caller starts each at once."""
        begun = await self._call_store(self._buffer.started_groups, self._job.key)
        for group in begun:
            yield group
        resumed = {group.key for group in begun}
        while True:
            await self._read_on(skip=resumed)
            if not self._next:
                return
            state = await self._wait_for_room()
            group = self._choose(state)
            self._next.remove(group)
            del self._passed_over[group.key]
            yield group

    async def _read_on(self, skip: set[int]) -> None:
        while len(self._next) < GROUPS_READ_AHEAD // 2:
            found: list[GroupRecord] = await self._call_store(
                lambda: self._buffer.open_groups(self._job.key, after=self._after, limit=GROUPS_READ_AHEAD)
            )
            if not found:
                return
            self._after = (found[-1].epoch, found[-1].position)
            self._next.extend(group for group in found if group.key not in skip)

    async def _wait_for_room(self) -> AdmissionState | None:
        """Waits until the job's limits and ``rules.admission`` leave room for a group; returns the latter's state."""
        while True:
            # Counted before the query, so that a group that becomes ready in between is counted twice, not left out.
            played = self._count_played()
            is_full = await self._is_full(played)
            state = await self._admission_state(played)
            if not is_full and (state is None or state.room != 0):
                return state
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _is_full(self, played: int) -> bool:
        limits = self._job.settings
        if limits.max_groups_ahead is None and limits.max_groups_ready is None:
            return False
        waiting: WaitingGroups = await self._call_store(self._buffer.waiting_groups, self._job.key)
        too_many_ahead = limits.max_groups_ahead is not None and played + waiting.total >= limits.max_groups_ahead
        return too_many_ahead or (limits.max_groups_ready is not None and waiting.ready >= limits.max_groups_ready)

    async def _admission_state(self, played: int) -> AdmissionState | None:
        if self._job.settings.max_weight_version_lag is None:
            return None
        state: AdmissionState | None = await self._call_store(
            lambda: self._buffer.admission_state(self._job.key, running=played)
        )
        return state

    def _choose(self, state: AdmissionState | None) -> GroupRecord:
        """Returns the first of the next groups that need not be deferred; the first of all if each should be."""
        if state is None:
            return self._next[0]
        for index, group in enumerate(list(self._next)[:MAX_PASSED_OVER]):
            if self._passed_over[group.key] >= MAX_PASSED_OVER or not self._is_too_slow_now(group, state):
                self._passed_over.update(passed.key for passed in list(self._next)[:index])
                return group
        return self._next[0]

    def _is_too_slow_now(self, group: GroupRecord, state: AdmissionState) -> bool:
        expected_s = self._times.expected_s(group.instance_id, group.task)
        return should_defer(state.lag, state.pace, state.ahead, expected_s)
