"""Pure: statistics of a trajectory for charts and filters, computed from its payload when it is written.

They are columns, so that charts read no payloads. An unknown value is None, not zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from slime_plugins.rollout_buffer.types import Generation

WAITING = frozenset({"acquire"})
"""Phases in which an episode waits for its device."""


class EpisodeFacts(NamedTuple):
    """Statistics of one episode; the names are those of the columns."""

    success: float | None = None
    """In [0, 1]: the environment's result, before reward shaping."""
    turns: int | None = None
    sampled_tokens: int | None = None
    generate_s: float | None = None
    """Seconds spent in generation requests."""
    played_s: float | None = None
    """Seconds of all phases except the wait for a device."""


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are known; None if no value is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def facts_of(
    extra_info: Mapping[str, Any], timings_s: Mapping[str, Any], generations: Sequence[Generation]
) -> EpisodeFacts:
    """Computes the statistics; a missing or invalid value is None."""
    values = [value for phase, value in timings_s.items() if phase not in WAITING]
    phases = [seconds for value in values if (seconds := _at_least_zero(value)) is not None]
    return EpisodeFacts(
        success=_success(extra_info),
        turns=_turns(extra_info, generations),
        sampled_tokens=sum(len(one.output_ids) for one in generations) if generations else None,
        generate_s=_at_least_zero(timings_s.get("generate")),
        played_s=_at_least_zero(sum(phases)) if phases else None,
    )


def forks_of(extra_info: Mapping[str, Any]) -> int:
    """Returns how many forks the recorder of a session noted: branches beyond the first from the same turn."""
    session = extra_info.get("gateway", extra_info.get("remote_rollout"))
    forks = session.get("forks") if isinstance(session, Mapping) else None
    return len(forks) if isinstance(forks, list) else 0


def _success(extra_info: Mapping[str, Any]) -> float | None:
    breakdown = extra_info.get("reward_breakdown")
    from_breakdown = breakdown.get("success") if isinstance(breakdown, Mapping) else None
    reported = extra_info.get("success")
    for value in (from_breakdown, float(reported) if isinstance(reported, bool) else reported):
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
