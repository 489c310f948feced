"""Slots that are filled from outside: handed out in order, fenced, given back, and their groups closed."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import BusyError, ConflictError, StaleAttemptError
from slime_plugins.rollout_buffer.gateway.slot_claims import EndedClaim, SlotClaim, SlotClaims
from slime_plugins.rollout_buffer.rules.heartbeats import GATEWAY
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Trajectory
from tests.support import (
    Claims,
    begun_attempt,
    poll,
    slot_counts,
    start_external,
    start_played,
    trajectory,
    uids,
    write,
    written,
)


@pytest.fixture
def claims(buffer: Buffer) -> Claims:
    return Claims(buffer)


def brought(claim: SlotClaim, reward: float = 1.0) -> Trajectory:
    return trajectory(claim.uid, claim.group.instance_id, reward)


def test_a_slot_that_is_spent_in_every_group_before_does_not_hide_the_free_one(buffer: Buffer, claims: Claims) -> None:
    names = tuple(f"i{number}" for number in range(40))
    job = start_external(buffer, n=2, ids=names, max_attempts=1)
    for name in names[:-1]:
        spent = claims.take(job.job_id, name)
        claims.take(job.job_id, name)
        claims.lose(spent)
    assert claims.take(job.job_id).group.instance_id == names[-1]


def test_written_items_and_claims_share_the_slots_of_a_group(buffer: Buffer, claims: Claims) -> None:
    job = start_external(buffer, n=3, ids=("i",))
    assert write(buffer, job, written("u", "i")) == ["stored"]
    first, second = claims.take(job.job_id), claims.take(job.job_id)
    assert (first.slot, second.slot) == (1, 2)
    with pytest.raises(BusyError, match="is taken"):
        claims.take(job.job_id)
    claims.finish(first, brought(first, 0.0))
    claims.finish(second, brought(second, 0.5))
    assert uids(buffer, poll(buffer, job)) == ["u", first.uid, second.uid]
    with pytest.raises(ConflictError, match="no open group"):
        claims.take(job.job_id)


def test_a_claim_is_finished_once_and_a_given_up_one_never(buffer: Buffer, claims: Claims) -> None:
    job = start_external(buffer, n=2, ids=("i",))
    kept, lost = claims.take(job.job_id), claims.take(job.job_id)
    assert [claims.finish(kept, brought(kept)) for _ in range(2)] == ["stored", "duplicate"]
    claims.lose(lost)
    with pytest.raises(StaleAttemptError):
        claims.finish(lost, brought(lost))
    state = claims.find(lost.uid)
    assert isinstance(state, EndedClaim)
    assert (state.state, state.error_code, state.reward) == ("failed", "session_expired", None)
    state = claims.find(kept.uid)
    assert isinstance(state, EndedClaim)
    assert (state.state, state.reward) == ("finished", 1.0)


def test_claims_outlive_the_process_that_handed_them_out(buffer: Buffer, claims: Claims) -> None:
    job = start_external(buffer, n=3, ids=("i",))
    ended, kept, left = (claims.take(job.job_id, idle_timeout_s=60.0 + at) for at in range(3))
    claims.finish(ended, brought(ended))
    successor = SlotClaims(buffer)
    assert [*successor.open_sessions()] == [kept.uid, left.uid]
    found = [one for uid in successor.open_sessions() if isinstance(one := successor.find(uid), SlotClaim)]
    assert [one.idle_timeout_s for one in found] == [61.0, 62.0]
    assert [successor.finish(one, brought(one)) for one in found] == ["stored", "stored"]


@pytest.mark.parametrize("last", ["a trajectory", "an item", "a failure"])
def test_a_group_is_closed_in_the_transaction_that_fills_its_last_slot(
    buffer: Buffer, claims: Claims, last: str
) -> None:
    job = start_external(buffer, n=2, ids=("i",), max_attempts=1)
    filled, spent = claims.take(job.job_id), claims.take(job.job_id)
    if last == "a failure":
        claims.finish(filled, brought(filled))
    claims.lose(spent)
    if last == "an item":
        assert write(buffer, job, written("u", "i")) == ["stored"]
        assert claims.finish(filled, brought(filled)) == "late"
    if last == "a trajectory":
        assert claims.finish(filled, brought(filled)) == "stored"
    assert slot_counts(buffer, job)["open"] == 0


def test_a_start_that_allows_fewer_attempts_closes_the_groups_that_it_leaves_without_a_slot_to_claim(
    buffer: Buffer, claims: Claims
) -> None:
    names = ("spent", "claimed again", "filled", "given up")
    job = start_external(buffer, n=2, ids=names, job_id="j", max_attempts=2)
    for name in names:
        claims.lose(claims.take("j", name))
        again, other = claims.take("j", name), claims.take("j", name)
        if name == "filled":
            claims.finish(again, brought(again))
        elif name != "claimed again":
            claims.lose(again)
        claims.lose(other, given_up=name in ("filled", "given up"))
    start_external(buffer, n=2, ids=names, job_id="j", max_attempts=1)
    assert slot_counts(buffer, job)["failed"] == 2


def test_a_start_of_the_gateway_closes_only_the_full_groups_that_a_killed_process_left_open(
    buffer: Buffer, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_plugins.rollout_buffer.state.attempts.close_full_groups", lambda *_, only: None)
    job = start_external(buffer, n=2, ids=("filled", "spent", "claimed", "to be claimed"), max_attempts=1)
    for reward in (0.0, 1.0):
        claim = claims.take(job.job_id, "filled")
        claims.finish(claim, brought(claim, reward))
        claims.lose(claims.take(job.job_id, "spent"))
    filled, _ = claims.take(job.job_id, "claimed"), claims.take(job.job_id, "claimed")
    claims.finish(filled, brought(filled))
    claims.lose(claims.take(job.job_id, "to be claimed"))
    assert slot_counts(buffer, job)["open"] == 8
    buffer.resume_sessions()
    counts = slot_counts(buffer, job)
    assert (counts["ready"], counts["failed"], counts["open"]) == (2, 2, 4)


def test_a_group_with_a_session_from_before_a_restart_is_judged_by_the_new_settings(
    buffer: Buffer, claims: Claims
) -> None:
    job = start_external(buffer, n=2, ids=("i", "k"), job_id="j", max_attempts=1)
    kept, other, *lost = [claims.take(job.job_id) for _ in range(4)]
    start_external(
        buffer, n=2, ids=("i", "k"), job_id="j", max_attempts=2, skip_instance_ids=[], normalize_rewards=True
    )
    for claim in lost:
        claims.lose(claim)
    claims.finish(kept, brought(kept, 0.0))
    claims.finish(other, brought(other, 1.0))
    with buffer.store.read() as connection:
        rewards = [row["reward"] for row in connection.execute("SELECT reward FROM members ORDER BY reward")]
    assert slot_counts(buffer, job)["open"] == 2
    assert rewards == pytest.approx([-1, 1])


def test_an_attempt_of_a_runner_is_no_session(buffer: Buffer, claims: Claims) -> None:
    fence = buffer.begin_running(start_played(buffer).key)
    (group,) = buffer.open_groups(1, after=(-1, -1), limit=1)
    attempt = begun_attempt(buffer, fence, group, 0)
    uid = group.attempt_uid(0, attempt)
    assert claims.find(uid) is None
    buffer.add_trajectory(fence, group, 0, attempt, trajectory(uid))
    assert claims.find(uid) is None


def five_with_one_open(buffer: Buffer, claims: Claims) -> tuple[JobRecord, SlotClaim]:
    """A group of which four members have come, and the fifth's session is open."""
    job = start_external(buffer, n=5, ids=("i",))
    *finished, last = [claims.take(job.job_id) for _ in range(5)]
    for claim in finished:
        claims.finish(claim, brought(claim))
    return job, last


def test_an_open_session_holds_the_clock_of_its_group_while_its_gateway_lives(
    buffer: Buffer, claims: Claims, clock: SettableClock
) -> None:
    job, last = five_with_one_open(buffer, claims)
    for _ in range(100):
        clock.advance(10)
        buffer.beat(GATEWAY.name, 1, {})
        assert buffer.close_timed_out_groups() == 0
    claims.lose(last)
    clock.advance(299)
    assert buffer.close_timed_out_groups() == 0
    clock.advance(2)
    assert buffer.close_timed_out_groups() == 1
    assert slot_counts(buffer, job)["ready"] == 5


def test_a_slot_whose_result_came_late_is_claimed_again_once_its_group_is_open_again(
    buffer: Buffer, claims: Claims, clock: SettableClock
) -> None:
    job = start_external(buffer, n=1, ids=("i",), group_timeout_seconds=10, job_id="j", evaluation=True)
    claim = claims.take(job.job_id)
    start_external(buffer, n=1, ids=("i",), group_timeout_seconds=10, job_id="j", evaluation=True,
                   skip_instance_ids=["i"])  # fmt: skip
    assert claims.finish(claim, brought(claim)) == "late"
    start_external(buffer, n=1, ids=("i",), group_timeout_seconds=10, job_id="j", evaluation=True,
                   skip_instance_ids=[])  # fmt: skip
    again = claims.take(job.job_id)
    assert (again.slot, again.attempt) == (claim.slot, 2)
