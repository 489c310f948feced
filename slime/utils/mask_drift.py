"""Re-tokenisation drift: compares sampled tokens with the tokens rebuilt from the messages.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only. Drift is counted, never
repaired: the sampled ids are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slime.utils.mask_rows import Generation, TrainingRow


class DriftKind(StrEnum):
    """Kinds of differences between sampled and rebuilt tokens."""

    SPLIT = "split"  # the same text in other tokens
    TEXT = "text"  # another text: normalised, stripped or re-serialised by tokenizer, parser or template
    BOUNDARY = "boundary"  # generation prompt and first sampled character became one token
    EOS = "eos"  # the template closes a truncated turn, or closes it with another token than the sampled one
    THINK_STRIPPED = "think_stripped"  # the template dropped sampled reasoning
    INJECTED = "injected"  # text that looks like an added token became one, or vice versa
    CONTEXT = "context"  # the prompt differs, not the output
    MASK = "mask"  # equal tokens with different masks
    ROWS = "rows"  # the trajectory packs into more than one row; its messages rebuild into one
    TURNS = "turns"  # there is not one generation for each assistant message


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Differences between sampled and rebuilt tokens in ids and mask; ``kinds`` is empty if there are none.

    ``first_differing_turn`` is the index of a generation, and ``first_differing_token`` the index in its prompt and
    output together; both are None without differences or if only the numbers of turns differ. ``tokens_affected``
    counts sampled tokens between the common prefix and the common suffix of the turn.
    """

    kinds: list[str]
    first_differing_turn: int | None = None
    first_differing_token: int | None = None
    tokens_affected: int = 0
    rows: int = 1

    @property
    def is_clean(self) -> bool:
        """True if there is no difference."""
        return not self.kinds


@dataclass(frozen=True, slots=True)
class RebuiltTurn:
    """Tokens ``start`` to ``end`` of the rebuilt ids are one assistant turn.

    ``merged``: the token before ``start`` holds the end of the generation prompt and the turn's first character.
    """

    start: int
    end: int
    merged: bool = False


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The rebuilt conversation, with the tokenizer's data for the comparison.

    ``added_ids`` are the ids of all added tokens, ``special_ids`` of those that can end a turn.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    turns: Sequence[RebuiltTurn]
    added_ids: Collection[int]
    special_ids: Collection[int]
    decode: Callable[[list[int]], str]


def compare_with_rebuilt(
    generations: Sequence[Generation], rows: Sequence[TrainingRow], rebuilt: Rebuilt
) -> DriftReport:
    """Compares rebuilt ids and mask with the packed rows.

    The template's text after the last turn (a newline, later messages) is no drift.
    """
    if _agree(rows, rebuilt):
        return DriftReport([], rows=len(rows))

    kinds: set[DriftKind] = set()
    if len(generations) != len(rebuilt.turns):
        kinds.add(DriftKind.TURNS)
    if len(rows) > 1:
        kinds.add(DriftKind.ROWS)
    first: tuple[int, int] | None = None
    affected = 0
    for index, (generation, turn) in enumerate(zip(generations, rebuilt.turns, strict=False)):
        difference = _Difference(generation, turn, rebuilt)
        kinds |= difference.kinds
        affected += difference.tokens_affected
        if difference.kinds and first is None:
            first = (index, difference.first_token)
    if len(rows) > 1 and first is None:
        opening = rows[1].generation_indices[0]
        first = (opening, 0)
    return DriftReport(
        kinds=[kind.value for kind in DriftKind if kind in (kinds or {DriftKind.CONTEXT})],
        first_differing_turn=None if first is None else first[0],
        first_differing_token=None if first is None else first[1],
        tokens_affected=affected,
        rows=len(rows),
    )


def _agree(rows: Sequence[TrainingRow], rebuilt: Rebuilt) -> bool:
    end = rebuilt.turns[-1].end if rebuilt.turns else 0
    if not rows:
        return 1 not in rebuilt.loss_mask

    return (
        len(rows) == 1
        and list(rebuilt.token_ids[:end]) == rows[0].token_ids
        and list(rebuilt.loss_mask[:end]) == rows[0].loss_mask
    )


class _Difference:
    """Differences between a generation and its rebuilt turn."""

    def __init__(self, generation: Generation, turn: RebuiltTurn, rebuilt: Rebuilt) -> None:
        self._rebuilt = rebuilt
        self._merged = turn.merged
        prompt, shown = list(generation.prompt_ids), list(rebuilt.token_ids[: turn.start])
        sampled, again = list(generation.output_ids), list(rebuilt.token_ids[turn.start : turn.end])
        self.kinds: set[DriftKind] = set()
        self.tokens_affected = 0
        self.first_token = len(prompt)
        if sampled != again:
            self.kinds |= self._kinds_of_output(sampled, again)
            same = _common(sampled, again)
            self.tokens_affected = len(sampled) - same - _common(sampled[same:][::-1], again[same:][::-1])
            self.first_token += same
        elif any(mask != int(generation.is_trained) for mask in rebuilt.loss_mask[turn.start : turn.end]):
            self.kinds.add(DriftKind.MASK)
        if prompt != shown and not turn.merged:
            self.kinds.add(DriftKind.CONTEXT)
            self.first_token = _common(prompt, shown)

    def _kinds_of_output(self, sampled: list[int], again: list[int]) -> set[DriftKind]:
        kinds: set[DriftKind] = {DriftKind.BOUNDARY} if self._merged else set()
        if sampled[-1:] != again[-1:]:
            kinds.add(DriftKind.EOS)
        body, body_again = self._without_end(sampled), self._without_end(again)
        if body != body_again:
            kinds |= self._kinds_of_body(body, body_again)
        return kinds or {DriftKind.SPLIT}

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self._rebuilt.special_ids else ids

    def _kinds_of_body(self, body: list[int], again: list[int]) -> set[DriftKind]:
        text, text_again = self._rebuilt.decode(body), self._rebuilt.decode(again)
        if text == text_again:
            return {DriftKind.SPLIT if self._added(body) == self._added(again) else DriftKind.INJECTED}

        if self._merged and text.lstrip() == text_again.lstrip():
            return set()

        if "</think>" in text and text.rpartition("</think>")[2].strip() == text_again.strip():
            return {DriftKind.THINK_STRIPPED}

        return {DriftKind.TEXT}

    def _added(self, ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._rebuilt.added_ids]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Counts the equal items at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))
