"""The settings of stored jobs are typed."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from slime_plugins.rollout_buffer.rules.stored_settings import StoredSettings, parse_settings
from slime_plugins.rollout_buffer.wire.job_settings import JobSettings

TYPED = [one.name for one in fields(StoredSettings) if one.name not in ("generation_cap", "all_values")]


CHANGED: dict[str, Any] = {
    "tokenizer_path": "/t",
    "evaluation": True,
    "min_valid_group_size_ratio": 0.5,
    "min_valid_item_size_ratio": 0.4,
    "min_timeout_group_size_ratio": 0.3,
    "group_timeout_seconds": 7.5,
    "reward_range": (-1.0, 2.0),
    "normalize_rewards": True,
    "padding": "copy",
    "max_attempts": 5,
    "max_groups_ahead": None,
    "max_groups_ready": 7,
    "max_weight_version_lag": 2,
    "staleness_policy": "flag",
    "pause_when_idle_s": None,
}


@pytest.mark.parametrize("name", TYPED)
def test_each_typed_setting_is_what_the_payload_said(name: str) -> None:
    stored = JobSettings(task_type="math", **{name: CHANGED[name]}).model_dump_json()
    assert getattr(parse_settings(stored), name) == CHANGED[name]


@pytest.mark.parametrize(
    ("settings", "cap"),
    [
        ({}, None),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "sampling_params": {"max_tokens": 8}}, 8),
        ({"max_tokens": 9, "sampling_params": {"max_tokens": 8, "max_new_tokens": 7}}, 7),
    ],
)
def test_the_cap_of_a_generation_is_the_first_that_was_named(settings: dict[str, Any], cap: int | None) -> None:
    assert parse_settings(json.dumps(settings)).generation_cap == cap


def test_what_only_a_generator_knows_is_kept_and_cannot_be_changed() -> None:
    settings = parse_settings('{"bonus": 3}')
    assert settings.all_values["bonus"] == 3
    with pytest.raises(TypeError):
        settings.all_values["bonus"] = 4  # type: ignore[index]  # that it cannot be assigned is the claim
