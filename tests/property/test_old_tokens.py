"""Tokens of old weights: what is masked, and which weights sampled what, over any spans of any turns."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slime.utils.mask_utils import Generation, TrainingRow, WeightVersionSpan, pack_training_rows
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.trainer.token_alignment import mask_old_tokens, output_versions
from slime_plugins.rollout_buffer.types import version_number
from slime_plugins.rollout_buffer.wire import RolloutItem

VERSIONS = ("default", "1", "2", "5", "6", "no number")
versions = st.sampled_from(VERSIONS)


@st.composite
def turns(draw: st.DrawFn) -> Generation:
    """A turn that one version sampled, or several after one another, as after an abort and an update."""
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    spans = tuple(
        WeightVersionSpan(weight_version=draw(versions), start=end - length, end=end)
        for length, end in zip(lengths, ends, strict=True)
    )
    tokens = ends[-1] if ends else draw(st.integers(1, 5))
    return Generation(
        prompt_ids=[],
        output_ids=draw(st.lists(st.integers(10, 99), min_size=tokens, max_size=tokens)),
        output_log_probs=[-0.5] * tokens,
        weight_version=draw(st.none() | versions),
        trained=draw(st.integers(0, 4)) > 0,
        weight_version_spans=spans,
    )


@st.composite
def episodes(draw: st.DrawFn) -> list[Generation]:
    """Turns whose prompts go on from the one before, or start again."""
    found: list[Generation] = []
    held: list[int] = []
    for turn in draw(st.lists(turns(), min_size=1, max_size=4)):
        prompt = [*(held if draw(st.booleans()) else []), draw(st.integers(1, 9))]
        found.append(replace(turn, prompt_ids=prompt))
        held = [*prompt, *turn.output_ids]
    return found


def ages(generation: Generation, trainer: int) -> list[int]:
    """How far behind each output token is, -1 where nobody knows: by going through all spans for each token."""
    named = [generation.weight_version] * len(generation.output_ids)
    for at in range(len(named)):
        for span in generation.weight_version_spans:
            if span.start <= at < span.end:
                named[at] = span.weight_version
    return [-1 if (number := version_number(one)) is None else trainer - number for one in named]


def masks(generations: list[Generation], trainer: int, lag: int) -> list[TrainingRow]:
    return [mask_old_tokens(row, generations, trainer, lag) for row in pack_training_rows(generations)]


@given(generations=episodes(), trainer=st.integers(0, 7), lag=st.integers(0, 7))
def test_exactly_the_trained_tokens_that_are_too_old_are_masked(
    generations: list[Generation], trainer: int, lag: int
) -> None:
    for before, after in zip(pack_training_rows(generations), masks(generations, trainer, lag), strict=True):
        expected = list(before.loss_mask)
        for index in before.generation_indices:
            start = len(generations[index].prompt_ids)
            for at, age in enumerate(ages(generations[index], trainer)):
                assert before.token_ids[start + at] == generations[index].output_ids[at]
                expected[start + at] *= age <= lag
        assert after.loss_mask == expected
        assert after.token_ids == before.token_ids
        assert after.log_probs is not None
        assert [value != 0 for value in after.log_probs] == [bool(one) for one in after.loss_mask]


@given(generations=episodes(), trainer=st.integers(0, 7))
def test_a_larger_lag_never_masks_more_and_no_lag_unmasks(generations: list[Generation], trainer: int) -> None:
    rows = pack_training_rows(generations)
    by_lag = [[row.loss_mask for row in masks(generations, trainer, lag)] for lag in range(8)]

    for stricter, looser in zip(by_lag, [*by_lag[1:], [row.loss_mask for row in rows]], strict=True):
        for one, other in zip(stricter, looser, strict=True):
            assert all(kept <= more for kept, more in zip(one, other, strict=True))


@given(generations=episodes(), trainer=st.integers(0, 7))
def test_rows_say_of_each_trained_token_which_weights_sampled_it(generations: list[Generation], trainer: int) -> None:
    settings = RowSettings(
        samples_per_group=1, masks=MaskSettings(tokenizer_path=None, loss_mask_type="qwen", source=None)
    )
    item = RolloutItem(uid="u", instance_id="i", reward=1.0, generations=generations, group_index=0)
    (group,) = RowBuilder(settings).groups([item], trainer_version=trainer)

    for row in group.rows:
        packed = pack_training_rows(generations)[row.number]
        expected: list[int | None] = [None] * len(row.token_ids)
        named: dict[int, str] = {}
        for index in packed.generation_indices:
            start = len(generations[index].prompt_ids)
            for at, age in enumerate(ages(generations[index], trainer)):
                if generations[index].trained:
                    expected[start + at] = None if age == -1 and not _is_known(generations[index], at) else max(0, age)
                    if version := output_versions(generations[index])[at]:
                        named[start + at] = version
        assert row.version_lag == expected
        covered = {place: span.weight_version for span in row.version_spans for place in range(span.start, span.end)}
        assert covered == named


def _is_known(generation: Generation, at: int) -> bool:
    return version_number(output_versions(generation)[at]) is not None
