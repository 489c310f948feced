"""Rows rebuilt from messages train everything that was written, once, after what was shown, and nothing else."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from slime.utils.mask_utils import TrainingRow, UndecidedReason
from tests import chat_tokenizers, mask_conversations, played_conversations
from tests.example_counts import examples
from tests.mask_conversations import generator_of

every_family = pytest.mark.parametrize("name", list(played_conversations.FAMILIES))


pytestmark = pytest.mark.timeout(300)  # conversations are rendered turn by turn, hundreds of them


def trained_stretches(row: TrainingRow) -> list[tuple[int, int]]:
    """Where the mask is 1, as runs."""
    starts = [at for at, one in enumerate(row.loss_mask) if one and (at == 0 or not row.loss_mask[at - 1])]
    ends = [at + 1 for at, one in enumerate(row.loss_mask) if one and not (row.loss_mask[at + 1 :] or [0])[0]]
    return list(zip(starts, ends, strict=True))


def turns_of(tokenizer: Any, rows: list[TrainingRow]) -> list[tuple[str, str]]:
    """What each trained stretch was sampled after, and what it says."""
    return [
        (tokenizer.decode(row.token_ids[:start]), tokenizer.decode(row.token_ids[start:end]))
        for row in rows
        for start, end in trained_stretches(row)
    ]


@every_family
@examples(120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_written_character_is_trained_once_after_what_was_shown(name: str, data: st.DataObject) -> None:
    tokenizer = chat_tokenizers.load(name)
    one = data.draw(played_conversations.played(name, tokenizer))
    rebuilt = generator_of(name).rebuild_rows(one.messages, cut=one.cut)

    turns = zip(one.prompts, one.outputs, one.trained, strict=True)
    wanted = [(prompt, output) for prompt, output, trained in turns if trained and output]
    assert turns_of(tokenizer, rebuilt.rows) == wanted
    assert rebuilt.by_turn
    assert sum(sum(row.loss_mask) for row in rebuilt.rows) == sum(
        len(tokenizer(output, add_special_tokens=False)["input_ids"]) for _, output in wanted
    )


@every_family
@examples(40, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_each_row_holds_the_images_that_its_last_prompt_showed(name: str, data: st.DataObject) -> None:
    tokenizer = chat_tokenizers.load(name)
    one = data.draw(played_conversations.played(name, tokenizer))
    rebuilt = generator_of(name).rebuild_rows(
        one.messages,
        cut=one.cut,
        images_before=lambda index: ("0",) * played_conversations.image_placeholders(one.messages[:index]),
    )

    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for row in rebuilt.rows:
        assert row.images is not None
        assert row.token_ids.count(pad) == len(row.images)


@pytest.mark.parametrize("name", list(chat_tokenizers.KINDS))
@examples(25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_hostile_text_costs_a_written_character(name: str, data: st.DataObject) -> None:
    """Whatever stands in a conversation: each reply is trained whole, in one generation, or said to hold an image."""
    messages, tools = data.draw(mask_conversations.conversations(chat_tokenizers.KINDS[name].oracle))
    decode = chat_tokenizers.load(name).decode
    try:
        rebuilt = generator_of(name).rebuild_rows(messages, tools)
    except ValueError as refused:  # the template's own refusal, of the whole conversation as well
        with pytest.raises(type(refused)):
            generator_of(name).get_loss_mask(messages, tools)
        return

    replies = [message for message in messages if message["role"] == "assistant"]
    images = sum(one.reason is UndecidedReason.IMAGE for one in rebuilt.undecided)
    outputs = [generation.output_ids for generation in rebuilt.generations if generation.trained]
    assert sum(sum(row.loss_mask) for row in rebuilt.rows) + images == sum(map(len, outputs))
    for generation, message in zip(rebuilt.generations, replies, strict=True):
        written = unicodedata.normalize("NFC", decode(generation.output_ids))
        # What stands in front may be the prompt's: an opened block, or one that is closed again and empty.
        in_front = ("", "<think>\n", "<think>\n\n</think>\n\n")
        assert any(_said(message).removeprefix(text) in written for text in in_front)
        assert unicodedata.normalize("NFC", message.get("reasoning_content") or "").strip() in written


def _said(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return unicodedata.normalize("NFC", text)
