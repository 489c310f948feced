"""Reads a job's newest closed groups and their members, for ``rules/selection_bias.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.rules.selection_bias import FinishedGroup, FinishedMember, GroupOutcome, MemberOutcome
from slime_plugins.rollout_buffer.storage.tables import job_rows
from slime_plugins.rollout_buffer.storage.tables.connection import Connection
from slime_plugins.rollout_buffer.types import AttemptState, GroupState

MAX_MEMBERS_READ = 1000
"""The newest groups with this many slots in total are read."""
FOR_REWARDS = frozenset({CauseCode.NOT_VALID, CauseCode.ITEMS_FILTERED, CauseCode.GROUP_FUNCTION})

_NEWEST = (
    "WITH newest AS (SELECT * FROM groups INDEXED BY groups_by_closing "
    "WHERE job_key = ? AND closed_at IS NOT NULL AND opened_at IS NOT NULL "
    "AND state IN ('delivered', 'leased', 'filtered', 'failed') ORDER BY closed_at DESC LIMIT ?) "
)
_GROUPS = "SELECT key, state, cause_code, opened_at, closed_at, task FROM newest"
_CAME = (
    "SELECT group_key, slot, attempt, uid, late, created_at, sampled_tokens, turns, reward, success "
    "FROM newest JOIN trajectories ON group_key = newest.key"
)
_KEPT = "SELECT coalesce(source_uid, uid) FROM newest JOIN members ON group_key = newest.key WHERE NOT remove_sample"
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
    came: dict[_Slot, Any] = {}
    for row in connection.execute(_NEWEST + _CAME, newest):
        if not row["late"] or (row["group_key"], row["slot"]) not in came:
            came[row["group_key"], row["slot"]] = row
    kept = {row[0] for row in connection.execute(_NEWEST + _KEPT, newest)}
    attempts: defaultdict[_Slot, list[Any]] = defaultdict(list)
    for row in connection.execute(_NEWEST + _ATTEMPTS, newest):
        attempts[row["group_key"], row["slot"]].append(row)
    found = []
    for group in connection.execute(_NEWEST + _GROUPS, newest):
        of_group = _group_outcome(group["state"], group["cause_code"])
        slots = [(group["key"], slot) for slot in range(size)]
        members = [_member(group, of_group, came.get(slot), attempts[slot], kept) for slot in slots]
        found.append(FinishedGroup(outcome=of_group, seconds=group["closed_at"] - group["opened_at"], members=members))
    return found


def _group_outcome(state: str, cause_code: str) -> GroupOutcome:
    if state in (GroupState.DELIVERED, GroupState.LEASED):
        return GroupOutcome.TRAINED
    return GroupOutcome.FILTERED if CauseCode(cause_code) in FOR_REWARDS else GroupOutcome.LOST


def _member(
    group: Any, of_group: GroupOutcome, came: Any | None, attempts: list[Any], kept: Collection[str]
) -> FinishedMember:
    """``came`` is the member's trajectory, which may be late, or None; ``kept`` has the uids of delivered members."""
    outcome = _outcome(of_group, came, attempts, kept)
    dummy = of_group is GroupOutcome.TRAINED and outcome is not MemberOutcome.TRAINED
    if came is None:
        longest = max((one["seconds"] for one in attempts if one["seconds"] is not None), default=None)
        return FinishedMember(outcome=outcome, seconds=longest, task=group["task"], dummy=dummy)
    own = [one["seconds"] for one in attempts if one["attempt"] == came["attempt"]]
    return FinishedMember(
        outcome=outcome,
        seconds=own[0] if own else came["created_at"] - group["opened_at"],
        length=came["sampled_tokens"],
        turns=came["turns"],
        reward=came["reward"],
        success=came["success"],
        task=group["task"],
        dummy=dummy,
    )


def _outcome(of_group: GroupOutcome, came: Any | None, attempts: list[Any], kept: Collection[str]) -> MemberOutcome:
    if came is None or came["late"]:
        last = max(attempts, key=lambda one: int(one["attempt"]), default=None)
        failed = last is not None and last["state"] == AttemptState.FAILED
        return MemberOutcome.FAILED if failed else MemberOutcome.GIVEN_UP
    if of_group is not GroupOutcome.TRAINED:
        return MemberOutcome.FILTERED if of_group is GroupOutcome.FILTERED else MemberOutcome.LOST
    return MemberOutcome.TRAINED if came["uid"] in kept else MemberOutcome.FILTERED
