"""Pure: the few numbers of a trajectory that charts and filters need, taken out of its payload when it is written.

They stand in columns, so that no chart ever reads a payload. What a trajectory does not tell stays None: unknown is no
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.types import Generation

WAITING = frozenset({"acquire"})
"""Phases in which an episode waits for its device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFacts:
    """What is counted of one episode; the names are those of the columns."""

    success: float | None = None
    """In [0, 1]: what the environment said, before any shaping."""
    turns: int | None = None
    sampled_tokens: int | None = None
    generate_s: float | None = None
    """Seconds it waited for the engine."""
    played_s: float | None = None
    """Seconds of all its phases together but for the wait for a device: as long as it held one."""

    def columns(self) -> dict[str, float | int | None]:
        """Returns the facts by column."""
        return {name: getattr(self, name) for name in self.__slots__}


def facts_of(
    extra_info: Mapping[str, Any], timings_s: Mapping[str, Any], generations: Sequence[Generation]
) -> EpisodeFacts:
    """Reads what an episode says of itself; what is missing or makes no sense is None."""
    held = [value for phase, value in timings_s.items() if phase not in WAITING]
    phases = [seconds for value in held if (seconds := _at_least_zero(value)) is not None]
    return EpisodeFacts(
        success=_success(extra_info),
        turns=_turns(extra_info, generations),
        sampled_tokens=sum(len(one.output_ids) for one in generations) if generations else None,
        generate_s=_at_least_zero(timings_s.get("generate")),
        played_s=sum(phases) if phases else None,
    )


def _success(extra_info: Mapping[str, Any]) -> float | None:
    breakdown = extra_info.get("reward_breakdown")
    exact = breakdown.get("success") if isinstance(breakdown, Mapping) else None
    reported = extra_info.get("success")
    for value in (exact, float(reported) if isinstance(reported, bool) else reported):
        number = _at_least_zero(value)
        if number is not None and number <= 1:
            return number
    return None


def _turns(extra_info: Mapping[str, Any], generations: Sequence[Generation]) -> int | None:
    reported = extra_info.get("turns")
    if type(reported) is int and 0 <= reported < 2**31:
        return reported
    return len(generations) or None


def _at_least_zero(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
