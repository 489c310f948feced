"""Three consumers of one job that poll, repeat polls, acknowledge late or never: no group is two's, and none is lost.

What a consumer may train is what it was told is ``acked``. What it consumes of filtered groups is what it writes into
its checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.trainer.consumed import JobProgress
from slime_plugins.rollout_buffer.wire import RolloutData, RolloutItem
from tests.example_counts import examples
from tests.support import delivered_items, poll, start_external, write, written

LEASE_S = 10.0
CONSUMERS = ("a", "b", "c")

DELIVERED, DULL = "delivered", "dull"
"""Two instances with a group in each epoch; all groups of the second are filtered, because its rewards are equal."""


@dataclass
class Consumer:
    """What one consumer knows: deliveries by poll, groups that it was told are its own, and filtered ones."""

    name: str
    polls: int = 0
    got: dict[str, frozenset[int]] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    progress: JobProgress = field(default_factory=JobProgress)
    named: set[int] = field(default_factory=set)
    consumed: Counter[str] = field(default_factory=Counter)


class ConsumersMachine(RuleBasedStateMachine):
    """Model: whose each group is. A group that was acknowledged never changes hands and never comes again."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollout-buffer-"))
        self.clock = SettableClock()
        self.buffer = Buffer(Store(self.folder), clock=self.clock)
        self.job = start_external(self.buffer, ids=(DELIVERED, DULL), num_epoch=1000)
        self.consumers = [Consumer(name) for name in CONSUMERS]
        self.complete = 0
        self.dull = 0

    @rule(count=st.integers(1, 3))
    def write_groups(self, count: int) -> None:
        for number in range(self.complete, self.complete + count):
            write(self.buffer, self.job, *(written(f"{number}.{i}", DELIVERED, reward=i) for i in (0, 1)))
        self.complete += count

    @rule()
    def write_a_group_that_is_filtered(self) -> None:
        write(self.buffer, self.job, *(written(f"dull{self.dull}.{i}", DULL, reward=1) for i in (0, 1)))
        self.dull += 1

    @rule(who=st.integers(0, 2), limit=st.none() | st.integers(1, 3))
    def take(self, who: int, limit: int | None) -> None:
        consumer = self.consumers[who]
        consumer.polls += 1
        self._receive(consumer, self._poll(consumer, consumer.polls, limit))

    @rule(who=st.integers(0, 2), back=st.integers(0, 2))
    def repeat_a_poll(self, who: int, back: int) -> None:
        consumer = self.consumers[who]
        if consumer.polls > back:
            self._receive(consumer, self._poll(consumer, consumer.polls - back, None))

    @rule(who=st.integers(0, 2), data=st.data())
    def acknowledge(self, who: int, data: st.DataObject) -> None:
        consumer = self.consumers[who]
        if consumer.got:
            # By number: the ids themselves are random, and a replay must find the same choices.
            at = data.draw(st.integers(0, len(consumer.got) - 1))
            self._acknowledge(consumer, list(consumer.got)[at])

    @rule(late=st.integers(0, 2), further=st.integers(1, 2))
    def acknowledge_what_another_has(self, late: int, further: int) -> None:
        """A lease runs out, another consumer polls, and both acknowledge: rules at random hardly come to that."""
        heir = (late + further) % len(CONSUMERS)
        self.write_groups(1)
        self.take(late, None)
        self.wait(LEASE_S + 1)
        self.take(heir, None)
        for consumer in (self.consumers[late], self.consumers[heir]):
            self._acknowledge(consumer, list(consumer.got)[-1])

    @rule(late=st.integers(0, 2), further=st.integers(1, 2))
    def receive_what_is_left_of_a_delivery(self, late: int, further: int) -> None:
        """Another consumer takes a group of it, and further groups are filtered before the rest comes again."""
        self.write_a_group_that_is_filtered()
        self.write_groups(2)
        self.take(late, None)
        self.wait(LEASE_S + 1)
        self.take((late + further) % len(CONSUMERS), 1)
        self.write_a_group_that_is_filtered()
        self.take(late, None)

    @rule(seconds=st.sampled_from([6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def no_group_is_acknowledged_to_two(self) -> None:
        owned = [group for consumer in self.consumers for group in consumer.owned]
        assert len(owned) == len(set(owned))

    @invariant()
    def each_filtered_group_is_consumed_once_by_whom_it_is_named_to(self) -> None:
        assert all(consumer.consumed[DULL] == len(consumer.named) for consumer in self.consumers)

    def teardown(self) -> None:
        if not hasattr(self, "buffer"):
            return
        try:
            self._fetch_the_rest()
            assert sum(len(consumer.owned) for consumer in self.consumers) == self.complete, "a group was lost"
            named = set().union(*(consumer.named for consumer in self.consumers))
            assert len(named) == self.dull, "a filtered group was not named"
        finally:
            self.buffer.store.close()
            shutil.rmtree(self.folder)

    def _fetch_the_rest(self) -> None:
        self.clock.advance(LEASE_S + 1)
        last = self.consumers[0]
        self.write_groups(1)  # with which the last filtered groups are named
        for _ in range(self.complete + 1):  # each poll brings a group at least
            last.polls += 1
            received = self._poll(last, last.polls, None)
            if received is not None:
                self._receive(last, received)
                self._acknowledge(last, str(received.delivery_id))

    def _poll(self, consumer: Consumer, number: int, limit: int | None) -> RolloutData | None:
        options = {"lease_s": LEASE_S, "consumer_id": consumer.name, "poll_id": str(number)}
        delivery = poll(self.buffer, self.job, **(options if limit is None else {**options, "max_groups": limit}))
        if delivery is None:
            return None
        items = tuple(
            RolloutItem(uid=light["uid"], instance_id=light["instance_id"], group_index=light["group_index"])
            for light, _ in delivered_items(self.buffer, delivery)
        )
        return RolloutData(success=True, message="", items=items, meta_info=delivery.meta_info)

    def _receive(self, consumer: Consumer, received: RolloutData | None) -> None:
        if received is None:
            return
        delivery_id, groups = str(received.delivery_id), received.group_numbers
        assert consumer.got.setdefault(delivery_id, groups) == groups, "one id, two deliveries"
        others = {group for other in self.consumers if other is not consumer for group in other.owned}
        assert not groups & others, "given out after it was acknowledged"
        assert all(delivery_id not in other.got for other in self.consumers if other is not consumer)
        consumer.named |= set(received.meta_info["ended_groups"])
        new = consumer.progress.new_part(received)
        if new is not None:
            consumer.consumed.update(new.meta_info["finished_groups"])
            consumer.progress.remember(new)

    def _acknowledge(self, consumer: Consumer, delivery_id: str) -> None:
        answers = self.buffer.acknowledge([delivery_id])
        answer = next(what for what, ids in answers.items() if ids)
        assert answer in ("acked", "expired")
        if answer == "acked":
            consumer.owned |= consumer.got[delivery_id]
        else:
            consumer.progress.lose({delivery_id: consumer.got[delivery_id]})


ConsumersMachine.TestCase.settings = examples(40, stateful_step_count=30)
TestConsumersMachine = ConsumersMachine.TestCase
