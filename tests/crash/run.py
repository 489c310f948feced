"""The crash test: a buffer under load, ``kill -9`` at random moments, and an audit of its store.

    python -m tests.crash.run --kills 200 --seed 0 [--minutes N] [--folder FOLDER] [--without KIND …]

Writers fill a job over HTTP, runners play two others (one needs a Ray cluster), agents play sessions of the gateway
with a scripted engine, trainers lease, acknowledge, train and write checkpoints. All of them, and every process of
the buffer itself, are killed again and again, alone or all at once, or stopped for a while (SIGSTOP); the disk is
filled to its last byte and emptied. The test restarts only those processes that nobody else restarts. The accounting
is read all the time and after every fault. In the end nothing may be lost, nothing doubled and no process left behind.
The last line of the report is the verdict. Exit code 0: everything balances; 1: the report says what does not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port
from slime_plugins.rollout_buffer.wire.job_settings import MAX_ATTEMPTS
from tests.crash import agents_run, checkpoint_trainer, writer
from tests.crash.accounting import CHECKS, SHOWN, StoreView, bodies
from tests.crash.disk import SmallDisk
from tests.crash.fleet import FREEZES_S, Fleet, FleetError
from tests.crash.samples import Sampler
from tests.crash.workload import (
    DEVICES_JOB,
    DEVICES_TASK_TYPE,
    PLAYED_JOB,
    SESSIONS_JOB,
    WRITTEN_JOB,
    Journal,
    Plan,
    played_lines,
    read_journal,
    say,
)

WEIGHTS = {
    "supervisor": 8,
    "everything": 3,
    "frozen runner": 3,
    "master": 9,
    "worker": 14,
    "runner": 13,
    "gateway": 8,
    "ray": 3,
    "engine": 5,
    "writer": 9,
    "agent": 5,
    "leasing": 9,
    "checkpoint": 6,
    "freeze": 9,
    "full disk": 3,
}
MEAN_SECONDS_BETWEEN_KILLS = 0.8
LEASING = {WRITTEN_JOB: ("a0", "a1", "a2"), SESSIONS_JOB: ("s0", "s1"), DEVICES_JOB: ("d0",)}
"""The consumers of each job: what runs out at one goes to another."""
AGENTS = 3
CALM_TIMEOUT_S = 120.0
CALM_TIMEOUT_PER_KILL_S = 1.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the test and prints its report; returns the exit code."""
    options = _parser().parse_args(arguments)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="rollout-buffer-crash-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.agents:
        return agents_run.run(options, _plan(folder, 0, kills=options.kills, seed=options.seed))
    test = CrashTest(
        folder,
        kills=options.kills,
        seed=options.seed,
        minutes=options.minutes,
        without=options.without,
        gateway_workers=options.gateway_workers,
    )
    findings = test.run()
    test.report(findings)
    if findings:
        say(f"everything is kept in {folder}")
    elif options.folder is None:
        shutil.rmtree(folder)
    return 1 if findings else 0


class CrashTest:
    """One run from the first process to the last line of the report."""

    def __init__(
        self,
        folder: Path,
        *,
        kills: int,
        seed: int,
        minutes: float | None,
        without: Sequence[str],
        gateway_workers: int,
    ) -> None:
        self.kills = kills
        self.weights = {kind: weight for kind, weight in WEIGHTS.items() if kind not in without}
        self.leasing = {
            job_id: names for job_id, names in LEASING.items() if job_id != DEVICES_JOB or "ray" in self.weights
        }
        self.rng = random.Random(seed)
        self.deadline = None if minutes is None else time.monotonic() + minutes * 60
        port, gateway_port, engine_port = free_port(), free_port(), free_port()
        self.plan = replace(
            _plan(folder, port, kills=kills, seed=seed),
            gateway_url=f"http://127.0.0.1:{gateway_port}",
            gateway_workers=gateway_workers,
            engine_port=engine_port,
        )
        self.plan.save()
        self.plan.path("played.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in played_lines(self.plan)), encoding="utf-8"
        )
        self.journal = Journal(self.plan.path("kills.jsonl"))
        disk = SmallDisk(self.plan.path("data"), self.plan.path("disk.img"), megabytes=200 + 2 * kills)
        self.fleet = Fleet(plan=self.plan, journal=self.journal, port=port, gateway_port=gateway_port, disk=disk)
        self.had_disk = disk.is_mounted
        self.sampler = Sampler(self.plan)
        self.killed: Counter[str] = Counter()
        self.stopped_in_s = 0.0
        self.numbers: dict[str, Any] = {}
        self.began = time.monotonic()

    def run(self) -> list[str]:
        """Plays the run and returns what does not balance, what is lost or doubled first."""
        findings: list[str] = []
        try:
            self._start()
            self._kill_at_random()
            self._calm_down()
            self._restart_in_order()
            findings += self._left_behind()
        except FleetError as error:
            findings.append(f"the run did not come to its end: {error}")
        finally:
            self.fleet.end_everything()
        self.sampler.finish()
        self.fleet.disk.close()
        findings += [*self.sampler.discrepancies, *self._audit()]
        return sorted(findings, key=lambda sentence: "LOST" not in sentence and "DOUBLED" not in sentence)

    def _start(self) -> None:
        self.fleet.start_serve()
        self.fleet.tend_until(lambda: self.fleet.is_healthy, 60, "the first start")
        RolloutBufferClient(self.plan.url).start_rollout(
            {
                "task_type": "external",
                "job_id": WRITTEN_JOB,
                "num_repeat_per_sample": self.plan.written_size,
                "group_timeout_seconds": self.plan.written_timeout_s,
            }
        )
        self._start_sessions()
        if DEVICES_JOB in self.leasing:
            self._start_devices()
        plan_path = str(self.plan.path("plan.json"))
        self.fleet.add(
            "engine", "slime_plugins.rollout_buffer", "engine", "--port", str(self.plan.engine_port), service=True
        )
        for number in range(AGENTS):
            self.fleet.add(f"agent-{number}", "tests.crash.agent", plan_path, str(number))
        for number in range(self.plan.writers):
            self.fleet.add(f"writer-{number}", "tests.crash.writer", plan_path, str(number))
        for job_id, names in self.leasing.items():
            for name in names:
                self.fleet.add(f"leasing-{name}", "tests.crash.leasing_trainer", plan_path, name, job_id)
        self.fleet.add("checkpoint", "tests.crash.checkpoint_trainer", plan_path)
        self.sampler.start()

    def _start_sessions(self) -> None:
        RolloutBufferClient(self.plan.url).start_rollout(
            {
                "task_type": "external",
                "job_id": SESSIONS_JOB,
                "num_repeat_per_sample": 2,
                "remote_engine_url": f"http://127.0.0.1:{self.plan.engine_port}",
                "tokenizer_path": str(DEMO_TOKENIZER_PATH),
                "max_tokens": 60,
                "max_attempts": MAX_ATTEMPTS,
                "instances": [
                    {"instance_id": f"s{number}", "question": f"What is {number} + {number}?"}
                    for number in range(self.plan.sessions)
                ],
            }
        )

    def _start_devices(self) -> None:
        RolloutBufferClient(self.plan.url).start_rollout(
            {
                "task_type": DEVICES_TASK_TYPE,
                "job_id": DEVICES_JOB,
                "num_repeat_per_sample": 2,
                "remote_engine_url": f"http://127.0.0.1:{self.plan.engine_port}",
                "num_process": 1,
                "max_attempts": MAX_ATTEMPTS,
                "instances": [{"instance_id": f"d{number}"} for number in range(self.plan.devices)],
            }
        )

    # --- killing -----------------------------------------------------------------------------------------------------

    def _kill_at_random(self) -> None:
        next_note = 25
        while self.killed.total() < self.kills and not self._is_late():
            self.fleet.tend_for(self.rng.expovariate(1 / MEAN_SECONDS_BETWEEN_KILLS))
            kind = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
            victims = self.fleet.victims(kind)
            if not victims:
                continue
            self._kill(kind, *self.rng.choice(victims))
            if self.killed.total() >= next_note:
                say(f"  {self.killed.total()} kills after {time.monotonic() - self.began:.0f} s")
                next_note += 25

    def _kill(self, kind: str, name: str, pid: int) -> None:
        try:
            self.fleet.kill(kind, name, pid, length_s=self.rng.choice(FREEZES_S))
        except ProcessLookupError:
            return
        self.killed[kind] += 1
        self.journal.note(kill=self.killed.total(), kind=kind, name=name, pid=pid)
        self.sampler.read_now()
        # Most of the time the buffer gets up first; now and then it is hit while it does.
        if kind != "freeze" and name == "serve" and self.rng.random() < 0.7:
            self.fleet.reconcile()
            self.fleet.tend_until(lambda: self.fleet.is_healthy, 60, "a restart")

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    # --- coming to an end --------------------------------------------------------------------------------------------

    def _calm_down(self) -> None:
        say(f"  {self.killed.total()} kills; now everybody goes on to the end")
        self.plan.path("calm").touch()
        self.fleet.thaw_all()
        crew = self.fleet.crew
        writers = [crew[name] for name in crew if name.startswith("writer")]
        timeout_s = CALM_TIMEOUT_S + self.kills * CALM_TIMEOUT_PER_KILL_S
        self.fleet.tend_until(lambda: all(one.done for one in writers), timeout_s, "the end of the writers")
        self.plan.path("all-written").touch()
        self.fleet.tend_until(
            lambda: all(one.done or one.service for one in crew.values()), timeout_s, "the trainers' end"
        )
        self.fleet.stop_services()

    def _restart_in_order(self) -> None:
        """Stops the buffer while polls wait, starts it again, and compares what it says of its jobs."""
        before = self._reported()
        for _ in range(12):
            threading.Thread(target=self._wait_in_vain, daemon=True).start()
        time.sleep(0.5)
        self.stopped_in_s = self.fleet.stop_serve()
        self.fleet.start_serve()
        self.fleet.tend_until(lambda: self.fleet.is_healthy, 60, "the start after an orderly stop")
        after = self._reported()
        if after != before:
            raise FleetError(f"a restart changed the numbers:\n{before}\n{after}")
        self.fleet.stop_serve()

    def _reported(self) -> dict[str, Any]:
        jobs = RolloutBufferClient(self.plan.url).jobs()
        return {job["job_id"]: {key: job[key] for key in ("state", "slots", "outcomes", "late")} for job in jobs}

    def _wait_in_vain(self) -> None:
        try:
            RolloutBufferClient(self.plan.url).get_rollout_data(job_id=WRITTEN_JOB, wait_s=60, lease_s=60)
        except (requests.RequestException, RolloutBufferError, ValueError):
            return  # the server stops while it waits: that is the point

    def _left_behind(self) -> list[str]:
        return [f"process {pid} was left behind: {command}" for pid, command in self.fleet.marked().items()]

    def _audit(self) -> list[str]:
        try:
            view = StoreView(self.plan, self.leasing)
        except (RolloutBufferError, sqlite3.Error) as error:
            return [f"the store does not open: {error}"]
        try:
            self.numbers = _numbers(view)
            return [f"{check.__name__}: {sentence}" for check in CHECKS for sentence in check(view)]
        finally:
            view.close()

    # --- the report --------------------------------------------------------------------------------------------------

    def report(self, findings: list[str]) -> None:
        """Prints what was killed, what was done meanwhile, and what does not balance."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.killed.most_common())
        starts = self.fleet.start_times_s
        say(f"{self.killed.total()} kills in {time.monotonic() - self.began:.0f} s, seed {self.plan.seed}: {kinds}")
        if starts:
            say(
                f"starts of serve: {len(starts)}, median {statistics.median(starts):.1f} s, longest {max(starts):.1f} s"
            )
        say(f"stop with waiting polls: {self.stopped_in_s:.1f} s")
        say(
            f"the accounting was read {self.sampler.over_http} times over HTTP, {self.sampler.from_database} times in "
            f"the database, {self.sampler.after_faults} of them right after a fault"
        )
        if not self.had_disk:
            say("no disk was filled: this machine does not mount one (it takes root)")
        for name, number in self.numbers.items():
            say(f"{name}: {number}")
        for name, number in sorted(self._failures().items()):
            say(f"client saw {name}: {number}")
        for name, count in sorted(_tracebacks(self.plan).items()):
            say(f"tracebacks in {name}: {count}")
        for sentence in findings[:SHOWN]:
            say(f"  {sentence}")
        lost, doubled = (sum(word in sentence for sentence in findings) for word in ("LOST", "DOUBLED"))
        verdict = "NOT BALANCED" if findings else "BALANCED"
        count = self.killed.total()
        say(f"{verdict}: {lost} lost, {doubled} doubled, {len(findings)} discrepancies after {count} faults")

    def _failures(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for path in Path(self.plan.folder).glob("*.jsonl"):
            counted.update(event["failed"].split("(")[0][:70] for event in read_journal(path) if "failed" in event)
        return counted


def _numbers(view: StoreView) -> dict[str, Any]:
    answered = writer.progress(view.plan)
    states: dict[str, Any] = {"sessions": _sessions(view)}
    for job_id in (PLAYED_JOB, *view.leasing):
        rows = view.rows("SELECT state, count(*) FROM groups WHERE job_key = ? GROUP BY 1", view.job_key(job_id))
        states[f"groups of the {job_id} job"] = {row[0]: row[1] for row in rows}
    attempts = view.rows("SELECT state, count(*) FROM attempts GROUP BY 1")
    deliveries = view.rows("SELECT state, count(*) FROM deliveries GROUP BY 1")
    return {
        "items written": f"{len(answered)} ({Counter(answered.values())})",
        **states,
        "attempts": {row[0]: row[1] for row in attempts},
        "deliveries": {row[0]: row[1] for row in deliveries},
        "checkpoints": checkpoint_trainer.last_checkpoint(view.plan) + 1,
        "runners": view.rows("SELECT max(fence) FROM jobs")[0][0],
    }


def _sessions(view: StoreView) -> str:
    """A turn that was stored and not answered, and sampled again, leaves a gap in the numbers of the turns."""
    orders = [json.loads(body)["extra_info"]["gateway"]["emission_order"] for _, body in bodies(view, SESSIONS_JOB)]
    again = sum(sorted(order) != list(range(1, len(order) + 1)) for order in orders)
    return f"{len(orders)} closed with {sum(map(len, orders))} turns; a completed turn was sampled again in {again}"


def _tracebacks(plan: Plan) -> Counter[str]:
    counted: Counter[str] = Counter()
    for path in (*Path(plan.folder).glob("*.log"), *plan.path("data", "logs").glob("*.log")):
        counted[path.name] = path.read_text(encoding="utf-8", errors="replace").count("Traceback")
    return +counted


def _plan(folder: Path, port: int, *, kills: int, seed: int) -> Plan:
    return Plan(
        folder=str(folder),
        url=f"http://127.0.0.1:{port}",
        gateway_url="",
        gateway_workers=2,
        engine_port=0,
        seed=seed,
        writers=3,
        written_groups=20 + kills * 4,
        written_size=4,
        write_pause_s=0.15,
        written_timeout_s=25.0 if kills > 50 else 8.0,
        lease_s=3.0,
        played_instances=20 + kills // 2,
        played_epochs=2,
        played_size=4,
        train_pause_s=0.7,
        sessions=8 + kills // 3,
        devices=6 + kills // 4,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many faults: kills, freezes, full disks (200)")
    parser.add_argument("--seed", type=int, default=0, help="of victims, moments and items (0)")
    parser.add_argument("--minutes", type=float, help="stop killing after that long, however many it were")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=list(WEIGHTS),
        help="a kind of fault to leave out; without ray, no job needs it",
    )
    parser.add_argument("--gateway-workers", type=int, default=2, help="processes of the gateway (2)")
    parser.add_argument(
        "--agents", type=int, default=0, metavar="N",
        help="instead of the whole: kill gateway, server, supervisor and engine while N each of Claude Code, Codex, "
        "openai loops and agents with screenshots play sessions",
    )  # fmt: skip
    parser.add_argument("--pace-s", type=float, default=3.8, help="seconds between kills with --agents (3.8)")
    parser.add_argument("--folder", help="keep data, logs and journals here; a temporary folder otherwise")
    return parser


if __name__ == "__main__":
    sys.exit(main())
