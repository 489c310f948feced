"""Settings: the shipped file is the defaults, mistakes are named with key and line, jobs may not touch the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.android_world.config import (
    CONFIG_VARIABLE,
    JOB_KEYS,
    SHIPPED_CONFIG,
    AndroidWorldSettings,
    load_settings,
    read_settings,
)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def test_the_shipped_file_spells_out_exactly_the_defaults() -> None:
    assert read_settings(SHIPPED_CONFIG) == AndroidWorldSettings()
    values = yaml.safe_load(SHIPPED_CONFIG.read_text(encoding="utf-8"))
    assert set(values) == set(AndroidWorldSettings.model_fields)
    assert set(values["reward"]) == set(type(AndroidWorldSettings().reward).model_fields)


def test_the_variable_names_the_hosts_file_when_a_job_starts(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text("num_workers: 64\nresources_per_worker:\n  num_cpus: 4\n", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config_file))
    settings = load_settings({})
    assert (settings.num_workers, settings.resources_per_worker.num_cpus) == (64, 4)


def test_a_job_overrides_key_by_key_also_within_a_section() -> None:
    settings = load_settings({"android_world": {"max_turns": 5, "reward": {"thinking_bonus": 0.2}}})
    assert (settings.max_turns, settings.reward.thinking_bonus, settings.reward.step_decay) == (5, 0.2, 0.1)


@pytest.mark.parametrize("key", sorted(set(AndroidWorldSettings.model_fields) - JOB_KEYS))
def test_what_belongs_to_the_host_is_refused_from_a_job(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"android_world\.{key} belongs to the host"):
        load_settings({"android_world": {key: "/bin/sh"}})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_turn": 5}, "android_world.max_turn is not a setting"),
        ({"max_turns": 0}, "android_world.max_turns: Input should be greater than or equal to 1, not 0"),
        ({"reward": {"premature_penalty": 3}}, "android_world.reward.premature_penalty: "),
        ({"rollout_mode": "backwards"}, "android_world.rollout_mode: "),
        ("max_turns=5", "must be an object"),
    ],
)
def test_a_wrong_override_is_named(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"android_world": overrides})
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_workers: 2\nmax_turn: 5\n", "mine.yaml: line 2: max_turn is not a setting"),
        ("# one\n\nmax_turns: many\n", "mine.yaml: line 3: max_turns: "),
        ("reward:\n  step_decay: -1\n", "mine.yaml: line 2: reward.step_decay: "),
        ("num_workers: 2\nnum_workers: 3\n", "mine.yaml: line 2: num_workers was already set in line 1"),
        ("base_avd_name_pattern: worker\n", "line 1: base_avd_name_pattern: must contain {} once"),
        ("device: toaster\n", "line 1: device: must be simulated"),
        ("- a\n- b\n", "must be a list of `key: value` lines"),
        ("max_turns: [1\n", "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_line(config_file: Path, text: str, message: str) -> None:
    config_file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_settings(config_file)
    assert message in caught.value.message


def test_a_missing_file_is_named(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(config_file)


def test_an_empty_file_is_all_defaults(config_file: Path) -> None:
    config_file.write_text("# nothing\n", encoding="utf-8")
    assert read_settings(config_file) == AndroidWorldSettings()


def test_devices_do_not_care_what_jobs_override() -> None:
    job = load_settings({"android_world": {"max_turns": 5, "max_context_len": 100, "reward": {"step_decay": 1}}})
    assert job.for_devices() == AndroidWorldSettings().for_devices()


def test_image_tokens_are_estimated_upwards_from_the_pixel_cap() -> None:
    assert AndroidWorldSettings(screenshot_max_pixels=1025).image_tokens == 2
    assert AndroidWorldSettings().image_tokens == 633
