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
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_plugins.rollout_buffer.errors import DamagedError
from slime_plugins.rollout_buffer.packs import BLOCK_BYTES, HEADER, Place, header_of, pack_path

__all__ = ["PackReader"]

OPEN_PACKS = 64
WINDOW_BYTES = 2 * 1024 * 1024
"""How much is read at once, when no single record is larger. Each thread that reads holds so much memory meanwhile."""
GAP_BYTES = 64 * 1024
"""Records this close to each other are read together, with what lies between them."""
FREE_BUFFERS = 8


@dataclass(slots=True)
class _Span:
    """Records of one pack that are read together; ``start`` and ``end`` are whole blocks."""

    pack: int
    start: int
    end: int
    places: list[Place] = field(default_factory=list)


class PackReader:
    """Reads records from any pack and checks them. Safe to use from many threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenPack] = OrderedDict()
        self._buffers: list[mmap.mmap] = []

    def read(self, place: Place) -> bytes:
        """Returns the data at a place.

        Raises:
            DamagedError: the pack is gone, ends before, or holds something else there.
        """
        return next(bytes(data) for _, data in self.each([place]))

    def each(self, places: Iterable[Place]) -> Iterator[tuple[Place, memoryview]]:
        """Yields every place once with its data, in the order of the disk; the data is valid until the next step.

        Raises:
            DamagedError: as ``read``, for the first place that is damaged.
        """
        for span in _spans(places):
            with self._buffer(span.end - span.start) as buffer:
                got = self._fill(buffer, span)
                for place in span.places:
                    yield place, _checked(place, buffer[:got], place.offset - span.start)

    def close(self) -> None:
        """Lets go of the files."""
        with self._lock:
            self._files.clear()
            self._buffers.clear()

    @contextmanager
    def _buffer(self, size: int) -> Iterator[memoryview]:
        """Lends aligned memory that was used before, which the system need not find and clear first."""
        with self._lock:
            kept = self._buffers.pop() if self._buffers and size <= WINDOW_BYTES else None
        memory = kept or mmap.mmap(-1, max(size, WINDOW_BYTES))
        try:
            yield memoryview(memory)[:size]
        finally:
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
            raise DamagedError(f"the bytes at {span.places[0]} cannot be read: {error}") from error
        return got

    def _file(self, pack: int) -> _OpenPack:
        with self._lock:
            file = self._files.get(pack)
            if file is None:
                file = self._files[pack] = _OpenPack(pack_path(self._folder, pack))
            self._files.move_to_end(pack)
            while len(self._files) > OPEN_PACKS:
                self._files.popitem(last=False)
        return file


class _OpenPack:
    """A file that closes itself when its last reader has let it go: others may still read what the cache drops."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # tmpfs and some others cannot: through the page cache, then
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_DIRECT)

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


def _spans(places: Iterable[Place]) -> list[_Span]:
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


def _checked(place: Place, read: memoryview, at: int) -> memoryview:
    start = at + HEADER.size
    data = read[start : start + place.length]
    if len(data) != place.length or read[at:start] != header_of(data):
        raise DamagedError(f"the bytes at {place} are not what was written there")
    return data
