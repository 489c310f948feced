"""Reads records from pack files with direct I/O (``O_DIRECT``): delivered records are read once.

Allocating pages of the page cache costs more than the read itself, and would evict pages of other processes. Adjacent
records, such as the screenshots of an episode, are read together.
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
"""Number of pack files that stay open."""
WINDOW_BYTES = 2 * 1024 * 1024
"""Bytes of one read, unless a single record is larger. A delivery holds up to four windows in memory."""
GAP_BYTES = 64 * 1024
"""Records at most this far apart are read together."""
TRANSIENT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM})
"""Errors of the process or the machine: the record is not marked as damaged."""
FREE_BUFFERS = 8
"""Number of unused buffers that are kept for later reads."""
WINDOWS_AHEAD = 2
"""Number of windows that ``Reading`` reads ahead of its consumer."""


@dataclass(slots=True)
class _Span:
    """Records of one pack that are read together; ``start`` and ``end`` are whole blocks."""

    pack: int
    start: int
    end: int
    refs: list[BlobRef] = field(default_factory=list)


_Window = tuple[mmap.mmap, int]
"""A buffer with the data of a span, and the number of bytes read."""


class PackReader:
    """Reads records from any pack and checks them. Safe to use from many threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenPack] = OrderedDict()
        self._buffers: list[mmap.mmap] = []

    def read(self, ref: BlobRef) -> bytes:
        """Returns the data of a record.

        Raises:
            DamagedError: the pack is missing or too short, or holds another record there.
            UnavailableError: a transient error.
        """
        return next(bytes(data) for _, data in self.each([ref]))

    def each(self, refs: Iterable[BlobRef]) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields every distinct ref with its data, in disk order; the data is valid until the next step.

        Raises:
            DamagedError: as ``read``, at the first damaged record.
            UnavailableError: a transient error.
        """
        for span in _spans(refs):
            yield from self._records(span, self._read_window(span))

    def begin(self, refs: Iterable[BlobRef], pool: Executor) -> Reading:
        """Starts reading in threads of a pool; ``Reading.each`` checks the data."""
        return Reading(self, _spans(refs), pool)

    def close(self) -> None:
        """Drops the cached files and buffers; a file is closed when its last reader drops it."""
        with self._lock:
            self._files.clear()
            self._buffers.clear()

    def _read_window(self, span: _Span) -> _Window:
        """Reads a span into an aligned buffer, which is recycled if a free buffer is large enough."""
        size = span.end - span.start
        with self._lock:
            recycled = self._buffers.pop() if self._buffers and size <= WINDOW_BYTES else None
        memory = recycled or disk_memory(max(size, WINDOW_BYTES))
        try:
            return memory, self._fill(memoryview(memory)[:size], span)
        except BaseException:
            self._recycle(memory)
            raise

    def _records(self, span: _Span, window: _Window) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields the records of a window, and recycles its buffer."""
        memory, read_bytes = window
        try:
            for ref in span.refs:
                yield ref, _checked(ref, memoryview(memory)[:read_bytes], ref.offset - span.start)
        finally:
            self._recycle(memory)

    def _recycle(self, memory: mmap.mmap) -> None:
        with self._lock:
            if len(memory) == WINDOW_BYTES and len(self._buffers) < FREE_BUFFERS:
                self._buffers.append(memory)

    def _fill(self, buffer: memoryview, span: _Span) -> int:
        """Reads a span and returns the number of bytes read: the newest pack may end in the middle of the span."""
        try:
            file = self._file(span.pack)
            read_bytes = 0
            while read_bytes < len(buffer) and (more := file.read_into(buffer[read_bytes:], span.start + read_bytes)):
                read_bytes += more
                if read_bytes % BLOCK_BYTES:
                    break  # only at the end of the file
        except OSError as error:
            if error.errno in TRANSIENT_ERRORS:
                raise UnavailableError(f"the bytes at {span.refs[0]} cannot be read now: {error.strerror}") from error
            raise DamagedError(f"the bytes at {span.refs[0]} cannot be read: {error}") from error
        return read_bytes

    def _file(self, pack: int) -> _OpenPack:
        """Returns an open pack, from the cache if possible."""
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
    """Reads records ahead of the consumer by ``WINDOWS_AHEAD`` windows."""

    def __init__(self, reader: PackReader, spans: Iterable[_Span], pool: Executor) -> None:
        self._reader = reader
        self._spans = iter(spans)
        self._pool = pool
        self._begun: deque[tuple[_Span, Future[_Window]]] = deque()
        for _ in range(WINDOWS_AHEAD):
            self._begin_next()

    def each(self) -> Iterator[tuple[BlobRef, memoryview]]:
        """Yields and raises as ``PackReader.each``."""
        try:
            while self._begun:
                span, window = self._begun.popleft()
                self._begin_next()
                yield from self._reader._records(span, window.result())
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Starts no more reads."""
        self._spans = iter(())
        for _, window in self._begun:
            window.cancel()

    def _begin_next(self) -> None:
        span = next(self._spans, None)
        if span is not None:
            self._begun.append((span, self._pool.submit(self._reader._read_window, span)))


class _OpenPack:
    """An open file, closed when its last reader drops it: other threads may use a file that the cache has evicted."""

    __slots__ = ("_descriptor", "_inode")

    def __init__(self, path: Path) -> None:
        self._descriptor = -1  # for ``__del__`` if the file cannot be opened
        self._descriptor = os.open(path, os.O_RDONLY)
        self._inode = os.fstat(self._descriptor).st_ino
        with contextlib.suppress(OSError):  # tmpfs and others do not support it: the page cache is used
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)

    def is_still(self, path: Path) -> bool:
        """Returns False if the path names another file; True if it names this file or, after retention, no file."""
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
        # This file system accepts O_DIRECT, but refuses to read with it.
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
        return os.preadv(self._descriptor, [buffer], offset)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _spans(refs: Iterable[BlobRef]) -> list[_Span]:
    """Returns spans that cover the distinct refs, in disk order."""
    spans: list[_Span] = []
    for ref in sorted(set(refs)):
        start = ref.offset // BLOCK_BYTES * BLOCK_BYTES
        end = -(-ref.end // BLOCK_BYTES) * BLOCK_BYTES  # rounded up
        span = spans[-1] if spans else None
        is_near = span is not None and span.pack == ref.pack and start <= span.end + GAP_BYTES
        if span is None or not is_near or end - span.start > WINDOW_BYTES:
            span = _Span(ref.pack, start, end)
            spans.append(span)
        span.end = max(span.end, end)
        span.refs.append(ref)
    return spans


def _checked(ref: BlobRef, window: memoryview, offset: int) -> memoryview:
    """Returns the data of the record at ``offset`` of a window.

    Raises:
        DamagedError: it is not the record that the ref refers to.
    """
    start = offset + HEADER.size
    data = window[start : start + ref.length]
    if len(data) != ref.length or window[offset:start] != header_of(ref, data):
        raise DamagedError(f"the bytes at {ref} are not what was written there")
    return data
