"""Training rows from generations: what a row holds, what it never makes up, and what it refuses."""

from __future__ import annotations

import time

import pytest

from slime.utils.mask_utils import (
    Generation,
    TrainingRow,
    expand_image_tokens,
    pack_training_rows,
    pack_training_rows_within,
)


def test_an_edited_context_opens_a_row_and_an_unedited_one_does_not() -> None:
    turns = [Generation([1, 2], [3]), Generation([1, 7], [4]), Generation([1, 7, 4], [5])]
    assert [(row.token_ids, row.generation_indices) for row in pack_training_rows(turns)] == [
        ([1, 2, 3], (0,)),
        ([1, 7, 4, 5], (1, 2)),
    ]


def test_an_untrained_generation_stays_as_context() -> None:
    turns = [Generation([1], [2], [-1.0], trained=False), Generation([1, 2, 3], [4], [-2.0])]
    (row,) = pack_training_rows(turns)
    assert row.loss_mask == [0, 0, 0, 1]
    assert row.log_probs == [0.0, 0.0, 0.0, -2.0]
    assert row.generation_indices == (0, 1)
    assert row.response_length == 1


def test_a_cut_turn_keeps_what_was_sampled_and_nothing_invented() -> None:
    turns = [Generation([1], [2, 3], finish_reason="length"), Generation([1, 2, 3, 9, 4], [5])]
    (row,) = pack_training_rows(turns)
    assert row.token_ids == [1, 2, 3, 9, 4, 5]
    assert row.loss_mask == [0, 1, 1, 0, 0, 1]


def test_log_probs_are_none_when_nobody_recorded_any() -> None:
    (row,) = pack_training_rows([Generation([1], [2])])
    assert row.log_probs is None


def test_log_probs_are_never_made_up_for_a_trained_turn_that_has_none() -> None:
    turns = [Generation([1], [2], [-0.5]), Generation([1, 2], [3]), Generation([8], [9], [-0.7])]
    mixed, complete = pack_training_rows(turns)
    assert mixed.log_probs is None
    assert complete.log_probs == [0.0, -0.7]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_log_prob_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"generation 1 has the log-prob .* at output token 1"):
        pack_training_rows([Generation([1], [2], [-1.0]), Generation([1, 2], [3, 4], [-1.0, value])])


def test_a_generation_too_long_for_any_row_is_dropped_whole_and_named() -> None:
    turns = [Generation([1], [2]), Generation([1, 2, 3], [4, 5, 6]), Generation([1, 2], [7])]
    rows, dropped = pack_training_rows_within(turns, 4)
    assert dropped == [1]
    assert [(row.token_ids, row.generation_indices) for row in rows] == [([1, 2, 7], (0, 2))]


def test_fifty_turns_of_thirty_thousand_tokens_pack_in_no_time() -> None:
    whole = list(range(30_000))
    turns = [Generation(whole[: at * 600 + 500], whole[at * 600 + 500 : at * 600 + 600]) for at in range(50)]
    start = time.process_time()
    (row,) = pack_training_rows(turns)
    assert time.process_time() - start < 1.0
    assert row.token_ids == whole
    assert sum(row.loss_mask) == 5_000


def test_image_placeholders_expand_in_place() -> None:
    row = TrainingRow([1, 7, 2, 3, 7, 4], [0, 0, 1, 1, 0, 1], [0.0, 0.0, -1.0, -2.0, 0.0, -3.0], 4, (0, 1))
    assert expand_image_tokens(row, 7, [3, 1]) == TrainingRow(
        token_ids=[1, 7, 7, 7, 2, 3, 7, 4],
        loss_mask=[0, 0, 0, 0, 1, 1, 0, 1],
        log_probs=[0.0, 0.0, 0.0, 0.0, -1.0, -2.0, 0.0, -3.0],
        response_length=4,
        generation_indices=(0, 1),
    )


def test_expanding_refuses_another_number_of_images() -> None:
    row = TrainingRow([1, 7, 2], [0, 0, 1], None, 1, (0,))
    with pytest.raises(ValueError, match="1 image placeholders for 2 images"):
        expand_image_tokens(row, 7, [3, 1])


def test_expanding_refuses_a_placeholder_that_was_sampled() -> None:
    row = TrainingRow([1, 7, 2], [0, 1, 1], None, 2, (0,))
    with pytest.raises(ValueError, match="was sampled"):
        expand_image_tokens(row, 7, [3])
