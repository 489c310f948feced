"""The time that all processes of a data directory go by: the machine's clock, but for a jump of it until that is noted.

Leases, timeouts and retention compare times that are stored. When the machine's clock is set forward by a day, none of
them has aged by a day. The supervisor therefore leaves a mark of both clocks, the one that may be set and the one that
cannot, a few times a second. Whoever sees them apart by more than they can drift goes by the second one, until the
supervisor has moved what is stored (``Buffer.follow_clock``) and left another mark.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slime_plugins.rollout_buffer.storage.data_dir import open_lock_file

TOLERANCE_S = 1.0
"""The two clocks drift by less between two marks."""
_MARK = struct.Struct("<16sddI")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Mark(NamedTuple):
    """What both clocks said at one moment."""

    boot: bytes
    wall: float
    monotonic: float


class SharedClock:
    """Seconds since the epoch; call it. Safe to use from many threads and processes."""

    def __init__(
        self, data_dir: Path, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """``wall`` is the clock that may be set, ``monotonic`` the one that counts since the machine was started."""
        self._wall, self._monotonic = wall, monotonic
        self._boot = _boot()
        self._file: int | None = open_lock_file(data_dir / "clock")

    def __call__(self) -> float:
        """Returns the time; after a jump of the machine's clock that nobody has noted yet, without it."""
        jump = self.jump_s()
        return self._wall() - jump

    def jump_s(self) -> float:
        """Returns by how much the machine's clock was set since the last mark; 0 for what is mere drift."""
        mark = self._read()
        if mark is None:
            return 0.0
        ahead = (self._wall() - mark.wall) - (self._monotonic() - mark.monotonic)
        return ahead if abs(ahead) > TOLERANCE_S else 0.0

    def mark(self) -> None:
        """Notes both clocks: everybody goes by the machine's clock again. For the supervisor."""
        content = _MARK.pack(self._boot, self._wall(), self._monotonic(), 0)[:-4]
        if self._file is not None:
            os.pwrite(self._file, content + zlib.crc32(content).to_bytes(4, "little"), 0)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> _Mark | None:
        """The last mark; None for none, a torn one, or one from before the machine was started again."""
        try:
            content = b"" if self._file is None else os.pread(self._file, _MARK.size, 0)
        except OSError:
            return None
        if len(content) < _MARK.size:
            return None
        boot, wall, monotonic, checksum = _MARK.unpack(content)
        if boot != self._boot or checksum != zlib.crc32(content[:-4]):
            return None
        return _Mark(boot, wall, monotonic)


def _boot() -> bytes:
    try:
        return bytes.fromhex(_BOOT_ID.read_text(encoding="ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
