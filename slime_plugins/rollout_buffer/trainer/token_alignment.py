"""What is known of single tokens of a packed row: where each output stands, and which weights sampled it. Pure.

A generation that a row holds has its output behind its prompt: from ``len(prompt_ids)`` on, in the row as it is packed,
with one placeholder for each image. Expanding images moves every place and no order: what is known of the trained
tokens is kept one after the other, and laid out again along the mask of the expanded row.
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
    """Returns which weights sampled each output token: its span's, the generation's where no span tells."""
    versions: list[str | None] = [generation.weight_version] * len(generation.output_ids)
    for span in generation.weight_version_spans:
        covered = range(max(0, span.start), min(span.end, len(versions)))
        versions[covered.start : covered.stop] = [span.weight_version] * len(covered)
    return versions


def mask_old_tokens(
    row: TrainingRow, generations: Sequence[Generation], trainer_version: int, max_lag: int
) -> TrainingRow:
    """Returns the row without tokens that weights sampled more than ``max_lag`` versions before the trainer's.

    Nothing is ever unmasked; a token of weights that nobody named stays.
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
    """Returns what is known of the row's trained tokens, in their order; ``of_output`` has a value for each output id.

    It is indexed as ``generations``; what it says of a generation that is not trained is not looked at.
    """
    return [
        value
        for index, start in _outputs(row, generations)
        if generations[index].is_trained
        for place, value in enumerate(of_output[index], start)
        if row.loss_mask[place]
    ]


def laid_out(loss_mask: Sequence[int], values: Iterable[Value], elsewhere: Value) -> list[Value]:
    """Returns the values along a mask: the next at every 1, ``elsewhere`` at every 0.

    Raises:
        ValueError: there are more or fewer values than ones.
    """
    left = iter(values)
    found = [next(left, None) if trained else elsewhere for trained in loss_mask]
    if None in found or next(left, None) is not None:
        raise ValueError(f"the mask has {sum(map(bool, loss_mask))} trained tokens, and another number of values came")
    return found  # type: ignore[return-value]  # none of them is None


def version_spans(along: Sequence[str]) -> tuple[WeightVersionSpan, ...]:
    """Returns which weights sampled which tokens, as spans of places; ``along`` names them at each, "" where nobody."""
    return tuple(_runs(along))


def _runs(along: Sequence[str]) -> Iterator[WeightVersionSpan]:
    start = 0
    for version, run in groupby(along):
        end = start + len(list(run))
        if version:
            yield WeightVersionSpan(weight_version=version, start=start, end=end)
        start = end


def _outputs(row: TrainingRow, generations: Sequence[Generation]) -> Iterator[tuple[int, int]]:
    """Yields the index of each generation in the row, and the place of its first output token."""
    for index in row.generation_indices if generations else ():
        yield index, len(generations[index].prompt_ids)
