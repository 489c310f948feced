"""Payloads and screenshots: durable before the row that names them, and found again by it.

A payload is the JSON that only readers care about; its messages name screenshots by hash. Small payloads go into their
row, large ones and screenshots into packs; a screenshot is kept once. What a row is to say of the bytes is
``StoredPayload``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import pybase64

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import DamagedError, InvalidPayloadError, NotFoundError, UnavailableError
from slime_plugins.rollout_buffer.storage.pack_reader import Reading
from slime_plugins.rollout_buffer.storage.pack_writer import Blob, BlobRef
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables import image_rows, pack_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import Image

Pieces = list[bytes]
"""A payload, in the order of its pieces."""

INLINE_BODY_BYTES = 32 * 1024
"""Payloads up to here live in their row: one fsync less. Larger ones would bloat the database's pages."""
ALONGSIDE_BODY_BYTES = 2 * 1024
"""Payloads from here on go with their screenshots, when those are written to a pack anyway."""


@dataclass(frozen=True, slots=True)
class PendingPayload:
    """A payload on its way in, the screenshots and token records it needs, and those that came with it, by hash.

    ``name`` stands for it in errors, ``uid`` is whose it is.
    """

    body: bytes
    needs: Sequence[str]
    came: Mapping[str, bytes]
    name: str
    uid: str

    @property
    def takes_place(self) -> bool:
        """True when keeping it writes more than its row."""
        return bool(self.needs) or len(self.body) > INLINE_BODY_BYTES


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload whose bytes are durable: in the row (``body``) or at a place. ``images`` are new places."""

    body: bytes | None
    place: BlobRef | None
    size: int
    images: Mapping[str, BlobRef]
    known: Sequence[str] = ()
    """Screenshots that were there already."""

    def columns(self) -> dict[str, Any]:
        """Returns what the trajectory's row says of its payload."""
        place = None if self.place is None else str(self.place)
        return {"body": self.body, "body_place": place, "body_bytes": self.size}

    def record(self, connection: Connection, now: float) -> None:
        """Makes the places known, in the transaction of the row that names them.

        Raises:
            UnavailableError: a screenshot that was there has just been purged; the same write brings it again.
        """
        if self.known and image_rows.mark_images_used(connection, self.known, now) != len(self.known):
            raise UnavailableError("a screenshot was purged while it was being named: write the item again")
        if self.images:
            image_rows.insert_images(connection, self.images, now)
        if self.images or self.place is not None:
            pack_rows.mark_packs_used(
                connection, [*self.images.values(), *([self.place] if self.place is not None else [])]
            )


class PayloadStore:
    """Keeps and finds the bytes of trajectories. Safe to use from many threads."""

    def __init__(self, store: Store, *, clock: Callable[[], float] | None = None) -> None:
        """``clock`` gives seconds since the epoch; without one, the store's."""
        self._store = store
        self._clock = clock or store.clock

    # --- keeping -----------------------------------------------------------------------------------------------------

    def store(self, pending: Sequence[PendingPayload]) -> list[StoredPayload]:
        """Makes payloads and their screenshots durable, all with one fsync.

        Raises:
            UnavailableError: a screenshot was purged since ``check_named`` saw it; the same write brings it again.
            StorageFullError: the disk is full.
        """
        known = self._known({sha256 for one in pending for sha256 in one.needs})
        missing = [[sha256 for sha256 in one.needs if sha256 not in known] for one in pending]
        packed = [_goes_into_a_pack(one, names) for one, names in zip(pending, missing, strict=True)]
        blobs: list[Blob] = []
        for one, names, is_packed in zip(pending, missing, packed, strict=True):
            blobs += _screenshot_blobs(one, names)
            blobs += [Blob(one.body, owner=one.uid)] if is_packed else []
        places = iter(self._store.append(blobs))
        return [
            StoredPayload(
                images={sha256: next(places) for sha256 in names},
                place=next(places) if is_packed else None,
                body=None if is_packed else one.body,
                size=len(one.body),
                known=[sha256 for sha256 in dict.fromkeys(one.needs) if sha256 in known],
            )
            for one, names, is_packed in zip(pending, missing, packed, strict=True)
        ]

    def check_named(self, connection: Connection, pending: PendingPayload) -> None:
        """Checks that what a payload names came with it, or is stored.

        Raises:
            InvalidPayloadError: it names something that is not there.
        """
        named = [sha256 for sha256 in pending.needs if sha256 not in pending.came]
        known = image_rows.image_refs(connection, named) if named else {}
        for sha256 in named:
            if sha256 not in known:
                raise InvalidPayloadError(
                    f"{pending.name} names {sha256}, an image or token records that are not stored: PUT them to "
                    "/images first, or send an image inline"
                )

    def store_image(self, image: Image) -> bool:
        """Makes one screenshot durable; returns False when it was there already. Damaged bytes are replaced."""
        known = self._known([image.sha256])
        if known and self._is_whole(known[image.sha256]):
            return False
        (place,) = self._store.append([Blob(image.data, None if known else bytes.fromhex(image.sha256), image.sha256)])

        def record(connection: Connection) -> None:
            image_rows.insert_images(connection, {image.sha256: place}, self._clock())
            if known:
                image_rows.replace_image(connection, image.sha256, place)
            pack_rows.mark_packs_used(connection, [place])

        self._store.commit(record)
        return True

    def _known(self, hashes: Iterable[str]) -> dict[str, BlobRef]:
        wanted = list(hashes)
        if not wanted:
            return {}
        with self._store.read() as connection:
            return image_rows.image_refs(connection, wanted)

    def _is_whole(self, place: BlobRef) -> bool:
        try:
            self._store.fetch(place)
        except DamagedError:
            return False
        return True

    # --- finding -----------------------------------------------------------------------------------------------------

    def image(self, sha256: str) -> bytes:
        """Returns a screenshot: exactly the bytes that came in.

        Raises:
            NotFoundError: it was never stored, or its bytes are damaged.
        """
        place = self._known([sha256] if wire.is_sha256(sha256) else []).get(sha256)
        if place is None:
            raise NotFoundError(f"there is no image {sha256[:80]!r}")
        try:
            return self._store.fetch(place)
        except DamagedError as error:
            raise NotFoundError(f"image {sha256} is damaged: PUT it again ({error.message})") from error

    def inlined(self, body: bytes) -> Pieces:
        """Returns a payload in pieces, with screenshots as data URIs where they were named by hash.

        Raises:
            DamagedError: one of them is gone, or is not what was written.
        """
        spots, places = self._shown(body)
        return _pieces(body, spots, places, self._store.fetch_each(places.values()))

    def begin_inlining(self, body: bytes, pool: Executor) -> Inlining:
        """Has threads of a pool fetch a payload's screenshots; the pieces are made by who takes the result.

        Raises:
            DamagedError: one of them is gone.
        """
        spots, places = self._shown(body)
        return Inlining(body, spots, places, self._store.fetch_ahead(places.values(), pool))

    def _shown(self, body: bytes) -> tuple[list[wire.ImageSpot], dict[str, BlobRef]]:
        """Where a payload names screenshots, and where these are."""
        spots = wire.image_spots(body)
        places = self._known({sha256 for _, _, sha256 in spots})
        missing = next((sha256 for _, _, sha256 in spots if sha256 not in places), None)
        if missing is not None:
            raise DamagedError(f"image {missing} is not stored")
        return spots, places


@dataclass(frozen=True, slots=True)
class Inlining:
    """A payload whose screenshots are on their way from the disk."""

    body: bytes
    spots: Sequence[wire.ImageSpot]
    places: Mapping[str, BlobRef]
    reading: Reading

    def result(self) -> Pieces:
        """Waits for the screenshots and returns the payload with them, as ``PayloadStore.inlined`` does.

        Raises:
            DamagedError: one of them is not what was written.
        """
        return _pieces(self.body, self.spots, self.places, self.reading.each())

    def cancel(self) -> None:
        """Says that nobody wants it any more."""
        self.reading.cancel()


def _pieces(
    body: bytes,
    spots: Sequence[wire.ImageSpot],
    places: Mapping[str, BlobRef],
    read: Iterable[tuple[BlobRef, memoryview]],
) -> Pieces:
    shots = {place: _data_uri(data) for place, data in read}
    pieces: list[bytes] = []
    at = 0
    for start, end, sha256 in spots:
        pieces += (body[at:start], *shots[places[sha256]])
        at = end
    return [*pieces, body[at:]]


def _screenshot_blobs(one: PendingPayload, hashes: Sequence[str]) -> list[Blob]:
    if any(sha256 not in one.came for sha256 in hashes):
        raise UnavailableError(f"a screenshot that {one.name} names was purged meanwhile: write it again")
    return [Blob(one.came[sha256], bytes.fromhex(sha256)) for sha256 in hashes]


def _goes_into_a_pack(one: PendingPayload, new_shots: Sequence[str]) -> bool:
    return len(one.body) > (ALONGSIDE_BODY_BYTES if new_shots else INLINE_BODY_BYTES)


def _data_uri(data: memoryview) -> tuple[bytes, bytes]:
    media_type = wire.image_media_type(bytes(data[:16]))
    return _URI_HEADS[media_type], pybase64.b64encode(data)


_URI_HEADS = {
    media_type: f"data:{media_type or 'application/octet-stream'};base64,".encode("ascii")
    for media_type in (None, "image/png", "image/jpeg", "image/webp")
}
