"""Aligns values of single tokens (weight versions, returns, records) with the tokens of a packed row. Pure.

In a packed row, which has one placeholder per image, the output of a generation starts at index ``len(prompt_ids)``.
Expanding images shifts indices but keeps the order of tokens. So the values of the trained tokens are collected in
order, and distributed along the mask of the expanded row (``laid_out``).

A sampled token has the experts of the forward pass that sampled it. Any other token has the experts of the first pass
of its row that read the token before it. Top-p ids belong to sampled tokens only. Records are never shifted to fit:
records that do not belong to exactly these tokens raise ``RecordProblemError``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar, TypeVar

from slime.utils.mask_rows import (
    ROUTED_EXPERTS,
    TOP_P_TOKENS,
    Generation,
    TokenRecords,
    TrainingRow,
    WeightVersionSpan,
    joined_records,
    response_length_of,
)
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.types import version_number

Value = TypeVar("Value")

MAX_SHARE_OUTSIDE = 0.25
"""Tolerated share of sampled tokens outside of their top-p ids: kernels of engines differ at the threshold."""
MIN_TOKENS_TO_JUDGE = 8
"""In rows with fewer sampled tokens, this share is not checked."""

ReadRecords = Sequence[Mapping[str, TokenRecords]]
"""The records of each generation, by kind."""


def output_versions(generation: Generation) -> list[str | None]:
    """Returns the weight version of each output token: its span's version, or else the generation's."""
    versions: list[str | None] = [generation.weight_version] * len(generation.output_ids)
    for span in generation.weight_version_spans:
        covered = range(max(0, span.start), min(span.end, len(versions)))
        versions[covered.start : covered.stop] = [span.weight_version] * len(covered)
    return versions


def mask_old_tokens(
    row: TrainingRow, generations: Sequence[Generation], trainer_version: int, max_lag: int
) -> TrainingRow:
    """Returns the row with tokens masked whose version lags the trainer's by more than ``max_lag``.

    Tokens without a known version stay trained.
    """
    mask = list(row.loss_mask)
    for index, start in _outputs(row, generations):
        for position, version in enumerate(output_versions(generations[index]), start):
            number = version_number(version)
            if number is not None and trainer_version - number > max_lag:
                mask[position] = 0
    if mask == list(row.loss_mask):
        return row
    log_probs = row.log_probs
    if log_probs is not None:
        log_probs = [value if trained else 0.0 for value, trained in zip(log_probs, mask, strict=True)]
    return replace(row, loss_mask=mask, log_probs=log_probs, response_length=response_length_of(mask))


def trained_values(
    row: TrainingRow, generations: Sequence[Generation], of_output: Sequence[Sequence[Value]]
) -> list[Value]:
    """Returns the values of the row's trained tokens, in order.

    ``of_output`` has a value for each output id of each of ``generations``; generations that are not trained are
    skipped.
    """
    return [
        value
        for index, start in _outputs(row, generations)
        if generations[index].is_trained
        for position, value in enumerate(of_output[index], start)
        if row.loss_mask[position]
    ]


def laid_out(loss_mask: Sequence[int], values: Iterable[Value], elsewhere: Value) -> list[Value]:
    """Distributes values along a mask: the next value at every 1, ``elsewhere`` at every 0.

    Raises:
        ValueError: there are more or fewer values than ones.
    """
    remaining = iter(values)
    by_token = [next(remaining, None) if trained else elsewhere for trained in loss_mask]
    if None in by_token or next(remaining, None) is not None:
        raise ValueError(f"the mask has {sum(map(bool, loss_mask))} trained tokens, but not as many values")
    return by_token  # type: ignore[return-value]  # no value is None


def version_spans(versions: Sequence[str]) -> tuple[WeightVersionSpan, ...]:
    """Returns spans of equal weight versions; ``versions`` has the version of each token, "" if unknown."""
    spans, start = [], 0
    for version, equal in groupby(versions):
        end = start + len(list(equal))
        if version:
            spans.append(WeightVersionSpan(weight_version=version, start=start, end=end))
        start = end
    return tuple(spans)


def _outputs(row: TrainingRow, generations: Sequence[Generation]) -> Iterator[tuple[int, int]]:
    """Yields the index of each generation in the row, and the index of its first output token."""
    for index in row.generation_indices if generations else ():
        yield index, len(generations[index].prompt_ids)


# --- token records ---------------------------------------------------------------------------------------------------


class RecordProblemError(ValueError):
    """The records of a trajectory are missing, or do not belong to its tokens."""

    counter: ClassVar[str] = "record_problems"


def read_records(generations: Sequence[Generation], kinds: Iterable[str], fetched: FetchedImages) -> ReadRecords:
    """Returns the records of the wanted kinds, which generations hold or name by hash.

    Raises:
        RecordProblemError: a generation has no records of a kind, or their bytes are missing or truncated.
    """
    return [{kind: _read(index, turn, kind, fetched) for kind in kinds} for index, turn in enumerate(generations)]


def _read(index: int, generation: Generation, kind: str, fetched: FetchedImages) -> TokenRecords:
    record = generation.records.get(kind)
    if record is None:
        raise RecordProblemError(f"turn {index} has no {kind}: they were not requested, or the engine returned none")
    data = record.data or fetched.data.get(record.sha256)
    if data is None:
        reason = fetched.missing.get(record.sha256, "they were not fetched")
        raise RecordProblemError(f"the {kind} of turn {index} are missing: {reason}")
    try:
        return TokenRecords.decode(data)
    except ValueError as error:
        raise RecordProblemError(f"the {kind} of turn {index} cannot be read: {error}") from error


def routed_experts_of_row(
    row: TrainingRow, expanded: TrainingRow, generations: Sequence[Generation], records: ReadRecords, width: int | None
) -> TokenRecords:
    """Returns the experts of every token of a row but its first; ``expanded`` is the row with images expanded.

    Raises:
        RecordProblemError: a token has no experts or not ``width`` of them, or there are experts of further tokens.
    """
    index = row.generation_indices[-1]
    parts = [records[index][ROUTED_EXPERTS]]
    while parts[0].start > 1:  # an engine returns no experts of tokens that it has returned in an earlier turn
        index = _continued_turn(index, parts[0].start, generations, records)
        parts.insert(0, records[index][ROUTED_EXPERTS])
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
            f"the engine returned {experts.width} experts for each token, and the trainer's model has {width} (layers "
            "times experts per token)"
        )
    return experts


def _continued_turn(index: int, start: int, generations: Sequence[Generation], records: ReadRecords) -> int:
    """Returns the latest turn before whose tokens begin this turn's prompt, and whose experts end at ``start``."""
    prompt, shown = generations[index].prompt_ids, generations[index].images
    for earlier in range(index - 1, -1, -1):
        before = generations[earlier]
        ids = [*before.prompt_ids, *before.output_ids]
        images = before.images or ()
        same_images = shown is None or before.images is None or shown[: len(images)] == images
        if records[earlier][ROUTED_EXPERTS].end == start and list(prompt[: len(ids)]) == ids and same_images:
            return earlier
    raise RecordProblemError(f"no turn has the experts of the first {start} tokens of turn {index}")


def kept_ids_of_row(
    row: TrainingRow, expanded: TrainingRow, generations: Sequence[Generation], records: ReadRecords, start: int
) -> TokenRecords:
    """Returns the top-p ids of the tokens from ``start`` on; a token that is not trained has an empty set.

    Raises:
        RecordProblemError: there is not one set per sampled token, or too many sampled tokens are outside of their set.
    """
    of_output: list[list[array[int]]] = [[] for _ in generations]
    for index in row.generation_indices:
        of_output[index] = records[index][TOP_P_TOKENS].split()
        if len(of_output[index]) != len(generations[index].output_ids):
            raise RecordProblemError(
                f"turn {index} has {len(generations[index].output_ids)} sampled tokens and "
                f"{len(of_output[index])} sets of top-p ids"
            )
    sets = laid_out(expanded.loss_mask, trained_values(row, generations, of_output), array("I"))[start:]
    _check_holds_sampled(expanded, sets, start)
    values, ends = array("I"), []
    for ids in sets:
        values.extend(ids.tolist())
        ends.append(len(values))
    return TokenRecords(start, values.tobytes(), 4, ends=tuple(ends))


def _check_holds_sampled(row: TrainingRow, sets: Sequence[array[int]], start: int) -> None:
    """Checks that the sampled tokens are in their sets of top-p ids; ``sets`` begin at token ``start``."""
    trained = [position for position in range(start, len(row.token_ids)) if row.loss_mask[position]]
    outside = sum(row.token_ids[position] not in sets[position - start] for position in trained)
    if len(trained) >= MIN_TOKENS_TO_JUDGE and outside > MAX_SHARE_OUTSIDE * len(trained):
        raise RecordProblemError(
            f"{outside} of {len(trained)} sampled tokens are not among their top-p ids: the ids belong to other tokens"
        )
