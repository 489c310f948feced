"""Pure: the settings of a stored job, typed, as far as its states and groups go by them.

``wire.start_request.JobSettings`` checks what a caller sends; this is what of it was kept. A job that was stored
before a setting came has its default, which is the same there and here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSettings:
    """What a job goes by; the meaning of each is told in ``JobSettings``. ``kept`` has all, also a generator's own."""

    tokenizer_path: str | None = None
    generation_cap: int | None = None
    """Cap of one generation in tokens; None where nobody has named one."""
    evaluation: bool = False
    min_valid_group_size_ratio: float = 1.0
    min_valid_item_size_ratio: float = 0.7
    min_timeout_group_size_ratio: float = 0.7
    group_timeout_seconds: float | None = None
    reward_range: tuple[float, float] | None = None
    normalize_rewards: bool = False
    padding: str = "dummy"
    max_attempts: int = 3
    max_groups_ahead: int | None = 256
    max_groups_ready: int | None = None
    max_weight_version_lag: int | None = None
    staleness_policy: str | None = None
    pause_when_idle_s: float | None = 3600.0
    kept: Mapping[str, Any] = field(default_factory=dict, repr=False)


_NAMES = frozenset(one.name for one in fields(StoredSettings)) - {"generation_cap", "reward_range", "kept"}


@lru_cache(maxsize=64)
def parse_settings(text: str) -> StoredSettings:
    """Reads the settings of a job's row. Cached, since a row is read with every write and poll."""
    kept = json.loads(text)
    wanted = kept.get("reward_range")
    return StoredSettings(
        generation_cap=_generation_cap(kept),
        reward_range=None if wanted is None else (wanted[0], wanted[1]),
        kept=MappingProxyType(kept),
        **{name: value for name, value in kept.items() if name in _NAMES},
    )


def _generation_cap(kept: Mapping[str, Any]) -> int | None:
    params = kept.get("sampling_params") or {}
    return params.get("max_new_tokens") or params.get("max_tokens") or kept.get("max_tokens")
