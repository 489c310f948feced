"""Reads what became of a job's groups, for ``rules/bias.py``: the newest that are over."""

from __future__ import annotations

from slime_plugins.rollout_buffer.rules.bias import FinishedGroup, GroupOutcome
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import GroupState

__all__ = ["groups_over"]

GROUPS_LOOKED_AT = 500
FOR_REWARDS = frozenset({CauseCode.NOT_VALID, CauseCode.ITEMS_FILTERED, CauseCode.GROUP_FUNCTION})

_OVER = (
    "SELECT groups.state, groups.cause_code, groups.closed_at - groups.opened_at, "
    "coalesce(json_extract(line, '$.metadata.task_name'), groups.instance_id), "
    "(SELECT avg(turns) FROM trajectories WHERE group_key = groups.key AND late = 0), "
    "(SELECT avg(success) FROM trajectories WHERE group_key = groups.key AND late = 0) "
    "FROM groups INDEXED BY groups_by_closing JOIN instances USING (job_key, position) "
    "WHERE job_key = ? AND closed_at IS NOT NULL AND opened_at IS NOT NULL "
    "AND state IN ('delivered', 'leased', 'filtered', 'failed') ORDER BY closed_at DESC LIMIT ?"
)


def groups_over(connection: Connection, job_key: int) -> list[FinishedGroup]:
    """Returns the newest groups that were handed out, filtered, or failed; those that wait or run may still be trained.

    ``seconds`` are from a group's first attempt to its verdict.
    """
    return [
        FinishedGroup(fate=_fate(state, code), seconds=seconds, task=str(task), turns=turns, success=success)
        for state, code, seconds, task, turns, success in connection.execute(_OVER, (job_key, GROUPS_LOOKED_AT))
    ]


def _fate(state: str, cause_code: str) -> GroupOutcome:
    if state in (GroupState.DELIVERED, GroupState.LEASED):
        return GroupOutcome.TRAINED
    return GroupOutcome.FILTERED if CauseCode(cause_code) in FOR_REWARDS else GroupOutcome.LOST
