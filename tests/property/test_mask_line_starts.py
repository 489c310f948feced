"""Where a turn is put together from header and body, its ids are still the tokenizer's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.utils.mask_tokens import ChunkTokenizer, cuts_text_at_line_starts, is_line_start
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests import chat_tokenizers
from tests.example_counts import examples

CUT_AT_LINE_STARTS = ["small-hybrid", "qwen2.5", "qwen3-hybrid", "qwen3.5", "deepseek-r1-distill"]
PIECES = st.one_of(
    st.sampled_from(
        ["\n", "\r", "\r\n", "\n\n", " ", "  ", "\t", "\x0b", "\x1c", "\x85", "\u00a0", "\u2028", "\u3000", ""]
    ),
    st.sampled_from(["<think>", "</think>", "<|im_end|>", "<|im_start|>", "<tool_call>", "<|im_"]),
    st.sampled_from(["'s", "'S", "don't", "!?", "...", "/", "42", "a", "word"]),
    st.sampled_from(["é", "e\u0301", "\u0301", "你好", "\u1100\u1161", "😀"]),
    st.text(max_size=4),
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)


def drawn(count: int) -> settings:
    """Settings of ``count`` examples, without Hypothesis's health checks."""
    return examples(count, suppress_health_check=list(HealthCheck))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("name", CUT_AT_LINE_STARTS)
@drawn(60)
@given(text=TEXTS)
@example(text="!\n/usr\n'll \n \n\u0301x\r\nA\n1")
def test_a_text_cut_at_any_line_start_has_the_ids_of_its_parts(name: str, text: str) -> None:
    tokenizer = chat_tokenizers.load(name)
    assert cuts_text_at_line_starts(tokenizer)
    whole = ids_of(tokenizer, text)
    for at in filter(lambda at: is_line_start(text, at), range(len(text))):
        assert ids_of(tokenizer, text[:at]) + ids_of(tokenizer, text[at:]) == whole


@pytest.mark.parametrize("name", ["small-hybrid", "qwen3-hybrid"])
def test_an_answer_that_becomes_history_is_tokenised_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = ChunkTokenizer._encode

    def counted(self: ChunkTokenizer, texts: Sequence[str]) -> list[list[int]]:
        encoded.extend(texts)
        return encode(self, texts)

    monkeypatch.setattr(ChunkTokenizer, "_encode", counted)
    generator = MultiTurnLossMaskGenerator(chat_tokenizers.load(name), "qwen3")
    messages = []
    for turn in range(4):
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": f"answer {turn}" + " and more" * 10},
        ]
        generator.get_loss_mask(messages)
    for turn in range(4):
        assert sum(f"answer {turn}" in text for text in encoded) == 1


def tokenizer_with(
    pattern: str = chat_tokenizers.QWEN_PATTERN, normalizer: Any = None, model: Any = None, **flags: bool
) -> Any:
    backend = Tokenizer(model or models.BPE())
    backend.normalizer = normalizer or normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.add_tokens([AddedToken("<mark>", normalized=False, **flags)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_tokenizer_that_may_look_across_a_line_break_is_not_cut_there() -> None:
    slashes = chat_tokenizers.QWEN_PATTERN.replace("[\\r\\n]*|", "[\\r\\n/]*|")
    assert cuts_text_at_line_starts(tokenizer_with())
    assert not cuts_text_at_line_starts(tokenizer_with(slashes))
    assert not cuts_text_at_line_starts(tokenizer_with(normalizer=normalizers.Strip()))
    assert not cuts_text_at_line_starts(tokenizer_with(model=models.BPE(dropout=0.1)))
    assert not cuts_text_at_line_starts(tokenizer_with(model=models.WordLevel()))
    assert not cuts_text_at_line_starts(tokenizer_with(lstrip=True))
    assert not cuts_text_at_line_starts(tokenizer_with(rstrip=True))
    assert not cuts_text_at_line_starts(tokenizer_with(single_word=True))
    assert not cuts_text_at_line_starts(object())
