"""Drift reports: what re-tokenising would have done to a trajectory, kind by kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from slime.utils.mask_drift import RebuiltTokens, RebuiltTurn, compare_with_rebuilt
from slime.utils.mask_utils import DriftReport, Generation, pack_training_rows
from tests import chat_tokenizers, mask_conversations
from tests.example_counts import examples
from tests.mask_conversations import assistant, generator_of, user

Message = dict[str, Any]


def ids(text: str, name: str = "small-plain") -> list[int]:
    found: list[int] = chat_tokenizers.load(name)(text, add_special_tokens=False)["input_ids"]
    return found


def faithful(messages: list[Message], name: str = "small-plain") -> list[Generation]:
    """What an engine would have sampled if the rebuilt ids were the truth."""
    masked = generator_of(name).mask_conversation(messages)
    return [
        Generation(masked.token_ids[: turn.start], masked.token_ids[turn.start : turn.end]) for turn in masked.turns
    ]


TWO_TURNS = [user("Open the settings"), assistant("tap"), user("and then"), assistant("The answer is 42.")]


def report(generations: list[Generation], messages: list[Message] = TWO_TURNS) -> DriftReport:
    return generator_of("small-plain").report_drift(messages, generations)


def continued(first: Generation, *, bridge: str = "\n", output: list[int]) -> list[Generation]:
    """The two turns, the second prompt holding exactly what came before."""
    held = [*first.prompt_ids, *first.output_ids]
    shown = ids(f"{bridge}<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n")
    return [first, Generation(held + shown, output)]


PROMPT = ids("<|im_start|>user\nOpen the settings<|im_end|>\n<|im_start|>assistant\n")
ANSWER = ids("The answer is 42.<|im_end|>")


def test_other_splits_of_the_same_text_are_found() -> None:
    letters = [token for character in "tap" for token in ids(character)]
    assert letters != ids("tap")
    found = report(continued(Generation(PROMPT, letters + ids("<|im_end|>")), output=ANSWER))
    assert found.kinds[0] == "split"
    assert found.first_differing_turn == 0
    assert found.tokens_affected == len(letters)


def test_a_turn_that_was_cut_is_found_even_where_the_ids_agree() -> None:
    cut = Generation(PROMPT, ids("tap"), finish_reason="length")
    found = report(continued(cut, bridge="<|im_end|>\n", output=ANSWER))
    rebuilt, _ = generator_of("small-plain").get_loss_mask(TWO_TURNS)
    (row,) = pack_training_rows(continued(cut, bridge="<|im_end|>\n", output=ANSWER))
    assert row.token_ids == rebuilt[: len(row.token_ids)]
    assert found.kinds == ["eos"]
    assert found.first_differing_turn == 0


def test_reasoning_that_the_template_drops_is_found() -> None:
    name = "small-hybrid"
    messages = [
        user("one"),
        assistant("<think>\nwhy\n</think>\n\ntap"),
        user("two"),
        assistant("wait", reasoning_content="so"),
    ]
    start = ids("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n", name)
    first = Generation(start, ids("<think>\nwhy\n</think>\n\ntap<|im_end|>", name))
    second = generator_of(name).mask_conversation(messages).turns[1]
    shown, _ = generator_of(name).get_loss_mask(messages)
    found = generator_of(name).report_drift(
        messages, [first, Generation(shown[: second.start], shown[second.start : second.end])]
    )
    assert found.kinds == ["think_stripped", "rows"]
    assert found.first_differing_turn == 0
    assert found.rows == 2


def test_marker_text_sampled_as_plain_pieces_is_found() -> None:
    pieces = [token for character in "<|im_start|>" for token in ids(character)]
    messages = [user("Open the settings"), assistant("<|im_start|>")]
    assert report([Generation(PROMPT, pieces + ids("<|im_end|>"))], messages).kinds == ["injected"]


def test_a_turn_trained_on_one_side_only_is_found() -> None:
    off = [*TWO_TURNS[:1], assistant("tap", step_loss_mask=0), *TWO_TURNS[2:]]
    assert report(faithful(TWO_TURNS), off).kinds == ["mask"]
    first, second = faithful(TWO_TURNS)
    untrained = Generation(first.prompt_ids, first.output_ids, trained=False)
    assert report([untrained, second]).kinds == ["mask"]
    assert report([untrained, second], off).is_clean


def compared(generations: list[Generation], turns: list[RebuiltTurn]) -> DriftReport:
    """The report on generations whose messages rebuild into the tokens 0 to 9."""
    mask = [int(any(turn.start <= at < turn.end for turn in turns)) for at in range(10)]
    rebuilt = RebuiltTokens(
        range(10), mask, turns, added_ids=(), special_ids=(), decode=lambda ids: "".join(map(str, ids))
    )
    return compare_with_rebuilt(generations, pack_training_rows(generations), rebuilt)


def test_a_first_character_that_merged_into_the_prompt_is_no_other_text() -> None:
    for first, kinds in ((3, ["boundary"]), (8, ["text", "boundary"])):
        assert compared([Generation([0, 1, 2], [first, 4, 5])], [RebuiltTurn(4, 6, merged=True)]).kinds == kinds


def test_a_prompt_that_differs_before_an_equal_output_is_placed_also_if_its_end_merged() -> None:
    found = compared([Generation([0, 1, 77, 3], [4, 5])], [RebuiltTurn(4, 6, merged=True)])
    assert (found.kinds, found.first_differing_turn, found.first_differing_token) == (["context"], 0, 2)


def test_a_second_row_is_placed_at_the_first_token_that_the_messages_do_not_rebuild() -> None:
    turns = [Generation([0, 1], [2, 3]), Generation([0, 1, 2, 3, 4], [5])]
    found = compared([*turns, Generation([0, 1, 2, 3, 88], [5])], [RebuiltTurn(2, 4), RebuiltTurn(5, 6)])
    assert found.kinds == ["rows", "turns"]
    assert (found.first_differing_turn, found.first_differing_token) == (2, 4)


def test_rows_that_differ_in_images_alone_are_placed_after_their_tokens() -> None:
    turns = [Generation([0, 1], [2, 3], images=("a",)), Generation([0, 1, 2, 3, 4], [5], images=("b",))]
    found = compared(turns, [RebuiltTurn(2, 4), RebuiltTurn(5, 6)])
    assert (found.kinds, found.first_differing_turn, found.first_differing_token) == (["rows"], 1, 6)


@pytest.mark.parametrize("name", ["small-plain", "small-hybrid", "small-thinking", "small-deepseek"])
@examples(60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_report_is_clean_exactly_when_ids_and_mask_agree(name: str, data: st.DataObject) -> None:
    """Over faithful trajectories, harmed in random ways."""
    messages, _ = data.draw(mask_conversations.conversations(chat_tokenizers.KINDS[name].oracle))
    before = copy.deepcopy(messages)
    masked = generator_of(name).mask_conversation(messages)
    generations: list[Generation] = []
    held: list[int] = []
    for turn in masked.turns:
        shown = masked.token_ids[len(held) : turn.start]
        if data.draw(st.integers(0, 9)) == 0:
            shown = shown[1:]
        sampled = masked.token_ids[turn.start : turn.end]
        match data.draw(st.integers(0, 12)):
            case 0:
                sampled = sampled[:-1]
            case 1:
                sampled = [0, *sampled]
            case 2:
                held = held[1:]
        generations.append(Generation([*held, *shown], sampled, trained=data.draw(st.integers(0, 9)) > 0))
        held = [*held, *shown, *sampled]

    found = generator_of(name).report_drift(messages, generations)

    rows = pack_training_rows(generations)
    end = masked.turns[-1].end if masked.turns else 0
    agree = (
        [(row.token_ids, row.loss_mask) for row in rows] == [(masked.token_ids[:end], masked.loss_mask[:end])]
        if rows
        else 1 not in masked.loss_mask
    )
    assert found.is_clean == agree
    assert (found.kinds == []) == agree
    assert messages == before
