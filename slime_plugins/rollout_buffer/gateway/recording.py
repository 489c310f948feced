"""Pure: what was sampled in a session, as a tree of turns whose paths are exactly what the engine was sent.

    root                prompt ids of the first request
     └─ turn            + what was sampled
         └─ turn        + bridge ids of the new messages, + what was sampled
         └─ turn        the same request asked again, or an edited history: another branch

A request whose messages begin with those of a recorded path goes on from the ids of that path; nothing of it is
rendered or tokenised again. Ids are held once per turn, so a session's memory is linear in what was said. Every path
from the root to a leaf becomes one training row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slime.utils.mask_token_records import RecordBytes
from slime_plugins.rollout_buffer.engine.base import GenerateReply
from slime_plugins.rollout_buffer.types import Generation, PromptReceipt, WeightVersionSpan


@dataclass(slots=True, eq=False)
class Turn:
    """One sampled turn.

    ``context`` has the digests of the messages since its parent, ``reply`` the digest of its own message.
    ``from_start``: the context covers the whole request; so for roots, and for a turn whose ids continue its parent's
    path although its messages do not. ``ran_prompt_ids``: the prompt as the engine ran it, if that differs from the
    path. ``is_unusable``: it holds a token that no prompt may hold, so no turn can continue it.
    """

    parent: Turn | None
    key: bytes
    number: int
    context: tuple[bytes, ...]
    context_ids: array[int]
    images: tuple[str, ...]
    output_ids: array[int]
    log_probs: array[float]
    finish_reason: str
    weight_version: str | None
    spans: tuple[WeightVersionSpan, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    records: Mapping[str, RecordBytes]
    prompt_receipt: PromptReceipt | None
    engine_s: float | None
    ran_prompt_ids: array[int] | None
    reply: bytes
    from_start: bool
    is_closed: bool
    is_unusable: bool
    children: list[Turn] = field(default_factory=list)

    @property
    def own_length(self) -> int:
        """Number of ids that this turn adds to its parent's path."""
        return len(self.context_ids) + len(self.output_ids)

    @property
    def record_bytes(self) -> int:
        """Bytes of its token records."""
        return sum(len(one.data or b"") for one in self.records.values())

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
            ids += turn.output_ids
        return ids

    def held_images(self) -> tuple[str, ...]:
        """The images of the path, in the order of their placeholders."""
        return tuple(image for turn in self.path() for image in turn.images)


@dataclass(frozen=True, slots=True)
class Match:
    """The recorded part of a request: its first ``consumed`` messages end with the reply of ``turn``; None, 0 if
    nothing is."""

    turn: Turn | None
    consumed: int


class Recording:
    """The turns of one session. ``key`` identifies what shapes a prompt besides messages, such as tools."""

    def __init__(self) -> None:
        self._roots: list[Turn] = []
        self._entries: dict[tuple[bytes, bytes], list[Turn]] = {}
        self._count = 0
        self.turns = 0
        self.ids = 0
        self.record_bytes = 0

    def find(self, key: bytes, digests: Sequence[bytes], replies: Sequence[bytes | None]) -> Match:
        """Returns the longest recorded path that is a proper prefix of the messages.

        Of equal paths (one request sampled twice with the same reply) the latest counts.
        """
        best = Match(None, 0)
        open_ends = [Match(turn, 0) for turn in self._entries.get((key, digests[0]), ())]
        while open_ends:
            end = open_ends.pop()
            turn = end.turn
            assert turn is not None
            after = end.consumed + len(turn.context)
            if after + 1 >= len(digests) or replies[after] != turn.reply:
                continue
            if tuple(digests[end.consumed : after]) != turn.context:
                continue
            here = Match(turn, after + 1)
            if _is_better(here, best):
                best = here
            open_ends += [Match(child, after + 1) for child in turn.children if not child.from_start]
        return best

    def find_ids(self, ids: Sequence[int], images: Sequence[str]) -> Turn | None:
        """Returns the latest of the longest paths that are exact prefixes of a prompt's ids and images."""
        best: tuple[int, int, Turn] | None = None
        open_ends = [(turn, 0, 0) for turn in self._roots]
        while open_ends:
            turn, at, shown = open_ends.pop()
            end, images_end = at + turn.own_length, shown + len(turn.images)
            own = [*turn.context_ids, *turn.output_ids]
            if turn.is_unusable or list(ids[at:end]) != own or tuple(images[shown:images_end]) != turn.images:
                continue
            if best is None or (end, turn.number) > best[:2]:
                best = (end, turn.number, turn)
            open_ends += [(child, end, images_end) for child in turn.children]
        return None if best is None else best[2]

    def add(
        self,
        parent: Turn | None,
        *,
        key: bytes,
        context: tuple[bytes, ...],
        context_ids: Sequence[int],
        images: tuple[str, ...],
        sampled: GenerateReply,
        reply: bytes,
        from_start: bool,
        is_closed: bool,
        is_unusable: bool = False,
    ) -> Turn:
        """Records a turn after ``parent``; None begins a new tree. For the other arguments see ``Turn``."""
        self._count += 1
        turn = Turn(
            parent=parent,
            key=key,
            number=self._count,
            context=context,
            context_ids=array("i", context_ids),
            images=images,
            output_ids=array("i", sampled.output_ids),
            log_probs=array("d", sampled.output_log_probs),
            finish_reason=sampled.finish_reason,
            weight_version=sampled.weight_version,
            spans=tuple(sampled.weight_version_spans),
            prompt_tokens=sampled.prompt_tokens,
            cached_tokens=sampled.cached_tokens,
            records=sampled.record_bytes(),
            prompt_receipt=sampled.prompt_receipt,
            engine_s=sampled.engine_s,
            ran_prompt_ids=None if sampled.ran_prompt_ids is None else array("i", sampled.ran_prompt_ids),
            reply=reply,
            from_start=from_start,
            is_closed=is_closed,
            is_unusable=is_unusable,
        )
        (self._roots if parent is None else parent.children).append(turn)
        if from_start:
            self._entries.setdefault((key, context[0]), []).append(turn)
        self.turns += 1
        self.ids += turn.own_length
        self.record_bytes += turn.record_bytes
        return turn

    def take_back(self, turn: Turn) -> None:
        """Removes a turn that did not reach its client, and so has no children."""
        (self._roots if turn.parent is None else turn.parent.children).remove(turn)
        if turn.from_start:
            self._entries[turn.key, turn.context[0]].remove(turn)
        self.turns -= 1
        self.ids -= turn.own_length
        self.record_bytes -= turn.record_bytes

    def branches(self) -> int:
        """Returns the number of leaves, which is that of training rows."""
        return sum(not turn.children for turn, _ in self._in_order())

    def numbers(self) -> list[int]:
        """Returns for each generation, in order, the number of its turn in sampling order, from 1."""
        return [turn.number for turn, _ in self._in_order()]

    def generations(self) -> list[Generation]:
        """Returns all turns as generations, branch after branch, each turn after the one it continues.

        In this order the packer makes one row per branch; a turn shared by several branches is trained in the first.
        """
        found: list[Generation] = []
        held: list[int] = []
        images: list[str] = []
        depths: dict[Turn, tuple[int, int]] = {}
        for turn, parent in self._in_order():
            at, shown = depths[parent] if parent is not None else (0, 0)
            held = [*held[:at], *turn.context_ids]
            images = [*images[:shown], *turn.images]
            found.append(_generation(turn, held, tuple(images)))
            held = [*held, *found[-1].output_ids]
            depths[turn] = len(held), len(images)
        return found

    def _in_order(self) -> Iterator[tuple[Turn, Turn | None]]:
        """Yields each turn with its parent, depth first, older children first."""
        waiting = [(turn, turn.parent) for turn in reversed(self._roots)]
        while waiting:
            turn, parent = waiting.pop()
            yield turn, parent
            waiting += [(child, turn) for child in reversed(turn.children)]


def _is_better(match: Match, best: Match) -> bool:
    if best.turn is None or match.turn is None:
        return best.turn is None
    return (match.consumed, match.turn.number) > (best.consumed, best.turn.number)


def _generation(turn: Turn, prompt_ids: list[int], images: tuple[str, ...]) -> Generation:
    return Generation(
        prompt_ids=prompt_ids if turn.ran_prompt_ids is None else turn.ran_prompt_ids.tolist(),
        output_ids=turn.output_ids.tolist(),
        output_log_probs=turn.log_probs.tolist(),
        finish_reason=turn.finish_reason,
        weight_version=turn.weight_version,
        weight_version_spans=turn.spans,
        images=images,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        records=turn.records,
        prompt_receipt=turn.prompt_receipt,
        engine_s=turn.engine_s,
    )
