"""Compares two mathematical expressions, as a program that ``judge.py`` runs in processes.

Reads one JSON question per line from stdin and writes one JSON verdict per line to stdout.

Imports nothing of this project, so that it starts fast. Exits when stdin closes, and by SIGPROF when a comparison
exceeds its CPU time: the signal's default action stops even a loop in C that no Python handler could interrupt.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

MEMORY_LIMIT_BYTES = 2 * 1024**3
"""Memory limit; the library treats an expression that exceeds it as different."""
_SLACK_BYTES = 256 * 1024**2
"""What ``_may_grow_to`` leaves out, so that only the kernel can refuse the rest, not the memory limit."""
_MAP_NORESERVE = 0x4000  # Linux; the module ``mmap`` names it from Python 3.13 on

Compare = Callable[[str, str], bool]


def main() -> int:
    """Answers questions until stdin ends; returns 3 if math-verify is missing."""
    timeout_s = float(sys.argv[1])
    try:
        are_equal = _load_comparison()
    except ImportError as error:
        _send({"error": str(error)})
        return 3
    _raise_oom_score()
    limit = _limit_memory()
    _send({"ready": are_equal("4", "2 + 2")})
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, timeout_s)
        verdict = _verdict(are_equal, question["label"], question["answer"], limit)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(verdict)
    return 0


def _limit_memory() -> int:
    """Limits the address space, or keeps a lower limit; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


def _verdict(are_equal: Compare, label: str, answer: str, limit: int) -> dict[str, object]:
    """Returns the message to send; "not equal" after a refused allocation is no verdict.

    The library answers "not equal" after a MemoryError. If the process may grow to its limit, the expression caused the
    error: a verdict. If it may not, the machine is short of memory, and another process may succeed.
    """
    try:
        equal = are_equal(label, answer)
    except Exception:  # noqa: BLE001 - an expression that the library cannot parse is a wrong answer
        equal = False
    if not equal and not _may_grow_to(limit):
        return {"error": "the machine has no free memory"}
    return {"equal": equal}


def _may_grow_to(limit: int) -> bool:
    """Returns True if the kernel would grant this process its memory limit; touches no page."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        room = limit - pages * mmap.PAGESIZE - _SLACK_BYTES
        if room > 0:
            mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE).close()
    except (OSError, MemoryError):
        return False
    return True


def _load_comparison() -> Compare:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def are_equal(label: str, answer: str) -> bool:
        # The library's own timeouts are wall-clock and would fail on a slow machine: disabled.
        gold, given = (math_verify.parse(f"\\boxed{{{_bare(text)}}}", parsing_timeout=None) for text in (label, answer))
        return bool(math_verify.verify(gold, given, timeout_seconds=None))

    return are_equal


def _bare(text: str) -> str:
    """Removes a ``\\boxed{}`` around an expression."""
    inside = text.strip()
    return inside[len("\\boxed{") : -1] if inside.startswith("\\boxed{") and inside.endswith("}") else inside


def _raise_oom_score() -> None:
    """Makes the OOM killer prefer this process: its end costs one retry, the runner's end costs all its episodes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _send(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
