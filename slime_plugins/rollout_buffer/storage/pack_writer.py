"""Pack files: the bytes of payloads and screenshots, appended one after the other and fsynced before anybody is told.

A record is a header (magic, length, crc32, owner) and its data; its place (pack, offset, length, owner) names it.
The owner is a digest of what the record is: of a screenshot's hash, or of a trajectory's uid and the data's checksum. A
record with another one, however whole, is not what was written there. Each process appends to a pack of its own, which
it holds locked for as long as it lives; a full one is sealed (read-only). A number that a pack had is never another's.
Appends that wait at the same time share one fsync. A pack knows nothing of rows: what no row names is cut off by
``state/recovery.py``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zlib_ng import zlib_ng

from slime_plugins.rollout_buffer.storage.group_commit import GroupCommit, Ticket

HEADER = struct.Struct("<4sII8s")
MAGIC = b"RBP2"
OWNER_BYTES = 8
PACK_LIMIT_BYTES = 256 * 1024 * 1024
"""A pack is sealed once it has grown beyond this."""
REMEMBERED_NAMES = 16_384
"""Screenshots appended lately, by hash: siblings often show the same screen at the same time."""
SEALED_MODE = 0o400
MAX_DIGITS = 15
BLOCK_BYTES = 4096
STAGE_BYTES = 4 * 1024 * 1024


class BlobRef(NamedTuple):
    """Where a record is. ``length`` counts the data alone, ``offset`` is where the header starts."""

    pack: int
    offset: int
    length: int
    owner: bytes

    @property
    def end(self) -> int:
        """Where the next record starts."""
        return self.offset + HEADER.size + self.length

    def __str__(self) -> str:
        return f"{self.pack}:{self.offset}:{self.length}:{self.owner.hex()}"

    @classmethod
    def parse(cls, text: str) -> BlobRef:
        """Reads a place back from its text."""
        pack, offset, length, owner = text.split(":")
        return cls(int(pack), int(offset), int(length), bytes.fromhex(owner))


class Blob(NamedTuple):
    """Bytes to keep. A ``name`` (the sha256) says that one copy serves everybody who brings the same.

    ``owner`` says whose bytes without a name are: the uid of a trajectory.
    """

    data: bytes | memoryview
    name: bytes | None = None
    owner: str = ""


def disk_memory(size: int) -> mmap.mmap:
    """Returns memory that the disk can be read into, and written from, past the page cache.

    In large pages where the system has them: of 4 KB ones each is looked up and handed to the disk by itself, which
    can take longer than the transfer. A process that is forked meanwhile does not get it: its copy could receive what
    the disk brings, on kernels before 5.12.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return memory


class Disk:
    """The file operations that durability rests on; a test puts its own in between.

    Writes go past the page cache where the file system can (``O_DIRECT``): it would first look for free memory, and
    then have to be flushed. They are therefore whole blocks, from a buffer that is aligned to them.
    """

    def __init__(self) -> None:
        self._stage = disk_memory(STAGE_BYTES)

    def open_new(self, path: Path) -> int:
        """Creates a file to write to; raises ``FileExistsError`` when it is there."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, 0o600)
        with contextlib.suppress(OSError):  # tmpfs and some others cannot: through the page cache, then
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        return descriptor

    def write(self, descriptor: int, pieces: Iterable[bytes | memoryview], offset: int) -> int:
        """Writes pieces one after the other from ``offset`` on; returns the next whole block's start after them."""
        filled = 0
        for piece in pieces:
            after = filled + len(piece)
            if after < STAGE_BYTES:
                self._stage[filled:after] = piece
                filled = after
                continue
            rest = memoryview(piece)
            while rest:
                part = rest[: STAGE_BYTES - filled]
                self._stage[filled : filled + len(part)] = part
                filled, rest = filled + len(part), rest[len(part) :]
                if filled == STAGE_BYTES:
                    offset, filled = self._flush(descriptor, filled, offset), 0
        if filled:
            padded = -(-filled // BLOCK_BYTES) * BLOCK_BYTES
            self._stage[filled:padded] = bytes(padded - filled)
            offset = self._flush(descriptor, padded, offset)
        return offset

    def _flush(self, descriptor: int, size: int, offset: int) -> int:
        with memoryview(self._stage) as stage:
            done = 0
            while done < size:
                written = os.pwrite(descriptor, stage[done:size], offset + done)
                if written % BLOCK_BYTES:
                    raise OSError(errno.ENOSPC, "only part of a block could be written")
                done += written
        return offset + size

    def sync(self, descriptor: int) -> None:
        """Returns when what was written survives a power cut."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Returns when the names in the folder survive a power cut."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def pack_path(folder: Path, pack: int) -> Path:
    """Returns the file of a pack."""
    return folder / f"{pack:08d}.pack"


def packs_in(folder: Path) -> list[int]:
    """Returns the numbers of the packs that are there, oldest first; a folder is none, whatever its name."""
    return sorted(number for path, number in _numbered(folder) if path.is_file())


def highest_number(folder: Path) -> int:
    """Returns the highest number that any name in the folder takes; 0 for none."""
    return max((number for _, number in _numbered(folder)), default=0)


def _numbered(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yields what is named like a pack. No counter comes as far as ``MAX_DIGITS``, and the database holds no more."""
    for path in folder.glob("*.pack"):
        if path.stem.isascii() and path.stem.isdigit() and len(path.stem) <= MAX_DIGITS:
            yield path, int(path.stem)


def is_locked(descriptor: int) -> bool:
    """Returns True if another process holds the pack; when none does, the caller holds it from now on."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


class _Record(NamedTuple):
    """A blob with its header, made by the thread that brings it: checksums of many run side by side."""

    blob: Blob
    header: bytes
    owner: bytes

    @classmethod
    def of(cls, blob: Blob) -> _Record:
        """Checks the data once, and says whose it is."""
        checksum = zlib_ng.crc32(blob.data)
        owner = blob.name if blob.name is not None else _owner(blob.owner, checksum)
        owner = owner[:OWNER_BYTES]
        return cls(blob, HEADER.pack(MAGIC, len(blob.data), checksum, owner), owner)


_SEAL: Sequence[_Record] = ()
"""What is brought to the writer to have its pack sealed."""


class PackWriter:
    """Appends records to this process's own pack. Safe to use from many threads."""

    def __init__(
        self,
        folder: Path,
        *,
        disk: Disk | None = None,
        limit_bytes: int = PACK_LIMIT_BYTES,
        next_number: Callable[[], int] | None = None,
    ) -> None:
        """``next_number`` gives a number that no pack ever had; without it, one that none in the folder has."""
        self._folder = folder
        self._next_number = next_number or (lambda: highest_number(folder) + 1)
        self._disk = disk or Disk()
        self._limit = limit_bytes
        self._commits: GroupCommit[Sequence[_Record]] = GroupCommit(self._append_batch)
        self._descriptor: int | None = None
        self._pack = 0
        self._end = 0
        self._names: OrderedDict[bytes, BlobRef] = OrderedDict()

    def append(self, blobs: Sequence[Blob]) -> list[BlobRef]:
        """Returns where each blob is, once all of them survive a power cut.

        Raises:
            OSError: the disk is full or broken. Nothing of what this call brought is kept.
        """
        if not blobs:
            return []
        places: list[BlobRef] = self._commits.run([_Record.of(blob) for blob in blobs])
        return places

    def seal(self) -> None:
        """Appends no more to the pack of now, so that retention may remove it; the next append starts another."""
        self._commits.run(_SEAL)

    def close(self) -> None:
        """Lets go of the pack; the next append starts another."""
        descriptor, self._descriptor = self._descriptor, None
        self._names.clear()  # only what lies in the pack that this process holds is safe from being purged
        if descriptor is not None:
            os.close(descriptor)

    def _append_batch(self, batch: Sequence[Ticket[Sequence[_Record]]]) -> None:
        """One write and one fsync for everybody; only then are names remembered and callers answered."""
        if any(ticket.work is _SEAL for ticket in batch) and self._descriptor is not None:
            self._seal(self._descriptor)
        batch = [ticket for ticket in batch if ticket.work is not _SEAL]
        if not batch:
            return
        if self._descriptor is None:
            self._open()
        descriptor, start = self._descriptor, self._end
        assert descriptor is not None
        pieces: list[bytes | memoryview] = []
        fresh: dict[bytes, BlobRef] = {}
        for ticket in batch:
            ticket.result = [self._placed(record, pieces, fresh) for record in ticket.work]
        if not pieces:
            return
        try:
            self._end = self._disk.write(descriptor, pieces, start)
            self._disk.sync(descriptor)
        except BaseException:
            self._give_up(descriptor, start)
            raise
        self._remember(fresh)
        if self._end >= self._limit:
            self._seal(descriptor)

    def _placed(self, record: _Record, pieces: list[bytes | memoryview], fresh: dict[bytes, BlobRef]) -> BlobRef:
        blob = record.blob
        if blob.name is not None and (known := fresh.get(blob.name) or self._names.get(blob.name)) is not None:
            return known
        place = BlobRef(self._pack, self._end, len(blob.data), record.owner)
        pieces += (record.header, blob.data)
        self._end = place.end
        if blob.name is not None:
            fresh[blob.name] = place
        return place

    def _remember(self, fresh: dict[bytes, BlobRef]) -> None:
        self._names.update(fresh)
        while len(self._names) > REMEMBERED_NAMES:
            self._names.popitem(last=False)

    def _give_up(self, descriptor: int, start: int) -> None:
        """After a failed write or fsync nobody knows what the file holds beyond ``start``: a new pack goes on."""
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, start)
            if start == 0:
                pack_path(self._folder, self._pack).unlink(missing_ok=True)
        self._seal(descriptor)

    def _seal(self, descriptor: int) -> None:
        """Nobody appends to it or cuts it any more: rows of what it holds may still be on their way."""
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, SEALED_MODE)
        self.close()

    def _open(self) -> None:
        """Starts a pack under a new number, and makes its name durable."""
        while True:
            number = self._next_number()
            path = pack_path(self._folder, number)
            try:
                descriptor = self._disk.open_new(path)
            except FileExistsError:
                continue  # another process was quicker
            if not is_locked(descriptor) and path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                break
            os.close(descriptor)  # mending took it between the two calls
        self._disk.sync_folder(self._folder)
        self._descriptor, self._pack, self._end = descriptor, number, 0


def header_of(place: BlobRef, data: bytes | memoryview) -> bytes:
    """Returns what must stand before the data at a place."""
    return HEADER.pack(MAGIC, len(data), zlib_ng.crc32(data), place.owner)


def _owner(uid: str, checksum: int) -> bytes:
    """A digest of whose bytes these are, and of which: no other record has it."""
    return hashlib.blake2b(
        uid.encode("utf-8", "surrogatepass") + checksum.to_bytes(4, "little"), digest_size=OWNER_BYTES
    ).digest()
