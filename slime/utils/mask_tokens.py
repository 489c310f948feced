"""Tokenises rendered text in cached chunks of one message each, and maps character to token positions.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only.

Turn markers such as ``<|im_start|>`` are added tokens: the tokenizer splits the text at them first, so that a chunk
that starts with one has the same ids everywhere. Chunks are therefore tokenised once, all missing ones in one parallel
batch, and cached up to a size limit. For a tokenizer without this guarantee, the whole text is one chunk.

Some templates render an answer without its thinking block once it is history. Their tokenizers also split any text
after a line break, so that the text of such an answer need not be tokenised again: a missing turn is composed of its
header and its body, and the body may be cached.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Lock
from typing import Any

_MAX_SHORT_TEXT = 64  # characters of a header or trailer that is tokenised separately
_MIN_CHUNKS_FOR_THREADS = 256
_BYTES_PER_TOKEN = 48  # an id as an object, its pointer, and two offsets in the chunks that need them
_BYTES_PER_CHUNK = 400  # its containers, without text and tokens
_THINKING_END = "</think>"
_LINE_BREAKS = "\r\n"
_PATTERNS_THAT_END_AT_LINE_BREAKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Split patterns of Qwen's tokenizers. None looks back, and no word contains a line break before its end: they always
split between a line break and a character that is no white space."""
_HARMLESS_NORMALIZERS = ({"type": "NFC"}, {"type": "Sequence", "normalizers": []})


class Chunk:
    """A stretch of rendered text and its token ids.

    ``boundaries`` caches the results of ``ChunkTokenizer.boundary`` by character. ``offsets`` are the first and the
    last character of each token, None until a boundary needs them.
    """

    __slots__ = ("boundaries", "ids", "offsets", "text")

    def __init__(self, text: str, ids: Iterable[int]) -> None:
        self.text = text
        self.ids = tuple(ids)
        self.boundaries: dict[int, tuple[int, int]] = {}
        self.offsets: tuple[array[int], array[int]] | None = None

    @property
    def cost(self) -> int:
        """Upper bound of the chunk's bytes in memory."""
        return sys.getsizeof(self.text) + _BYTES_PER_TOKEN * len(self.ids) + _BYTES_PER_CHUNK


def added_token_texts(tokenizer: Any) -> list[str]:
    """Returns the text of every added token."""
    return [str(token) for token in tokenizer.get_added_vocab()]


class ChunkTokenizer:
    """Tokenises rendered text exactly as the tokenizer, with a cache of chunks; safe to share between threads."""

    def __init__(
        self,
        tokenizer: Any,
        chunk_markers: Sequence[str],
        end_marker: str,
        max_cache_bytes: int,
        header: str | None = None,
    ) -> None:
        """``chunk_markers`` begin messages, ``end_marker`` ends a turn; ``header`` begins every assistant turn, None if
        it varies.
        """
        self._tokenizer = tokenizer
        self._header = header if header and cuts_text_at_line_starts(tokenizer) else None
        self._markers = [marker for marker in chunk_markers if cuts_text_cleanly(tokenizer, marker)]
        self._end_marker = end_marker if cuts_text_cleanly(tokenizer, end_marker) else None
        self._cache: OrderedDict[str, Chunk] = OrderedDict()
        self._cache_bytes = 0
        self._max_cache_bytes = max_cache_bytes
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Pickles without the cache."""
        return {**self.__dict__, "_cache": OrderedDict(), "_cache_bytes": 0, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes."""
        return self._cache_bytes

    def chunks(self, texts: Sequence[str]) -> list[list[Chunk]]:
        """Tokenises several texts: all chunks that are not in the cache, in one batch on all cores."""
        pieces_per_text = [self._split(text) for text in texts]
        known: dict[str, Chunk] = {}
        with self._lock:
            for pieces in pieces_per_text:
                for piece in pieces:
                    if piece not in known and piece in self._cache:
                        self._cache.move_to_end(piece)
                        known[piece] = self._cache[piece]
        missing = list(dict.fromkeys(piece for pieces in pieces_per_text for piece in pieces if piece not in known))
        known.update(self._tokenise(missing))
        return [[known[piece] for piece in pieces] for pieces in pieces_per_text]

    def boundary(self, chunk: Chunk, position: int) -> tuple[int, int]:
        """Returns ``(before, after)``: tokens before index ``before`` end at or before this character, and the tokens
        from ``after`` on start at or after it. If the two indices differ, the tokens between them cross the character.
        """
        if position <= 0:
            return 0, 0

        if position >= len(chunk.text):
            return len(chunk.ids), len(chunk.ids)

        boundary = chunk.boundaries.get(position)
        if boundary is None:
            boundary = self._boundary_at_known_text(chunk, position) or self._boundary_by_offsets(chunk, position)
            chunk.boundaries[position] = boundary
        return boundary

    def _split(self, text: str) -> list[str]:
        pieces = [text]
        for marker in self._markers:
            pieces = [part for piece in pieces for part in _split_before(piece, marker)]
        return [piece for piece in pieces if piece]

    def _tokenise(self, missing: Sequence[str]) -> dict[str, Chunk]:
        """Creates and caches the missing chunks. Of a turn whose body is cached, only the header is tokenised."""
        parts_of = {piece: self._cut(piece) for piece in missing}
        all_parts = list(dict.fromkeys(chain.from_iterable(parts_of.values())))
        with self._lock:
            ids = {part: self._cache[part].ids for part in all_parts if part in self._cache}
        new = [part for part in all_parts if part not in ids]
        ids.update(zip(new, map(tuple, self._encode(new)), strict=True))
        chunks = {
            piece: Chunk(piece, chain.from_iterable(ids[part] for part in parts)) for piece, parts in parts_of.items()
        }
        bodies = [Chunk(parts[1], ids[parts[1]]) for parts in parts_of.values() if len(parts) > 1]
        self._remember([*chunks.values(), *bodies])
        return chunks

    def _cut(self, piece: str) -> tuple[str, ...]:
        """Splits a turn into header (with its thinking block, if any) and body, if the tokenizer splits there."""
        if self._header is None or not piece.startswith(self._header):
            return (piece,)

        thinking_end = piece.rfind(_THINKING_END)
        start = len(self._header) if thinking_end < 0 else thinking_end + len(_THINKING_END)
        while start < len(piece) and piece[start] in _LINE_BREAKS:
            start += 1
        return (piece[:start], piece[start:]) if is_line_start(piece, start) else (piece,)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.truncation or backend.padding or backend.encode_special_tokens:
            # Other code may have set these in the shared tokenizer object; calling it applies the call's own settings.
            encoded: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            return encoded

        encode = getattr(backend, "encode_batch_fast", backend.encode_batch)
        if len(texts) < _MIN_CHUNKS_FOR_THREADS:
            return [encoding.ids for encoding in encode(list(texts), add_special_tokens=False)]

        # The tokenizer's own threads are off in many trainers (TOKENIZERS_PARALLELISM, fork); it releases the GIL, so
        # that Python threads work as well.
        size = _MIN_CHUNKS_FOR_THREADS // 4
        slices = [list(texts[start : start + size]) for start in range(0, len(texts), size)]
        with ThreadPoolExecutor(min(len(slices), os.cpu_count() or 1)) as pool:
            encodings_of_slices = pool.map(
                lambda texts_of_slice: encode(texts_of_slice, add_special_tokens=False), slices
            )
            return [encoding.ids for encodings in encodings_of_slices for encoding in encodings]

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
        """Finds the boundary of a header at the start or a trailer at the end by its ids, without offsets."""
        head, tail = chunk.text[:position], chunk.text[position:]
        if len(head) <= _MAX_SHORT_TEXT and any(head.startswith(marker) for marker in self._markers):
            ids = self._ids_of_short(head)
            if ids is not None and chunk.ids[: len(ids)] == ids:
                return len(ids), len(ids)

        if self._end_marker is not None and len(tail) <= _MAX_SHORT_TEXT and head.endswith(self._end_marker):
            ids = self._ids_of_short(self._end_marker + tail)
            if ids is not None and chunk.ids[-len(ids) :] == ids:
                after_marker = len(chunk.ids) - len(ids) + 1  # the first of these ids is the end marker
                return after_marker, after_marker

        return None

    def _ids_of_short(self, text: str) -> tuple[int, ...] | None:
        """Returns the ids of a text that is one chunk without unknown tokens; else None."""
        chunks = self.chunks([text])[0]
        if len(chunks) != 1:
            return None

        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return None if unknown in chunks[0].ids else chunks[0].ids

    def _boundary_by_offsets(self, chunk: Chunk, position: int) -> tuple[int, int]:
        if chunk.offsets is None:
            chunk.offsets = self._offsets_of(chunk)
        starts, ends = chunk.offsets
        before = next((index for index, end in enumerate(ends) if end > position), len(ends))
        after = next((index for index in range(before, len(starts)) if starts[index] >= position), len(starts))
        return before, after

    def _offsets_of(self, chunk: Chunk) -> tuple[array[int], array[int]]:
        """Returns where each token starts and ends. Tokens cover the text: trimmed white space is included."""
        try:
            encoding = self._tokenizer(chunk.text, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:  # a slow tokenizer has no offsets: nothing inside of the chunk can be decided
            return array("I", [0] * len(chunk.ids)), array("I", [len(chunk.text)] * len(chunk.ids))
        if list(encoding["input_ids"]) != list(chunk.ids):
            raise ValueError("this tokenizer returns different ids for the same text")

        starts, ends = array("I"), array("I")
        reached = 0
        for start, end in encoding["offset_mapping"]:
            starts.append(min(start, reached))
            reached = max(reached, end)
            ends.append(reached)
        return starts, ends


def cuts_text_cleanly(tokenizer: Any, marker: str) -> bool:
    """True if the tokenizer splits any text at this marker first, so that the parts are tokenised independently."""
    tokens = getattr(tokenizer, "added_tokens_decoder", None)
    if not marker or not tokens or getattr(tokenizer, "backend_tokenizer", None) is None:
        return False

    added = next((token for token in tokens.values() if str(token) == marker), None)
    if added is None or added.lstrip or added.rstrip or added.single_word:
        return False

    if getattr(tokenizer, "split_special_tokens", False) or (
        added.normalized and _may_change_text(tokenizer.backend_tokenizer)
    ):
        return False

    return not any(_may_overlap(str(token), marker) for token in tokens.values() if str(token) != marker)


def cuts_text_at_line_starts(tokenizer: Any) -> bool:
    """True if the tokenizer splits any text at every ``is_line_start``, so that the parts are tokenised independently.

    This holds for byte-level BPE with the known split patterns. NFC normalisation does not affect it: no character
    composes with a line break, and none is moved past it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _has_plain_byte_pairs(backend) or not _has_known_words(backend):
        return False

    tokens = tokenizer.added_tokens_decoder.values()
    return not any(
        token.lstrip
        or token.rstrip
        or token.single_word
        or any(line_break in str(token) for line_break in _LINE_BREAKS)
        for token in tokens
    )


def is_line_start(text: str, position: int) -> bool:
    """True between a line break and a character that is white space for no tokenizer."""
    if not 0 < position < len(text) or text[position - 1] not in _LINE_BREAKS:
        return False

    return text[position].isalnum() or "!" <= text[position] <= "~"  # the visible ASCII characters


def _has_plain_byte_pairs(backend: Any) -> bool:
    model = backend.model
    if type(model).__name__ != "BPE" or model.dropout:
        return False

    return not (model.continuing_subword_prefix or model.end_of_word_suffix)


def _has_known_words(backend: Any) -> bool:
    if backend.normalizer is not None and _state_of(backend.normalizer) not in _HARMLESS_NORMALIZERS:
        return False

    state = _state_of(backend.pre_tokenizer) if backend.pre_tokenizer is not None else {}
    match state.get("pretokenizers"):
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return pattern in _PATTERNS_THAT_END_AT_LINE_BREAKS
    return False


def _state_of(component: Any) -> Any:
    return json.loads(component.__getstate__())


def _may_change_text(backend: Any) -> bool:
    """True if the tokenizer has a normaliser that is not empty."""
    return backend.normalizer is not None and repr(backend.normalizer) != "Sequence(normalizers=[])"


def _may_overlap(token: str, marker: str) -> bool:
    """True if token and marker can overlap in a text, so that the tokenizer may find the token and not the marker."""
    if not token:
        return False

    if marker in token or token in marker:
        return True

    shortest = min(len(token), len(marker))
    return any(token[-size:] == marker[:size] or marker[-size:] == token[:size] for size in range(1, shortest))


def _split_before(text: str, marker: str) -> list[str]:
    first, *others = text.split(marker)
    return [first, *(marker + other for other in others)]
