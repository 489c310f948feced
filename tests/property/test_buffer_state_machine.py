"""The buffer against a model of it, under any order of writing, polling, acknowledging, waiting and restarting."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.example_counts import examples
from tests.support import poll, slot_counts, start_external, uids, write, written

GROUP_SIZE = 2
LEASE_S = 10.0
TIMEOUT_S = 100.0
INSTANCES = ("a", "b", "c", "d")


class BufferMachine(RuleBasedStateMachine):
    """Model: each uid was written once; each is in exactly one place; what was acknowledged never comes again."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollout-buffer-"))
        self.clock = SettableClock()
        self.buffer = Buffer(Store(self.folder), clock=self.clock)
        self.starts: list[dict[str, Any]] = [{"start_id": "s0", "skip_instance_ids": []}]
        self.job: JobRecord = self._start(self.starts[0])
        self.written: dict[str, str] = {}
        self.leased: dict[str, tuple[list[str], float]] = {}
        self.delivered: list[str] = []
        self.first_seen: dict[str, Delivery] = {}

    @rule(name=st.sampled_from(INSTANCES), reward=st.sampled_from([0.0, 1.0]))
    def write_one(self, name: str, reward: float) -> None:
        uid = f"{name}{len(self.written)}"
        (status,) = write(self.buffer, self.job, written(uid, name, reward=reward))
        self.written[uid] = status
        assert status in ("stored", "late")

    @rule(name=st.sampled_from(INSTANCES))
    def write_a_whole_group(self, name: str) -> None:
        for reward in (0.0, 1.0):
            self.write_one(name, reward)

    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        if self.written:
            uid = data.draw(st.sampled_from(sorted(self.written)))
            assert write(self.buffer, self.job, written(uid, uid[0], reward=0.5)) == ["duplicate"]

    @rule(limit=st.none() | st.integers(1, 3))
    def lease(self, limit: int | None) -> None:
        self._expire_in_model()
        delivery = poll(self.buffer, self.job, lease_s=LEASE_S, max_groups=limit)
        if delivery is None:
            return
        got = uids(self.buffer, delivery)
        self._check_new(got)
        assert limit is None or len(got) <= limit * GROUP_SIZE
        if delivery.delivery_id in self.first_seen:
            assert delivery == self.first_seen[delivery.delivery_id]
        self.first_seen[delivery.delivery_id] = delivery
        self.leased[delivery.delivery_id] = (got, self.clock.now + LEASE_S)

    @rule()
    def pop(self) -> None:
        self._expire_in_model()
        got = uids(self.buffer, poll(self.buffer, self.job))
        self._check_new(got)
        self.delivered.extend(got)

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        if not self.first_seen:
            return
        # By number: the ids themselves are random, and a replay must find the same choices.
        delivery_id = list(self.first_seen)[data.draw(st.integers(0, len(self.first_seen) - 1))]
        answer = self.buffer.acknowledge([delivery_id])
        if answer["acked"] and delivery_id in self.leased:
            self.delivered.extend(self.leased.pop(delivery_id)[0])
        elif answer["acked"]:
            # Late, but nobody else had its groups, or it was delivered before: either way each uid counts once.
            late = uids(self.buffer, self.first_seen[delivery_id])
            self.delivered.extend(uid for uid in late if uid not in self.delivered)
        else:
            assert answer["expired"] == [delivery_id]

    @rule(seconds=st.sampled_from([6.0, 11.0, 11.0, 101.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.buffer.expire_leases()
        self.buffer.close_timed_out_groups()
        self._expire_in_model()

    @rule()
    def restart(self) -> None:
        self.buffer.store.close()
        self.buffer = Buffer(Store(self.folder), clock=self.clock)

    @rule()
    def start_anew(self) -> None:
        self.starts.append({"start_id": f"s{len(self.starts)}"})
        self._start(self.starts[-1])

    @rule(data=st.data())
    def start_again_late(self, data: st.DataObject) -> None:
        before = slot_counts(self.buffer, self.job)
        again = self._start(self.starts[data.draw(st.integers(0, len(self.starts) - 1))])
        assert (again.key, again.trainer_run) == (self.job.key, len(self.starts))
        assert slot_counts(self.buffer, self.job) == before

    @invariant()
    def the_accounting_balances(self) -> None:
        accounting = slot_counts(self.buffer, self.job)
        assert accounting["submitted"] == len(INSTANCES) * 2 * GROUP_SIZE
        assert accounting["delivered"] == len(self.delivered)
        assert accounting["leased"] == sum(len(got) for got, _ in self.leased.values())
        assert len(set(self.delivered)) == len(self.delivered)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.store.close()
            shutil.rmtree(self.folder)

    def _start(self, start: dict[str, Any]) -> JobRecord:
        return start_external(
            self.buffer,
            n=GROUP_SIZE,
            ids=INSTANCES,
            num_epoch=2,
            job_id="j",
            group_timeout_seconds=TIMEOUT_S,
            min_timeout_group_size_ratio=1.0,
            **start,
        )

    def _expire_in_model(self) -> None:
        for delivery_id, (_, expires_at) in list(self.leased.items()):
            if expires_at <= self.clock.now:
                del self.leased[delivery_id]

    def _check_new(self, got: list[str]) -> None:
        in_hand = {uid for held, _ in self.leased.values() for uid in held}
        assert not in_hand & set(got), "leased to somebody else"
        assert not set(self.delivered) & set(got), "delivered before"
        assert all(self.written[uid] == "stored" for uid in got), "never stored"


BufferMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestBufferMachine = BufferMachine.TestCase
