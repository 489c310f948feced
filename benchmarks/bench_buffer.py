"""Trajectories per second over HTTP, durable, compared with slime's in-memory buffer.

    pip install fastapi uvicorn uvloop          # for the baseline, ancestor_buffer.py
    python -m benchmarks.bench_buffer --json buffer.json
    python -m benchmarks.bench_buffer --many 100000
    python -m benchmarks.bench_buffer --ceiling

The buffer runs as in production: ``rollout-buffer serve``, an ``external`` job, every write fsynced before its 200.
Contenders alternate within each round, every round with new items and a new job; the client is a separate process, the
same for both, with 32 connections for writing (``--connections``) and one for reading. The table has medians, their
range (lowest to highest round) and the ratio of the medians. ``1m`` is an episode of 25 steps with 25 inline
screenshots; ``1m-shared``: members of a group share half of them; ``1m-ids``: with sampled ids and log-probs. Reads are
measured with and without parsing by the client. Then the latency of a waiting poll after the write that completes a
group. ``--many`` writes that many small trajectories instead, and shows memory and poll times; ``--ceiling`` measures
client and loopback alone (``canned_server.py``).

Caveats: loopback; client and server share the machine's cores, so on a busy machine use the ratios. The baseline keeps
everything in memory and acknowledges nothing: a crash loses all of it. Put the data directory on the disk that the
buffer will use (``--folder``); its fsync is timed first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ratios import spread
from benchmarks.servers import is_healthy, listens, running, serve_command
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port

HERE = Path(__file__).resolve().parent
COUNTS = {"2k": 3200, "64k": 1920, "1m": 128, "1m-shared": 128, "1m-ids": 128}
CONNECTIONS = 32
"""Concurrent writers, as in a job of some hundred episodes; fewer writers share fewer fsyncs."""
HOW_TO_INSTALL = "the ancestor needs FastAPI: pip install fastapi uvicorn uvloop (or run with --without-ancestor)"
Rates = dict[tuple[str, str], list[float]]


class Client:
    """The load client, ``buffer_load.py`` in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "buffer_load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def do(self, what: str, **options: Any) -> dict[str, Any]:
        """Sends one command to the client and returns its measurements."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"do": what, **options}) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit("the load client exited; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(kw_only=True, slots=True)
class Contender:
    """A running buffer. ``named_jobs`` is True if it has job ids, leases and acknowledgements."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    named_jobs: bool
    rates: Rates = field(default_factory=dict)

    def job(self, run: str) -> str | None:
        """Returns the id of a run's job; None if the contender has no ids."""
        return run if self.named_jobs else None


# --- starting --------------------------------------------------------------------------------------------------------


@contextmanager
def ancestor(folder: Path) -> Iterator[Contender]:
    port = free_port()
    command = [sys.executable, str(HERE / "ancestor_buffer.py"), "--port", str(port)]
    with running(command, folder / "ancestor.log", lambda: listens(port)) as process:
        yield Contender(name="ancestor", port=port, process=process, named_jobs=False)


@contextmanager
def rollout_buffer(folder: Path) -> Iterator[Contender]:
    port = free_port()
    with running(serve_command(port, folder), folder / "serve.log", lambda: is_healthy(port)) as process:
        time.sleep(1.0)  # one worker answered; the others are still starting
        yield Contender(name="buffer", port=port, process=process, named_jobs=True)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(client: Client, contender: Contender, kind: str, number: int, connections: int) -> None:
    """Measures one round of one kind: write and read, without and with parsing."""
    count = COUNTS[kind]
    for parse in (False, True):
        run = f"{kind}-{number}-{'parsed' if parse else 'raw'}"
        job = contender.job(run)
        client.do("start", port=contender.port, job_id=job)
        written = client.do(
            "write", port=contender.port, kind=kind, count=count, run=run, job_id=job, connections=connections
        )
        read = client.do("read", port=contender.port, job_id=job, parse=parse)
        if written["failures"] or read["items"] != count:
            raise SystemExit(f"{contender.name}: {read['items']} of {count} items came back; {written['failures'][:3]}")
        contender.rates.setdefault((kind, "write"), []).append(count / written["seconds"])
        contender.rates.setdefault((kind, "read, parsed" if parse else "read"), []).append(count / read["seconds"])


def time_waiting(client: Client, buffer: Contender, count: int = 60) -> list[float]:
    """Returns milliseconds from the write that completes a group to its arrival at a waiting poll."""
    client.do("start", port=buffer.port, job_id="waiting")
    times = client.do("wait", port=buffer.port, job_id="waiting", count=count, run="waiting")["times"]
    return sorted(1000 * seconds for seconds in times)


def time_fsync(folder: Path) -> float:
    """Returns the median milliseconds of writing 4 KB with fsync."""
    times = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(50):
            began = time.perf_counter()
            file.write(os.urandom(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def many(client: Client, buffer: Contender, count: int, console: Console) -> dict[str, Any]:
    """Writes ``count`` small trajectories in steps; after each, measures worker memory and ten polls."""
    client.do("start", port=buffer.port, job_id="many")
    table = Table(title=f"{count} small trajectories, most of them unread in the buffer")
    for column in ("stored", "writes /s", "memory of the workers, MB", "poll of 4 groups, ms: median", "largest"):
        table.add_column(column, justify="right")
    rows = []
    step = max(1000, count // 10)
    for start_at in range(0, count, step):
        done = client.do("many", port=buffer.port, job_id="many", count=step, run="many", batch=50, start_at=start_at)
        memory = [rss_mb(pid) for pid in workers(buffer.process.pid)]
        polls = [1000 * seconds for seconds in done["polls"]]
        row = {"stored": start_at + step, "writes": step / done["seconds"], "memory": memory,
               "median": statistics.median(polls), "largest": max(polls)}  # fmt: skip
        rows.append(row)
        sizes = " + ".join(f"{size:.0f}" for size in memory)
        table.add_row(
            str(row["stored"]), f"{row['writes']:.0f}", sizes, f"{row['median']:.1f}", f"{row['largest']:.1f}"
        )
    console.print(table)
    return {"many": rows}


def workers(supervisor: int) -> list[int]:
    """Returns the gunicorn workers: grandchildren of the supervisor."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    masters = [pid for pid, parent in parents.items() if parent == supervisor]
    return sorted(pid for pid, parent in parents.items() if parent in masters)


def rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def ceiling(client: Client, kind: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures a server that stores nothing, for one kind."""
    count, port = COUNTS[kind], free_port()
    reads = folder / f"{kind}.json"
    client.do("can", kind=kind, count=count, path=str(reads))
    command = [sys.executable, str(HERE / "canned_server.py"), "--port", str(port), "--reads", str(reads)]
    rates: dict[str, Any] = {"item": kind, "write": [], "read": []}
    with running(command, folder / "canned.log", lambda: listens(port)):
        for number in range(arguments.rounds):
            load = {"kind": kind, "count": count, "run": f"{number}", "connections": arguments.connections}
            written = client.do("write", port=port, job_id=None, **load)
            read = client.do("read", port=port, job_id=None, parse=False)
            rates["write"].append(count / written["seconds"])
            rates["read"].append(count / read["seconds"])
    return rates


def ceilings(arguments: argparse.Namespace, console: Console, folder: Path) -> dict[str, Any]:
    """Prints the table of ``--ceiling``, and returns its rows."""
    client = Client()
    rows = [ceiling(client, kind, folder, arguments) for kind in arguments.kinds.split(",")]
    client.close()
    table = Table(title="trajectories per second of a server that stores nothing: median (lowest to highest round)")
    for column in ("item", "write", "read"):
        table.add_column(column, justify="left" if column == "item" else "right")
    for row in rows:
        table.add_row(row["item"], spread(row["write"], "{:.0f}"), spread(row["read"], "{:.0f}"))
    console.print(table)
    return {"ceilings": rows}


# --- output ----------------------------------------------------------------------------------------------------------


def show(console: Console, buffer: Contender, baseline: Contender | None) -> list[dict[str, Any]]:
    table = Table(title="trajectories per second: median (lowest to highest round)")
    for column in ("item", "what", "ancestor, in memory", "rollout buffer, durable", "ratio"):
        table.add_column(column, justify="left" if column in ("item", "what") else "right")
    rows = []
    for (kind, what), rates in buffer.rates.items():
        others = baseline.rates[kind, what] if baseline is not None else []
        ratio = statistics.median(rates) / statistics.median(others) if others else None
        rows.append({"item": kind, "what": what, "ancestor": others, "buffer": rates, "ratio": ratio})
        table.add_row(
            kind, what, spread(others, "{:.0f}"), spread(rates, "{:.0f}"), "" if ratio is None else f"{ratio:.2f}"
        )
    console.print(table)
    return rows


def machine(folder: Path) -> dict[str, Any]:
    """Returns facts about the machine."""
    versions = {}
    if importlib.util.find_spec("fastapi") is not None and importlib.util.find_spec("uvicorn") is not None:
        import fastapi
        import uvicorn

        loop = "uvloop" if importlib.util.find_spec("uvloop") is not None else "asyncio"
        versions = {"fastapi": fastapi.__version__, "uvicorn": f"{uvicorn.__version__} (h11, {loop})"}
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load before": os.getloadavg()[0],
        "fsync of 4 KB, ms": round(time_fsync(folder), 2),
        **versions,
    }


def compare(arguments: argparse.Namespace, console: Console, folder: Path) -> dict[str, Any]:
    """Runs the alternating comparison, and the waiting poll."""
    client = Client()
    with rollout_buffer(folder) as buffer, ancestor_or_none(folder, arguments.without_ancestor) as baseline:
        contenders = [contender for contender in (baseline, buffer) if contender is not None]
        for number in range(arguments.rounds):
            for kind in arguments.kinds.split(","):
                # Alternate the order: the first contender of a round warms the machine's caches for the second.
                for contender in contenders if number % 2 == 0 else contenders[::-1]:
                    measure(client, contender, kind, number, arguments.connections)
        rows = show(console, buffer, baseline)
        waits = time_waiting(client, buffer)
    client.close()
    median, p95 = statistics.median(waits), waits[int(0.95 * len(waits))]
    console.print(f"a waiting poll gets a group {median:.1f} ms after its last write was sent (95%: {p95:.1f} ms)")
    return {"rates": rows, "waits_ms": waits}


@contextmanager
def ancestor_or_none(folder: Path, without: bool) -> Iterator[Contender | None]:
    """Starts the baseline unless it is disabled."""
    if without:
        yield None
    else:
        with ancestor(folder) as baseline:
            yield baseline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="concurrent writers")
    parser.add_argument("--kinds", default=",".join(COUNTS), help="kinds of items, of " + ", ".join(COUNTS))
    parser.add_argument("--without-ancestor", action="store_true")
    parser.add_argument("--many", type=int, help="write this many small trajectories instead, a multiple of 10,000")
    parser.add_argument("--ceiling", action="store_true", help="measure a server that stores nothing instead")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="parent of the temporary data directory")
    parser.add_argument("--json", type=Path, help="also write all measurements to this file")
    arguments = parser.parse_args()
    console = Console(width=120)
    needs_ancestor = not (arguments.without_ancestor or arguments.ceiling or arguments.many is not None)
    if needs_ancestor and not all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")):
        raise SystemExit(HOW_TO_INSTALL)
    folder = Path(tempfile.mkdtemp(prefix="bench-buffer-", dir=arguments.folder))
    try:
        about = machine(folder)
        console.print(", ".join(f"{name} {value}" for name, value in about.items()))
        if arguments.many is not None:
            client = Client()
            with rollout_buffer(folder) as buffer:
                measured = many(client, buffer, arguments.many, console)
            client.close()
        elif arguments.ceiling:
            measured = ceilings(arguments, console, folder)
        else:
            measured = compare(arguments, console, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": about, **measured}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
