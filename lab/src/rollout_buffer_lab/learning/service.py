"""Requests of a learning run to the buffer and the engine: the job's groups, and weight updates."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from slime_plugins.rollout_buffer import InputExhaustedError, RolloutBatch, RolloutFeed
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import EngineError, RolloutBufferError
from slime_plugins.rollout_buffer.types import JobState

POLL_INTERVAL_S = 0.2
QUIET_S = 5.0
"""A step starts with fewer groups if no attempt ran for so long: then the limit of the lag lets no new group begin."""
UPDATE_TIMEOUT_S = 300.0
CLOSED_STATES = ("ready", "leased", "delivered", "filtered")
"""States of a closed group that was played; failed and skipped groups are not counted."""
PLAYED_PER_STEP = 4
"""A step waits until at most this many times its groups are closed, if most are filtered for equal rewards."""
GROUPS_PER_PAGE = 200


class LearnError(RolloutBufferError):
    """The run failed; the message names the logs."""

    code = "learn"


class EngineWeights:
    """Updates an engine's weights over SGLang's routes, while its requests wait."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def push(self, folder: Path, version: int) -> None:
        """Loads the weights in ``folder``, an absolute path, under a version; running requests continue with them.

        Raises:
            EngineError: the engine does not take them.
        """
        self._post("pause_generation", {"mode": "retract"})
        try:
            self._post("update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version)})
        finally:
            self._post("continue_generation", {})

    def _post(self, route: str, body: Mapping[str, Any]) -> None:
        try:
            reply = requests.post(f"{self._url}/{route}", json=body, timeout=UPDATE_TIMEOUT_S)
        except requests.RequestException as error:
            raise EngineError(f"the engine at {self._url} cannot be reached for {route}: {error!r}") from error
        if reply.status_code != 200 or '"success":false' in reply.text.replace(" ", ""):
            raise EngineError(f"the engine answers {route} with {reply.status_code}: {reply.text[:300]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayedGroup:
    """A closed group and its members' rewards; delivered or not."""

    group_index: int
    rewards: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean reward of its members."""
        return sum(self.rewards) / len(self.rewards)


class LearningJob:
    """One job as a trainer sees it: its deliveries, and the rewards of all groups that were played."""

    def __init__(self, feed: RolloutFeed, client: RolloutBufferClient, *, groups_per_step: int) -> None:
        self._feed, self._client = feed, client
        self._groups_per_step = groups_per_step
        self._reported: set[int] = set()
        self._closed_before = 0

    def next_batch(self, version: int) -> RolloutBatch | None:
        """Waits for a step's groups and leases them; None if there are no more, or all were filtered.

        ``version`` is the trainer's newest weight version. Returns fewer than ``groups_per_step`` groups once the job
        has closed ``PLAYED_PER_STEP`` times as many, filtered ones included, or has had no running attempt for
        ``QUIET_S`` seconds.

        Raises:
            JobEndedError: the job has failed or was cancelled; the message has the reason.
        """
        played_at = time.monotonic()
        while True:
            job = self._client.job(self._feed.job_id)
            groups = job["groups"]
            closed = sum(groups[state] for state in CLOSED_STATES)
            if job["attempts"].get("running"):
                played_at = time.monotonic()
            is_quiet = time.monotonic() - played_at > QUIET_S
            has_closed_enough = closed - self._closed_before >= PLAYED_PER_STEP * self._groups_per_step
            has_ended = not groups["open"] or job["state"] in (JobState.FAILED, JobState.CANCELLED)
            min_groups = 1 if has_closed_enough or is_quiet else self._groups_per_step
            if groups["ready"] >= min_groups or has_ended:
                break
            if has_closed_enough:
                return None
            time.sleep(POLL_INTERVAL_S)
        self._closed_before = closed
        try:
            return self._feed.next_batch(min(self._groups_per_step, max(1, groups["ready"])), weight_version=version)
        except InputExhaustedError:
            return None

    def played(self) -> list[PlayedGroup]:
        """Returns the groups leased or filtered since the last call."""
        groups: list[PlayedGroup] = []
        for state in ("leased", "filtered"):
            groups += self._played_in(state)
        self._reported.update(group.group_index for group in groups)
        return groups

    def _played_in(self, state: str) -> list[PlayedGroup]:
        groups: list[PlayedGroup] = []
        cursor: str | None = None
        while True:
            page = self._client.groups(self._feed.job_id, state=state, limit=GROUPS_PER_PAGE, cursor=cursor)
            # The group that changed last comes first: after a page with a reported group there is nothing new.
            new = [entry for entry in page["groups"] if entry["group_index"] not in self._reported]
            for entry in new:
                rewards = tuple(member["reward"] for member in entry["members"] if not member["late"])
                if rewards:
                    groups.append(PlayedGroup(group_index=entry["group_index"], rewards=rewards))
            cursor = page["next_cursor"]
            if cursor is None or len(new) < len(page["groups"]):
                return groups


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes an input file as JSONL."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
