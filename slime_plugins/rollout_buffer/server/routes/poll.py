"""``POST /get_rollout_data``: acknowledges deliveries and leases ready groups.

These functions block; ``asgi`` calls them in threads and waits between them, without Flask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_plugins.rollout_buffer.json_bodies import json_object
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.server.delivery_reply import delivery_chunks
from slime_plugins.rollout_buffer.server.http import Answer, ServerContext, as_json
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import GroupState
from slime_plugins.rollout_buffer.wire.delivery_replies import Acknowledged, DeliveredGroups, PollReply
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload
from slime_plugins.rollout_buffer.wire.request_fields import parse

POLL_NOTE_INTERVAL_S = 5.0
"""The time of a poll is recorded only if the last recorded poll is older: frequent polls write nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Poll:
    """A poll and its result so far."""

    payload: PollPayload
    job: JobRecord | None
    acknowledged: Acknowledged | None = None
    delivery: Delivery | None = None
    attended: bool = False
    """True if a supervisor's heartbeat was stored when the poll began. A supervisor that stops removes its heartbeat:
    then the poll is answered at once."""

    @property
    def may_wait(self) -> bool:
        """Returns True if waiting may still bring a delivery."""
        return self.delivery is None and self.job is not None and self.payload.wait_s > 0


def begin_poll(context: ServerContext, content: bytes) -> Poll:
    """Acknowledges the named deliveries and leases ready groups."""
    payload = parse(PollPayload, json_object(content))
    buffer = context.buffer
    job, acknowledged = buffer.resolve_job(payload.job_id, payload.ack)
    if job is None:
        return Poll(payload=payload, job=None, acknowledged=acknowledged)
    if buffer.store.clock() - (job.last_poll_at or 0.0) > POLL_NOTE_INTERVAL_S:
        buffer.note_poll(job)
    delivery = buffer.take(job, payload)
    if delivery is None:
        buffer.note_empty_poll(job)
    attended = buffer.heartbeat(SUPERVISOR.name) is not None
    return Poll(payload=payload, job=job, acknowledged=acknowledged, delivery=delivery, attended=attended)


def should_take_again(context: ServerContext, poll: Poll) -> bool | None:
    """Returns True if a waiting poll should try again, False if it should be answered, None if it should keep
    waiting."""
    assert poll.job is not None
    buffer = context.buffer
    if buffer.would_deliver(poll.job, poll.payload):
        return True
    if buffer.is_over(poll.job) or (poll.attended and buffer.heartbeat(SUPERVISOR.name) is None):
        return False
    return None


def take_again(context: ServerContext, poll: Poll) -> Poll:
    """Leases groups that became ready, unless another poll was faster."""
    assert poll.job is not None
    return replace(poll, delivery=context.buffer.take(poll.job, poll.payload))


def answer_poll(context: ServerContext, poll: Poll) -> Answer:
    """Encodes the result of a poll."""
    if poll.delivery is not None:
        return Answer(delivery_chunks(context.buffer, poll.delivery, poll.payload, poll.acknowledged))
    meta_info = context.buffer.empty_meta_info(poll.job)
    message = _nothing_open(context) if poll.job is None else _nothing_ready(context, poll.job)
    if cause := meta_info.get("job_cause"):
        message = f"nothing is ready, and job {meta_info['job_id']} is {meta_info['job_state']}: {cause}"
    if poll.acknowledged is not None:
        meta_info["acknowledged"] = poll.acknowledged
    nothing = DeliveredGroups(data=[], meta_info=meta_info)
    return Answer(as_json(PollReply(success=False, message=message, data=nothing)))


def _nothing_ready(context: ServerContext, job: JobRecord) -> str:
    """Returns the message of a poll without groups; if all closed groups were dropped, with the commonest cause."""
    counted, causes = context.buffer.groups_and_causes(job.key)
    deliverable = sum(counted[state] for state in (GroupState.READY, GroupState.LEASED, GroupState.DELIVERED))
    dropped = {state: counted[state] for state in (GroupState.FILTERED, GroupState.FAILED) if counted[state]}
    if deliverable or not dropped:
        return "nothing is ready yet"
    states = " and ".join(f"{count} {state.value}" for state, count in dropped.items())
    counted_causes = [entry for by_cause in causes.values() for entry in by_cause.items()]
    commonest, count = max(counted_causes, key=lambda entry: entry[1])
    return f"nothing is ready yet: every group that closed was dropped ({states}), {count} of them because {commonest}"


def _nothing_open(context: ServerContext) -> str:
    last = context.buffer.last_job()
    if last is None or not last.cause:
        return "no job is open"
    return f"no job is open; the last, {last.job_id}, is {last.state.value}: {last.cause}"
