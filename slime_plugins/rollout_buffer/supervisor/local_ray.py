"""A Ray cluster of one machine, as a program: it ends with its parent.

    python -m slime_plugins.rollout_buffer.supervisor.local_ray --num-cpus 2 --address-file FILE

Starts a Ray head without dashboard, writes its address to the file (or to the supervisor's descriptor) once it
can be used, and stays until SIGTERM, SIGINT or the death of its parent. Then it ends everything that it started, device
workers included, and nothing else: the kernel makes orphaned descendants children of this program, which so knows them
all. Ray itself is started through its own command, not imported here.

Ray listens on every network interface and runs whatever it is sent. So this program starts no cluster without a token:
``RAY_AUTH_TOKEN_PATH`` must name a file with the token. Each user of the cluster needs this variable in its
environment too, and ``RAY_AUTH_MODE=token``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from slime_plugins.rollout_buffer.devices.worker_folders import WorkerFolder
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat
from slime_plugins.rollout_buffer.observability.logs import set_up_logging
from slime_plugins.rollout_buffer.observability.process_status import all_process_statuses
from slime_plugins.rollout_buffer.supervisor.child_processes import die_with_parent, free_port

logger = logging.getLogger(__name__)

_SET_CHILD_SUBREAPER = 36
_START_TIMEOUT_S = 120.0
_START_ATTEMPTS = 3
"""Attempts to start Ray, which gives up if its parts take more than 30 s to find each other, as on a busy host."""
_GRACE_S = 6.0
_POLL_S = 0.1
_TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
_READY_LINE = "Ray runtime started"
_MAX_TEMP_ROOT = 22
"""Ray's unix sockets lie about 60 characters below this folder, and their paths are limited to 107."""


class _StopAskedError(Exception):
    """Raised by the signal handler to interrupt any wait."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cluster until SIGTERM or SIGINT; returns 0, or 1 if Ray does not start."""
    options = _parse(arguments)
    set_up_logging()
    parent = os.getppid()
    _adopt_orphans()
    die_with_parent(parent)
    folder = WorkerFolder("rb_ray", Path(options.temp_root))
    try:
        signal.signal(signal.SIGTERM, _handle_stop_signal)
        signal.signal(signal.SIGINT, _handle_stop_signal)
        return _run(options.num_cpus, folder.path, lambda address: _report_address(options, address))
    except _StopAskedError:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if options.address_file is not None:
            options.address_file.unlink(missing_ok=True)
        _kill_descendants()
        folder.remove()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="local_ray", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-cpus", type=int, default=os.cpu_count() or 1, help="CPUs that Ray may assign")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--address-file", type=Path, help="file to write HOST:PORT to once Ray is ready")
    where.add_argument("--address-fd", type=int, help="descriptor of shared memory to write it to instead")
    parser.add_argument("--temp-root", default="/tmp", help="Ray's files go below it; must be a short path")
    options = parser.parse_args(arguments)
    if options.num_cpus < 1:
        parser.error("--num-cpus must be at least 1")
    if len(os.path.abspath(options.temp_root)) > _MAX_TEMP_ROOT:
        parser.error(f"--temp-root may have up to {_MAX_TEMP_ROOT} characters: Ray's socket paths are limited")
    if not os.environ.get(_TOKEN_VARIABLE):
        parser.error(f"{_TOKEN_VARIABLE} must name a file with a token: the cluster listens on the network")
    return options


def _run(num_cpus: int, temp_dir: Path, on_address: Callable[[str], None]) -> int:
    for attempt in range(_START_ATTEMPTS):
        address, folder = f"127.0.0.1:{free_port()}", temp_dir / str(attempt)
        folder.mkdir()
        head = _start_head(num_cpus, folder, address)
        if _wait_until_ready(head, folder / "head.log"):
            break
        logger.error("Ray did not start:\n%s", (folder / "head.log").read_text(errors="replace")[-4000:])
        _kill_descendants()
    else:
        return 1
    on_address(address)
    logger.info("Ray is up at %s with %d CPUs, files in %s", address, num_cpus, folder)
    logger.error("Ray ended by itself with code %d", _wait_and_reap(head))
    return 1


def _wait_and_reap(head: subprocess.Popen[bytes]) -> int:
    """Returns the head's exit code once it has exited; reaps adopted descendants meanwhile."""
    while True:
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if dead is None or dead.si_pid == head.pid:
            return head.wait()
        os.waitpid(dead.si_pid, 0)


def _start_head(num_cpus: int, temp_dir: Path, address: str) -> subprocess.Popen[bytes]:
    host, _, port = address.partition(":")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--node-ip-address={host}", f"--port={port}", f"--num-cpus={num_cpus}", f"--temp-dir={temp_dir}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]
    with (temp_dir / "head.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_AUTH_MODE": "token"},
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )


def _wait_until_ready(head: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and head.poll() is None:
        if _READY_LINE in log.read_text(errors="replace"):
            return True
        time.sleep(_POLL_S)
    return False


def _report_address(options: argparse.Namespace, address: str) -> None:
    if options.address_file is None:
        Heartbeat(options.address_fd).beat(address=address)
        return
    part = options.address_file.with_name(options.address_file.name + ".part")
    part.write_text(address, encoding="utf-8")
    part.replace(options.address_file)  # so that nobody reads a part of the address


# ---- dying together --------------------------------------------------------------------------------------------------


def _handle_stop_signal(_signal: int, _frame: FrameType | None) -> None:
    raise _StopAskedError


def _adopt_orphans() -> None:
    """Asks the kernel to make orphaned descendants children of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _kill_descendants() -> None:
    """Sends SIGTERM to all descendants, and SIGKILL after the grace period."""
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while _living_descendants() and time.monotonic() < deadline:
        _reap()
        time.sleep(_POLL_S)
    while _living_descendants():  # killing a parent makes its children ours
        _signal_all(signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)


def _signal_all(number: signal.Signals) -> None:
    for process in _living_descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def _living_descendants() -> list[int]:
    """Returns the process ids of all live descendants, without zombies."""
    parents = {process: status.parent for process, status in all_process_statuses() if status.lives}
    found = [os.getpid()]
    for process in found:  # grows during the loop
        found.extend(child for child, parent in parents.items() if parent == process)
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
