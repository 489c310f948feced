"""Training rows from generations: what a row holds, which image stands behind each placeholder, what is refused."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from slime.utils.mask_utils import Generation, TrainingRow, expand_image_tokens, pack_training_rows
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import PromptCheck, PromptReceipt
from slime_plugins.rollout_buffer.wire import decode_generations, encode_generations


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


@pytest.mark.parametrize(
    ("loss_mask", "counts", "says"),
    [([0, 0, 1], [3, 1], "1 image placeholders for 2 images"), ([0, 1, 1], [3], "was sampled")],
)
def test_expanding_refuses_another_number_of_images_and_a_placeholder_that_was_sampled(
    loss_mask: list[int], counts: list[int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        expand_image_tokens(TrainingRow([1, 7, 2], loss_mask, None, 2, (0,)), 7, counts)


PAD = 9
A, B, C = (hashlib.sha256(name.encode()).hexdigest() for name in "abc")


def append_only_generations(turns: int) -> list[Generation]:
    """The generations of an episode that sees a new image in every turn."""
    names = [hashlib.sha256(str(turn).encode()).hexdigest() for turn in range(turns)]
    generations: list[Generation] = []
    held: list[int] = []
    for turn in range(turns):
        held = [*held, 1, PAD, 2]
        generations.append(
            Generation(held, [7, 8], [-0.5, -0.5], images=tuple(names[: turn + 1]), prompt_tokens=len(held) + 10)
        )
        held = [*held, 7, 8]
    return generations


def test_images_and_counts_survive_the_wire() -> None:
    generations = (
        *append_only_generations(3),
        Generation([1, PAD], [5], images=(B,), prompt_receipt=PromptReceipt(PromptCheck.EQUAL, images=(B,))),
        Generation([1, PAD, PAD], [5], images=(C, B), prompt_receipt=PromptReceipt(PromptCheck.EQUAL, images=(B, C))),
        Generation([1], [5], images=()),
        Generation([1], [5]),
    )

    back = decode_generations(json.loads(json.dumps(encode_generations(generations))))

    assert [generation.images for generation in back] == [generation.images for generation in generations]
    assert [generation.prompt_tokens for generation in back] == [13, 18, 23, None, None, None, None]
    assert [generation.prompt_receipt for generation in back] == [one.prompt_receipt for one in generations]


def test_images_on_the_wire_grow_with_the_turns_and_not_with_their_square() -> None:
    def length(turns: int) -> int:
        return len(json.dumps(encode_generations(append_only_generations(turns))))

    assert length(50) - length(40) < 1.2 * (length(20) - length(10))


@pytest.mark.parametrize(
    "entry",
    [
        {"images": ["short"]},
        {"images": A},
        {"images": [], "keep_images": 1},
        {"images": [], "keep_images": -1},
        {"prompt_tokens": "5"},
    ],
)
def test_what_is_no_image_list_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(InvalidPayloadError, match=r"generations\[0\]"):
        decode_generations([{"prompt_ids": [1], "output_ids": [2], **entry}])


def test_another_image_behind_the_same_placeholder_opens_a_row() -> None:
    first, second = Generation([1, PAD], [5], images=(A,)), Generation([1, PAD, 5, PAD], [6], images=(B, C))

    assert [row.images for row in pack_training_rows([first, second])] == [(A,), (B, C)]
