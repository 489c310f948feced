"""Reads records out of packs, past the page cache: what is delivered is read once.

The cache would take a new page of memory for every 4 KB, which costs more than the disk's own read, and would push out
what others need. Records that lie next to each other, as the screenshots of an episode do, are read together.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer.errors import DamagedError, UnavailableError
from slime_plugins.rollout_buffer.storage.pack_writer import (
    BLOCK_BYTES,
    HEADER,
    BlobRef,
    disk_memory,
    header_of,
    pack_path,
)

OPEN_PACKS = 64
WINDOW_BYTES = 2 * 1024 * 1024
"""How much is read at once, when no single record is larger. A delivery holds up to four times as much meanwhile."""
GAP_BYTES = 64 * 1024
"""Records this close to each other are read together, with what lies between them."""
NOT_ITS_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM})
"""What keeps a process from reading bytes that may be as they were: nothing is given up for it."""
FREE_BUFFERS = 8
WINDOWS_AHEAD = 2


@dataclass(slots=True)
class _Span:
    """Records of one pack that are read together; ``start`` and ``end`` are whole blocks."""

    pack: int
    start: int
    end: int
    places: list[BlobRef] = field(default_factory=list)


_Window = tuple[mmap.mmap, int]
"""Memory with a span in it, and how much of the span there was."""


class PackReader:
    """Reads records from any pack and checks them. Safe to use from many threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenPack] = OrderedDict()
        self._buffers: list[mmap.mmap] = []

    @property
    def free_windows(self) -> int:
        """How many windows' memory waits to be used again."""
        return len(self._buffers)

    def read(self, place: BlobRef) -> bytes:
        """Returns the data at a place.

        Raises:
            DamagedError: the pack is gone, ends before, or holds something else there.
            UnavailableError: this process cannot open it now.
        """
        return next(bytes(data) for _, data in self.each([place]))

    def each(self, places: Iterable[BlobRef]) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields every place once with its data, in the order of the disk; the data is valid until the next step.

        Raises:
            DamagedError: as ``read``, for the first place that is damaged.
        """
        for span in _spans(places):
            yield from self._records(span, self._window(span))

    def begin(self, places: Iterable[BlobRef], pool: Executor) -> Reading:
        """Has threads of a pool read places that are wanted soon; what comes is checked by who asks for it."""
        return Reading(self, _spans(places), pool)

    def close(self) -> None:
        """Lets go of the files."""
        with self._lock:
            self._files.clear()
            self._buffers.clear()

    def _window(self, span: _Span) -> _Window:
        """Reads a span into aligned memory that was used before, which the system need not find and clear first."""
        size = span.end - span.start
        with self._lock:
            kept = self._buffers.pop() if self._buffers and size <= WINDOW_BYTES else None
        memory = kept or disk_memory(max(size, WINDOW_BYTES))
        try:
            return memory, self._fill(memoryview(memory)[:size], span)
        except BaseException:
            self._keep(memory)
            raise

    def _records(self, span: _Span, window: _Window) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields what is in a window, and keeps its memory for the next one."""
        memory, got = window
        try:
            for place in span.places:
                yield place, _checked(place, memoryview(memory)[:got], place.offset - span.start)
        finally:
            self._keep(memory)

    def _keep(self, memory: mmap.mmap) -> None:
        with self._lock:
            if len(memory) == WINDOW_BYTES and len(self._buffers) < FREE_BUFFERS:
                self._buffers.append(memory)

    def _fill(self, buffer: memoryview, span: _Span) -> int:
        """Reads a span and returns how much of it there was: the last pack may end in the middle."""
        try:
            file = self._file(span.pack)
            got = 0
            while got < len(buffer) and (more := file.read_into(buffer[got:], span.start + got)):
                got += more
                if got % BLOCK_BYTES:
                    break  # only at the end of the file
        except OSError as error:
            if error.errno in NOT_ITS_FAULT:
                raise UnavailableError(f"the bytes at {span.places[0]} cannot be read now: {error.strerror}") from error
            raise DamagedError(f"the bytes at {span.places[0]} cannot be read: {error}") from error
        return got

    def _file(self, pack: int) -> _OpenPack:
        path = pack_path(self._folder, pack)
        with self._lock:
            file = self._files.get(pack)
            if file is None or not file.is_still(path):
                file = self._files[pack] = _OpenPack(path)
            self._files.move_to_end(pack)
            while len(self._files) > OPEN_PACKS:
                self._files.popitem(last=False)
        return file


class Reading:
    """Places on their way from the disk, a few windows ahead of who takes them."""

    def __init__(self, reader: PackReader, spans: Iterable[_Span], pool: Executor) -> None:
        self._reader = reader
        self._spans = iter(spans)
        self._pool = pool
        self._begun: deque[tuple[_Span, Future[_Window]]] = deque()
        for _ in range(WINDOWS_AHEAD):
            self._begin_next()

    def each(self) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields as ``PackReader.each`` does, and raises what it raises."""
        try:
            while self._begun:
                span, window = self._begun.popleft()
                self._begin_next()
                yield from self._reader._records(span, window.result())
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Begins nothing more of it."""
        self._spans = iter(())
        for _, window in self._begun:
            window.cancel()

    def _begin_next(self) -> None:
        span = next(self._spans, None)
        if span is not None:
            self._begun.append((span, self._pool.submit(self._reader._window, span)))


class _OpenPack:
    """A file that closes itself when its last reader has let it go: others may still read what the cache drops."""

    __slots__ = ("_descriptor", "_inode")

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        self._inode = os.fstat(self._descriptor).st_ino
        with contextlib.suppress(OSError):  # tmpfs and some others cannot: through the page cache, then
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)

    def is_still(self, path: Path) -> bool:
        """Returns True if the path leads to this file; once retention has removed it, another may get its number."""
        try:
            return path.stat().st_ino == self._inode
        except FileNotFoundError:
            return True

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Reads whole blocks, fewer at the end of the file."""
        try:
            return os.preadv(self._descriptor, [buffer], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)  # it takes the flag, and does not mean it
        return os.preadv(self._descriptor, [buffer], offset)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _spans(places: Iterable[BlobRef]) -> list[_Span]:
    spans: list[_Span] = []
    for place in sorted(set(places)):
        start = place.offset // BLOCK_BYTES * BLOCK_BYTES
        end = -(-place.end // BLOCK_BYTES) * BLOCK_BYTES
        last = spans[-1] if spans else None
        is_near = last is not None and last.pack == place.pack and start <= last.end + GAP_BYTES
        if last is None or not is_near or end - last.start > WINDOW_BYTES:
            last = _Span(place.pack, start, end)
            spans.append(last)
        last.end = max(last.end, end)
        last.places.append(place)
    return spans


def _checked(place: BlobRef, read: memoryview, at: int) -> memoryview:
    start = at + HEADER.size
    data = read[start : start + place.length]
    if len(data) != place.length or read[at:start] != header_of(place, data):
        raise DamagedError(f"the bytes at {place} are not what was written there")
    return data
