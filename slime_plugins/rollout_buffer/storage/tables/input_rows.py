"""Rows of ``input_chunks`` and ``input_index``: the lines of a job's input in order, and an index of instance ids."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import Instance

CHUNK_BYTES = 8_192
"""Size in bytes of a chunk of lines as JSON, before compression. Reading a line reads its whole chunk."""
IDS_PER_BUCKET = 256
"""Mean number of instance ids in a bucket of the index. Looking up an id reads its whole bucket."""
COMPRESSION_LEVEL = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedInput:
    """An input in stored form. Packing takes most of the time of a start, and runs outside of the transaction."""

    instance_ids: Sequence[str]
    digest: str
    """sha256 of all lines, which recognizes the same input."""
    chunks: Sequence[tuple[int, bytes]]
    """The number of the first line of each chunk, and its lines as (instance_id, data)."""
    buckets: Sequence[bytes]
    """Maps of instance ids to line numbers; the hash of an instance_id selects its bucket."""


def pack_input(instances: Sequence[Instance]) -> PackedInput:
    """Splits an input into chunks and builds its index."""
    digest = hashlib.sha256()
    chunks: list[tuple[int, bytes]] = []
    for first, lines in _chunks(instances):
        digest.update(lines)
        chunks.append((first, zlib.compress(lines, COMPRESSION_LEVEL)))
    buckets: list[dict[str, int]] = [{} for _ in range(_bucket_count(len(instances)))]
    for number, instance in enumerate(instances):
        buckets[_bucket_of(instance.instance_id, len(buckets))][instance.instance_id] = number
    return PackedInput(
        instance_ids=[instance.instance_id for instance in instances],
        digest=digest.hexdigest(),
        chunks=chunks,
        buckets=[zlib.compress(orjson.dumps(bucket), COMPRESSION_LEVEL) for bucket in buckets],
    )


def _chunks(instances: Iterable[Instance]) -> Iterator[tuple[int, bytes]]:
    """Yields the number of the first line of each chunk, and its lines as JSON."""
    lines: list[bytes] = []
    size = first = 0
    for number, instance in enumerate(instances):
        if size >= CHUNK_BYTES:
            yield first, b"[" + b",".join(lines) + b"]"
            lines, size, first = [], 0, number
        lines.append(orjson.dumps((instance.instance_id, instance.data)))
        size += len(lines[-1])
    yield first, b"[" + b",".join(lines) + b"]"


def insert_input(connection: Connection, job_key: int, packed: PackedInput, *, first_position: int) -> None:
    """Stores an input. The lines of an earlier input stay, but the index no longer names them."""
    connection.executemany(
        "INSERT INTO input_chunks (job_key, first_position, lines) VALUES (?, ?, ?)",
        ((job_key, first_position + first, lines) for first, lines in packed.chunks),
    )
    connection.execute("DELETE FROM input_index WHERE job_key = ?", (job_key,))
    connection.executemany(
        "INSERT INTO input_index (job_key, bucket, line_numbers) VALUES (?, ?, ?)",
        ((job_key, number, bucket) for number, bucket in enumerate(packed.buckets)),
    )


def instances_at(connection: Connection, job_key: int, positions: Iterable[int]) -> Iterator[Instance]:
    """Yields the instances at ascending positions; ends at the first position without a line."""
    query = (
        "SELECT first_position, lines FROM input_chunks WHERE job_key = ? AND first_position <= ? "
        "ORDER BY first_position DESC LIMIT 1"
    )
    first = 0
    lines: list[tuple[str, dict[str, Any]]] = []
    for position in positions:
        if position >= first + len(lines):
            row = connection.execute(query, (job_key, position)).fetchone()
            first, lines = (position, []) if row is None else (row[0], orjson.loads(zlib.decompress(row[1])))
        if position >= first + len(lines):
            return
        instance_id, data = lines[position - first]
        yield Instance(instance_id=instance_id, data=data)


def line_numbers(connection: Connection, job_key: int, lines: int, instance_ids: Collection[str]) -> dict[str, int]:
    """Returns the line numbers of instance ids in an input of ``lines`` lines; unknown ids are left out."""
    ids_by_bucket: dict[int, list[str]] = defaultdict(list)
    for instance_id in instance_ids:
        ids_by_bucket[_bucket_of(instance_id, _bucket_count(lines))].append(instance_id)
    number_of_id: dict[str, int] = {}
    for bucket, ids in ids_by_bucket.items():
        query = "SELECT line_numbers FROM input_index WHERE job_key = ? AND bucket = ?"
        numbers = orjson.loads(zlib.decompress(connection.execute(query, (job_key, bucket)).fetchone()[0]))
        number_of_id |= {instance_id: numbers[instance_id] for instance_id in ids if instance_id in numbers}
    return number_of_id


def _bucket_count(lines: int) -> int:
    return 1 + lines // IDS_PER_BUCKET


def _bucket_of(instance_id: str, buckets: int) -> int:
    return zlib.crc32(instance_id.encode()) % buckets
