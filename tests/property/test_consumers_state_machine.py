"""Three consumers of one job that poll, repeat polls, acknowledge late or never: no group is two's, and none is lost.

Once over the buffer itself and once over HTTP. What a consumer may train is what it was told is ``acked``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.http import ServerContext
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from tests.asgi_client import create_app
from tests.example_counts import examples
from tests.support import delivered_items, poll, start_external, write, written

LEASE_S = 10.0
CONSUMERS = ("a", "b", "c")

Received = tuple[str, frozenset[int]]
"""A delivery's id and its groups."""


class Port(Protocol):
    """How the consumers reach the buffer."""

    def take(self, options: dict[str, Any]) -> Received | None:
        """Polls once."""

    def acknowledge(self, delivery_id: str) -> str:
        """Returns what the delivery was."""


@dataclass
class Consumer:
    """What one consumer knows: deliveries by poll, and groups that it was told are its own."""

    name: str
    polls: int = 0
    got: dict[str, frozenset[int]] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)


class ConsumersMachine(RuleBasedStateMachine):
    """Model: whose each group is. A group that was acknowledged never changes hands and never comes again."""

    def port(self, buffer: Buffer, clock: SettableClock, folder: Path) -> Port:
        return DirectPort(buffer)

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollout-buffer-"))
        self.clock = SettableClock()
        self.buffer = Buffer(Store(self.folder), clock=self.clock)
        self.job = start_external(self.buffer, job_id="j")
        self.entrance = self.port(self.buffer, self.clock, self.folder)
        self.consumers = [Consumer(name) for name in CONSUMERS]
        self.complete = 0

    @rule(count=st.integers(1, 3))
    def write_groups(self, count: int) -> None:
        for number in range(self.complete, self.complete + count):
            write(self.buffer, self.job, *(written(f"{number}.{i}", f"g{number}", reward=i) for i in (0, 1)))
        self.complete += count

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

    @rule(seconds=st.sampled_from([6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def no_group_is_acknowledged_to_two(self) -> None:
        owned = [group for consumer in self.consumers for group in consumer.owned]
        assert len(owned) == len(set(owned))

    def teardown(self) -> None:
        if not hasattr(self, "buffer"):
            return
        try:
            self._fetch_the_rest()
            assert sum(len(consumer.owned) for consumer in self.consumers) == self.complete, "a group was lost"
        finally:
            self.buffer.store.close()
            shutil.rmtree(self.folder)

    def _fetch_the_rest(self) -> None:
        self.clock.advance(LEASE_S + 1)
        last = self.consumers[0]
        for _ in range(self.complete + 1):  # each poll brings a group at least
            last.polls += 1
            received = self._poll(last, last.polls, None)
            if received is not None:
                self._receive(last, received)
                self._acknowledge(last, received[0])

    def _poll(self, consumer: Consumer, number: int, limit: int | None) -> Received | None:
        options = {"lease_s": LEASE_S, "consumer_id": consumer.name, "poll_id": str(number), "job_id": "j"}
        return self.entrance.take(options if limit is None else {**options, "max_groups": limit})

    def _receive(self, consumer: Consumer, received: Received | None) -> None:
        if received is None:
            return
        delivery_id, groups = received
        assert consumer.got.setdefault(delivery_id, groups) == groups, "one id, two deliveries"
        others = {group for other in self.consumers if other is not consumer for group in other.owned}
        assert not groups & others, "given out after it was acknowledged"
        assert all(delivery_id not in other.got for other in self.consumers if other is not consumer)

    def _acknowledge(self, consumer: Consumer, delivery_id: str) -> None:
        answer = self.entrance.acknowledge(delivery_id)
        assert answer in ("acked", "expired")
        if answer == "acked":
            consumer.owned |= consumer.got[delivery_id]


class DirectPort:
    """The buffer itself."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def take(self, options: dict[str, Any]) -> Received | None:
        """Polls once."""
        delivery = poll(self._buffer, self._buffer.job("j"), **options)
        if delivery is None:
            return None
        groups = frozenset(light["group_index"] for light, _ in delivered_items(self._buffer, delivery))
        return delivery.delivery_id, groups

    def acknowledge(self, delivery_id: str) -> str:
        """Returns what the delivery was."""
        answer = self._buffer.acknowledge([delivery_id])
        return next(what for what, ids in answer.items() if ids)


class HttpPort:
    """The routes of the server, on the same buffer."""

    def __init__(self, buffer: Buffer, folder: Path) -> None:
        app = create_app(ServeSettings(data_dir=folder))
        context: ServerContext = app.extensions["rollout_buffer"]
        context.buffer.store.close()
        context.buffer = buffer
        buffer.beat(SUPERVISOR.name, 1, {"task_types": {"external": {}}})
        self._client = app.test_client()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        reply = self._client.post(path, data=json.dumps(body))
        assert reply.status_code == 200, reply.get_data()
        return reply.get_json()

    def take(self, options: dict[str, Any]) -> Received | None:
        """Polls once."""
        reply = self._post("/get_rollout_data", options)
        if not reply["success"]:
            return None
        groups = frozenset(item["group_index"] for item in reply["data"]["data"])
        return reply["data"]["meta_info"]["delivery_id"], groups

    def acknowledge(self, delivery_id: str) -> str:
        """Returns what the delivery was."""
        answer: dict[str, list[str]] = self._post("/ack", {"delivery_id": delivery_id})
        return next(what for what, ids in answer.items() if ids)


class ConsumersOverHttpMachine(ConsumersMachine):
    """The same over HTTP."""

    def port(self, buffer: Buffer, clock: SettableClock, folder: Path) -> Port:
        return HttpPort(buffer, folder)


ConsumersMachine.TestCase.settings = examples(40, stateful_step_count=30)
ConsumersOverHttpMachine.TestCase.settings = examples(15, stateful_step_count=30)
TestConsumersMachine = ConsumersMachine.TestCase
TestConsumersOverHttpMachine = ConsumersOverHttpMachine.TestCase
