"""The outcome of an episode for each stop reason of the episode loops of ``gui_agent`` and ``context_editing``."""

from __future__ import annotations

from slime_plugins.rollout_buffer.types import Outcome, StopReason

_CUT = frozenset({StopReason.MAX_TOKENS, StopReason.MAX_CONTEXT, StopReason.FORBIDDEN_TOKEN})


def outcome_of(stop_reason: StopReason) -> Outcome:
    """Returns ``truncated`` if the last reply or the context was cut; reaching the limit of turns is ``completed``."""
    if stop_reason is StopReason.ABORTED:
        return Outcome.ABORTED
    return Outcome.TRUNCATED if stop_reason in _CUT else Outcome.COMPLETED
