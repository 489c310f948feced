"""How many examples a property is tried with: a share of what a test asks for, or ten times as many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings

PERCENT = 100


def examples(count: int, *, suppress_health_check: Sequence[HealthCheck] = (), **more: Any) -> settings:
    """Settings of a test that asks for ``count`` examples.

    The profile's ``max_examples`` is the percentage of them that is tried: 40 for ``quick``, the default, and 1000 with
    ``--hypothesis-profile thorough``.
    """
    profile = settings()
    return settings(
        max_examples=max(1, count * profile.max_examples // PERCENT),
        suppress_health_check=[*profile.suppress_health_check, *suppress_health_check],
        **more,
    )
