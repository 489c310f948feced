"""How many examples a property is tried with: what a test asks for, and ten times as many in a thorough run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings

__all__ = ["examples"]

PLAIN = 100
"""Examples of a test that asks for no number, in the profile ``quick``."""


def examples(count: int, *, suppress_health_check: Sequence[HealthCheck] = (), **more: Any) -> settings:
    """So many examples; with ``--hypothesis-profile thorough`` ten times as many."""
    profile = settings()
    return settings(
        max_examples=count * profile.max_examples // PLAIN,
        suppress_health_check=[*profile.suppress_health_check, *suppress_health_check],
        **more,
    )
