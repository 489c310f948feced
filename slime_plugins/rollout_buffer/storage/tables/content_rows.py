"""Rows of ``images`` and ``packs``, and where payloads are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from slime_plugins.rollout_buffer.storage.pack_writer import BlobRef
from slime_plugins.rollout_buffer.storage.tables.connection import MAX_MARKS, Connection


def image_places(connection: Connection, hashes: Sequence[str]) -> dict[str, BlobRef]:
    """Returns where the screenshots of those hashes are; one that is not stored is left out."""
    found: dict[str, BlobRef] = {}
    for start in range(0, len(hashes), MAX_MARKS):
        digests = [bytes.fromhex(sha256) for sha256 in hashes[start : start + MAX_MARKS]]
        query = f"SELECT sha256, place FROM images WHERE sha256 IN ({', '.join('?' for _ in digests)})"
        found.update({digest.hex(): BlobRef.parse(place) for digest, place in connection.execute(query, digests)})
    return found


def insert_images(connection: Connection, places: Mapping[str, BlobRef], now: float) -> None:
    """Keeps where screenshots are. The first place stays: another writer may have been quicker."""
    rows = [(bytes.fromhex(sha256), str(place), now) for sha256, place in places.items()]
    connection.executemany(
        "INSERT INTO images (sha256, place, last_used) VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET last_used = excluded.last_used",
        rows,
    )


def use_images(connection: Connection, hashes: Sequence[str], now: float) -> int:
    """Notes that a trajectory names screenshots that were there already; returns how many still are."""
    used = 0
    for start in range(0, len(hashes), MAX_MARKS - 1):
        digests = [bytes.fromhex(sha256) for sha256 in hashes[start : start + MAX_MARKS - 1]]
        query = f"UPDATE images SET last_used = ? WHERE sha256 IN ({', '.join('?' for _ in digests)})"
        used += connection.execute(query, (now, *digests)).rowcount
    return used


def replace_image(connection: Connection, sha256: str, place: BlobRef) -> None:
    """Keeps a new place for a screenshot whose old bytes are damaged."""
    connection.execute("UPDATE images SET place = ? WHERE sha256 = ?", (str(place), bytes.fromhex(sha256)))


def use_packs(connection: Connection, places: Iterable[BlobRef]) -> None:
    """Notes how far rows name bytes of packs: what lies beyond may be cut off."""
    ends: dict[int, int] = {}
    for place in places:
        ends[place.pack] = max(place.end, ends.get(place.pack, 0))
    connection.executemany(
        "INSERT INTO packs (number, used_to) VALUES (?, ?) ON CONFLICT DO UPDATE SET "
        "used_to = max(used_to, excluded.used_to)",
        list(ends.items()),
    )


def oldest_undelivered(connection: Connection, default: float) -> float:
    """Returns when the oldest trajectory was written that is still to be delivered."""
    query = (
        "SELECT min(trajectories.created_at) FROM groups JOIN trajectories ON group_key = groups.key "
        "WHERE groups.state IN ('open', 'ready', 'leased')"
    )
    found = connection.execute(query).fetchone()[0]
    return default if found is None else float(found)


def purge_payloads(connection: Connection, before: float) -> int:
    """Takes the payloads out of trajectories written before a time; returns how many had one."""
    return connection.execute(
        "UPDATE trajectories SET body = NULL, body_place = NULL "
        "WHERE created_at < ? AND (body IS NOT NULL OR body_place IS NOT NULL)",
        (before,),
    ).rowcount


def purge_images(connection: Connection, before: float) -> int:
    """Forgets screenshots that no trajectory has named since a time."""
    return connection.execute("DELETE FROM images WHERE last_used < ?", (before,)).rowcount


def packs_with_contents(connection: Connection) -> set[int]:
    """Returns the packs that some row names bytes of."""
    query = (
        "SELECT DISTINCT CAST(substr(place, 1, instr(place, ':') - 1) AS INTEGER) FROM images UNION "
        "SELECT DISTINCT CAST(substr(body_place, 1, instr(body_place, ':') - 1) AS INTEGER) FROM trajectories "
        "WHERE body_place IS NOT NULL"
    )
    return {int(row[0]) for row in connection.execute(query)}


def drop_pack(connection: Connection, number: int) -> None:
    """Forgets a pack that is about to be removed."""
    connection.execute("DELETE FROM packs WHERE number = ?", (number,))


def with_payloads(connection: Connection, group_keys: Sequence[int]) -> list[int]:
    """Returns those of the groups of which no payload was purged."""
    query = (
        "SELECT count(*) FROM members JOIN groups ON groups.key = members.group_key JOIN trajectories "
        "ON trajectories.job_key = groups.job_key AND trajectories.uid = members.source_uid "
        "WHERE members.group_key = ? AND body IS NULL AND body_place IS NULL"
    )
    return [key for key in group_keys if connection.execute(query, (key,)).fetchone()[0] == 0]


def used_packs(connection: Connection) -> dict[int, int]:
    """Returns for each pack that rows name how far they name it."""
    return {row[0]: row[1] for row in connection.execute("SELECT number, used_to FROM packs")}


def body_places(connection: Connection) -> Iterator[tuple[int, str, BlobRef]]:
    """Yields (job key, uid, place) of every payload that is in a pack."""
    query = "SELECT job_key, uid, body_place FROM trajectories WHERE body_place IS NOT NULL"
    return ((row[0], row[1], BlobRef.parse(row[2])) for row in connection.execute(query))


def all_image_places(connection: Connection) -> Iterator[tuple[str, BlobRef]]:
    """Yields (hash, place) of every screenshot."""
    return ((row[0].hex(), BlobRef.parse(row[1])) for row in connection.execute("SELECT sha256, place FROM images"))


def note_damage(connection: Connection, job_key: int, uid: str, damage: str) -> None:
    """Keeps why a trajectory could not be read."""
    query = "UPDATE trajectories SET damage = ? WHERE job_key = ? AND uid = ?"
    connection.execute(query, (damage, job_key, uid))


def count_damaged(connection: Connection, job_key: int) -> int:
    """Counts trajectories that could not be read when they were to be delivered."""
    query = "SELECT count(*) FROM trajectories WHERE job_key = ? AND damage IS NOT NULL"
    return int(connection.execute(query, (job_key,)).fetchone()[0])
