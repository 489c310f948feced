"""From rendered text to token ids, one message chunk at a time, and from character to token positions.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only.

Turn markers such as ``<|im_start|>`` are added tokens: the tokenizer cuts the text at them before it does anything
else, so a chunk that starts with one has the same ids wherever it stands. Chunks are therefore tokenised once, all
missing ones in one parallel batch, and remembered within a bound of bytes. Where a tokenizer gives no such guarantee,
the whole text is one chunk.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

__all__ = ["Chunk", "ChunkTokenizer", "added_token_texts"]

_SHORT = 64  # characters of header or trailer that are worth tokenising on their own
_MANY = 256  # chunks that are worth several threads
_BYTES_PER_TOKEN = 48  # an id as an object, its pointer, and two offsets in the chunks that need them


class Chunk:
    """A stretch of rendered text and its token ids."""

    __slots__ = ("boundaries", "ids", "offsets", "text")

    def __init__(self, text: str, ids: Iterable[int]) -> None:
        self.text = text
        self.ids = tuple(ids)
        self.boundaries: dict[int, tuple[int, int]] = {}
        self.offsets: tuple[array[int], array[int]] | None = None

    @property
    def cost(self) -> int:
        """Bytes that keeping this chunk takes, at most."""
        return sys.getsizeof(self.text) + _BYTES_PER_TOKEN * len(self.ids) + 400


def added_token_texts(tokenizer: Any) -> list[str]:
    """Gives the text of every added token, special or not."""
    return [str(token) for token in tokenizer.get_added_vocab()]


class ChunkTokenizer:
    """Tokenises rendered text exactly as the tokenizer would, remembering chunks; safe to share between threads."""

    def __init__(self, tokenizer: Any, chunk_markers: Sequence[str], end_marker: str, max_cache_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._markers = [marker for marker in chunk_markers if cuts_text_cleanly(tokenizer, marker)]
        self._end_marker = end_marker if cuts_text_cleanly(tokenizer, end_marker) else None
        self._cache: OrderedDict[str, Chunk] = OrderedDict()
        self._cache_bytes = 0
        self._max_cache_bytes = max_cache_bytes
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Travels to another process without what it remembers."""
        return {**self.__dict__, "_cache": OrderedDict(), "_cache_bytes": 0, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    @property
    def cache_bytes(self) -> int:
        """Bytes that the remembered chunks take; never above the bound."""
        return self._cache_bytes

    def chunks(self, texts: Sequence[str]) -> list[list[Chunk]]:
        """Tokenises several texts, all chunks that are not remembered in one batch over all cores."""
        pieces_per_text = [self._split(text) for text in texts]
        known: dict[str, Chunk] = {}
        with self._lock:
            for pieces in pieces_per_text:
                for piece in pieces:
                    if piece not in known and piece in self._cache:
                        self._cache.move_to_end(piece)
                        known[piece] = self._cache[piece]
        missing = list(dict.fromkeys(piece for pieces in pieces_per_text for piece in pieces if piece not in known))
        for piece, ids in zip(missing, self._encode(missing), strict=True):
            known[piece] = Chunk(piece, ids)
        self._remember([known[piece] for piece in missing])
        return [[known[piece] for piece in pieces] for pieces in pieces_per_text]

    def boundary(self, chunk: Chunk, position: int) -> tuple[int, int]:
        """Gives ``(before, after)``: tokens up to ``before`` end at or before this character, those from ``after`` on
        start at or after it. Where the two differ, the tokens between them lie on both sides.
        """
        if position <= 0:
            return 0, 0

        if position >= len(chunk.text):
            return len(chunk.ids), len(chunk.ids)

        found = chunk.boundaries.get(position)
        if found is None:
            found = self._boundary_at_known_text(chunk, position) or self._boundary_by_offsets(chunk, position)
            chunk.boundaries[position] = found
        return found

    def _split(self, text: str) -> list[str]:
        pieces = [text]
        for marker in self._markers:
            pieces = [part for piece in pieces for part in _split_before(piece, marker)]
        return [piece for piece in pieces if piece]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.truncation is not None or backend.padding is not None:
            encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            return encoded

        encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
        if len(texts) < _MANY:
            return [encoding.ids for encoding in encode(list(texts), add_special_tokens=False)]

        # The tokenizer's own threads are off in many trainers (TOKENIZERS_PARALLELISM, fork); it lets go of the
        # interpreter while it works, so that ours do as well.
        slices = [list(texts[start : start + _MANY // 4]) for start in range(0, len(texts), _MANY // 4)]
        with ThreadPoolExecutor(min(len(slices), os.cpu_count() or 1)) as pool:
            done = pool.map(lambda some: [one.ids for one in encode(some, add_special_tokens=False)], slices)
            return [ids for some in done for ids in some]

    def _remember(self, chunks: Sequence[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                if chunk.text not in self._cache and chunk.cost <= self._max_cache_bytes:
                    self._cache[chunk.text] = chunk
                    self._cache_bytes += chunk.cost
            while self._cache_bytes > self._max_cache_bytes:
                _, oldest = self._cache.popitem(last=False)
                self._cache_bytes -= oldest.cost

    def _boundary_at_known_text(self, chunk: Chunk, position: int) -> tuple[int, int] | None:
        """Recognises a header at the start or a trailer at the end by its own ids, without asking for offsets."""
        head, tail = chunk.text[:position], chunk.text[position:]
        if len(head) <= _SHORT and self._starts_with_marker(head):
            ids = self._ids_of_short(head)
            if ids is not None and chunk.ids[: len(ids)] == ids:
                return len(ids), len(ids)

        if self._end_marker is not None and len(tail) <= _SHORT and head.endswith(self._end_marker):
            ids = self._ids_of_short(self._end_marker + tail)
            if ids is not None and chunk.ids[-len(ids) :] == ids:
                at = len(chunk.ids) - len(ids) + 1
                return at, at

        return None

    def _starts_with_marker(self, text: str) -> bool:
        return any(text.startswith(marker) for marker in self._markers)

    def _ids_of_short(self, text: str) -> tuple[int, ...] | None:
        """Gives the ids of a text that its ids spell in full, or None if they do not."""
        ids = self.chunks([text])[0]
        if len(ids) != 1:
            return None

        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return None if unknown in ids[0].ids else ids[0].ids

    def _boundary_by_offsets(self, chunk: Chunk, position: int) -> tuple[int, int]:
        if chunk.offsets is None:
            chunk.offsets = self._offsets_of(chunk)
        starts, ends = chunk.offsets
        before = next((at for at, end in enumerate(ends) if end > position), len(ends))
        after = next((at for at in range(before, len(starts)) if starts[at] >= position), len(starts))
        return before, after

    def _offsets_of(self, chunk: Chunk) -> tuple[array[int], array[int]]:
        """Gives where each token starts and ends. Tokens tile the text: white space trimmed off is put back."""
        try:
            encoding = self._tokenizer(chunk.text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:  # a tokenizer written in Python: nothing inside the chunk can be decided
            return array("I", [0] * len(chunk.ids)), array("I", [len(chunk.text)] * len(chunk.ids))
        if list(encoding["input_ids"]) != list(chunk.ids):
            raise ValueError("this tokenizer gives different ids for the same text")

        starts, ends = array("I"), array("I")
        reached = 0
        for start, end in encoding["offset_mapping"]:
            starts.append(min(start, reached))
            reached = max(reached, end)
            ends.append(reached)
        return starts, ends


def cuts_text_cleanly(tokenizer: Any, marker: str) -> bool:
    """True when the tokenizer cuts any text at this marker first, so that the parts have ids of their own."""
    tokens = getattr(tokenizer, "added_tokens_decoder", None)
    if not marker or not tokens or getattr(tokenizer, "backend_tokenizer", None) is None:
        return False

    flags = next((token for token in tokens.values() if str(token) == marker), None)
    backend = tokenizer.backend_tokenizer
    if flags is None or flags.lstrip or flags.rstrip or flags.single_word:
        return False

    if (flags.normalized and _may_change_text(backend)) or getattr(backend, "encode_special_tokens", False):
        return False

    return not any(_may_overlap(str(token), marker) for token in tokens.values() if str(token) != marker)


def _may_change_text(backend: Any) -> bool:
    """True when the tokenizer has a normaliser that does something."""
    return backend.normalizer is not None and repr(backend.normalizer) != "Sequence(normalizers=[])"


def _may_overlap(token: str, marker: str) -> bool:
    """True when the two can share characters of one text, so that finding one hides the other."""
    if not token:
        return False

    if marker in token or token in marker:
        return True

    shortest = min(len(token), len(marker))
    return any(token[-size:] == marker[:size] or marker[-size:] == token[:size] for size in range(1, shortest))


def _split_before(text: str, marker: str) -> list[str]:
    first, *others = text.split(marker)
    return [first, *(marker + other for other in others)]
