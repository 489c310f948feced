"""What a policy wrote, told from messages alone: the cases that templates, servers and agents make hard."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, RebuiltRows, UndecidedReason
from tests import chat_tokenizers
from tests.mask_conversations import assistant, user

Message = dict[str, Any]
THINKERS = ["small-hybrid", "qwen3-hybrid", "qwen3-first-release"]
DISTILLED = ["small-deepseek", "deepseek-r1-distill"]
OPENED = ["small-thinking", "qwen3.5"]
END = {"small-deepseek": "<｜end▁of▁sentence｜>", "deepseek-r1-distill": "<｜end▁of▁sentence｜>"}


def generator(name: str, **options: Any) -> MultiTurnLossMaskGenerator:
    kind = chat_tokenizers.KINDS[name]
    return MultiTurnLossMaskGenerator(chat_tokenizers.load(name), kind.tokenizer_type, chat_template_kwargs=options)


def rebuilt(name: str, messages: list[Message], *, cut: bool = False, **options: Any) -> RebuiltRows:
    return generator(name, **options).rebuild_rows(messages, cut=cut)


def parts(name: str, messages: list[Message], *, cut: bool = False, **options: Any) -> list[tuple[str, str]]:
    """The prompt and the trained text of each row that holds one turn."""
    decode = chat_tokenizers.load(name).decode
    rows = rebuilt(name, messages, cut=cut, **options).rows
    starts = [row.loss_mask.index(1) for row in rows]
    return [
        (decode(row.token_ids[:start]), decode(row.token_ids[start:])) for row, start in zip(rows, starts, strict=True)
    ]


def trained(name: str, messages: list[Message], *, cut: bool = False, **options: Any) -> list[str]:
    """The trained stretches of all rows, in order."""
    one = generator(name, **options)
    rows = one.rebuild_rows(messages, cut=cut).rows
    return [text for row in rows for text in one.get_text_from_loss_mask(row.token_ids, row.loss_mask)]


@pytest.mark.parametrize("name", DISTILLED)
@pytest.mark.parametrize(
    "reply", ["long thoughts\n</think>\n\n42", "<think>\nlong thoughts\n</think>\n\n42", "42", "never done thinking"]
)
@pytest.mark.parametrize("cut", [False, True])
def test_a_single_distilled_reply_never_trains_fewer_tokens_than_slime(name: str, reply: str, cut: bool) -> None:
    """slime trains the tokens of the last message's text, whole, and no end of turn."""
    slimes = chat_tokenizers.load(name)(reply, add_special_tokens=False)["input_ids"]
    (row,) = rebuilt(name, [user(), assistant(reply)], cut=cut).rows
    ours = [token_id for token_id, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert ours[: len(slimes)] == slimes
    assert len(ours) == len(slimes) + (not cut)


@pytest.mark.parametrize("name", [*OPENED, *DISTILLED, *THINKERS])
def test_a_field_with_reasoning_is_put_back_in_front(name: str) -> None:
    opening = "" if name in OPENED or name in DISTILLED else "<think>\n"
    end = END.get(name, "<|im_end|>")
    assert trained(name, [user(), assistant("four", reasoning_content="two and two")]) == [
        f"{opening}two and two\n</think>\n\nfour{end}"
    ]
    assert trained(name, [user(), assistant("", reasoning_content="two and")], cut=True) == [f"{opening}two and"]
    assert trained(name, [user(), assistant(None, reasoning_content="two and")], cut=True) == [f"{opening}two and"]


@pytest.mark.parametrize("name", OPENED)
def test_a_cut_answer_of_an_agent_that_never_thinks_gets_no_thinking_prompt(name: str) -> None:
    *_, (prompt, output) = parts(name, [user(), assistant("two"), user("three"), assistant("the answ")], cut=True)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert output == "the answ"


@pytest.mark.parametrize("name", OPENED)
def test_a_cut_reply_is_thinking_unless_something_says_otherwise(name: str) -> None:
    ((prompt, output),) = parts(name, [user(), assistant("let me s")], cut=True)
    assert (prompt[-8:], output) == ("<think>\n", "let me s")
    ((prompt, output),) = parts(name, [user(), assistant("the answ")], cut=True, enable_thinking=False)
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    assert output == "the answ"
    *_, (prompt, _) = parts(name, [user(), assistant("so\n</think>\n\ntwo"), user(), assistant("let me s")], cut=True)
    assert prompt.endswith("<think>\n")


@pytest.mark.parametrize("name", ["small-plain", *THINKERS, *DISTILLED])
def test_a_turn_that_was_cut_trains_no_end_of_turn_and_any_other_does(name: str) -> None:
    end = END.get(name, "<|im_end|>")
    assert trained(name, [user(), assistant("two")]) == [f"two{end}"]
    assert trained(name, [user(), assistant("two")], cut=True) == ["two"]
    assert trained(name, [user(), assistant("two"), user()], cut=True) == [f"two{end}"]  # the last message is no reply
    told = [user(), assistant("two", finish_reason="length"), user(), assistant("four")]
    assert trained(name, told) == ["two", f"four{end}"]


@pytest.mark.parametrize("name", ["qwen3-hybrid", "qwen3.5"])
def test_thinking_between_tool_calls_stays_one_row(name: str) -> None:
    call = {"type": "function", "function": {"name": "tap", "arguments": {"x": 1}}}
    messages = [user()]
    for at in range(5):
        reply = assistant("I tap.", reasoning_content=f"thought {at}", tool_calls=[call])
        messages += [reply, {"role": "tool", "content": "done"}]
    messages.append(assistant("", reasoning_content="enough"))
    (row,) = rebuilt(name, messages).rows
    assert row.token_ids == generator(name).get_loss_mask(messages)[0][: len(row.token_ids)]
    assert len(trained(name, messages)) == 6


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("I tap.", "I tap.\n\n"),
        ("I tap.\n", "I tap.\n\n"),
        ("I tap.\n\n", "I tap.\n\n"),
        ("I tap.\n\n\n", "I tap.\n\n\n"),
        ("I tap: ", "I tap: \n\n"),
    ],
)
@pytest.mark.parametrize("name", OPENED)
def test_white_space_before_calls_is_kept_though_the_template_trims_it(name: str, text: str, written: str) -> None:
    call = {"type": "function", "function": {"name": "tap", "arguments": {"x": 1}}}
    (output,) = trained(name, [user(), assistant(text, reasoning_content="so", tool_calls=[call])])
    assert output.startswith(f"so\n</think>\n\n{written}<tool_call>")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "R\n</think>\n\n"},
        {"content": "<think>\nR\n</think>\n\n"},
        {"reasoning_content": "R", "content": ""},
    ],
    ids=["as sampled", "with the marker", "a field"],
)
def test_a_call_right_after_a_thought_closes_it_once(message: Message) -> None:
    """Qwen3's thinking models open the block in every prompt and know no prompt that closes it."""
    tokenizer = copy.deepcopy(chat_tokenizers.load("small-hybrid"))
    prompt = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"
    tokenizer.chat_template = tokenizer.chat_template.rpartition("{%- if add_generation_prompt -%}")[0] + prompt
    call = {"type": "function", "function": {"name": "tap", "arguments": {"x": 1}}}
    (row,) = MultiTurnLossMaskGenerator(tokenizer).rebuild_rows([user(), assistant(**message, tool_calls=[call])]).rows

    (written,) = MultiTurnLossMaskGenerator(tokenizer).get_text_from_loss_mask(row.token_ids, row.loss_mask)
    assert written == ('R\n</think>\n\n<tool_call>\n{"name": "tap", "arguments": {"x": 1}}\n</tool_call><|im_end|>')


def test_calls_that_the_template_cannot_write_are_reported() -> None:
    call = {"type": "function", "function": {"name": "tap", "arguments": "{}"}}
    messages = [user(), assistant("I tap.", tool_calls=[call])]
    found = rebuilt("small-deepseek", messages)
    assert [one.reason for one in found.undecided] == [UndecidedReason.DROPPED_CALLS]
    assert trained("small-deepseek", [user(), assistant("I tap.", tool_calls=[call])]) == [
        "I tap.<｜end▁of▁sentence｜>"
    ]


def test_an_image_token_that_a_reply_spells_is_not_trained_and_reported() -> None:
    found = rebuilt("small-thinking", [user("x"), assistant("so\n</think>\n\na<|image_pad|>b")])
    assert trained("small-thinking", [user("x"), assistant("so\n</think>\n\na<|image_pad|>b")]) == [
        "so\n</think>\n\na",
        "b<|im_end|>",
    ]
    assert [one.reason for one in found.undecided] == [UndecidedReason.IMAGE]
