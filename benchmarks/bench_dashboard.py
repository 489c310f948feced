"""Latency of all requests of the dashboard's pages with many stored trajectories.

    python -m benchmarks.bench_dashboard --json dashboard.json
    python -m benchmarks.bench_dashboard --folder /var/tmp/many        # stores the data for later runs

The buffer runs as in production: ``rollout-buffer serve``, two gunicorn workers. A runner plays one job of ``--played``
trajectories in groups of 8 (``generators/quick_episodes.py``: failed attempts, filtered groups, screenshots), while a
trainer polls and acknowledges; a second job is filled through ``/buffer/write`` with groups of one, so that it has as
many groups as trajectories; there are 40 small jobs in addition. Then every request is made ``--repeat`` times over one
connection: the table has the median and the longest, in milliseconds, and the size of the answer. "After a write" means
that one item was written just before each request, as while a job runs.

Caveats: loopback, and client and server share the machine's cores. The page cache is warm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import requests
from rich.console import Console
from rich.table import Table

from benchmarks.servers import is_healthy, running, serve_command
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port

HERE = Path(__file__).resolve().parent

PLAYED_JOB, WRITTEN_JOB = "many/played", "many/written"
SMALL_JOBS = 40
GROUP_SIZE = 8
BATCH = 100
LIMIT_MS = 200.0  # the table marks longer times with an exclamation mark


@dataclass(frozen=True, slots=True)
class Get:
    """A GET request of a page."""

    name: str
    path: str
    after_write: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations, in milliseconds, and the size of the answer, in bytes."""

    get: Get
    times_ms: list[float]
    size: int

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def longest_ms(self) -> float:
        return max(self.times_ms)


# --- filling ---------------------------------------------------------------------------------------------------------


def fill(client: RolloutBufferClient, folder: Path, played: int, written: int, console: Console) -> None:
    """Fills the store with that many trajectories, through the public routes."""
    for number in range(SMALL_JOBS):
        start_external(client, f"small/{number}", GROUP_SIZE)
        client.write(items(f"small-{number}", range(3 * GROUP_SIZE), GROUP_SIZE), job_id=f"small/{number}")
    write_many(client, written, console)
    play_many(client, folder, played, console)


def start_external(client: RolloutBufferClient, job_id: str, group_size: int) -> None:
    client.start_rollout(
        {
            "task_type": "external",
            "job_id": job_id,
            "num_repeat_per_sample": group_size,
            "reward_range": [-1, 2],
            "group_timeout_seconds": 1e6,
        }
    )


def items(run: str, numbers: range, group_size: int) -> list[dict[str, Any]]:
    """Returns small items that differ in the attributes of the filters."""
    return [
        {
            "uid": f"{run}-{number}",
            "instance_id": f"{'Clock' if number % 3 else 'Wifi'}Task-{run}-{number // group_size}",
            "reward": ((number * 37) % 100) / 80 - 0.3,
            "messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
            "extra_info": {"success": number % 2 == 0},
        }
        for number in numbers
    ]


def write_many(client: RolloutBufferClient, count: int, console: Console) -> None:
    """Fills the job with groups of one; a tenth is delivered."""
    start_external(client, WRITTEN_JOB, 1)
    began = time.monotonic()
    for start in range(0, count, BATCH):
        client.write(items("w", range(start, min(count, start + BATCH)), 1), job_id=WRITTEN_JOB)
    for _ in range(10):
        polled = client.get_rollout_data(job_id=WRITTEN_JOB, max_groups=max(1, count // 100), lease_s=60, images="hash")
        client.ack([polled.delivery_id] if polled.delivery_id else [])
    console.print(f"wrote {count} items in {time.monotonic() - began:.0f} s")


def play_many(client: RolloutBufferClient, folder: Path, count: int, console: Console) -> None:
    """Lets a runner play the other job, and polls until it is finished and has at most 300 ready groups."""
    lines = ({"instance_id": f"Errand{n % 116}-{n}", "number": n} for n in range(count // GROUP_SIZE))
    (folder / "errands.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    client.start_rollout(
        {
            "task_type": "quick_episodes",
            "job_id": PLAYED_JOB,
            "input_file": str(folder / "errands.jsonl"),
            "num_repeat_per_sample": GROUP_SIZE,
            "num_process": 64,
            "remote_engine_url": "http://127.0.0.1:1",
            "max_attempts": 2,
        }
    )
    began = time.monotonic()
    logged_at = 0.0
    while (job := client.job(PLAYED_JOB))["state"] == "running" or job["groups"]["ready"] > 300:
        delivery = client.get_rollout_data(job_id=PLAYED_JOB, max_groups=64, wait_s=2, lease_s=600, images="hash")
        if delivery.delivery_id is not None:
            client.ack([delivery.delivery_id])
        if time.monotonic() > logged_at + 20:
            logged_at = time.monotonic()
            console.print(f"played {sum(job['outcomes'].values())} of {count} in {logged_at - began:.0f} s")
    if job["state"] != "finished":
        raise SystemExit(f"the job is {job['state']}: {job['cause']}")
    console.print(f"played {count} episodes in {time.monotonic() - began:.0f} s")


# --- requests --------------------------------------------------------------------------------------------------------


def gets(ask: Callable[[str], Any]) -> Iterator[Get]:
    """Yields every GET request of the dashboard and of Prometheus, each filter with matches and without."""
    yield Get("the page", "/")
    yield Get("its largest file", "/dashboard/vendor/uplot/uPlot.iife.min.js")
    yield Get("/overview", "/overview?limit=20")
    yield Get("/overview, second page", f"/overview?limit=20&cursor={ask('/overview?limit=20')['next_cursor']}")
    yield Get("/jobs", "/jobs")
    yield Get("/metrics", "/metrics")
    yield Get("/metrics, after a write", "/metrics", after_write=True)
    for job in (PLAYED_JOB, WRITTEN_JOB):
        yield from job_gets(job, ask)
    yield from trajectory_gets(None, ask)


def job_gets(job: str, ask: Callable[[str], Any]) -> Iterator[Get]:
    name, root = job.rpartition("/")[2], f"/jobs/{quote(job, safe='')}"
    yield Get(f"{name}: /jobs/ID", root)
    yield Get(f"{name}: /jobs/ID, after a write", root, after_write=True)
    yield Get(f"{name}: explanation", f"{root}/explanation")
    yield Get(f"{name}: series, whole job", f"{root}/series")
    yield Get(f"{name}: series, an hour", f"{root}/series?range_s=3600")
    yield Get(f"{name}: series, buckets of 5 s", f"{root}/series?width_s=5")
    yield Get(f"{name}: deliveries", f"{root}/deliveries?limit=50")
    yield from group_gets(name, f"{root}/groups", ask)
    yield from trajectory_gets(job, ask)


def group_gets(name: str, path: str, ask: Callable[[str], Any]) -> Iterator[Get]:
    first = ask(f"{path}?limit=50")["groups"]
    filters: dict[str, dict[str, Any]] = {
        "first page": {},
        "last page": {"cursor": last_cursor(path, "groups", ask)},
        **{f"state {state}": {"state": state} for state in ("ready", "delivered", "filtered", "failed", "open")},
        "search, many found": {"search": "wifi" if "Wifi" in str(first) else "errand1"},
        "search, one found": {"search": first[0]["instance_id"]},
        "search, nothing found": {"search": "nothing like this"},
        "cause, many found": {"cause": "valid"},
        "cause, nothing found": {"cause": "nothing like this"},
        "state, search and cause, nothing found": {"state": "filtered", "search": "a", "cause": "nothing like this"},
    }
    for what, query in filters.items():
        yield Get(f"{name}: groups, {what}", f"{path}?{as_query({'limit': 50, **query})}")
    yield Get(f"{name}: a group", f"/groups/{first[0]['group_index']}")


def trajectory_gets(job: str | None, ask: Callable[[str], Any]) -> Iterator[Get]:
    of_job = {} if job is None else {"job_id": job}
    name = "all jobs" if job is None else job.rpartition("/")[2]
    path = f"/trajectories?{urlencode({'limit': 50, **of_job})}"
    first = ask(path)["trajectories"][0]
    filters: dict[str, dict[str, Any]] = {
        "first page": {},
        "last page": {"cursor": last_cursor(path, "trajectories", ask)},
        "an outcome": {"outcome": "truncated"},
        "an outcome, nothing found": {"outcome": "aborted"},
        "a stop reason, nothing found": {"stop_reason": "forbidden_token"},
        "success": {"success": "true"},
        "rewards": {"min_reward": 0.9},
        "rewards, nothing found": {"min_reward": 50},
        "versions, nothing found": {"min_version": 900},
        "an instance": {"instance_id": first["instance_id"]},
        "an instance, nothing found": {"instance_id": "nothing like this"},
        "search, many found": {"search": first["instance_id"][:5]},
        "search, one found": {"search": first["uid"]},
        "search, nothing found": {"search": "nothing like this"},
        "all filters, nothing found": {"outcome": "completed", "success": "true", "min_reward": 0, "search": "no such"},
    }
    for what, query in filters.items():
        yield Get(f"{name}: trajectories, {what}", f"{path}&{as_query(query)}")
    uid, owner = quote(first["uid"], safe=""), urlencode(of_job)
    yield Get(f"{name}: a trajectory", f"/trajectories/{uid}?{owner}")
    yield Get(f"{name}: its tokens", f"/token_rows/{uid}?{owner}")


def as_query(query: dict[str, Any]) -> str:
    """Formats a query string without entries of None, such as the cursor of a list with one page."""
    return urlencode({name: value for name, value in query.items() if value is not None})


def last_cursor(path: str, key: str, ask: Callable[[str], Any]) -> Any:
    """Reads all pages, of the largest size, and returns the cursor of the last one; None if there is only one."""
    limit = 500 if key == "groups" else 1000
    large_pages = f"{path.replace('limit=50', '')}{'&' if '?' in path else '?'}limit={limit}"
    cursor = None
    while True:
        page = ask(large_pages if cursor is None else f"{large_pages}&cursor={quote(str(cursor))}")
        if page["next_cursor"] is None:
            return cursor
        cursor = page["next_cursor"]


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(url: str, get: Get, repeat: int, write: Callable[[], None]) -> Timing:
    """Makes a request ``repeat`` times over one connection; raises unless the answer is a 200."""
    times, size = [], 0
    with requests.Session() as session:
        session.get(f"{url}/health", timeout=60)
        for _ in range(repeat):
            if get.after_write:
                write()
            began = time.perf_counter()
            reply = session.get(url + get.path, timeout=60)
            times.append(1000 * (time.perf_counter() - began))
            if not reply.ok:
                raise SystemExit(f"{get.path}: {reply.status_code} {reply.text[:300]}")
            size = len(reply.content)
    return Timing(get, times, size)


def writer(client: RolloutBufferClient) -> Callable[[], None]:
    """Returns a function that writes a new item to the external job."""
    numbers = itertools.count(time.time_ns())

    def write() -> None:
        number = next(numbers)
        client.write(items("new", range(number, number + 1), 1), job_id=WRITTEN_JOB)

    return write


def as_table(timings: list[Timing]) -> Table:
    table = Table("request", "median ms", "longest ms", "kB")
    for timing in timings:
        longest = f"{timing.longest_ms:.1f}{' !' if timing.longest_ms > LIMIT_MS else ''}"
        table.add_row(timing.get.name, f"{timing.median_ms:.1f}", longest, f"{timing.size / 1000:.1f}")
    return table


def run(folder: Path, arguments: argparse.Namespace, console: Console) -> list[Timing]:
    port = free_port()
    command = serve_command(port, folder, "--data-root", str(folder), "--generator-dir", str(HERE / "generators"))
    url = f"http://127.0.0.1:{port}"
    with running(command, folder / "serve.log", lambda: is_healthy(port)):
        client = RolloutBufferClient(url)
        if not (folder / "filled").exists():
            fill(client, folder, arguments.played, arguments.written, console)
            (folder / "filled").touch()
        if arguments.only_fill:
            return []
        get_list = list(gets(lambda path: requests.get(url + path, timeout=60).json()))
        write = writer(client)
        return [measure(url, get, arguments.repeat, write) for get in get_list if arguments.only in get.name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--played", type=int, default=100_000, help="trajectories of the runner's job")
    parser.add_argument("--written", type=int, default=100_000, help="trajectories of the external job")
    parser.add_argument("--repeat", type=int, default=20, help="repetitions of each request")
    parser.add_argument("--only", default="", help="measure only requests with this text in their name")
    parser.add_argument("--folder", type=Path, help="data directory; by default a temporary one")
    parser.add_argument("--only-fill", action="store_true", help="fill --folder and measure nothing")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        timings = run(folder, arguments, console)
    console.print(as_table(timings))
    if arguments.json:
        rows = [{"request": timing.get.name, "path": timing.get.path, "ms": timing.times_ms} for timing in timings]
        arguments.json.write_text(json.dumps({"machine": platform.platform(), "requests": rows}, indent=1))


if __name__ == "__main__":
    main()
