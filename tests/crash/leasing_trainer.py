"""A trainer of the crash test that leases and acknowledges, and notes what it got. May be killed at any time.

    python -m tests.crash.leasing_trainer PLAN NAME [JOB]

After a kill it goes on in one of the ways a client may: it asks again with the poll it had asked with, acknowledges
what it had noted, or forgets everything and lets its leases run out.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
import uuid
from typing import Any

import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import NotFoundError, StorageFullError, UnavailableError
from slime_plugins.rollout_buffer.wire import RolloutData, RolloutItem
from tests.crash.workload import WRITTEN_JOB, Journal, by_hash, checksum, load_plan

RETRY_S = 0.15


class LeasingTrainer:
    """One consumer of a job."""

    def __init__(self, plan_path: str, name: str, job_id: str = WRITTEN_JOB) -> None:
        self._plan = load_plan(plan_path)
        self._name = name
        self._job_id = job_id
        self._journal = Journal(self._plan.path(f"leasing-{name}.jsonl"))
        self._client = RolloutBufferClient(self._plan.url, timeout_s=20.0)
        events = self._journal.events()
        self._rng = random.Random(f"{self._plan.seed}/{name}/{len(events)}")
        self._poll_id: str | None = None
        self._pending: list[str] = []
        self._remember(events)

    def _remember(self, events: list[dict[str, Any]]) -> None:
        asked = [event for event in events if "asked" in event]
        acked = {name for event in events for name in event.get("acked", ())}
        got = [event for event in events if "got" in event]
        if not asked:
            return
        choice = self._rng.choice(("same poll", "acknowledge", "forget"))
        self._journal.note(woke=choice)
        if choice == "same poll":
            self._poll_id = asked[-1]["asked"]
        elif choice == "acknowledge" and got and got[-1]["got"] not in acked:
            self._pending = [got[-1]["got"]]

    def run(self) -> int:
        """Polls until it is calm, everything was written and nothing is left."""
        while not self._is_through():
            data = self._poll()
            if data.delivery_id is not None:
                self._receive(data)
                self._plan.pause(self._rng.choice((0.0, 0.05, 0.2, self._plan.lease_s * 1.3)))
        self._acknowledge()
        self._journal.note(done=True)
        return 0

    def _poll(self) -> RolloutData:
        if self._poll_id is None:
            self._poll_id = uuid.uuid4().hex
        self._journal.note(asked=self._poll_id)
        images = self._rng.choice(("hash", "hash", "inline"))
        data: RolloutData = self._until_answered(
            lambda: self._client.get_rollout_data(
                job_id=self._job_id,
                max_groups=self._group_limit,
                wait_s=1.0,
                lease_s=self._plan.lease_s,
                ack=self._pending,
                consumer_id=self._name,
                poll_id=self._poll_id,
                images=images,
            )
        )
        self._note_acknowledged(data.meta_info.get("acknowledged"))
        return data

    @property
    def _group_limit(self) -> int:
        return self._rng.choice((1, 2, 5))

    def _receive(self, data: RolloutData) -> None:
        groups: dict[int, list[RolloutItem]] = {}
        for item in data.items:
            self._check(item)
            groups.setdefault(item.group_index, []).append(item)
        digests = {str(key): _digest(items) for key, items in groups.items()}
        uids = [item.uid for item in data.items]
        self._journal.note(got=data.delivery_id, poll=self._poll_id, groups=digests, uids=uids)
        self._pending = [str(data.delivery_id)]
        self._poll_id = None
        if self._rng.random() < 0.5:
            self._acknowledge()

    def _check(self, item: RolloutItem) -> None:
        """A dummy holds nothing; everything else is what its writer made."""
        written = self._job_id == WRITTEN_JOB and not item.remove_sample
        if item.error is not None or (written and item.extra_info["checksum"] != _checksum(item)):
            self._journal.note(broken=item.uid, why=item.error or "its messages are not what was written")

    def _acknowledge(self) -> None:
        if self._pending:
            try:
                reply = self._until_answered(lambda: self._client.ack(self._pending))
            except NotFoundError as error:
                self._journal.note(broken=self._pending[0], why=f"acknowledging it: {error.message}")
                self._pending = []
            else:
                self._note_acknowledged(reply)

    def _note_acknowledged(self, reply: Any) -> None:
        if not reply:
            return
        self._journal.note(acked=reply["acked"], expired=reply["expired"])
        if reply["unknown"]:
            self._journal.note(broken=reply["unknown"][0], why="the buffer does not know a delivery that it made")
        self._pending = []

    def _is_through(self) -> bool:
        if self._pending or not self._plan.path("all-written").exists():
            return False
        groups = self._until_answered(lambda: self._client.job(self._job_id))["groups"]
        return not (groups["open"] or groups["ready"] or groups["leased"])

    def _until_answered(self, call: Any) -> Any:
        while True:
            try:
                return call()
            except (UnavailableError, StorageFullError, requests.RequestException, ValueError) as error:
                self._journal.note(failed=f"{type(error).__name__}: {error}"[:300])
            time.sleep(RETRY_S)


def _checksum(item: RolloutItem) -> str:
    return checksum(item.messages)


def _digest(items: list[RolloutItem]) -> str:
    """Digests everything an item says; screenshots by their hash, however they came."""
    plain = [{**item.raw, "messages": by_hash(item.messages)} for item in items]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(LeasingTrainer(*sys.argv[1:]).run())
