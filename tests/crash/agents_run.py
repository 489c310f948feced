"""The crash test with agents: ``scripts/crash_test --agents``.

Real clients (``agents_player``) play sessions of a gateway with two processes while gateway, server, supervisor and
engine are killed (SIGKILL) one by one. This process holds the ports, as systemd would. A trainer leases and takes what
is stored. ``agents_proxy`` stands between agents and gateway, and notes what was answered; ``agents_comparison``
compares that with what was sampled, stored and trained.

A session ended well if its agent's run succeeded, it is stored, and no turn that was answered was sampled again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from slime.utils.mask_utils import pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.supervisor.child_processes import free_ports
from slime_plugins.rollout_buffer.wire.job_settings import MAX_ATTEMPTS
from tests.command_line_agents import CLAUDE, CODEX, PROGRAMS
from tests.crash.accounting import (
    SHOWN,
    StoreView,
    bodies,
    bytes_and_rows_agree,
    database_is_sound,
    no_stored_trajectory_is_forgotten,
    no_trajectory_is_in_two_places,
)
from tests.crash.agents_comparison import Comparison
from tests.crash.agents_player import PLAYERS
from tests.crash.disk import SmallDisk
from tests.crash.fleet import Fleet, FleetError
from tests.crash.workload import SESSIONS_JOB, Journal, Plan, read_journal, say
from tests.held_sockets import HeldSockets

WEIGHTS = {"gateway": 4, "supervisor": 2, "master": 1, "worker": 2, "engine": 2}
GOAL = 0.95
CHECKS = (database_is_sound, no_trajectory_is_in_two_places, no_stored_trajectory_is_forgotten, bytes_and_rows_agree)
CALM_TIMEOUT_S = 400.0
RETRY_S = 0.2


def run(options: argparse.Namespace, plan: Plan) -> int:
    """Runs the test and prints its report; returns the exit code."""
    missing = [name for name in (CLAUDE, CODEX) if not (PROGRAMS / name).exists()]
    if missing:
        say(f"ROLLOUT_BUFFER_TEST_NPM must name a folder with `npm install @anthropic-ai/claude-code @openai/codex`: "
             f"{', '.join(missing)} missing")  # fmt: skip
        return 2
    test = AgentsTest(plan, kills=options.kills, pace_s=options.pace_s, each=options.agents, minutes=options.minutes)
    findings = test.run()
    return test.report(findings)


@dataclass(slots=True)
class Trainer:
    """Leases and acknowledges until it is told to end; holds what it has trained."""

    plan: Plan
    trained: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    """Of each acknowledged trajectory the id, and the sampled ids of each turn in its rows."""
    broken: list[str] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to poll."""
        self._thread = threading.Thread(target=self._poll_until_told, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Takes what is left and ends."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(CALM_TIMEOUT_S)

    def _poll_until_told(self) -> None:
        client = RolloutBufferClient(self.plan.url, timeout_s=60.0)
        poll_id = uuid.uuid4().hex
        while True:
            is_last = self._end.is_set()
            try:
                data = client.get_rollout_data(
                    job_id=SESSIONS_JOB, max_groups=50, wait_s=1.0, lease_s=60.0, consumer_id="trainer", poll_id=poll_id
                )
                poll_id = uuid.uuid4().hex
                if data.delivery_id is not None and _is_acknowledged(client, data.delivery_id):
                    self.broken += [f"{item.uid}: {item.error}" for item in data.items if item.error]
                    self.trained += [(item.uid, _turns(item.generations)) for item in data.items]
                elif is_last:
                    return
            except (requests.RequestException, RolloutBufferError, ValueError):
                time.sleep(RETRY_S)


def _is_acknowledged(client: RolloutBufferClient, delivery_id: str) -> bool:
    """Acknowledges until there is an answer: one that was lost may have been to an acknowledgement that counted."""
    while True:
        try:
            return bool(client.ack([delivery_id])["acked"])
        except (requests.RequestException, RolloutBufferError, ValueError):
            time.sleep(RETRY_S)


def _turns(generations: Any) -> list[list[int]]:
    """The runs of trained ids in the rows of a trajectory."""
    turns: list[list[int]] = []
    for row in pack_training_rows(generations):
        before = 0
        for token, mask in zip(row.token_ids, row.loss_mask, strict=True):
            if mask and not before:
                turns.append([])
            if mask:
                turns[-1].append(token)
            before = mask
    return turns


def _stored(view: StoreView) -> dict[str, list[list[int]]]:
    """The turns of each session in the database."""
    items = ((uid, json.loads(body)) for uid, body in bodies(view, SESSIONS_JOB))
    return {uid: _turns(wire.decode_generations(item["generations"])) for uid, item in items}


class AgentsTest:
    """One run from the first process to the last line of the report."""

    def __init__(self, plan: Plan, *, kills: int, pace_s: float, each: int, minutes: float | None) -> None:
        self.kills, self.pace_s, self.each = kills, pace_s, each
        self.limit_s = math.inf if minutes is None else minutes * 60
        self.rng = random.Random(plan.seed)
        folder = Path(plan.folder)
        port, gateway_port, engine_port, proxy_port = free_ports(4)
        self.plan = replace(
            plan,
            url=f"http://127.0.0.1:{port}",
            gateway_url=f"http://127.0.0.1:{proxy_port}",
            engine_port=engine_port,
        )
        self.plan.save()
        self.journal = Journal(folder / "kills.jsonl")
        self.fleet = Fleet(
            plan=self.plan,
            journal=self.journal,
            port=port,
            gateway_port=gateway_port,
            disk=SmallDisk(folder / "data", folder / "disk.img", megabytes=0),
            held=HeldSockets([port, gateway_port]),
        )
        self.trainer = Trainer(self.plan)
        self.killed: Counter[str] = Counter()
        self.killing_s = 0.0

    def run(self) -> list[str]:
        """Plays the run and returns what does not balance."""
        findings: list[str] = []
        try:
            self._start()
            self._kill()
            self._calm_down()
        except FleetError as error:
            findings.append(f"the run did not come to its end: {error}")
        finally:
            self.fleet.end_everything()
        view = StoreView(self.plan, {})
        findings += [sentence for check in CHECKS for sentence in check(view)]
        self.comparison = Comparison(self.plan, _stored(view), self.trainer.trained)
        view.close()
        if words := self.fleet.words("proxy"):
            findings.append(f"the proxy failed: {words}")
        return [*findings, *self.trainer.broken, *self.comparison.findings()]

    def _start(self) -> None:
        self.fleet.start_serve()
        plan_path = str(self.plan.path("plan.json"))
        self.fleet.add("engine", "tests.crash.agents_engine", plan_path, service=True)
        self.fleet.add("proxy", "tests.crash.agents_proxy", plan_path, str(self.fleet.gateway_port), service=True)
        self.fleet.tend_until(lambda: self.fleet.is_healthy, 60, "the first start")
        RolloutBufferClient(self.plan.url).start_rollout(
            {
                "task_type": "external",
                "job_id": SESSIONS_JOB,
                "num_repeat_per_sample": 1,
                "remote_engine_url": f"http://127.0.0.1:{self.plan.engine_port}",
                "tokenizer_path": str(DEMO_TOKENIZER_PATH),
                "max_tokens": 300,
                "max_attempts": MAX_ATTEMPTS,
                "instances": [{"instance_id": f"s{number}"} for number in range(100 + 20 * self.kills)],
            }
        )
        for kind in PLAYERS:
            for number in range(self.each):
                self.fleet.add(f"{kind}-{number}", "tests.crash.agents_player", plan_path, kind, str(number))
        self.trainer.start()
        journals = [self.plan.path(f"agents-{name}.jsonl") for name, one in self.fleet.crew.items() if not one.service]
        self.fleet.tend_until(lambda: all(map(read_journal, journals)), 120, "a session of each agent")

    def _kill(self) -> None:
        began = time.monotonic()
        while self.killed.total() < self.kills and time.monotonic() - began < self.limit_s:
            self.fleet.tend_for(self.pace_s * self.rng.uniform(0.5, 1.5))
            kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            victims = self.fleet.victims(kind)
            if not victims:  # it is being started
                continue
            name, pid = self.rng.choice(victims)
            try:
                self.fleet.kill(kind, name, pid)
            except ProcessLookupError:
                continue
            self.killed[kind] += 1
            self.journal.note(kill=self.killed.total(), kind=kind, name=name, pid=pid)
            if self.killed.total() % 25 == 0:
                say(f"  {self.killed.total()} kills after {time.monotonic() - began:.0f} s")
        self.killing_s = time.monotonic() - began

    def _calm_down(self) -> None:
        self.plan.path("calm").touch()
        crew = self.fleet.crew.values()
        self.fleet.tend_until(lambda: all(one.done or one.service for one in crew), CALM_TIMEOUT_S, "the agents' end")
        self.trainer.finish()
        self.fleet.stop_services()
        self.fleet.stop_serve()

    # --- the report --------------------------------------------------------------------------------------------------

    def report(self, findings: list[str]) -> int:
        """Prints the report; returns the exit code."""
        comparison, count = self.comparison, self.killed.total()
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.killed.most_common())
        say(f"{count} kills in {self.killing_s:.0f} s, one each {self.pace_s} s at the mean, "
             f"seed {self.plan.seed}: {kinds}")  # fmt: skip
        starts = self.fleet.start_times_s
        say(f"starts of serve: {len(starts)}, median {statistics.median(starts or [0]):.1f} s, "
             f"longest {max(starts, default=0):.1f} s")  # fmt: skip
        for kind in PLAYERS:
            sessions = [one for one in comparison.sessions if one["kind"] == kind]
            unwell = [one for one in sessions if not comparison.ended_well(one)]
            uids = [one["session"] for one in sessions]
            say(f"{kind}: {len(sessions) - len(unwell)} of {len(sessions)} sessions ended well; "
                 f"{sum(len(comparison.answered(uid)) for uid in uids)} turns were answered, "
                 f"{sum(len(comparison.again(one)) for one in sessions)} of them sampled again; "
                 f"{sum(comparison.allowed(uid) for uid in uids)} others are trained by rule")  # fmt: skip
            causes = {comparison.cause(one): one["session"] for one in unwell}
            for cause, number in Counter(map(comparison.cause, unwell)).most_common():
                say(f"    {number} x {cause}; {causes[cause]}, for example")
        for sentence in findings[:SHOWN]:
            say(f"  {sentence}")
        total = len(comparison.sessions) or 1
        share = sum(map(comparison.ended_well, comparison.sessions)) / total
        never_again = sum(not comparison.again(one) for one in comparison.sessions) / total
        say(f"without an answered turn that was sampled again: {never_again:.1%} of the sessions")
        lost, doubled = (sum(word in sentence for sentence in findings) for word in ("LOST", "DOUBLED"))
        verdict = "NOT BALANCED" if findings else "BALANCED"
        say(f"{verdict}: {lost} lost, {doubled} doubled, {len(findings)} discrepancies after {count} kills; "
             f"{share:.1%} of {len(comparison.sessions)} sessions ended well (goal {GOAL:.0%})")  # fmt: skip
        return 0 if not findings and share >= GOAL else 1
