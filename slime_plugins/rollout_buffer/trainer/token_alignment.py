"""Aligns values of single tokens (weight versions, returns, records) with the tokens of a packed row. Pure.

In a packed row, which has one placeholder per image, the output of a generation starts at index ``len(prompt_ids)``.
Expanding images shifts indices but keeps the order: values of the trained tokens are collected in order, and
distributed along the mask of the expanded row (``laid_out``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from slime.utils.mask_rows import Generation, TrainingRow, WeightVersionSpan, get_response_lengths
from slime_plugins.rollout_buffer.rules.weight_versions import version_number

Value = TypeVar("Value")


def output_versions(generation: Generation) -> list[str | None]:
    """Returns the weight version of each output token: that of its span, or else of the generation."""
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
        for place, version in enumerate(output_versions(generations[index]), start):
            number = version_number(version)
            if number is not None and trainer_version - number > max_lag:
                mask[place] = 0
    if mask == list(row.loss_mask):
        return row
    log_probs = row.log_probs
    if log_probs is not None:
        log_probs = [value if kept else 0.0 for value, kept in zip(log_probs, mask, strict=True)]
    return replace(row, loss_mask=mask, log_probs=log_probs, response_length=get_response_lengths([mask])[0])


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
        for place, value in enumerate(of_output[index], start)
        if row.loss_mask[place]
    ]


def laid_out(loss_mask: Sequence[int], values: Iterable[Value], elsewhere: Value) -> list[Value]:
    """Distributes values along a mask: the next value at every 1, ``elsewhere`` at every 0.

    Raises:
        ValueError: there are more or fewer values than ones.
    """
    left = iter(values)
    found = [next(left, None) if trained else elsewhere for trained in loss_mask]
    if None in found or next(left, None) is not None:
        raise ValueError(f"the mask has {sum(map(bool, loss_mask))} trained tokens, but not as many values")
    return found  # type: ignore[return-value]  # none of them is None


def version_spans(along: Sequence[str]) -> tuple[WeightVersionSpan, ...]:
    """Returns spans of equal weight versions; ``along`` has the version of each token, "" if unknown."""
    return tuple(_runs(along))


def _runs(along: Sequence[str]) -> Iterator[WeightVersionSpan]:
    start = 0
    for version, run in groupby(along):
        end = start + len(list(run))
        if version:
            yield WeightVersionSpan(weight_version=version, start=start, end=end)
        start = end


def _outputs(row: TrainingRow, generations: Sequence[Generation]) -> Iterator[tuple[int, int]]:
    """Yields the index of each generation in the row, and the index of its first output token."""
    for index in row.generation_indices if generations else ():
        yield index, len(generations[index].prompt_ids)
