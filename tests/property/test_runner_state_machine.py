"""A played job against a model of it: runners that come and go, attempts that fail, a trainer that goes back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slime_plugins.rollout_buffer.buffer import Buffer
from slime_plugins.rollout_buffer.errors import StaleAttemptError
from slime_plugins.rollout_buffer.rules.attempt_uid import AttemptUid
from slime_plugins.rollout_buffer.rules.causes import Shortfall
from slime_plugins.rollout_buffer.rules.groups import DEFAULT_FUNCTIONS
from slime_plugins.rollout_buffer.state.attempts import AttemptFailure
from slime_plugins.rollout_buffer.state.job_lookup import group_policy
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.storage.tables.attempt_rows import attempts_by_error
from slime_plugins.rollout_buffer.storage.tables.group_rows import GroupRecord, as_group
from slime_plugins.rollout_buffer.storage.tables.job_rows import JobRecord
from slime_plugins.rollout_buffer.testing.clock import SettableClock
from slime_plugins.rollout_buffer.types import Trajectory
from slime_plugins.rollout_buffer.wire import job_settings
from tests.example_counts import examples
from tests.support import poll, slot_counts, start_played, trajectory, uids

NAMES = ("a", "b", "c")
GROUP_SIZE = 2
MAX_ATTEMPTS = 2
LEASE_S = 10.0
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None

Attempt = tuple[str, int, int]


class PlayedJobMachine(RuleBasedStateMachine):
    """Model: a group has one state; a slot is filled once; only the newest runner writes; the skip list decides."""

    @initialize(skipped=st.sets(st.sampled_from(NAMES)))
    def start(self, skipped: set[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rollout-buffer-", dir=IN_MEMORY))
        self.clock = SettableClock()
        self.buffer = Buffer(Store(self.folder), clock=self.clock)
        self.consumed = set(skipped)
        self.checkpoints = [set[str](), set(skipped)]
        self.job = self._start_job(skipped)
        self.states = dict.fromkeys(NAMES, "open") | dict.fromkeys(skipped, "skipped")
        self.groups = self._all_groups()
        self.fences = [self.buffer.begin_running(self.job.key)]
        self.max_attempts = MAX_ATTEMPTS
        self.running: dict[Attempt, int] = {}
        self.filled: dict[tuple[str, int], str] = {}
        self.failures: dict[tuple[str, int], int] = {}
        self.attempts: dict[tuple[str, int], int] = {}
        self.ready_uids: dict[str, list[str]] = {}
        self.leases: dict[str, tuple[list[str], float]] = {}

    def _start_job(self, skip: set[str] | None, *, retry_given_up: bool = False) -> JobRecord:
        return start_played(
            self.buffer,
            NAMES,
            job_id="j",
            num_repeat_per_sample=GROUP_SIZE,
            evaluation=True,  # groups whose rewards are equal are delivered too
            min_timeout_group_size_ratio=0.5,
            min_valid_group_size_ratio=0.5,
            min_valid_item_size_ratio=0.5,
            max_attempts=MAX_ATTEMPTS,
            retry_given_up=retry_given_up,
            skip_instance_ids=None if skip is None else sorted(skip),
        )

    def _all_groups(self) -> dict[str, GroupRecord]:
        self.buffer.open_groups(self.job.key, after=(-1, -1), limit=len(NAMES))
        with self.buffer.store.read() as connection:
            rows = connection.execute("SELECT * FROM groups").fetchall()
        return {row["instance_id"]: as_group(row) for row in rows}

    # --- runners -----------------------------------------------------------------------------------------------------

    @rule()
    def another_runner_takes_over(self) -> None:
        self.fences.append(self.buffer.begin_running(self.job.key))
        self.running.clear()

    @rule(name=st.sampled_from(NAMES), slot=st.integers(0, GROUP_SIZE - 1))
    def begin(self, name: str, slot: int) -> None:
        place = (name, slot)
        if place in self.filled or self.failures.get(place, 0) >= self.max_attempts or self._is_running(place):
            return
        number = self.buffer.begin_attempt(self.fences[-1], self.groups[name], slot)
        if self.states[name] != "open":
            assert number is None
            return
        self.attempts[place] = self.attempts.get(place, 0) + 1
        assert number == self.attempts[place]
        self.running[(name, slot, number)] = self.fences[-1]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, data: st.DataObject, reward: float) -> None:
        name, slot, number = data.draw(st.sampled_from(sorted(self.running)))
        found = self._trajectory(name, slot, number, reward)
        result = self.buffer.add_trajectory(self.fences[-1], self.groups[name], slot, number, found)
        assert result.status == ("stored" if self.states[name] == "open" else "late")
        del self.running[(name, slot, number)]
        if self.states[name] == "open":
            self.filled[(name, slot)] = found.uid
        again = self.buffer.add_trajectory(self.fences[-1], self.groups[name], slot, number, found)
        assert again.status == "duplicate"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name, slot, number = data.draw(st.sampled_from(sorted(self.running)))
        self.buffer.fail_attempt(
            self.fences[-1], self.groups[name], slot, number, AttemptFailure(code="device", message="it is gone")
        )
        del self.running[(name, slot, number)]
        self.failures[(name, slot)] = self.failures.get((name, slot), 0) + 1

    @precondition(lambda self: len(self.fences) > 1)
    @rule(data=st.data(), name=st.sampled_from(NAMES), slot=st.integers(0, GROUP_SIZE - 1))
    def an_old_runner_is_refused(self, data: st.DataObject, name: str, slot: int) -> None:
        fence, group = data.draw(st.sampled_from(self.fences[:-1])), self.groups[name]
        late = self._trajectory(name, slot, 999, 1.0)
        with pytest.raises(StaleAttemptError):
            self.buffer.begin_attempt(fence, group, slot)
        with pytest.raises(StaleAttemptError):
            self.buffer.add_trajectory(fence, group, slot, self.attempts.get((name, slot), 1), late)
        with pytest.raises(StaleAttemptError):
            self.buffer.fail_attempt(fence, group, slot, 1, AttemptFailure(code="device", message="it is gone"))
        with pytest.raises(StaleAttemptError):
            self.buffer.judge_and_close(group, group_policy(self.job), shortfall=Shortfall.TIMED_OUT, fence=fence)
        if self.states[name] == "open":
            functions = DEFAULT_FUNCTIONS
            with pytest.raises(StaleAttemptError):
                self.buffer.judge_and_close(
                    group, group_policy(self.job), functions, shortfall=Shortfall.TIMED_OUT, fence=fence
                )

    @rule(name=st.sampled_from(NAMES), timed_out=st.booleans(), own_functions=st.booleans())
    def close(self, name: str, timed_out: bool, own_functions: bool) -> None:
        settled = all(
            (name, slot) in self.filled or self.failures.get((name, slot), 0) >= self.max_attempts
            for slot in range(GROUP_SIZE)
        )
        if not settled and not timed_out:
            return
        verdict = self.buffer.judge_and_close(
            self.groups[name],
            group_policy(self.job),
            DEFAULT_FUNCTIONS if own_functions else None,
            shortfall=Shortfall.SLOTS_FAILED if settled else Shortfall.TIMED_OUT,
            fence=self.fences[-1],
        )
        assert (verdict is not None) == (self.states[name] == "open")
        if verdict is not None:
            expected = [self.filled[(name, slot)] for slot in range(GROUP_SIZE) if (name, slot) in self.filled]
            assert [member.uid for member in verdict.members if not member.remove_sample] == expected
            self.states[name] = "ready" if expected else "failed"
            self.ready_uids[name] = expected

    # --- the trainer -------------------------------------------------------------------------------------------------

    @rule(limit=st.none() | st.integers(1, 2))
    def lease(self, limit: int | None) -> None:
        self._expire()
        delivery = poll(self.buffer, self.job, lease_s=LEASE_S, max_groups=limit)
        if delivery is None:
            assert "ready" not in self.states.values()
            return
        got = uids(self.buffer, delivery)
        names = [name for name in self.ready_uids if set(self.ready_uids[name]) & set(got)]
        for name in names:
            assert self.states[name] == "ready"
            assert set(self.ready_uids[name]) <= set(got)
            self.states[name] = "leased"
        assert len(got) == GROUP_SIZE * len(names)
        self.leases[delivery.delivery_id] = (names, self.clock.now + LEASE_S)
        self.consumed.update(names)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        self._expire()
        if self.leases:
            delivery_id = data.draw(st.sampled_from(sorted(self.leases)))
            assert self.buffer.acknowledge([delivery_id])["acked"] == [delivery_id]
            for name in self.leases.pop(delivery_id)[0]:
                self.states[name] = "delivered"

    @rule(seconds=st.sampled_from([4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.buffer.expire_leases()
        self._expire()

    @rule()
    def save_a_checkpoint(self) -> None:
        self.checkpoints.append(set(self.consumed))

    @rule(data=st.data())
    def the_trainer_comes_back(self, data: st.DataObject) -> None:
        """From any checkpoint: what is in it is not wanted, everything else is, also what was skipped before."""
        self.consumed = set(data.draw(st.sampled_from(self.checkpoints)))
        assert self._start_job(self.consumed).key == self.job.key
        self.max_attempts = MAX_ATTEMPTS
        self.leases.clear()
        for name, state in self.states.items():
            if name in self.consumed:
                self.states[name] = {"open": "skipped", "ready": "skipped", "leased": "delivered"}.get(state, state)
            elif state in ("leased", "delivered"):
                self.states[name] = "ready"
            elif state == "skipped":
                self.states[name] = "ready" if name in self.ready_uids else "open"

    @rule()
    def what_was_given_up_is_tried_again(self) -> None:
        """Closed groups that came short are open again with what they have; what is out under a lease stays out."""
        self._expire()
        self._start_job(None, retry_given_up=True)
        for name, state in self.states.items():
            filled = sum((name, slot) in self.filled for slot in range(GROUP_SIZE))
            if state in ("ready", "delivered", "failed") and filled < GROUP_SIZE:
                self.states[name] = "open"
                self.ready_uids.pop(name, None)
        spent = [
            self.failures.get((name, slot), 0)
            for name in NAMES
            for slot in range(GROUP_SIZE)
            if self.states[name] == "open" and (name, slot) not in self.filled
        ]
        self.max_attempts = min(max(spent, default=0) + MAX_ATTEMPTS, job_settings.MAX_ATTEMPTS)
        assert self.buffer.job("j").settings.max_attempts == self.max_attempts

    @rule()
    def restart(self) -> None:
        self.buffer.store.close()
        self.buffer = Buffer(Store(self.folder), clock=self.clock)

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def the_accounting_is_the_models(self) -> None:
        accounting = slot_counts(self.buffer, self.job)
        for state in ("open", "ready", "leased", "delivered", "failed", "skipped"):
            assert accounting[state] == GROUP_SIZE * list(self.states.values()).count(state), (state, self.states)

    @invariant()
    def attempts_are_counted_as_their_rows_say(self) -> None:
        query = "SELECT state, coalesce(error_code, ''), count(*) FROM attempts GROUP BY 1, 2"
        with self.buffer.store.read() as connection:
            rows = {(row[0], row[1]): row[2] for row in connection.execute(query)}
            assert attempts_by_error(connection, self.job.key) == rows

    @invariant()
    def the_next_runner_would_know_what_is_left(self) -> None:
        wanted = [group.instance_id for group in self.buffer.open_groups(self.job.key, after=(-1, -1), limit=99)]
        assert wanted == [name for name in NAMES if self.states[name] == "open"]
        for name in wanted:
            progress = self.buffer.slot_progress(self.groups[name].key)
            for slot in range(GROUP_SIZE):
                filled, failures = progress.get(slot, (False, 0))
                assert filled == ((name, slot) in self.filled)
                assert failures == self.failures.get((name, slot), 0)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.store.close()
            shutil.rmtree(self.folder)

    def _is_running(self, place: tuple[str, int]) -> bool:
        return any((name, slot) == place for name, slot, _ in self.running)

    def _trajectory(self, name: str, slot: int, number: int, reward: float) -> Trajectory:
        uid = str(AttemptUid(job_key=self.job.key, epoch=0, position=NAMES.index(name), slot=slot, attempt=number))
        return trajectory(uid, name, reward)

    def _expire(self) -> None:
        for delivery_id, (names, until) in list(self.leases.items()):
            if until <= self.clock.now:
                del self.leases[delivery_id]
                for name in names:
                    self.states[name] = "ready"


PlayedJobMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestPlayedJobMachine = PlayedJobMachine.TestCase
