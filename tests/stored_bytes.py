"""Finds damage in the payloads and images of a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import image_rows, payload_rows


def find_damage(store: Store) -> Iterator[str]:
    """Reads every stored payload and image and yields a message for each damaged one."""
    with store.read() as connection:
        images = dict(image_rows.all_image_refs(connection))
        bodies = list(payload_rows.payload_refs(connection))
    for sha256, place in images.items():
        try:
            if hashlib.sha256(store.fetch(place)).hexdigest() != sha256:
                yield f"image {sha256}: the bytes at {place} hash to something else"
        except DamagedError as error:
            yield f"image {sha256}: {error.message}"
    for _, uid, place in bodies:
        yield from _examine_body(store, uid, place, images)


def _examine_body(store: Store, uid: str, place: BlobRef, images: dict[str, BlobRef]) -> Iterator[str]:
    try:
        body = bytes(store.fetch(place))
    except DamagedError as error:
        yield f"trajectory {uid}: {error.message}"
        return
    for sha256 in wire.image_hashes(body):
        if sha256 not in images:
            yield f"trajectory {uid} shows image {sha256}, which is not stored"
    for sha256 in named_records(body):
        if sha256 not in images:
            yield f"trajectory {uid} names token records {sha256}, which are not stored"


def named_records(body: bytes) -> list[str]:
    """Returns the token records that a stored payload names, each once."""
    if b'"records"' not in body:
        return []
    named = (entry.get("records") or {} for entry in json.loads(body).get("generations") or ())
    return list(dict.fromkeys(sha256 for records in named for sha256 in records.values()))
