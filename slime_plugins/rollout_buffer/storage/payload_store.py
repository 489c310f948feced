"""Stores payloads and screenshots durably, before the row that refers to them.

A payload is the JSON of a trajectory; its messages name screenshots by hash. Small payloads are stored in their row,
large ones and screenshots in packs; each screenshot once. ``StoredPayload`` has the columns of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pybase64

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import DamagedError, InvalidPayloadError, NotFoundError, UnavailableError
from slime_plugins.rollout_buffer.storage.pack_reader import Reading
from slime_plugins.rollout_buffer.storage.pack_writer import Blob, BlobRef, pack_path
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import image_rows, pack_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import Image

Pieces = list[bytes]
"""A payload as consecutive pieces of bytes."""

INLINE_BODY_BYTES = 32 * 1024
"""Payloads up to this size are stored in their row, which saves an fsync. Larger ones would bloat the database."""
ALONGSIDE_BODY_BYTES = 2 * 1024
"""Payloads larger than this go into the pack if their screenshots are written to it anyway."""
_URI_HEADS = {
    media_type: f"data:{media_type or 'application/octet-stream'};base64,".encode("ascii")
    for media_type in (None, "image/png", "image/jpeg", "image/webp", wire.RECORDS_TYPE)
}


@dataclass(frozen=True, slots=True)
class PendingPayload:
    """A payload to store. ``hashes`` are those of its screenshots and token records.

    ``data`` has the bytes of the screenshots and records that came with the payload, by hash; the others must be stored
    already. ``name`` identifies the payload in errors, ``uid`` its trajectory.
    """

    body: bytes
    hashes: Sequence[str]
    data: Mapping[str, bytes]
    name: str
    uid: str

    @property
    def needs_pack(self) -> bool:
        """True if storing the payload may write to a pack."""
        return bool(self.hashes) or len(self.body) > INLINE_BODY_BYTES


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload that is durable in a pack (``ref``), or that will be stored in its row (``body``).

    ``size`` is its number of bytes. ``images`` has the refs of screenshots that were not stored before.
    """

    body: bytes | None
    ref: BlobRef | None
    size: int
    images: Mapping[str, BlobRef]
    packs_dir: Path
    known: Sequence[str] = ()
    """Screenshots that were stored already."""

    def columns(self) -> dict[str, Any]:
        """Returns the payload's columns of the trajectory's row."""
        ref = None if self.ref is None else str(self.ref)
        return {"body": self.body, "body_place": ref, "body_bytes": self.size}

    def record(self, connection: Connection, now: float) -> None:
        """Records the refs, in the transaction that adds the trajectory's row.

        Raises:
            UnavailableError: retention has removed a stored screenshot or the pack meanwhile; the client repeats the
                write.
        """
        if self.known and image_rows.mark_images_used(connection, self.known, now) != len(self.known):
            raise UnavailableError("a screenshot was purged while it was being named: write the item again")
        if self.images:
            image_rows.insert_images(connection, self.images, now)
        refs = [*self.images.values(), *([] if self.ref is None else [self.ref])]
        if not all(pack_path(self.packs_dir, pack).exists() for pack in {ref.pack for ref in refs}):
            raise UnavailableError("a full pack was removed before its last row was written: write the item again")
        pack_rows.mark_packs_used(connection, refs)


class PayloadStore:
    """Stores and reads payloads and screenshots. Safe to use from many threads."""

    def __init__(self, store: Store, *, clock: Callable[[], float] | None = None) -> None:
        """``clock`` returns seconds since the epoch; the default is the store's clock."""
        self._store = store
        self._clock = clock or store.clock

    # --- writing -----------------------------------------------------------------------------------------------------

    def store(self, pending: Sequence[PendingPayload]) -> list[StoredPayload]:
        """Makes payloads and their screenshots durable, all with one fsync.

        Raises:
            UnavailableError: a screenshot was purged after ``check_named``; the client repeats the write with it.
            StorageFullError: the disk is full.
        """
        known = self._known_refs({sha256 for payload in pending for sha256 in payload.hashes})
        new_hashes = [[sha256 for sha256 in payload.hashes if sha256 not in known] for payload in pending]
        packed = [_goes_into_a_pack(payload, hashes) for payload, hashes in zip(pending, new_hashes, strict=True)]
        blobs: list[Blob] = []
        for payload, hashes, is_packed in zip(pending, new_hashes, packed, strict=True):
            blobs += _screenshot_blobs(payload, hashes)
            blobs += [Blob(payload.body, owner=payload.uid)] if is_packed else []
        refs = iter(self._store.append(blobs))  # in the order of the blobs: a payload's screenshots, then its body
        return [
            StoredPayload(
                images={sha256: next(refs) for sha256 in hashes},
                ref=next(refs) if is_packed else None,
                body=None if is_packed else payload.body,
                size=len(payload.body),
                packs_dir=self._store.packs_dir,
                known=[sha256 for sha256 in dict.fromkeys(payload.hashes) if sha256 in known],
            )
            for payload, hashes, is_packed in zip(pending, new_hashes, packed, strict=True)
        ]

    def check_named(self, connection: Connection, pending: PendingPayload) -> None:
        """Checks that the images and records named by a payload are in the request or stored.

        Raises:
            InvalidPayloadError: an image or record is missing.
        """
        hashes = [sha256 for sha256 in pending.hashes if sha256 not in pending.data]
        known = image_rows.image_refs(connection, hashes) if hashes else {}
        for sha256 in hashes:
            if sha256 not in known:
                raise InvalidPayloadError(
                    f"{pending.name} names {sha256}, an image or token records that are not stored: PUT them to "
                    "/images first, or send an image inline"
                )

    def store_image(self, image: Image) -> bool:
        """Makes one screenshot durable; returns False if it was stored already. Damaged bytes are replaced."""
        known = self._known_refs([image.sha256])
        if known and self._is_whole(known[image.sha256]):
            return False
        # In place of a damaged record the bytes get no name: the writer would return its cached ref of that record.
        (ref,) = self._store.append([Blob(image.data, None if known else bytes.fromhex(image.sha256), image.sha256)])

        stored = StoredPayload(None, None, 0, {image.sha256: ref}, self._store.packs_dir)

        def record(connection: Connection) -> None:
            stored.record(connection, self._clock())
            if known:
                image_rows.replace_image(connection, image.sha256, ref)

        self._store.commit(record)
        return True

    def _known_refs(self, hashes: Iterable[str]) -> dict[str, BlobRef]:
        """Returns the refs of those images that are stored, by hash."""
        wanted = list(hashes)
        if not wanted:
            return {}
        with self._store.read() as connection:
            return image_rows.image_refs(connection, wanted)

    def _is_whole(self, ref: BlobRef) -> bool:
        try:
            self._store.fetch(ref)
        except DamagedError:
            return False
        return True

    # --- reading -----------------------------------------------------------------------------------------------------

    def image(self, sha256: str) -> bytes:
        """Returns the bytes of a screenshot.

        Raises:
            NotFoundError: it is not stored.
            DamagedError: its bytes are missing or differ from what was written.
        """
        ref = self._known_refs([sha256] if wire.is_sha256(sha256) else []).get(sha256)
        if ref is None:
            raise NotFoundError(f"there is no image {sha256[:80]!r}")
        try:
            return self._store.fetch(ref)
        except DamagedError as error:
            raise DamagedError(f"image {sha256} is damaged: PUT it again ({error.message})") from error

    def inlined(self, body: bytes) -> Pieces:
        """Returns a payload in pieces, with the hashes of screenshots replaced by data URIs.

        Raises:
            DamagedError: a screenshot is missing or damaged.
        """
        spots, refs = self._images_of(body)
        return _pieces(body, spots, refs, self._store.fetch_each(refs.values()))

    def begin_inlining(self, body: bytes, pool: Executor) -> Inlining:
        """Starts fetching a payload's screenshots in threads of a pool.

        Raises:
            DamagedError: a screenshot is missing.
        """
        spots, refs = self._images_of(body)
        return Inlining(body, spots, refs, self._store.fetch_ahead(refs.values(), pool))

    def _images_of(self, body: bytes) -> tuple[list[wire.ImageSpot], dict[str, BlobRef]]:
        """Returns the positions of image hashes in a payload, and the images' refs."""
        spots = wire.image_spots(body)
        refs = self._known_refs({sha256 for _, _, sha256 in spots})
        missing = next((sha256 for _, _, sha256 in spots if sha256 not in refs), None)
        if missing is not None:
            raise DamagedError(f"image {missing} is not stored")
        return spots, refs


@dataclass(frozen=True, slots=True)
class Inlining:
    """A payload whose screenshots are being read."""

    body: bytes
    spots: Sequence[wire.ImageSpot]
    refs: Mapping[str, BlobRef]
    reading: Reading

    def result(self) -> Pieces:
        """Waits for the screenshots and returns the payload as ``PayloadStore.inlined``.

        Raises:
            DamagedError: a screenshot is damaged.
        """
        return _pieces(self.body, self.spots, self.refs, self.reading.each())

    def cancel(self) -> None:
        """Stops reading."""
        self.reading.cancel()


def _pieces(
    body: bytes,
    spots: Sequence[wire.ImageSpot],
    refs: Mapping[str, BlobRef],
    read: Iterable[tuple[BlobRef, memoryview]],
) -> Pieces:
    """Returns a payload with data URIs in place of the image hashes at ``spots``; ``read`` yields the images."""
    uris = {ref: _data_uri(data) for ref, data in read}
    pieces: list[bytes] = []
    copied = 0
    for start, end, sha256 in spots:
        pieces += (body[copied:start], *uris[refs[sha256]])
        copied = end
    return [*pieces, body[copied:]]


def _screenshot_blobs(payload: PendingPayload, hashes: Sequence[str]) -> list[Blob]:
    if any(sha256 not in payload.data for sha256 in hashes):
        raise UnavailableError(f"a screenshot of {payload.name} was purged meanwhile: write the item again")
    return [Blob(payload.data[sha256], bytes.fromhex(sha256)) for sha256 in hashes]


def _goes_into_a_pack(payload: PendingPayload, new_hashes: Sequence[str]) -> bool:
    return len(payload.body) > (ALONGSIDE_BODY_BYTES if new_hashes else INLINE_BODY_BYTES)


def _data_uri(data: memoryview) -> tuple[bytes, bytes]:
    """Returns the two parts of a data URI, which need not be joined."""
    media_type = wire.image_media_type(bytes(data[:16]))
    return _URI_HEADS[media_type], pybase64.b64encode(data)
