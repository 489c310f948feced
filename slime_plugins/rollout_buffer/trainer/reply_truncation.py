"""Decides whether the last reply was truncated: its mask then has no end of turn."""

from __future__ import annotations

from slime_plugins.rollout_buffer.types import StopReason
from slime_plugins.rollout_buffer.wire import RolloutItem

STOPS_THAT_CUT = frozenset({StopReason.MAX_TOKENS, StopReason.MAX_CONTEXT, StopReason.FORBIDDEN_TOKEN})
"""Stop reasons of a truncated last reply."""
STOPS_BETWEEN_TURNS = frozenset(
    {StopReason.MAX_TURNS, StopReason.TERMINATED, StopReason.ANSWERED, StopReason.TASK_ENDED, StopReason.REPEATED}
)
FINISH_REASONS_THAT_CUT = frozenset({"length", "abort"})


def is_last_reply_truncated(item: RolloutItem) -> bool:
    """Returns True if the last reply was truncated before its end of turn.

    ``finish_reason`` is ``length`` for every truncated episode, also for one that ran out of turns: the stop reason
    decides first.
    """
    if item.stop_reason in STOPS_BETWEEN_TURNS:
        return False
    return item.stop_reason in STOPS_THAT_CUT or item.extra_info.get("finish_reason") in FINISH_REASONS_THAT_CUT
