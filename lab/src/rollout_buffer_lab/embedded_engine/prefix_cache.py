"""A prefix cache: the KV cache of finished requests, for later turns and for other members of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rollout_buffer_lab.embedded_engine.kv_cache import StoredKeys

MAX_ENTRIES: Final = 512  # each is compared with each new prompt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Entry:
    ids: Ids
    stored: StoredKeys
    size: int


class PrefixCache:
    """Stores the most recently used sequences within a limit of bytes. Its caller flushes it when weights change."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: list[_Entry] = []

    def find(self, ids: Sequence[int]) -> tuple[int, StoredKeys]:
        """Returns the length of the longest prefix shared with a stored sequence, and what is stored of that sequence.

        The length is 0 if none is shared, and never covers the last id, because its logits have to be computed.
        """
        wanted = np.asarray(ids[:-1], dtype=np.int64)
        shared = [_common_prefix(entry.ids, wanted) for entry in self._entries]
        if not shared or max(shared) == 0:
            return 0, []
        best = int(np.argmax(shared))
        entry = self._entries.pop(best)
        self._entries.append(entry)
        return shared[best], entry.stored

    def keep(self, ids: Sequence[int], stored: StoredKeys) -> None:
        """Stores a sequence in place of stored prefixes of it; evicts the least recently used beyond the limits."""
        new = np.asarray(ids, dtype=np.int64)
        size = sum(tensor.numel() * tensor.element_size() for pair in stored for tensor in pair)
        if size > self._max_bytes or not len(new):
            return
        self._entries = [entry for entry in self._entries if _common_prefix(entry.ids, new) < len(entry.ids)]
        self._entries.append(_Entry(new, stored, size))
        while len(self._entries) > MAX_ENTRIES or sum(entry.size for entry in self._entries) > self._max_bytes:
            self._entries.pop(0)

    def flush(self) -> None:
        self._entries.clear()


def _common_prefix(left: Ids, right: Ids) -> int:
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter
