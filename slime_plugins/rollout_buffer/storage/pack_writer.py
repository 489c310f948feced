"""Pack files: the bytes of payloads and screenshots, appended and fsynced before the caller continues.

A record is a header (magic, length, crc32, owner) and its data; a ``BlobRef`` (pack, offset, length, owner) refers to
it. The owner identifies the record: it is the start of a screenshot's hash, or a digest of a trajectory's uid and the
data's checksum. A record with another owner than its ref is treated as damaged. Each process appends to its own pack
and holds a lock on it; a full pack is sealed (read-only). Pack numbers are never reused. Concurrent appends share one
fsync. ``state/recovery.py`` truncates records that no row refers to.
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

from slime_plugins.rollout_buffer.storage.data_dir import try_lock
from slime_plugins.rollout_buffer.storage.group_commit import GroupCommit, Ticket

HEADER = struct.Struct("<4sII8s")
MAGIC = b"RBP2"
OWNER_BYTES = 8
PACK_LIMIT_BYTES = 256 * 1024 * 1024
"""A pack is sealed when it exceeds this size."""
MAX_CACHED_NAMES = 16_384
"""Number of recently appended screenshots whose refs are cached by hash: members of a group often show the same
screenshots."""
SEALED_MODE = 0o400
"""File mode of a sealed pack: read-only."""
MAX_DIGITS = 15
"""Digits of a pack number that fits into a database column."""
BLOCK_BYTES = 4096
"""Direct I/O reads and writes whole blocks of this size."""
STAGE_BYTES = 4 * 1024 * 1024
"""Size of the aligned buffer from which records are written."""


class BlobRef(NamedTuple):
    """Refers to a record. ``offset`` is the start of its header, ``length`` the size of its data."""

    pack: int
    offset: int
    length: int
    owner: bytes

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.offset + HEADER.size + self.length

    def __str__(self) -> str:
        return f"{self.pack}:{self.offset}:{self.length}:{self.owner.hex()}"

    @classmethod
    def parse(cls, text: str) -> BlobRef:
        """Parses the result of ``str``."""
        pack, offset, length, owner = text.split(":")
        return cls(int(pack), int(offset), int(length), bytes.fromhex(owner))


class Blob(NamedTuple):
    """Bytes to store. Bytes with a ``name`` (their sha256) are stored once; others belong to ``owner``, a uid."""

    data: bytes | memoryview
    name: bytes | None = None
    owner: str = ""


def disk_memory(size: int) -> mmap.mmap:
    """Returns an aligned buffer for direct I/O.

    It uses huge pages where available: mapping each 4 KB page for the transfer can take longer than the transfer. A
    fork does not copy it: before kernel 5.12 the child's copy could receive the data.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without it
                memory.madvise(getattr(mmap, advice))
    return memory


class Disk:
    """The file operations that durability depends on; tests replace them to inject faults.

    Writes use ``O_DIRECT`` where the file system supports it, in whole blocks from an aligned buffer.
    """

    def __init__(self) -> None:
        self._stage = disk_memory(STAGE_BYTES)

    def open_new(self, path: Path) -> int:
        """Creates a file for writing and returns its descriptor.

        Raises:
            FileExistsError: it exists.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, 0o600)
        with contextlib.suppress(OSError):  # tmpfs and others do not support it: the page cache is used
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        return descriptor

    def write(self, descriptor: int, pieces: Iterable[bytes | memoryview], offset: int) -> int:
        """Writes the pieces contiguously from ``offset`` on; returns the start of the next block after them."""
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
            padded = -(-filled // BLOCK_BYTES) * BLOCK_BYTES  # rounded up
            self._stage[filled:padded] = bytes(padded - filled)
            offset = self._flush(descriptor, padded, offset)
        return offset

    def _flush(self, descriptor: int, size: int, offset: int) -> int:
        """Writes the first ``size`` bytes of the buffer at ``offset``; returns the offset after them."""
        with memoryview(self._stage) as stage:
            done = 0
            while done < size:
                written = os.pwrite(descriptor, stage[done:size], offset + done)
                if written % BLOCK_BYTES:
                    raise OSError(errno.ENOSPC, "only part of a block could be written")
                done += written
        return offset + size

    def sync(self, descriptor: int) -> None:
        """Flushes written data to the disk, so that it survives a power failure."""
        os.fdatasync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Flushes the names in the folder to the disk, so that they survive a power failure."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def pack_path(folder: Path, pack: int) -> Path:
    """Returns the file of a pack."""
    return folder / f"{pack:08d}.pack"


def packs_in(folder: Path) -> list[int]:
    """Returns the numbers of the packs in the folder, oldest first."""
    return sorted(number for path, number in _numbered(folder) if path.is_file())


def highest_number(folder: Path) -> int:
    """Returns the highest number in use by any entry of the folder; 0 for none."""
    return max((number for _, number in _numbered(folder)), default=0)


def _numbered(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yields each entry named as a pack, with its number; skips numbers that do not fit into a database column."""
    for path in folder.glob("*.pack"):
        if path.stem.isascii() and path.stem.isdigit() and len(path.stem) <= MAX_DIGITS:
            yield path, int(path.stem)


class _Record(NamedTuple):
    """A blob with its header, computed in the caller's thread, so that checksums run in parallel."""

    blob: Blob
    header: bytes
    owner: bytes

    @classmethod
    def of(cls, blob: Blob) -> _Record:
        checksum = zlib_ng.crc32(blob.data)
        owner = blob.name if blob.name is not None else _owner(blob.owner, checksum)
        owner = owner[:OWNER_BYTES]
        return cls(blob, HEADER.pack(MAGIC, len(blob.data), checksum, owner), owner)


_SEAL: Sequence[_Record] = ()
"""Stands for the request to seal the current pack; recognized by identity."""


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
        """``next_number`` returns a number that was never used; by default a number that is free in the folder."""
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
        """Stores blobs and returns their refs, once all of them survive a power failure.

        Raises:
            OSError: the disk is full or broken. No blob of this call is stored.
        """
        if not blobs:
            return []
        refs: list[BlobRef] = self._commits.run([_Record.of(blob) for blob in blobs])
        return refs

    def seal(self) -> None:
        """Seals the current pack, so that retention may remove it; the next append starts another."""
        self._commits.run(_SEAL)

    def close(self) -> None:
        """Closes and unlocks the pack; the next append starts another."""
        descriptor, self._descriptor = self._descriptor, None
        self._names.clear()  # retention may remove records of a pack that is not locked
        if descriptor is not None:
            os.close(descriptor)

    def _append_batch(self, batch: Sequence[Ticket[Sequence[_Record]]]) -> None:
        """Writes the records of a batch with one write and one fsync; then caches their names and sets the results."""
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
            ticket.result = [self._ref_of(record, pieces, fresh) for record in ticket.work]
        if not pieces:
            return
        try:
            self._end = self._disk.write(descriptor, pieces, start)  # the next record starts at a whole block
            self._disk.sync(descriptor)
        except BaseException:
            self._abandon(descriptor, start)
            raise
        self._names.update(fresh)
        while len(self._names) > MAX_CACHED_NAMES:
            self._names.popitem(last=False)
        if self._end >= self._limit:
            self._seal(descriptor)

    def _ref_of(self, record: _Record, pieces: list[bytes | memoryview], fresh: dict[bytes, BlobRef]) -> BlobRef:
        """Returns the ref of a record, and adds its bytes to ``pieces`` unless a record of the same name was appended.

        ``fresh`` has the refs of the names in this batch.
        """
        blob = record.blob
        if blob.name is not None and (known := fresh.get(blob.name) or self._names.get(blob.name)) is not None:
            return known
        ref = BlobRef(self._pack, self._end, len(blob.data), record.owner)
        pieces += (record.header, blob.data)
        self._end = ref.end
        if blob.name is not None:
            fresh[blob.name] = ref
        return ref

    def _abandon(self, descriptor: int, start: int) -> None:
        """Truncates and seals the pack after a failed write or fsync: its content beyond ``start`` is undefined."""
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, start)
            if start == 0:
                pack_path(self._folder, self._pack).unlink(missing_ok=True)
        self._seal(descriptor)

    def _seal(self, descriptor: int) -> None:
        """Seals the pack: nothing appends to it, or truncates it while rows that refer to it wait for their commit."""
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, SEALED_MODE)
        self.close()

    def _open(self) -> None:
        """Creates a pack with a new number, and makes its name durable."""
        while True:
            number = self._next_number()
            path = pack_path(self._folder, number)
            try:
                descriptor = self._disk.open_new(path)
            except FileExistsError:
                continue  # another process created it
            if try_lock(descriptor) and path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                break
            os.close(descriptor)  # recovery removed it between the two calls
        self._disk.sync_folder(self._folder)
        self._descriptor, self._pack, self._end = descriptor, number, 0


def header_of(ref: BlobRef, data: bytes | memoryview) -> bytes:
    """Returns the header that the record of this ref and data must have."""
    return HEADER.pack(MAGIC, len(data), zlib_ng.crc32(data), ref.owner)


def _owner(uid: str, checksum: int) -> bytes:
    """Returns the owner of a trajectory's record."""
    return hashlib.blake2b(
        uid.encode("utf-8", "surrogatepass") + checksum.to_bytes(4, "little"), digest_size=OWNER_BYTES
    ).digest()
