"""Generations say which image stands behind each placeholder: over the wire, and when rows are packed."""

from __future__ import annotations

import hashlib
import json

import pytest

from slime.utils.mask_utils import Generation, pack_training_rows
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.types import PromptCheck, PromptReceipt
from slime_plugins.rollout_buffer.wire import decode_generations, encode_generations

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
