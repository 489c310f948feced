"""Finds the recorded turns that a request may continue or partly shares, without comparing it with each turn. Pure.

Messages that the rule of the job treats as equal have equal hashes. A run of tool results or of a user's messages
also has a hash that is equal for all its orders and mergers. A turn is kept under the hash of each beginning of its
messages.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from slime_plugins.rollout_buffer.recording.message_matching import (
    ASSISTANT,
    Fingerprint,
    message_key,
    outline_of,
    runs,
)
from slime_plugins.rollout_buffer.types import MessageMatching

Item = TypeVar("Item")


class Beginning(NamedTuple):
    """The messages of a request before index ``end``, as a hash of their content and of the place where they begin."""

    end: int
    hash: int


class PathIndex(Generic[Item]):
    """Items by the messages that lead to them, sorted by ``order``. Equal messages in two places, such as after two
    parents, are kept apart."""

    def __init__(self, rule: MessageMatching, order: Callable[[Item], int]) -> None:
        self._rule = rule
        self._order = order
        self._by_whole: defaultdict[int, list[Item]] = defaultdict(list)
        self._by_beginning: defaultdict[int, list[Item]] = defaultdict(list)

    def add(self, place: Hashable, context: Sequence[Fingerprint], reply: Fingerprint, item: Item) -> None:
        for table, key in self._keys(place, context, reply):
            insort(table[key], item, key=self._order)

    def remove(self, place: Hashable, context: Sequence[Fingerprint], reply: Fingerprint, item: Item) -> None:
        for table, key in self._keys(place, context, reply):
            table[key].remove(item)

    def beginnings(self, place: Hashable, sent: Sequence[Fingerprint], start: int) -> list[Beginning]:
        """Returns the beginnings of a request from one of its messages on, the shortest first."""
        return list(_beginnings(self._rule, place, sent, start))

    def matching(self, beginnings: Sequence[Beginning]) -> list[Item]:
        """Returns all items that the request may continue, and perhaps others."""
        items = (item for beginning in beginnings for item in self._by_whole.get(beginning.hash, ()))
        return list(dict.fromkeys(items))

    def sharing(self, beginning: Beginning) -> Iterator[Item]:
        """Yields the items with this beginning, the latest first. No other item shares as many messages with the
        request."""
        return reversed(self._by_beginning.get(beginning.hash, ()))

    def _keys(
        self, place: Hashable, context: Sequence[Fingerprint], reply: Fingerprint
    ) -> list[tuple[defaultdict[int, list[Item]], int]]:
        shared = list(_beginnings(self._rule, place, context, 0))
        whole = [hash((shared[-1].hash, message_key(self._rule, one))) for one in (reply, *reply.as_sent)]
        keys = dict.fromkeys([*(one.hash for one in shared), *whole])
        if reply.is_empty:  # clients leave out an empty reply
            whole += [one.hash for one in shared if one.end == len(context)]
        return [*((self._by_whole, key) for key in dict.fromkeys(whole)), *((self._by_beginning, key) for key in keys)]


def _beginnings(
    rule: MessageMatching, place: Hashable, messages: Sequence[Fingerprint], start: int
) -> Iterator[Beginning]:
    """Yields a hash after each message, and one more after each run that may be reordered or merged."""
    end, before = start, hash(place)
    yield Beginning(end, before)
    for run in runs(messages[start:]):
        within = before
        for one in run:
            end, within = end + 1, hash((within, message_key(rule, one)))
            yield Beginning(end, within)
        outline = None if run[0].role == ASSISTANT else outline_of(rule, run)
        if outline is None:
            before = within
            continue
        if any(outline):  # a run without any content, such as that of an empty message, may be left out
            before = hash((before, outline))
        yield Beginning(end, before)
