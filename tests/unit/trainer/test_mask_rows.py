"""Training rows from generations: what a row holds, what it never makes up, and what it refuses."""

from __future__ import annotations

import time

import pytest

from slime.utils.mask_utils import Generation, TrainingRow, expand_image_tokens, pack_training_rows


def test_log_probs_are_never_made_up_for_a_trained_turn_that_has_none() -> None:
    turns = [Generation([1], [2], [-0.5]), Generation([1, 2], [3]), Generation([8], [9], [-0.7])]
    mixed, complete = pack_training_rows(turns)
    assert mixed.log_probs is None
    assert complete.log_probs == [0.0, -0.7]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_a_log_prob_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"generation 1 has the log-prob .* at output token 1"):
        pack_training_rows([Generation([1], [2], [-1.0]), Generation([1, 2], [3, 4], [-1.0, value])])


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
