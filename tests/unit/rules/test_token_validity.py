"""How many ids a model has, as its files say it; which numbers are log-probs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.rules.validity import MAX_VOCABULARY, checked_log_prob, first_invalid_id
from slime_plugins.rollout_buffer.tokenizer_loading import UNKNOWN_PADDING, vocabulary_size


def folder(path: Path, config: Any = None, tokenizer: Any = None) -> Path:
    for name, content in (("config.json", config), ("tokenizer.json", tokenizer)):
        if content is not None:
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


TOKENIZER = {"model": {"vocab": {"a": 0, "b": 9}}, "added_tokens": [{"id": 12, "content": "<|im_end|>"}]}


@pytest.mark.parametrize(
    ("config", "tokenizer", "size"),
    [
        ({"vocab_size": 128}, TOKENIZER, 128),
        ({"vocab_size": 10}, TOKENIZER, 10),
        ({"text_config": {"vocab_size": 128}}, TOKENIZER, 128),
        ({"vocab_size": 64, "text_config": {"vocab_size": 128}}, TOKENIZER, 128),
        (None, TOKENIZER, 13 + UNKNOWN_PADDING),
        (None, {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}, 2 + UNKNOWN_PADDING),
        ({"vocab_size": "many"}, TOKENIZER, 13 + UNKNOWN_PADDING),
        ("{", "{", None),
        ([1], [1], None),
        (None, None, None),
    ],
)
def test_the_padded_size_is_in_the_models_files(tmp_path: Path, config: Any, tokenizer: Any, size: int | None) -> None:
    assert vocabulary_size(folder(tmp_path, config, tokenizer)) == size


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    assert vocabulary_size(folder(tmp_path, {"vocab_size": 100})) == 100
    assert vocabulary_size(folder(tmp_path, {"vocab_size": 100_000})) == 100_000


def test_without_a_folder_the_size_is_that_of_the_tokenizer_or_unknown() -> None:
    assert vocabulary_size("Qwen/Qwen3-8B", tokenizer=range(100)) == 100 + UNKNOWN_PADDING
    assert vocabulary_size("Qwen/Qwen3-8B") is None
    assert vocabulary_size(None) is None
    assert vocabulary_size(DEMO_TOKENIZER_PATH) is not None


def test_the_first_invalid_id_is_found() -> None:
    assert first_invalid_id([0, 9], 10) is None
    assert first_invalid_id([0, 10, 11], 10) == 10
    assert first_invalid_id([-1], None) == -1
    assert first_invalid_id([MAX_VOCABULARY - 1], None) is None
    assert first_invalid_id([MAX_VOCABULARY], None) == MAX_VOCABULARY


@pytest.mark.parametrize("value", [None, True, "0", [0.0], math.nan, math.inf, -math.inf, 0.5, 1, -1e39, 10**400])
def test_what_is_no_log_prob_is_not_taken(value: Any) -> None:
    assert checked_log_prob(value) is None


@given(st.floats(-1e30, 1e-3) | st.integers(-1000, 0))
def test_a_log_prob_stays_and_rounding_above_zero_is_cut_off(value: float) -> None:
    assert checked_log_prob(value) == min(value, 0.0)
