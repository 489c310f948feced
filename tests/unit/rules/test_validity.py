"""Which numbers and lists a generator may give as rewards, which ids a model has, and which numbers are log-probs."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.rules.validity import (
    MAX_VOCABULARY,
    as_reward,
    as_token_rewards,
    as_turn_rewards,
    checked_log_prob,
    first_invalid_id,
)
from slime_plugins.rollout_buffer.tokenizer_loading import UNKNOWN_PADDING, vocabulary_size


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.array(0.5), Decimal("0.5")])
def test_numbers_of_libraries_are_rewards(value: Any) -> None:
    assert as_reward(value) == 0.5
    assert type(as_reward(value)) is float


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (True, "a boolean"),
        (np.bool_(False), "a boolean"),
        (None, "must be a number"),
        ("1.0", "a string"),
        ([1.0], "must be a number"),
        (math.nan, "finite"),
        (-math.inf, "finite"),
        (10**400, "finite"),
        (1e308, "32 bits"),
        (-3.5e38, "32 bits"),
    ],
)
def test_what_cannot_be_trained_is_no_reward(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_reward(value)


@given(rewards=st.lists(st.floats(-1e6, 1e6), max_size=6))
def test_rewards_of_turns_are_one_number_for_each_turn(rewards: list[float]) -> None:
    assert as_turn_rewards(rewards, len(rewards)) == tuple(rewards)
    assert as_turn_rewards(None, 3) is None
    for turns in {0, len(rewards) + 1, len(rewards) + 7} - {len(rewards)}:
        with pytest.raises(ValueError, match=f"has {len(rewards)} entries for the {turns} turns that are trained"):
            as_turn_rewards(rewards, turns)


@pytest.mark.parametrize(
    ("value", "says"),
    [("12", "must be a list, not a string"), (3.0, "must be a list, not float"), ({}, "must be a list, not dict")]
    + [([1.0, value], "finite") for value in (math.nan, math.inf, 10**400)]
    + [([1.0, None], "must be a number, not null"), ([1.0, True], "not a boolean")],
)
def test_what_is_no_list_of_rewards_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        as_turn_rewards(value, 2)


def test_rewards_of_tokens_are_one_number_for_each_token_of_a_turn_or_none_for_it() -> None:
    assert as_token_rewards([None, [-1.0, 0]], [3, 2]) == (None, (-1.0, 0.0))
    assert as_token_rewards([None, None], [None, None]) == (None, None)
    with pytest.raises(ValueError, match="of turn 1 has 3 entries for the 2 sampled tokens of turn 1"):
        as_token_rewards([None, [0.0, 0.0, 0.0]], [3, 2])
    with pytest.raises(ValueError, match="in turn 0, whose tokens are not known: send generations"):
        as_token_rewards([[0.0]], [None])
    with pytest.raises(ValueError, match="of turn 0 must be a finite number"):
        as_token_rewards([[math.nan]], [1])


# --- ids and log-probs -----------------------------------------------------------------------------------------------


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
