"""Reads the accounting while processes are being killed: at every sample it must balance."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from tests.crash.accounting import read_only
from tests.crash.workload import PLAYED_JOB, WRITTEN_JOB, Plan, played_lines

INTERVAL_S = 0.25


class Sampler(threading.Thread):
    """Reads the accounting over HTTP and from the database, again and again; keeps what does not balance."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(name="sampler", daemon=True)
        self.plan = plan
        self.over_http = 0
        self.from_database = 0
        self.after_faults = 0
        self.discrepancies: list[str] = []
        self._client = RolloutBufferClient(plan.url, timeout_s=5.0)
        self._end = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._delivered = 0
        self._trajectories = 0

    def run(self) -> None:
        """Samples until ``finish``."""
        while not self._end.wait(INTERVAL_S):
            try:
                for job in self._client.jobs():
                    self._check_reported(job)
                self.over_http += 1
            except (requests.RequestException, RolloutBufferError, ValueError):
                pass  # it is being killed: no answer is no sample
            self._read_database()

    def read_now(self) -> None:
        """Reads the accounting from the database, right after a fault."""
        self.after_faults += self._read_database()

    def _read_database(self) -> bool:
        try:
            with self._one_at_a_time:
                self._look_into_the_database()
        except sqlite3.OperationalError as error:
            # While no server has the database open, a reader has to create its shared memory: a full disk refuses that.
            no_memory = error.sqlite_errorname == "SQLITE_IOERR_SHMSIZE"
            if not no_memory and not any(
                word in str(error) for word in ("unable to open", "locked", "no such table", "full")
            ):
                self._note(f"the database cannot be read: {error}")
            return False
        return True

    def finish(self) -> None:
        """Ends sampling."""
        self._end.set()
        if self.is_alive():
            self.join()

    def _check_reported(self, job: dict[str, Any]) -> None:
        slots = dict(job["slots"])
        submitted = slots.pop("submitted")
        if submitted != sum(slots.values()):
            self._note(f"{job['job_id']}: submitted {submitted} is not the sum of {slots}")
        expected = len(played_lines(self.plan)) * self.plan.played_epochs * self.plan.played_size
        if job["job_id"].startswith(PLAYED_JOB) and submitted != expected:
            self._note(f"{job['job_id']}: submitted {submitted}, planned {expected}")
        if job["job_id"] == WRITTEN_JOB:
            if slots["delivered"] < self._delivered:
                self._note(f"delivered went back from {self._delivered} to {slots['delivered']}")
            self._delivered = slots["delivered"]

    def _look_into_the_database(self) -> None:
        database = read_only(self.plan.path("data"))
        try:
            database.execute("BEGIN")
            self._check_rows(database)
            self.from_database += 1
        finally:
            database.close()

    def _check_rows(self, database: sqlite3.Connection) -> None:
        for row in database.execute(
            "SELECT job_id, (SELECT count(*) FROM groups WHERE job_key = jobs.key) + coalesce(unopened + skipped, 0), "
            "instance_count * num_epoch FROM jobs LEFT JOIN plans ON job_key = key"
        ):
            if row[1] != row[2]:
                self._note(f"job {row[0]} has {row[1]} groups, not {row[2]}")
        for row in database.execute(
            "SELECT job_id, group_size * count(*), group_size * sum(groups.state IN ('open', 'ready', 'leased', "
            "'delivered', 'filtered', 'failed', 'skipped')) FROM groups JOIN jobs ON jobs.key = job_key GROUP BY job_id"
        ):
            if row[1] != row[2]:
                self._note(f"job {row[0]}: {row[1]} slots were submitted, {row[2]} are in a state")
        for row in database.execute(
            "SELECT groups.key, groups.state, deliveries.state FROM groups LEFT JOIN deliveries "
            "ON deliveries.key = delivery_key WHERE groups.state = 'leased' AND deliveries.state IS NOT 'leased'"
        ):
            self._note(f"group {row[0]} is {row[1]} in a delivery that is {row[2]}")
        for row in database.execute(
            "SELECT delivery_id, groups.state FROM deliveries JOIN delivery_groups ON delivery_groups.delivery_key = "
            "deliveries.key "
            "JOIN groups ON groups.key = group_key JOIN jobs ON jobs.key = groups.job_key "
            "WHERE deliveries.state = 'acked' AND groups.state != 'delivered' AND job_id = ?",
            (WRITTEN_JOB,),
        ):
            self._note(f"delivery {row[0]} is acknowledged and one of its groups is {row[1]}")
        (count,) = database.execute("SELECT count(*) FROM trajectories").fetchone()
        if count < self._trajectories:
            self._note(f"the store held {self._trajectories} trajectories and now {count}")
        self._trajectories = count

    def _note(self, sentence: str) -> None:
        if len(self.discrepancies) < 100:
            self.discrepancies.append(f"during the run: {sentence}")
