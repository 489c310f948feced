"""A long document: its length, chunks and search index. Prompts hold only what a tool shows of it.

Documents, chunks and indices are shared by all episodes with the same text, so that the members of a group do not
compute them again. Words are counted and indices built in threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.install_hints import install_extra

_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without spaces between words
_WORD = re.compile(rf"[{_UNSPACED}]{{1,2}}|[^\s{_UNSPACED}]{{1,40}}")
"""A word of a chunk: of limited length, so that the length of a chunk is limited too."""
_TERM = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
"""A word to search for: without punctuation."""
_BLOCK_CHARACTERS = 16_000
"""Tokens are counted in blocks of this length."""
_MAX_CACHED_CHARACTERS = 64_000_000
_INDICES_PER_DOCUMENT = 4


def require_search_library() -> Any:
    """Returns the BM25 library.

    Raises:
        ConfigError: it is not installed; names the extra to install.
    """
    try:
        library = importlib.import_module("bm25s")
    except ImportError as error:
        raise ConfigError(f"searchEngine needs bm25s ({error}): {install_extra('context-editing')}") from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import sets DEBUG, which logs a line for each index
    return library


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A chunk that matches a query, and its BM25 score (above 0)."""

    chunk_id: int
    score: float


class ChunkIndex:
    """A document in chunks of ``chunk_words`` words, with a BM25 index. Neighbours share ``overlap`` words."""

    def __init__(self, text: str, *, chunk_words: int, overlap: int) -> None:
        self.chunks = _cut(text, chunk_words, overlap)
        terms = [_terms(chunk) for chunk in self.chunks]
        self._scorer = _scorer(terms) if any(terms) else None

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Returns up to ``top_k`` chunks that hold a word of the query, best first; equal scores in document order."""
        terms = _terms(query)
        if self._scorer is None or not terms:
            return []
        scores = [float(score) for score in self._scorer.get_scores(terms)]
        order = sorted(range(len(scores)), key=lambda chunk_id: (-scores[chunk_id], chunk_id))
        return [Hit(chunk_id=chunk_id, score=scores[chunk_id]) for chunk_id in order[:top_k] if scores[chunk_id] > 0]


class Document:
    """One text and its sha256."""

    def __init__(self, text: str, sha256: str) -> None:
        self.text = text
        self.sha256 = sha256
        self._token_count: int | None = None
        self._word_count: int | None = None
        self._indices: OrderedDict[tuple[int, int], ChunkIndex] = OrderedDict()
        self._busy = asyncio.Lock()

    async def word_count(self) -> int:
        """Returns the number of words."""
        async with self._busy:
            if self._word_count is None:
                self._word_count = await asyncio.to_thread(lambda: sum(1 for _ in _WORD.finditer(self.text)))
            return self._word_count

    async def token_count(self, count: Callable[[str], int]) -> int:
        """Returns the number of tokens. It is counted in blocks, and may be wrong by a token or two per block."""
        async with self._busy:
            if self._token_count is None:
                total = 0
                for start in range(0, len(self.text), _BLOCK_CHARACTERS):
                    total += count(self.text[start : start + _BLOCK_CHARACTERS])
                    await asyncio.sleep(0)  # lets other episodes run between two blocks
                self._token_count = total
            return self._token_count

    async def index(self, *, chunk_words: int, overlap: int) -> ChunkIndex:
        """Returns the index with these parameters; the most recently built indices are cached."""
        key = (chunk_words, overlap)
        async with self._busy:
            if key not in self._indices:
                index = await asyncio.to_thread(ChunkIndex, self.text, chunk_words=chunk_words, overlap=overlap)
                self._indices[key] = index
                while len(self._indices) > _INDICES_PER_DOCUMENT:
                    self._indices.popitem(last=False)
            return self._indices[key]


class DocumentCache:
    """The most recently used documents, up to ``max_characters`` together; the newest is cached at any length."""

    def __init__(self, max_characters: int = _MAX_CACHED_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._documents: OrderedDict[str, Document] = OrderedDict()

    def document(self, text: str) -> Document:
        """Returns the document with this text, from the cache if it is there."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # JSON may hold lone surrogates
        sha256 = hashlib.sha256(clean.encode()).hexdigest()
        document = self._documents.pop(sha256, None) or Document(clean, sha256)
        self._documents[sha256] = document
        while (
            len(self._documents) > 1 and sum(len(each.text) for each in self._documents.values()) > self._max_characters
        ):
            self._documents.popitem(last=False)
        return document


def _cut(text: str, chunk_words: int, overlap: int) -> list[str]:
    spans = [match.span() for match in _WORD.finditer(text)]
    # A chunk that started within the last ``overlap`` words would repeat the end of the chunk before it.
    starts = range(0, max(len(spans) - overlap, 1), chunk_words - overlap)
    return [_text_of(text, spans[start : start + chunk_words]) for start in starts if spans]


def _text_of(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Returns the text from the first span's start to the last span's end."""
    return text[spans[0][0] : spans[-1][1]]


def _terms(text: str) -> list[str]:
    return _TERM.findall(text.lower())


def _scorer(terms: list[list[str]]) -> Any:
    scorer = require_search_library().BM25()
    scorer.index(terms, show_progress=False)
    return scorer
