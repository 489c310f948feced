"""Re-tokenisation drift: compares sampled tokens with the tokens rebuilt from the messages.

Part of ``slime.utils.mask_utils``, which is the name to import from. Standard library only. Drift is counted, never
repaired: the sampled ids are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slime.utils.mask_rows import Generation, TrainingRow, common_prefix_length


class DriftKind(StrEnum):
    """Kinds of differences between sampled and rebuilt tokens."""

    SPLIT = "split"  # the same text in other tokens
    TEXT = "text"  # another text: normalised, stripped or re-serialised by tokenizer, parser or template
    BOUNDARY = "boundary"  # one rebuilt token holds the end of the generation prompt and the first sampled character
    EOS = "eos"  # the template closes a truncated turn, or closes it with another token than the sampled one
    THINK_STRIPPED = "think_stripped"  # the template dropped sampled reasoning
    INJECTED = "injected"  # text that looks like an added token was rebuilt as one, or vice versa
    CONTEXT = "context"  # the prompt differs
    MASK = "mask"  # equal tokens with different masks
    ROWS = "rows"  # the trajectory packs into more than one row; its messages rebuild into one
    TURNS = "turns"  # there is not one generation for each assistant message


@dataclass(frozen=True, slots=True)
class DriftReport:
    """Differences between sampled and rebuilt tokens in ids and mask; ``kinds`` is empty if there are none.

    ``first_differing_turn`` is the index of the first generation that differs, and ``first_differing_token`` the index
    of its first differing token in prompt and output together, which is their length if only the images differ. Both
    are None without differences, or if only the numbers of turns differ. ``tokens_affected`` counts, over all turns,
    the sampled tokens between the common prefix and the common suffix of sampled and rebuilt output.
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
class RebuiltTokens:
    """The rebuilt conversation, with the tokenizer's data for the comparison.

    ``added_ids`` are the ids of all added tokens, ``special_ids`` the ids of the tokens that can end a turn.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    turns: Sequence[RebuiltTurn]
    added_ids: Collection[int]
    special_ids: Collection[int]
    decode: Callable[[list[int]], str]


def compare_with_rebuilt(
    generations: Sequence[Generation], rows: Sequence[TrainingRow], rebuilt: RebuiltTokens
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
    pairs = zip(generations, rebuilt.turns, strict=False)
    differences = [_Difference(generation, turn, rebuilt) for generation, turn in pairs]
    kinds.update(*(difference.kinds for difference in differences))
    differing = ((index, turn.first_token) for index, turn in enumerate(differences) if turn.kinds)
    turn_index, token_index = next(differing, (None, None))
    if len(rows) > 1 and turn_index is None:  # only the images differ: the second row begins with other ones
        turn_index = rows[1].generation_indices[0]
        tokens = [*generations[turn_index].prompt_ids, *generations[turn_index].output_ids]
        token_index = common_prefix_length(tokens, rebuilt.token_ids)
    return DriftReport(
        # If the rows differ and no turn does, the difference is in their context.
        kinds=[kind.value for kind in DriftKind if kind in (kinds or {DriftKind.CONTEXT})],
        first_differing_turn=turn_index,
        first_differing_token=token_index,
        tokens_affected=sum(difference.tokens_affected for difference in differences),
        rows=len(rows),
    )


def _agree(rows: Sequence[TrainingRow], rebuilt: RebuiltTokens) -> bool:
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

    def __init__(self, generation: Generation, turn: RebuiltTurn, rebuilt: RebuiltTokens) -> None:
        self._rebuilt = rebuilt
        self._merged_ids = list(rebuilt.token_ids[turn.start - 1 : turn.start]) if turn.merged else []
        prompt, rebuilt_prompt = list(generation.prompt_ids), list(rebuilt.token_ids[: turn.start])
        sampled, rebuilt_output = list(generation.output_ids), list(rebuilt.token_ids[turn.start : turn.end])
        self.kinds: set[DriftKind] = set()
        self.tokens_affected = 0
        self.first_token = len(prompt)
        if sampled != rebuilt_output:
            self.kinds |= self._kinds_of_output(sampled, rebuilt_output)
            shared = common_prefix_length(sampled, rebuilt_output)
            rest, rebuilt_rest = sampled[shared:], rebuilt_output[shared:]
            self.tokens_affected = len(rest) - common_prefix_length(rest[::-1], rebuilt_rest[::-1])
            self.first_token += shared
        elif any(mask != int(generation.is_trained) for mask in rebuilt.loss_mask[turn.start : turn.end]):
            self.kinds.add(DriftKind.MASK)
        # The merged token makes the prompts differ as well; that is counted as BOUNDARY.
        if prompt != rebuilt_prompt and (sampled == rebuilt_output or not turn.merged):
            self.kinds.add(DriftKind.CONTEXT)
            self.first_token = common_prefix_length(prompt, rebuilt_prompt)

    def _kinds_of_output(self, sampled: list[int], rebuilt_output: list[int]) -> set[DriftKind]:
        kinds: set[DriftKind] = {DriftKind.BOUNDARY} if self._merged_ids else set()
        if sampled[-1:] != rebuilt_output[-1:]:
            kinds.add(DriftKind.EOS)
        body, rebuilt_body = self._without_end(sampled), self._without_end(rebuilt_output)
        if body != rebuilt_body:
            kinds |= self._kinds_of_body(body, rebuilt_body)
        return kinds or {DriftKind.SPLIT}

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in self._rebuilt.special_ids else ids

    def _kinds_of_body(self, body: list[int], rebuilt_body: list[int]) -> set[DriftKind]:
        text, rebuilt_text = self._rebuilt.decode(body), self._rebuilt.decode(rebuilt_body)
        if text == rebuilt_text:
            has_same_added_tokens = self._added_tokens(body) == self._added_tokens(rebuilt_body)
            return {DriftKind.SPLIT if has_same_added_tokens else DriftKind.INJECTED}

        if "</think>" in text and text.rpartition("</think>")[2].strip() == rebuilt_text.strip():
            return {DriftKind.THINK_STRIPPED}

        # If the rebuilt text lacks only a beginning that the merged token holds, the texts are equal.
        beginning = text.removesuffix(rebuilt_text)
        is_in_merged_token = self._rebuilt.decode(self._merged_ids).endswith(beginning)
        return set() if beginning + rebuilt_text == text and is_in_merged_token else {DriftKind.TEXT}

    def _added_tokens(self, ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._rebuilt.added_ids]
