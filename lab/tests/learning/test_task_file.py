"""A task in one file: found by its TASK_TYPE, its instances, and episodes to warm a policy up on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rollout_buffer_lab.learning.task_file import find_task
from slime_plugins.rollout_buffer.errors import ConfigError
from tests.demo_tokens import tokenizer

BARE = "TASK_TYPE = 'bare'\ndef create_generator(): ...\n"


def test_a_scripted_player_plays_the_generator_itself() -> None:
    task = find_task("next_digit", None)

    items = task.warm_up(tokenizer, random.Random(0), 60).items

    assert len(items) == 60
    assert all(len(item.generations) == 3 for item in items)
    said = [str(message["content"]) for item in items for message in item.messages if message["role"] == "assistant"]
    assert all(len(text) == 1 and text.isdigit() for text in said)
    rewards: list[Any] = [item.reward for item in items]
    assert 0.35 < sum(rewards) / 60 < 0.65


def test_the_first_mode_is_the_default_and_an_unknown_one_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "modes.py").write_text(BARE + "MODES = {'one': {'key': 1}, 'two': {'key': 2}}\n")
    task = find_task("bare", tmp_path)

    assert task.options(None) == {"key": 1}
    assert task.options("two") == {"key": 2}
    with pytest.raises(ConfigError, match="no mode 'three'; its modes: one, two"):
        task.options("three")


def test_a_task_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(BARE)

    with pytest.raises(ConfigError, match="TASK_TYPE = 'other'; the tasks there: bare"):
        find_task("other", tmp_path)


def test_a_file_that_does_not_load_is_named_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("TASK_TYPE = 'broken'\nimport nothing_of_that_name\n")

    with pytest.raises(ConfigError, match=r"broken\.py cannot be loaded: ModuleNotFoundError"):
        find_task("broken", tmp_path)
