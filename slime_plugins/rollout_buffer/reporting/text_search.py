"""Text search in the messages of stored trajectories: newest first, page by page.

There is no index: a search reads one payload after the other until its page is full or its time limit is reached,
and returns a cursor. It holds one payload in memory at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import orjson

from slime_plugins.rollout_buffer.errors import DamagedError, UnavailableError
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.reporting.message_texts import MessageText, message_texts
from slime_plugins.rollout_buffer.wire.query_params import SearchQuery
from slime_plugins.rollout_buffer.wire.trajectory_replies import FoundText, SearchHit, SearchPage

PAGE_TIME_LIMIT_S = 1.5
"""Time limit of a page, which is then returned with a cursor."""
MAX_CONCURRENT_SEARCHES = 2
"""Limit of concurrent searches of a process; further searches are refused."""
KEYS_PER_QUERY = 200
CONTEXT_CHARACTERS = 90
"""Characters shown on either side of a match."""


class TextSearch:
    """Searches stored messages. Thread-safe."""

    def __init__(self, inspection: Inspection, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds, for the time limit."""
        self._inspection = inspection
        self._clock = clock
        self._running = threading.BoundedSemaphore(MAX_CONCURRENT_SEARCHES)

    def page(self, query: SearchQuery) -> SearchPage:
        """Returns one page of trajectories with the text in their messages, newest first.

        Raises:
            NotFoundError: the job that is asked for does not exist.
            UnavailableError: ``MAX_CONCURRENT_SEARCHES`` searches are running.
        """
        if not self._running.acquire(blocking=False):
            raise UnavailableError(f"{MAX_CONCURRENT_SEARCHES} searches are running already; try again later")
        try:
            return self._page(query)
        finally:
            self._running.release()

    def _page(self, query: SearchQuery) -> SearchPage:
        until = self._clock() + PAGE_TIME_LIMIT_S
        needle = _Needle(query.text)
        hits: list[tuple[int, FoundText]] = []
        searched = unreadable = 0
        cursor: int | None
        for cursor in self._keys(query):
            searched += 1
            try:
                found = needle.first_in(self._inspection.payload(cursor))
            except DamagedError:
                unreadable += 1
                found = None
            if found is not None:
                hits.append((cursor, found))
            if len(hits) >= query.limit or self._clock() >= until:
                break
        else:
            cursor = None
        entries = self._inspection.entries([key for key, _ in hits])
        return SearchPage(
            hits=[SearchHit(**entry, **found) for entry, (_, found) in zip(entries, hits, strict=True)],
            searched=searched,
            unreadable=unreadable,
            out_of_time=cursor is not None and len(hits) < query.limit,
            next_cursor=cursor,
        )

    def _keys(self, query: SearchQuery) -> Iterator[int]:
        """Yields the keys of the trajectories that pass the filters, from the cursor on."""
        cursor = query.cursor
        while keys := self._inspection.keys_before(query, cursor, KEYS_PER_QUERY):
            yield from keys
            cursor = keys[-1]


def _forms(text: str) -> tuple[bytes, bytes]:
    """Returns a text as a JSON string has it, and as arguments have it that are no string."""
    return orjson.dumps(text)[1:-1], text.encode()


def _occurs(forms: tuple[bytes, bytes], body: bytes) -> bool:
    return forms[0] in body or forms[1] in body


class _Needle:
    """A case-insensitive search text."""

    def __init__(self, text: str) -> None:
        self._text = text.lower()
        # message_texts joins a call's name and arguments, which are apart in a payload, with a space.
        words = self._text.split(" ")
        cuts = [(" ".join(words[:cut]), " ".join(words[cut:])) for cut in range(len(words))]
        # Payload bytes are lowered as ASCII only.
        self._cuts = [[_forms(part) for part in cut] for cut in cuts] if text.isascii() else []

    def first_in(self, body: bytes) -> FoundText | None:
        """Returns the first match in a payload's messages and the number of matching texts; None without a match."""
        if self._cuts and not self._may_occur_in(body.lower()):
            return None  # most payloads need not be parsed
        payload = orjson.loads(body)
        texts = [each for each in message_texts(payload) if self._text in each.text.lower()]
        return self._describe(texts[0], len(texts)) if isinstance(payload, Mapping) and texts else None

    def _may_occur_in(self, lowered: bytes) -> bool:
        return any(_occurs(before, lowered) and _occurs(after, lowered) for before, after in self._cuts)

    def _describe(self, hit: MessageText, places: int) -> FoundText:
        start = hit.text.lower().find(self._text)
        end = start + len(self._text)
        return FoundText(
            turn=hit.turn,
            role=hit.role,
            before=("…" if start > CONTEXT_CHARACTERS else "") + hit.text[max(0, start - CONTEXT_CHARACTERS) : start],
            found=hit.text[start:end],
            after=hit.text[end : end + CONTEXT_CHARACTERS] + ("…" if len(hit.text) > end + CONTEXT_CHARACTERS else ""),
            places=places,
        )
