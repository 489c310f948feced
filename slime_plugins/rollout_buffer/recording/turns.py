"""The sampled turns of a session, as a tree whose paths are exactly the ids that the engine was sent. Pure.

    root                prompt ids of the first request
     └─ turn            + sampled ids
         └─ turn        + bridge ids of the new messages, + sampled ids
         └─ turn        another sample of the same request, or an edited history: another branch

A request whose messages begin with those of a recorded path continues from the ids of that path; the path
is neither rendered nor tokenised again. Each turn holds only its own ids, so a session's memory is linear in its
length. Every path from the root to a leaf becomes one training row.
"""

from __future__ import annotations

import sys
from array import array
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.recording.message_matching import (
    ASKED_AGAIN,
    NOTHING,
    OTHER_CONVERSATION,
    OTHER_TOOLS,
    Comparison,
    Difference,
    Fingerprint,
    Thinking,
    compare,
    fingerprint,
    is_same,
    message_key,
)
from slime_plugins.rollout_buffer.recording.messages import digest
from slime_plugins.rollout_buffer.recording.path_index import Beginning, PathIndex
from slime_plugins.rollout_buffer.types import Generation, Message, MessageMatching

MAX_FINGERPRINTS = 20_000
MAX_COMPARED_TURNS = 3
"""If a turn has more children, a request is compared only with those that the index finds."""

BY_NUMBER = attrgetter("number")


@dataclass(slots=True, eq=False)
class Turn:
    """One sampled turn. ``name`` is unique in the session, also before the turn has a number; it may be empty.

    ``request`` is the digest of the turn's request, ``key`` that of the prompt's inputs other than messages,
    ``message`` the reply in the form of a client's message, and ``created`` the time of the reply. ``context`` has the
    fingerprints of the messages since the parent turn; ``context_ids`` and ``images`` have the ids and images of the
    prompt after those of the parent's path. ``reply`` is the fingerprint of ``message``; ``thinking`` says where its
    text holds thoughts.
    ``from_start``: the context covers the whole request. This holds for roots, and for a turn whose ids continue its
    parent's path although its messages do not. ``tolerated`` names the parts in which the request differed from the
    path that it continues, ``difference`` why it continues no other path.
    ``sampled`` has prompt ids only if the engine ran other ids than those of the path.
    ``is_closed``: the sampled ids end with the end-of-turn token. ``is_unusable``: the turn holds a token that no
    prompt may hold, so that no turn can continue it. ``writer`` names the process that sampled the turn.
    ``sent``: whether the turn's answer reached the client; None while it is being sent, or if only ``writer`` knows.
    """

    parent: Turn | None
    number: int
    request: bytes
    key: bytes
    context: tuple[Fingerprint, ...]
    context_ids: array[int]
    images: tuple[str, ...]
    sampled: Generation
    message: Message
    created: float
    from_start: bool
    is_closed: bool
    is_unusable: bool = False
    name: str = ""
    writer: str = ""
    tolerated: tuple[str, ...] = ()
    difference: Difference | None = None
    thinking: Thinking = Thinking.FROM_START
    sent: bool | None = None
    children: list[Turn] = field(default_factory=list)
    reply: Fingerprint = field(init=False)

    def __post_init__(self) -> None:
        self.reply = fingerprint(self.message, digest(self.message), self.thinking)

    @property
    def own_length(self) -> int:
        """Number of ids that this turn adds to its parent's path."""
        return len(self.context_ids) + len(self.sampled.output_ids)

    @property
    def record_bytes(self) -> int:
        """Bytes of the turn's token records."""
        return sum(len(one.data or b"") for one in self.sampled.records.values())

    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    def held_ids(self) -> list[int]:
        """All ids of the path, this turn's output included."""
        ids: list[int] = []
        for turn in self.path():
            ids += turn.context_ids
            ids += turn.sampled.output_ids
        return ids

    def held_images(self) -> tuple[str, ...]:
        """The images of the path, in the order of their placeholders."""
        return tuple(image for turn in self.path() for image in turn.images)


class Match(NamedTuple):
    """The recorded part of a request: its first ``consumed`` messages end with the reply of ``turn``. If no part is
    recorded, ``turn`` is None and ``consumed`` 0. ``difference``: why the request does not continue the nearest of the
    other paths."""

    turn: Turn | None
    consumed: int
    tolerated: frozenset[str] = NOTHING
    difference: Difference | None = None


_NearTurn = tuple[Difference, int]
"""Why a request does not continue a turn, and the turn's number."""


class Recording:
    """The turns of one session. ``key`` identifies the inputs of a prompt other than messages, such as tools."""

    def __init__(self, matching: MessageMatching = MessageMatching.STRICT) -> None:
        self.matching = matching
        self._roots: list[Turn] = []
        self._entries: list[Turn] = []
        """Turns whose context covers the whole request, in order of their numbers."""
        self._index: PathIndex[Turn] = PathIndex(matching, order=BY_NUMBER)
        self._by_message: defaultdict[tuple[int, Hashable], list[Turn]] = defaultdict(list)
        """Entries by index and key of their first message, and of their second message."""
        self._by_request: dict[bytes, Turn] = {}
        self._fingerprints: dict[bytes, Fingerprint] = {}
        self.last_number = 0
        self.num_turns = 0
        self.num_ids = 0
        self.record_bytes = 0

    def fingerprints(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[Fingerprint, ...]:
        """Returns the fingerprints of messages; those of earlier requests, whose messages most requests repeat, are
        cached."""
        if len(self._fingerprints) > MAX_FINGERPRINTS:
            self._fingerprints.clear()
        for message, exact in zip(messages, digests, strict=True):
            if exact not in self._fingerprints:
                self._fingerprints[exact] = fingerprint(message, exact)
        return tuple(self._fingerprints[exact] for exact in digests)

    def find(self, key: bytes, sent: tuple[Fingerprint, ...]) -> Match:
        """Returns the longest recorded path that is a prefix of the messages.

        Of equally long paths, such as those of one request that was sampled twice with the same reply, the path with
        the fewest tolerated differences is returned, and of these the latest.
        """
        best, nearest = Match(None, 0), None
        open_ends: list[tuple[Turn | None, int, frozenset[str]]] = [(None, 0, NOTHING)]
        crowded: list[tuple[Turn | None, list[Beginning]]] = []
        # Depth first: after a turn that the request follows, its children are compared with the messages from ``start``
        # on. A turn that covers the whole request is compared as an entry, not as a child.
        while open_ends:
            parent, start, tolerated = open_ends.pop()
            siblings = self._entries if parent is None else parent.children
            # Of many siblings only those are compared that the index finds: no other can be continued.
            if len(siblings) > MAX_COMPARED_TURNS:
                crowded.append((parent, self._index.beginnings(key if parent is None else parent.number, sent, start)))
                siblings = self._index.matching(crowded[-1][1])
            for turn in siblings:
                if turn.from_start is not (parent is None):
                    continue
                end, newly_tolerated, difference = self._compared(turn, key, sent, start)
                if difference is not None:
                    nearest = _nearer(nearest, (difference, turn.number))
                    continue
                match = Match(turn, end, tolerated | newly_tolerated)
                best = max(best, match, key=_depth)
                open_ends.append((turn, end, match.tolerated))
        # The siblings that were left out may be nearer. The places visited last are mostly deepest: a near turn there
        # ends the search in the others early.
        for parent, beginnings in reversed(crowded):
            nearest = self._nearest(nearest, parent, key, sent, beginnings)
        return best if nearest is None else best._replace(difference=nearest[0])

    def _nearest(
        self,
        nearest: _NearTurn | None,
        parent: Turn | None,
        key: bytes,
        sent: tuple[Fingerprint, ...],
        beginnings: Sequence[Beginning],
    ) -> _NearTurn | None:
        """Returns the nearest turn after ``parent`` that the request does not continue, unless ``nearest`` is
        nearer."""
        start = beginnings[0].end
        # Groups of turns, nearest first, each with the ``_nearness`` that its turns can have at best.
        groups = [((one.end, True), self._index.sharing(one)) for one in reversed(beginnings) if one.end or parent]
        if parent is None:  # of the paths without a common beginning, one with equal second messages is the nearest
            keys = enumerate(message_key(self.matching, one) for one in sent[:2])
            groups += [((0, True), reversed(self._by_message.get(place, ()))) for place in keys]
            groups.append(((0, False), reversed(self._entries)))
        for best_possible, turns in groups:
            if nearest is not None and _nearness(nearest) > (*best_possible, sys.maxsize):
                break
            for turn in turns:
                difference = self._compared(turn, key, sent, start).difference
                if difference is None:
                    continue
                nearest = _nearer(nearest, (difference, turn.number))
                if _nearness((difference, turn.number)) >= best_possible:
                    break  # the other turns of this group are older, and no nearer
        return nearest

    def _compared(self, turn: Turn, key: bytes, sent: tuple[Fingerprint, ...], start: int) -> Comparison:
        compared = compare(self.matching, turn.context, turn.reply, sent, start)
        if turn.from_start and (turn.key != key or compared.difference is not None):
            return compared._replace(difference=self._difference_of_entry(turn, key, sent, compared.difference))
        return compared

    def _difference_of_entry(
        self, turn: Turn, key: bytes, sent: Sequence[Fingerprint], difference: Difference | None
    ) -> Difference:
        held = [*turn.context, turn.reply]
        if not is_same(self.matching, held[0], sent[0]):
            is_rewritten = len(sent) > 1 and is_same(self.matching, held[1], sent[1])
            differs = held[0].differences(sent[0]) if is_rewritten else {OTHER_CONVERSATION}
            return Difference(0, sent[0].role, tuple(sorted(differs)))
        return Difference(0, sent[0].role, (OTHER_TOOLS,)) if turn.key != key or difference is None else difference

    def find_ids(self, ids: list[int], images: Sequence[str]) -> Turn | None:
        """Returns the latest of the longest paths that are exact prefixes of a prompt's ids and images."""
        best: tuple[int, int, Turn] | None = None
        open_ends = [(turn, 0, 0) for turn in self._roots]
        while open_ends:
            turn, start, images_start = open_ends.pop()
            end, images_end = start + turn.own_length, images_start + len(turn.images)
            if turn.is_unusable or end > len(ids) or tuple(images[images_start:images_end]) != turn.images:
                continue
            if ids[start:end] != [*turn.context_ids, *turn.sampled.output_ids]:
                continue
            if best is None or (end, turn.number) > best[:2]:
                best = (end, turn.number, turn)
            open_ends += [(child, end, images_end) for child in turn.children]
        return None if best is None else best[2]

    def add(self, turn: Turn) -> None:
        """Records a turn after its parent, whose answer must have reached the client; without a parent, as a new
        root."""
        if turn.parent is not None and not turn.parent.sent:
            self.note_sent(turn.parent, sent=True)
        self.last_number = max(self.last_number, turn.number)
        self._by_request[turn.request] = turn
        for turns in (self._siblings(turn), *self._listed(turn)):
            insort(turns, turn, key=BY_NUMBER)
        self._index.add(_place(turn), turn.context, turn.reply, turn)
        self.num_turns += 1
        self.num_ids += turn.own_length
        self.record_bytes += turn.record_bytes

    def note_sent(self, turn: Turn, *, sent: bool) -> None:
        """Notes whether a turn's answer reached the client. A turn whose answer did not is removed, unless another turn
        continues it; it is added again once the answer to a repeated request reached the client."""
        is_held = turn in self._siblings(turn)
        if sent and not is_held:
            self.add(turn)
        turn.sent = turn.sent or sent
        if turn.sent or turn.children or not is_held:
            return
        for turns in (self._siblings(turn), *self._listed(turn)):
            turns.remove(turn)
        self._index.remove(_place(turn), turn.context, turn.reply, turn)
        self.num_turns -= 1
        self.num_ids -= turn.own_length
        self.record_bytes -= turn.record_bytes

    def latest(self, request: bytes) -> Turn | None:
        """Returns the latest answer to a request."""
        return self._by_request.get(request)

    def answered(self, request: bytes, *, is_retry: bool) -> Turn | None:
        """Returns the turn that answers a repeated request; None if the client wants another sample.

        The client gets its latest answer if the request is a retry, or if that answer did not reach the client.
        """
        turn = self._by_request.get(request)
        return turn if turn is not None and (is_retry or turn.sent is False) else None

    def _siblings(self, turn: Turn) -> list[Turn]:
        return self._roots if turn.parent is None else turn.parent.children

    def _listed(self, turn: Turn) -> list[list[Turn]]:
        """Returns the lists, besides that of its siblings, in which a turn is kept."""
        if not turn.from_start:
            return []
        keys = {
            (index, message_key(self.matching, reading))
            for index, message in enumerate((*turn.context, turn.reply)[:2])
            for reading in (message, *message.as_sent)
        }
        return [self._entries, *(self._by_message[key] for key in keys)]

    def forget(self, request: bytes) -> None:
        """Forgets the answer to a request that is sampled again, so that a retry gets the later answer."""
        self._by_request.pop(request, None)

    def branches(self) -> int:
        """Returns the number of leaves, which is the number of training rows."""
        return sum(not turn.children for turn, _ in self._in_order())

    def images(self) -> set[str]:
        """Returns the images of all turns."""
        return {image for turn, _ in self._in_order() for image in turn.images}

    def engine_s(self) -> float:
        """Returns the seconds that all turns waited for the engine."""
        return sum(turn.sampled.engine_s or 0.0 for turn, _ in self._in_order())

    def describe(self) -> dict[str, Any]:
        """Returns turns and branches as JSON: the order of generations, their parents, and why each branch began.

        ``repeated_ids`` counts ids in the prompts of branches that repeat ids of other branches.
        """
        in_order = [turn for turn, _ in self._in_order()]
        # The first of several siblings continues its parent's branch; the others begin branches.
        firsts = {siblings[0] for siblings in (self._roots, *(turn.children for turn in in_order)) if siblings}
        forks = [_fork(turn) for turn in in_order if turn not in firsts]
        return {
            "turns": self.num_turns,
            "branches": self.branches(),
            "emission_order": self.numbers(),
            "parents": [turn.parent.number if turn.parent else 0 for turn in in_order],
            "message_matching": self.matching,
            "forks": forks,
            "repeated_ids": sum(fork["repeated_ids"] for fork in forks),
            "tolerated": dict(sorted(Counter(part for turn in in_order for part in turn.tolerated).items())),
        }

    def numbers(self) -> list[int]:
        """Returns for each generation, in order, the number of its turn in sampling order, from 1."""
        return [turn.number for turn, _ in self._in_order()]

    def generations(self) -> list[Generation]:
        """Returns all turns as generations, branch after branch, each turn after the one it continues.

        In this order the packer makes one row per branch; a turn that several branches share is trained in the first of
        them.
        """
        ordered: list[Generation] = []
        held: list[int] = []
        images: list[str] = []
        depths: dict[Turn, tuple[int, int]] = {}
        for turn, parent in self._in_order():
            num_ids, num_images = depths[parent] if parent is not None else (0, 0)
            held = [*held[:num_ids], *turn.context_ids]
            images = [*images[:num_images], *turn.images]
            ordered.append(_generation(turn, held, tuple(images)))
            held = [*held, *ordered[-1].output_ids]
            depths[turn] = len(held), len(images)
        return ordered

    def _in_order(self) -> Iterator[tuple[Turn, Turn | None]]:
        """Yields each turn with its parent, depth first, older children first."""
        waiting = [(turn, turn.parent) for turn in reversed(self._roots)]
        while waiting:
            turn, parent = waiting.pop()
            yield turn, parent
            waiting += [(child, turn) for child in reversed(turn.children)]


def _place(turn: Turn) -> bytes | int:
    """Returns the turn's place in the index: the number of its parent, or for a root the key of the prompt's inputs."""
    return turn.key if turn.from_start or turn.parent is None else turn.parent.number


def _depth(match: Match) -> tuple[int, int, int]:
    return match.consumed, -len(match.tolerated), -1 if match.turn is None else match.turn.number


def _nearness(near: _NearTurn) -> tuple[int, bool, int]:
    difference, number = near
    return difference.message, OTHER_CONVERSATION not in difference.differs, number


def _nearer(nearest: _NearTurn | None, other: _NearTurn) -> _NearTurn:
    return other if nearest is None else max(other, nearest, key=_nearness)


def _fork(turn: Turn) -> dict[str, Any]:
    parent, why = turn.parent, turn.difference or Difference(0, None, (ASKED_AGAIN,))
    repeated = len(turn.context_ids) if parent is None else sum(one.own_length for one in parent.path())
    return {
        "turn": turn.number,
        "parent": parent.number if parent else 0,
        "message": why.message,
        "role": why.role,
        "differs": why.differs,
        "repeated_ids": 0 if why.differs == (OTHER_CONVERSATION,) else repeated,
    }


def sampled_in(reply: GenerateReply) -> Generation:
    """Returns the engine's reply as a generation without a prompt, with its numbers as arrays."""
    generation = reply.as_generation(())
    return replace(
        generation, output_ids=array("i", reply.output_ids), output_log_probs=array("d", reply.output_log_probs)
    )


def _generation(turn: Turn, prompt_ids: list[int], images: tuple[str, ...]) -> Generation:
    return replace(
        turn.sampled,
        prompt_ids=list(turn.sampled.prompt_ids) or prompt_ids,
        output_ids=list(turn.sampled.output_ids),
        output_log_probs=list(turn.sampled.output_log_probs or ()),
        images=images,
    )
