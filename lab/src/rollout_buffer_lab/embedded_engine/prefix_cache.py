"""A prefix cache: KV of finished requests, for later turns and for members of a group."""

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

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._entries: list[_Entry] = []

    def find(self, ids: Sequence[int]) -> tuple[int, StoredKeys]:
        """Returns the longest common prefix with a stored sequence, at most all ids but one, and its keys; else 0.

        The last id is left over, because its logits have to be computed.
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
        """Stores a sequence, replacing stored prefixes of it, and evicts the least recently used."""
        new = np.asarray(ids, dtype=np.int64)
        size = sum(tensor.numel() * tensor.element_size() for pair in stored for tensor in pair)
        if size > self._most_bytes or not len(new):
            return
        self._entries = [entry for entry in self._entries if _common_prefix(entry.ids, new) < len(entry.ids)]
        self._entries.append(_Entry(new, stored, size))
        while len(self._entries) > MAX_ENTRIES or sum(entry.size for entry in self._entries) > self._most_bytes:
            self._entries.pop(0)

    def flush(self) -> None:
        self._entries.clear()


def _common_prefix(left: Ids, right: Ids) -> int:
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter
