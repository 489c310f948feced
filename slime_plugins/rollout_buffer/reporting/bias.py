"""Reads a job's newest closed groups and their members, for ``rules/selection_bias.py``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.rules.selection_bias import FinishedGroup, FinishedMember, GroupOutcome, MemberOutcome
from slime_plugins.rollout_buffer.storage.tables import job_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import AttemptState, GroupState

MAX_MEMBERS_READ = 1000
"""The newest groups with this many slots in total are read."""
FILTERED_BY_REWARD = frozenset({CauseCode.NOT_VALID, CauseCode.ITEMS_FILTERED, CauseCode.GROUP_FUNCTION})
"""Causes of groups that were filtered for their rewards. Groups with other causes count as lost."""

_NEWEST = (
    "WITH newest AS (SELECT * FROM groups INDEXED BY groups_by_closing "
    "WHERE job_key = ? AND closed_at IS NOT NULL AND opened_at IS NOT NULL "
    "AND state IN ('delivered', 'leased', 'filtered', 'failed') ORDER BY closed_at DESC LIMIT ?) "
)
_GROUPS = "SELECT key, state, cause_code, opened_at, closed_at, task FROM newest"
_TRAJECTORIES = (
    "SELECT group_key, slot, attempt, uid, late, created_at, sampled_tokens, turns, reward, success "
    "FROM newest JOIN trajectories ON group_key = newest.key"
)
_UIDS = "SELECT coalesce(source_uid, uid) FROM newest JOIN members ON group_key = newest.key WHERE NOT remove_sample"
"""Uids of delivered members."""
_ATTEMPTS = (
    "SELECT group_key, slot, attempt, attempts.state, ended_at - started_at AS seconds "
    "FROM newest JOIN attempts ON group_key = newest.key"
)

_Slot = tuple[int, int]


def closed_groups(connection: Connection, job_key: int) -> list[FinishedGroup]:
    """Returns the newest groups that were delivered, leased, filtered, or failed: the fate of the others is open.

    A member's duration is that of the attempt that returned it; without a trajectory, that of the longest attempt. For
    a written item it is the time from the opening of its group to the write.
    """
    size = job_rows.get_job(connection, job_key).group_size
    newest = (job_key, max(1, MAX_MEMBERS_READ // size))
    trajectories: dict[_Slot, Any] = {}
    for row in connection.execute(_NEWEST + _TRAJECTORIES, newest):
        if not row["late"] or (row["group_key"], row["slot"]) not in trajectories:  # the one that filled the slot stays
            trajectories[row["group_key"], row["slot"]] = row
    delivered = {row[0] for row in connection.execute(_NEWEST + _UIDS, newest)}
    attempts: defaultdict[_Slot, list[Any]] = defaultdict(list)
    for row in connection.execute(_NEWEST + _ATTEMPTS, newest):
        attempts[row["group_key"], row["slot"]].append(row)
    groups = []
    for group in connection.execute(_NEWEST + _GROUPS, newest):
        outcome = _group_outcome(group["state"], group["cause_code"])
        slots = [(group["key"], number) for number in range(size)]
        members = [_member(group, outcome, trajectories.get(slot), attempts[slot], delivered) for slot in slots]
        groups.append(FinishedGroup(outcome=outcome, seconds=group["closed_at"] - group["opened_at"], members=members))
    return groups


def _group_outcome(state: str, cause_code: str) -> GroupOutcome:
    if state in (GroupState.DELIVERED, GroupState.LEASED):
        return GroupOutcome.TRAINED
    return GroupOutcome.FILTERED if CauseCode(cause_code) in FILTERED_BY_REWARD else GroupOutcome.LOST


def _member(
    group: Any, group_outcome: GroupOutcome, trajectory: Any | None, attempts: list[Any], delivered: set[str]
) -> FinishedMember:
    """``trajectory`` is the member's, which may be late; ``delivered`` has the uids of delivered members."""
    outcome = _outcome(group_outcome, trajectory, attempts, delivered)
    dummy = group_outcome is GroupOutcome.TRAINED and outcome is not MemberOutcome.TRAINED
    if trajectory is None:
        longest = max((each["seconds"] for each in attempts if each["seconds"] is not None), default=None)
        return FinishedMember(outcome=outcome, seconds=longest, task=group["task"], dummy=dummy)
    own = [each["seconds"] for each in attempts if each["attempt"] == trajectory["attempt"]]
    return FinishedMember(
        outcome=outcome,
        seconds=own[0] if own else trajectory["created_at"] - group["opened_at"],
        length=trajectory["sampled_tokens"],
        turns=trajectory["turns"],
        reward=trajectory["reward"],
        success=trajectory["success"],
        task=group["task"],
        dummy=dummy,
    )


def _outcome(group: GroupOutcome, trajectory: Any | None, attempts: list[Any], delivered: set[str]) -> MemberOutcome:
    if trajectory is None or trajectory["late"]:
        last = max(attempts, key=lambda each: int(each["attempt"]), default=None)
        failed = last is not None and last["state"] == AttemptState.FAILED
        return MemberOutcome.FAILED if failed else MemberOutcome.GIVEN_UP
    if group is not GroupOutcome.TRAINED:
        return MemberOutcome.FILTERED if group is GroupOutcome.FILTERED else MemberOutcome.LOST
    return MemberOutcome.TRAINED if trajectory["uid"] in delivered else MemberOutcome.FILTERED
