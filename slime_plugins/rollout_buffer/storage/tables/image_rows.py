"""Rows of ``images``: in which pack each image is stored, and when a trajectory last named it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.tables.connection import MAX_PARAMETERS, Connection


def image_refs(connection: Connection, hashes: Sequence[str]) -> dict[str, BlobRef]:
    """Returns the refs of stored images by hash; images that are not stored are left out."""
    refs: dict[str, BlobRef] = {}
    for start in range(0, len(hashes), MAX_PARAMETERS):
        digests = [bytes.fromhex(sha256) for sha256 in hashes[start : start + MAX_PARAMETERS]]
        query = f"SELECT sha256, place FROM images WHERE sha256 IN ({', '.join('?' for _ in digests)})"
        refs.update({digest.hex(): BlobRef.parse(ref) for digest, ref in connection.execute(query, digests)})
    return refs


def insert_images(connection: Connection, refs: Mapping[str, BlobRef], now: float) -> None:
    """Adds images. If another writer has already added an image, its ref stays."""
    rows = [(bytes.fromhex(sha256), str(ref), now) for sha256, ref in refs.items()]
    connection.executemany(
        "INSERT INTO images (sha256, place, last_used) VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET last_used = max(last_used, excluded.last_used)",
        rows,
    )


def mark_images_used(connection: Connection, hashes: Sequence[str], now: float) -> int:
    """Updates the time of last use of stored images; returns how many are still stored."""
    used = 0
    step = MAX_PARAMETERS - 1  # the time is a parameter as well
    for start in range(0, len(hashes), step):
        digests = [bytes.fromhex(sha256) for sha256 in hashes[start : start + step]]
        query = f"UPDATE images SET last_used = max(last_used, ?) WHERE sha256 IN ({', '.join('?' for _ in digests)})"
        used += connection.execute(query, (now, *digests)).rowcount
    return used


def replace_image(connection: Connection, sha256: str, ref: BlobRef) -> None:
    """Replaces the ref of a damaged image."""
    connection.execute("UPDATE images SET place = ? WHERE sha256 = ?", (str(ref), bytes.fromhex(sha256)))


def count_images(connection: Connection, before: float) -> int:
    """Counts the images that ``purge_images`` would delete."""
    return int(connection.execute("SELECT count(*) FROM images WHERE last_used < ?", (before,)).fetchone()[0])


def purge_images(connection: Connection, before: float) -> int:
    """Deletes images that no trajectory has named since a time; returns their number."""
    return connection.execute("DELETE FROM images WHERE last_used < ?", (before,)).rowcount


def all_image_refs(connection: Connection) -> Iterator[tuple[str, BlobRef]]:
    """Yields (hash, ref) of every image."""
    return ((row[0].hex(), BlobRef.parse(row[1])) for row in connection.execute("SELECT sha256, place FROM images"))
