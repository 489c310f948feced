"""Start-up times: of a command's help, of ``serve``, and of the first turn of a job.

    python -m benchmarks.bench_startup [--rounds 5] [--before CHECKOUT] [--json FILE]

Four times, measured from the outside, alternating round by round: ``rollout-buffer --help``; ``serve`` from its start
to the first job that it accepts; a job from its ``POST /start_rollout`` to its first turn at the engine, which is this
process; and a bare interpreter that imports an HTTP client and exits. ``--before`` adds another checkout of this
project to every round, with the same interpreter.

Wall-clock times depend on the machine's load, CPU times less. CPU time is that of the supervisor and its children,
exited ones included: with the runner, without the server's workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.ratios import spread
from slime_plugins.rollout_buffer.supervisor.child_processes import free_port

ROOT = Path(__file__).resolve().parents[1]
BARE = "import aiohttp"
CASES = ("help", "serve", "serve, processor", "first job", "first job, processor", "next job", "next job, processor")
LIMIT_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Contender:
    """A checkout, and the seconds of each case in each round."""

    name: str
    folder: Path
    seconds: dict[str, list[float]] = field(default_factory=lambda: {what: [] for what in CASES})

    def command(self, *arguments: str) -> list[str]:
        """Returns a command line of that checkout."""
        return [sys.executable, "-m", "slime_plugins.rollout_buffer", *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """The environment with its modules; without access to the model hub."""
        return {**os.environ, "PYTHONPATH": str(self.folder), "HF_HUB_OFFLINE": "1"}


# --- an engine that records its first request ------------------------------------------------------------------------


class RecordingEngine(ThreadingHTTPServer):
    """Records the time of the first turn and refuses every turn as too long."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _RecordingHandler)
        self.first_request = Event()
        self.first_request_at = 0.0
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _RecordingHandler(BaseHTTPRequestHandler):
    server: RecordingEngine

    def do_POST(self) -> None:
        if not self.server.first_request.is_set():
            self.server.first_request_at = time.monotonic()
            self.server.first_request.set()
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"error": {"message": "the prompt is too long"}}'
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may have been cancelled
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


# --- what is measured ------------------------------------------------------------------------------------------------


def seconds_of(command: list[str], contender: Contender) -> float:
    """Returns the duration of a command."""
    began = time.monotonic()
    subprocess.run(
        command,
        env=contender.environment,
        cwd=contender.folder,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    return time.monotonic() - began


@contextlib.contextmanager
def serving(contender: Contender, folder: Path) -> Iterator[tuple[str, int]]:
    """Runs ``serve`` during the context, records its start-up time, and yields its URL and process id."""
    port = free_port()
    url, data = f"http://127.0.0.1:{port}", str(ROOT / "data")
    command = contender.command("serve", "--port", str(port), "--data-dir", str(folder), "--data-root", data)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=contender.environment,
        cwd=contender.folder,  # `python -m` finds its modules there first
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if b"serving on" in line:
                break
        _until_accepted(url)
        contender.seconds["serve"].append(time.monotonic() - began)
        contender.seconds["serve, processor"].append(_processor_s(process.pid))
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        process.wait(LIMIT_S)


def _until_accepted(url: str) -> None:
    """Starts an external job, which no runner plays; retries while it is refused as too early."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            return _post(f"{url}/start_rollout", {"task_type": "external", "job_id": "early"})
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.02)
    raise SystemExit(f"{url} accepts no job")


def play_first_turn(contender: Contender, url: str, pid: int, name: str) -> None:
    """Measures the time from the start of a job of one episode to its first turn at the engine."""
    job_id = name.replace(" ", "-")
    engine = RecordingEngine()
    payload = {
        "task_type": "math",
        "job_id": job_id,
        "input_file": str(ROOT / "data" / "demo_math.jsonl"),
        "num_repeat_per_sample": 1,
        "remote_engine_url": engine.url,
        "tokenizer_path": str(contender.folder / "slime_plugins" / "rollout_buffer" / "assets" / "chatml_tokenizer"),
        "max_tokens": 64,
    }
    try:
        began, used = time.monotonic(), _processor_s(pid)
        _post(f"{url}/start_rollout", payload)
        if not engine.first_request.wait(LIMIT_S):
            raise SystemExit(f"job {job_id} sent no request to its engine")
        contender.seconds[name].append(engine.first_request_at - began)
        contender.seconds[f"{name}, processor"].append(_processor_s(pid) - used)
    finally:
        _post(f"{url}/jobs/{job_id}/cancel", {})
        engine.shutdown()
        engine.server_close()


def one_round(contender: Contender) -> None:
    contender.seconds["help"].append(seconds_of(contender.command("--help"), contender))
    with tempfile.TemporaryDirectory() as folder, serving(contender, Path(folder)) as (url, pid):
        play_first_turn(contender, url, pid, "first job")
        play_first_turn(contender, url, pid, "next job")


def _post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=LIMIT_S).read()


def _processor_s(pid: int) -> float:
    """Returns CPU seconds of a process and its session, exited children included."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == pid or int(fields[1]) == pid or int(entry.name) == pid:
                    ticks += sum(map(int, fields[11:15]))  # user and system time, own and of exited children
    return ticks / TICKS


# --- the program -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, measured in the same rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    contenders = [Contender("ours", ROOT)]
    if options.before is not None:
        contenders.append(Contender("before", options.before.resolve()))
    bare: list[float] = []
    for number in range(options.rounds):
        bare.append(seconds_of([sys.executable, "-c", BARE], contenders[0]))
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            one_round(contender)
    times = {"bare": bare, **{contender.name: contender.seconds for contender in contenders}}
    if options.json is not None:
        options.json.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(_table(times) + "\n")


def _table(times: dict[str, Any]) -> str:
    lines = [f"{'':30} {'median':>8} {'lowest':>8} {'highest':>8}   before / ours, round by round"]
    rows = [(f"{name}: {what}", seconds) for name in times if name != "bare" for what, seconds in times[name].items()]
    for name, seconds in [("bare interpreter", times["bare"]), *rows]:
        what = name.partition(": ")[2]
        ratio = ""
        if name.startswith("ours: ") and "before" in times:
            ratios = [b / o for b, o in zip(times["before"][what], seconds, strict=True)]
            ratio = f"   {spread(ratios, '{:.2f}')}"
        lines.append(f"{name:30} {statistics.median(seconds):7.2f}s {min(seconds):7.2f}s {max(seconds):7.2f}s{ratio}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
