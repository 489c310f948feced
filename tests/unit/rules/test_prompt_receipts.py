"""Turns whose engine ran other ids are counted, with what they cost; without receipts there are no counts."""

from __future__ import annotations

from slime_plugins.rollout_buffer.rules.prompt_receipts import PromptCounts, prompt_counts
from slime_plugins.rollout_buffer.types import Generation, PromptCheck, PromptReceipt

EQUAL = PromptReceipt(PromptCheck.EQUAL)


def test_turns_without_a_receipt_have_no_counts() -> None:
    assert prompt_counts([Generation([1], [2])]) is None


def test_a_turn_that_ran_other_ids_costs_rows_that_read_its_prompt_again() -> None:
    differing = PromptReceipt(PromptCheck.DIFFERING, [1, 2, 3, 4, 5])
    turns = [
        Generation([1, 2], [3, 4], prompt_receipt=EQUAL),
        Generation([1, 2, 9, 5], [6], prompt_receipt=differing),
        Generation([1, 2, 3, 4, 5, 6, 7], [8], prompt_receipt=EQUAL),
    ]
    # three rows, [1 2 3 4], [1 2 9 5 6] and [1 2 3 4 5 6 7 8], in place of the last alone
    assert prompt_counts(turns) == PromptCounts(equal=2, differing=1, forked=2, extra_tokens=9, row_tokens=17)


def test_tokens_of_images_count_as_the_engine_made_them() -> None:
    receipt = PromptReceipt(PromptCheck.EQUAL, image_tokens=(5, 7))
    found = prompt_counts([Generation([1, 0, 2, 0], [3], images=("a", "b"), prompt_receipt=receipt)])
    assert found == PromptCounts(equal=1, row_tokens=5 + 4 + 6)


def test_turns_with_unknown_prompts_are_counted_and_the_untrained_of_them_once_more() -> None:
    safe = PromptReceipt(PromptCheck.UNKNOWN)
    unsafe = PromptReceipt(PromptCheck.UNKNOWN, untrained_because="why")
    found = prompt_counts([Generation([1], [2], prompt_receipt=safe), Generation([1, 2], [3], prompt_receipt=unsafe)])
    assert found is not None
    assert found.as_dict() == {
        "checked": 0, "equal": 0, "differing": 0, "unknown": 2, "untrained": 1, "forked": 0, "extra_tokens": 0,
        "row_tokens": 3,
    }  # fmt: skip
