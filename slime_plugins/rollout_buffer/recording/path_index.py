"""Pure: finds the recorded turns that a request may continue, or comes near to, without a comparison with each of them.

Messages have a hash that is equal for all that the rule of the job treats as equal; a run of results or of a user's
messages also has one for all its orders and mergers. A turn is kept under the hash of each beginning of its messages.
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
    """The first messages of a request, up to its message ``end``, as a hash of their place and of what they say."""

    end: int
    hash: int


class PathIndex(Generic[Item]):
    """Items by the messages that lead to them, in their ``order``. A place, such as a parent, tells equal messages in
    two of them apart."""

    def __init__(self, rule: MessageMatching, order: Callable[[Item], int]) -> None:
        self._rule = rule
        self._order = order
        self._by_whole: defaultdict[int, list[Item]] = defaultdict(list)
        self._by_beginning: defaultdict[int, list[Item]] = defaultdict(list)

    def add(self, place: Hashable, context: Sequence[Fingerprint], reply: Fingerprint, item: Item) -> None:
        for found, key in self._keys(place, context, reply):
            insort(found[key], item, key=self._order)

    def remove(self, place: Hashable, context: Sequence[Fingerprint], reply: Fingerprint, item: Item) -> None:
        for found, key in self._keys(place, context, reply):
            found[key].remove(item)

    def beginnings(self, place: Hashable, sent: Sequence[Fingerprint], start: int) -> list[Beginning]:
        """Returns the beginnings of a request from one of its messages on, the shortest first."""
        return list(_beginnings(self._rule, place, sent, start))

    def matching(self, beginnings: Sequence[Beginning]) -> list[Item]:
        """Returns all items that the request may continue, and perhaps others."""
        found = (one for beginning in beginnings for one in self._by_whole.get(beginning.hash, ()))
        return list(dict.fromkeys(found))

    def sharing(self, beginning: Beginning) -> Iterator[Item]:
        """Yields the items with this beginning, the latest first. No other one shares as many messages with the
        request."""
        return reversed(self._by_beginning.get(beginning.hash, ()))

    def _keys(
        self, place: Hashable, context: Sequence[Fingerprint], reply: Fingerprint
    ) -> list[tuple[defaultdict[int, list[Item]], int]]:
        shared = list(_beginnings(self._rule, place, context, 0))
        whole = [hash((shared[-1].hash, message_key(self._rule, one))) for one in (reply, *reply.as_sent)]
        keys = dict.fromkeys([*(one.hash for one in shared), *whole])
        if reply.is_empty:  # clients leave it out
            whole += [one.hash for one in shared if one.end == len(context)]
        return [*((self._by_whole, key) for key in dict.fromkeys(whole)), *((self._by_beginning, key) for key in keys)]


def _beginnings(
    rule: MessageMatching, place: Hashable, messages: Sequence[Fingerprint], start: int
) -> Iterator[Beginning]:
    """Yields a hash after each message, and one more after each run that may be reordered or merged."""
    at, before = start, hash(place)
    yield Beginning(at, before)
    for run in runs(messages[start:]):
        within = before
        for one in run:
            at, within = at + 1, hash((within, message_key(rule, one)))
            yield Beginning(at, within)
        outline = None if run[0].role == ASSISTANT else outline_of(rule, run)
        before = within if outline is None else before if not any(outline) else hash((before, outline))
        if outline is not None:
            yield Beginning(at, before)
