"""Builders of records and one-line calls of the buffer, for tests of all packages."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StorageFullError
from slime_plugins.rollout_buffer.gateway.slot_claims import SlotClaim, SlotClaims
from slime_plugins.rollout_buffer.generator.base_generator import Generator
from slime_plugins.rollout_buffer.generator.registry import Plugin
from slime_plugins.rollout_buffer.reporting.job_description import describe_job
from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.state.deliveries import Delivery
from slime_plugins.rollout_buffer.storage import migrations
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.types import Instance, Outcome, StopReason, Trajectory
from slime_plugins.rollout_buffer.wire.poll_requests import PollPayload
from slime_plugins.rollout_buffer.wire.request_fields import parse
from slime_plugins.rollout_buffer.wire.start_request import StartPayload
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89"
    b"\x00\x00\x00\rIDATx\x9cc\xf8\xcf\xc0\xf0\x1f\x00\x05\x00\x01\xff\x89\x99=\x1d\x00\x00\x00\x00IEND\xaeB`\x82"
)
PNG_HASH = hashlib.sha256(PNG).hexdigest()


class Claims(SlotClaims):
    """``SlotClaims`` that takes or loses a slot in a transaction of its own."""

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        self._store = buffer.store

    def take(self, job_id: str, instance_id: str | None = None, **options: Any) -> SlotClaim:
        with self._store.write() as connection:
            return self.claim(connection, job_id, instance_id, **options)

    def lose(self, claim: SlotClaim, *, given_up: bool = False) -> None:
        failure = AttemptFailure(code="session_expired", message="it was forgotten", given_up=given_up)
        with self._store.write() as connection:
            self.fail(connection, claim, failure)


def written(uid: str, instance_id: str = "i", reward: float = 1.0, **changes: Any) -> dict[str, Any]:
    """The body of an item as a program posts it to ``/buffer/write``."""
    conversation = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": f"answer of {uid}"}]
    item = {"uid": uid, "instance_id": instance_id, "messages": conversation, "reward": reward, "extra_info": {}}
    return {**item, **changes}


def start_external(buffer: Buffer, n: int = 2, ids: tuple[str, ...] = (), **changes: Any) -> JobRecord:
    body = {"task_type": "external", "num_repeat_per_sample": n, **changes}
    instances = [Instance(instance_id=name, data={"instance_id": name}) for name in ids]
    if ids:
        body["instances"] = [dict(instance.data) for instance in instances]
    return buffer.start_job(parse(StartPayload, body), instances).job


def start_played(buffer: Buffer, ids: Sequence[str] = ("a",), **changes: Any) -> JobRecord:
    """Starts a job that a runner plays, in groups of two."""
    body = {
        "task_type": "math",
        "instances": [{"instance_id": name} for name in ids],
        "remote_engine_url": "http://127.0.0.1:9",
        "num_repeat_per_sample": 2,
        **changes,
    }
    instances = [Instance(instance_id=name, data={"instance_id": name}) for name in ids]
    return buffer.start_job(parse(StartPayload, body), instances).job


def plugin_of(task_type: str, create: Callable[[], Generator], **changes: Any) -> Plugin:
    """A task type as the registry hands it to a runner."""
    values: dict[str, Any] = {"needs_ray": False, "reward_range": None, "functions": DEFAULT_FUNCTIONS, **changes}
    return Plugin(task_type=task_type, source=Path(f"{task_type}.py"), create_generator=create, **values)


def trajectory(uid: str, instance_id: str = "a", reward: float = 1.0, **changes: Any) -> Trajectory:
    """What a generator returns for a completed episode."""
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}],
        "outcome": Outcome.COMPLETED,
        "stop_reason": StopReason.STOP,
        **changes,
    }
    return Trajectory(uid=uid, instance_id=instance_id, reward=reward, **values)


def write(buffer: Buffer, job: JobRecord | None, *items: dict[str, Any]) -> list[str]:
    """Writes the items in one call; returns the status of each."""
    decoded = [decode_written_item(item) for item in items]
    _, results = buffer.write_items(None if job is None else job.job_id, decoded)
    return [result.status for result in results]


def poll(buffer: Buffer, job: JobRecord, **options: Any) -> Delivery | None:
    return buffer.take(job, parse(PollPayload, options))


def polled_delivery(buffer: Buffer, job: JobRecord, **options: Any) -> Delivery:
    """The delivery of one poll, for which groups must be ready."""
    delivery = poll(buffer, job, **options)
    assert delivery is not None
    return delivery


def begun_attempt(buffer: Buffer, fence: int, group: GroupRecord, slot: int) -> int:
    """Begins an attempt at an open slot; returns its number."""
    attempt = buffer.begin_attempt(fence, group, slot)
    assert attempt is not None
    return attempt


def delivered_items(
    buffer: Buffer, delivery: Delivery, *, inline_images: bool = False
) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The members of a delivery, each as the keys that are not in its stored payload, and the payload's JSON."""
    for light, pieces in buffer.delivered_pieces(delivery, inline_images=inline_images):
        yield light, b"".join(pieces)


def refuse_room(buffer: Buffer, patch: pytest.MonkeyPatch) -> None:
    """Makes the buffer's store refuse whatever needs room, as on a full disk."""

    def full() -> None:
        raise StorageFullError("the disk is full")

    patch.setattr(buffer.store, "check_room", full)


def uids(buffer: Buffer, delivery: Delivery | None) -> list[str]:
    return [] if delivery is None else [light["uid"] for light, _ in delivered_items(buffer, delivery)]


def slot_counts(buffer: Buffer, job: JobRecord) -> dict[str, int]:
    """The job's slots by state, and ``submitted``, of which it asserts that it is their sum."""
    accounting: dict[str, int] = describe_job(buffer.store, job)["slots"]
    assert accounting["submitted"] == sum(count for state, count in accounting.items() if state != "submitted")
    return accounting


def message_with_image() -> dict[str, Any]:
    """A message with a screenshot in it."""
    part = {"type": "image_url", "image_url": {"url": wire.encode_data_uri(PNG)}}
    return {"role": "user", "content": [part]}


def use_next_schema(monkeypatch: pytest.MonkeyPatch, folder: Path, step: str = "") -> None:
    """Gives this process the schema after the present one. ``step`` is the SQL that leads to it, or ``NEXT_STEP``."""
    version = migrations.SCHEMA_VERSION + 1
    for earlier in migrations.MIGRATIONS_FOLDER.glob("migration_to_*.sql"):
        shutil.copy(earlier, folder)
    (folder / f"migration_to_{version}.sql").write_text(step or NEXT_STEP, "utf-8")
    monkeypatch.setattr(migrations, "MIGRATIONS_FOLDER", folder)
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", version)


NEXT_STEP = """
-- Who wrote it; a trigger, whose statements end in semicolons of their own, sees to that.
ALTER TABLE trajectories ADD COLUMN writer TEXT NOT NULL DEFAULT 'before';
CREATE TRIGGER trajectories_written AFTER INSERT ON trajectories BEGIN
    UPDATE trajectories SET writer = 'after' WHERE key = NEW.key;
    UPDATE jobs SET cause = '' WHERE key = NEW.job_key;
END;
"""
