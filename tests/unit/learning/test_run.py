"""A run takes nothing away that it is told to read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the policy needs torch")

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.learning.run import LearnSettings, learn


def test_a_model_or_an_input_in_the_folder_of_the_run_is_refused_and_stays(tmp_path: Path) -> None:
    earlier = tmp_path / "run" / "model" / "config.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")

    for settings in (
        LearnSettings(folder=tmp_path, model=earlier.parent),
        LearnSettings(folder=tmp_path, input_file=earlier),
    ):
        with pytest.raises(ConfigError, match="give another --folder"):
            learn(settings, print, print)

    assert earlier.read_text() == "{}"


def test_an_earlier_run_that_cannot_be_drawn_beside_this_one_is_named_before_anything_is_taken_away(
    tmp_path: Path,
) -> None:
    earlier = tmp_path / "run" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("no metrics")

    with pytest.raises(ConfigError, match="--beside"):
        learn(LearnSettings(folder=tmp_path, beside=(earlier,)), print, print)

    assert earlier.exists()
