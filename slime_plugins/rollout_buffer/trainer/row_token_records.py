"""What an engine told of a row's tokens: their experts and the ids that top_p kept, put together turn by turn. Pure.

The rule: a token's experts are those of the pass that sampled it; of a token that came in from outside, those of the
first pass of its row that read the token before it. Kept ids belong to sampled tokens alone. Nothing is moved to fit:
records that are not of exactly these tokens are a ``RecordProblemError``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from slime.utils.mask_rows import Generation, TrainingRow
from slime.utils.mask_token_records import ROUTED_EXPERTS, TOP_P_TOKENS, TokenRecords, joined_records
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.token_alignment import laid_out, trained_values

MAX_SHARE_OUTSIDE = 0.25
"""Of sampled tokens that are not among their kept ids: engines' kernels differ at the edge, and no more than that."""
MIN_TOKENS_TO_JUDGE = 8

ReadRecords = Sequence[Mapping[str, TokenRecords]]
"""For each generation its records by kind."""


class RecordProblemError(ValueError):
    """A trajectory whose records are missing, or not of its tokens."""

    counter: ClassVar[str] = "record_problems"


def read_records(generations: Sequence[Generation], kinds: Iterable[str], fetched: FetchedImages) -> ReadRecords:
    """Returns the records that generations name, of the kinds that are wanted.

    Raises:
        RecordProblemError: one has none, or its bytes are missing or cut.
    """
    return [{kind: _read(index, one, kind, fetched) for kind in kinds} for index, one in enumerate(generations)]


def _read(index: int, generation: Generation, kind: str, fetched: FetchedImages) -> TokenRecords:
    named = generation.records.get(kind)
    if named is None:
        raise RecordProblemError(f"turn {index} has no {kind}: the engine was not asked for them, or did not answer")
    data = named.data or fetched.data.get(named.sha256)
    if data is None:
        reason = fetched.missing.get(named.sha256, "they were not fetched")
        raise RecordProblemError(f"the {kind} of turn {index} are missing: {reason}")
    try:
        return TokenRecords.decode(data)
    except ValueError as error:
        raise RecordProblemError(f"the {kind} of turn {index} cannot be read: {error}") from error


def routed_experts_of_row(
    row: TrainingRow, expanded: TrainingRow, generations: Sequence[Generation], records: ReadRecords, width: int | None
) -> TokenRecords:
    """Returns the experts of every token of a row but its first; ``expanded`` has the row's images expanded.

    Raises:
        RecordProblemError: some token's are missing, or there are more than tokens, or not ``width`` for each.
    """
    at = row.generation_indices[-1]
    parts = [records[at][ROUTED_EXPERTS]]
    while parts[0].start > 1:
        at = _continued(at, parts[0].start, generations, records)
        parts.insert(0, records[at][ROUTED_EXPERTS])
    try:
        experts = joined_records(parts)
    except ValueError as error:
        raise RecordProblemError(str(error)) from error
    if experts.start != 1 or experts.end != len(expanded.token_ids):
        raise RecordProblemError(
            f"the engine routed {experts.end} tokens of a row of {len(expanded.token_ids)}: it read another prompt"
        )
    if width is not None and experts.width != width:
        raise RecordProblemError(
            f"the engine told {experts.width} experts for each token, and the trainer's model has layers times "
            f"experts per token of {width}"
        )
    return experts


def _continued(index: int, start: int, generations: Sequence[Generation], records: ReadRecords) -> int:
    """Returns the turn that ends where the experts of this one begin, and whose tokens its prompt begins with."""
    prompt, shown = generations[index].prompt_ids, generations[index].images
    for at in range(index - 1, -1, -1):
        before = generations[at]
        ids = [*before.prompt_ids, *before.output_ids]
        images = before.images or ()
        same_images = shown is None or before.images is None or shown[: len(images)] == images
        if records[at][ROUTED_EXPERTS].end == start and list(prompt[: len(ids)]) == ids and same_images:
            return at
    raise RecordProblemError(f"nobody told the experts of the first {start} tokens of turn {index}")


def kept_ids_of_row(
    row: TrainingRow, expanded: TrainingRow, generations: Sequence[Generation], records: ReadRecords, start: int
) -> TokenRecords:
    """Returns the kept ids of the tokens from ``start`` on, none at those that are not trained.

    Raises:
        RecordProblemError: they are not one set for each sampled token, or hardly ever hold the token that was sampled.
    """
    of_output: list[list[array[int]]] = [[] for _ in generations]
    for index in row.generation_indices:
        of_output[index] = records[index][TOP_P_TOKENS].split()
        if len(of_output[index]) != len(generations[index].output_ids):
            raise RecordProblemError(
                f"turn {index} has {len(generations[index].output_ids)} sampled tokens and "
                f"{len(of_output[index])} sets of kept ids"
            )
    along = laid_out(expanded.loss_mask, trained_values(row, generations, of_output), array("I"))[start:]
    _check_holds_sampled(expanded, along, start)
    values, ends = array("I"), []
    for kept in along:
        values.extend(kept.tolist())
        ends.append(len(values))
    return TokenRecords(start, values.tobytes(), 4, ends=tuple(ends))


def _check_holds_sampled(row: TrainingRow, along: Sequence[array[int]], start: int) -> None:
    trained = [place for place in range(start, len(row.token_ids)) if row.loss_mask[place]]
    outside = sum(row.token_ids[place] not in along[place - start] for place in trained)
    if len(trained) >= MIN_TOKENS_TO_JUDGE and outside > MAX_SHARE_OUTSIDE * len(trained):
        raise RecordProblemError(
            f"{outside} of {len(trained)} sampled tokens are not among the ids that top_p kept for them: "
            "these are kept ids of other tokens"
        )
