"""Pure: the typed settings of a stored job that rules on states and groups use, with their defaults.

``wire.job_settings.JobSettings`` has meaning and limits of each setting, and validates requests; ``StoredSettings`` is
read from the job's row. A job that was stored before a setting existed has the setting's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

DEFAULT_GROUP_TIMEOUT_S = 300.0
"""The group timeout of a job whose groups are filled by programs, if it sets none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSettings:
    """Settings of a job; ``JobSettings`` documents each. ``all_values`` has all, without the generator's
    options."""

    tokenizer_path: str | None = None
    generation_cap: int | None = None
    """Maximum tokens of one generation; None if not set."""
    evaluation: bool = False
    min_valid_group_size_ratio: float = 1.0
    min_valid_item_size_ratio: float = 0.7
    min_timeout_group_size_ratio: float = 0.7
    group_timeout_seconds: float | None = None
    reward_range: tuple[float, float] | None = None
    normalize_rewards: bool = False
    padding: Literal["dummy", "copy"] = "dummy"
    max_attempts: int = 3
    max_groups_ahead: int | None = 256
    max_groups_ready: int | None = None
    max_weight_version_lag: int | None = None
    staleness_policy: Literal["admit", "drop", "flag"] | None = None
    pause_when_idle_s: float | None = 3600.0
    all_values: Mapping[str, Any] = field(default_factory=dict, repr=False)


DEFAULTS = StoredSettings()

_NAMES = frozenset(one.name for one in fields(StoredSettings)) - {"generation_cap", "reward_range", "all_values"}


@lru_cache(maxsize=64)
def parse_settings(text: str) -> StoredSettings:
    """Parses the settings of a job's row. Cached, since every write and poll reads the row."""
    values = json.loads(text)
    bounds = values.get("reward_range")
    params = values.get("sampling_params") or {}
    return StoredSettings(
        generation_cap=params.get("max_new_tokens") or params.get("max_tokens") or values.get("max_tokens"),
        reward_range=None if bounds is None else (bounds[0], bounds[1]),
        all_values=MappingProxyType(values),
        **{name: value for name, value in values.items() if name in _NAMES},
    )
