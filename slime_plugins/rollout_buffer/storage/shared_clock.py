"""The clock of all processes of a data directory: the wall clock, corrected for jumps that are not applied yet.

Leases, timeouts and retention compare stored times. If the wall clock is set forward by a day, none of them has aged by
a day. The supervisor therefore stores a reference of both clocks, wall and monotonic, a few times a second. A process
that sees them differ by more than drift subtracts the difference, until the supervisor has moved the stored times
(``Buffer.follow_clock``) and stored a new reference.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from slime_plugins.rollout_buffer.observability.process_status import boot_id
from slime_plugins.rollout_buffer.storage.data_dir import open_lock_file

TOLERANCE_S = 1.0
"""A smaller difference between the two clocks counts as drift, not as a jump."""
_REFERENCE = struct.Struct("<16sddI")
"""Boot id, wall clock, monotonic clock, crc32 of the other three."""


class SharedClock:
    """Seconds since the epoch; call it. Safe to use from many threads and processes."""

    def __init__(
        self, data_dir: Path, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """``wall`` and ``monotonic`` are replaced in tests."""
        self._wall, self._monotonic = wall, monotonic
        self._boot = bytes.fromhex(boot_id().replace("-", "")) or bytes(16)  # zeros where the system has no boot id
        self._file: int | None = open_lock_file(data_dir / "clock")

    def __call__(self) -> float:
        """Returns the time of the wall clock, corrected for a jump since the last reference."""
        jump = self.jump_s()
        return self._wall() - jump

    def jump_s(self) -> float:
        """Returns the seconds by which the wall clock was set since the last reference; 0 within ``TOLERANCE_S``."""
        reference = self._read()
        if reference is None:
            return 0.0
        wall, monotonic = reference
        ahead = (self._wall() - wall) - (self._monotonic() - monotonic)
        return ahead if abs(ahead) > TOLERANCE_S else 0.0

    def store_reference(self) -> None:
        """Stores a new reference: all processes use the uncorrected wall clock again. For the supervisor."""
        content = _REFERENCE.pack(self._boot, self._wall(), self._monotonic(), 0)[:-4]  # without the checksum
        if self._file is not None:
            os.pwrite(self._file, content + zlib.crc32(content).to_bytes(4, "little"), 0)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> tuple[float, float] | None:
        """Returns the last reference; None if there is none, it is torn, or the machine was rebooted since."""
        try:
            content = b"" if self._file is None else os.pread(self._file, _REFERENCE.size, 0)
        except OSError:
            return None
        if len(content) < _REFERENCE.size:
            return None
        boot, wall, monotonic, checksum = _REFERENCE.unpack(content)
        if boot != self._boot or checksum != zlib.crc32(content[:-4]):
            return None
        return wall, monotonic
