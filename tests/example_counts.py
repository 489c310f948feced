"""How many examples a property is tried with: what a test asks for, and 25 times as many in a thorough run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings

PLAIN = 100
"""The profile ``quick`` tries 40 of a hundred that a test asks for, ``thorough`` ten times all of them."""


def examples(count: int, *, suppress_health_check: Sequence[HealthCheck] = (), **more: Any) -> settings:
    """So many examples; with ``--hypothesis-profile thorough`` 25 times as many."""
    profile = settings()
    return settings(
        max_examples=max(1, count * profile.max_examples // PLAIN),
        suppress_health_check=[*profile.suppress_health_check, *suppress_health_check],
        **more,
    )
