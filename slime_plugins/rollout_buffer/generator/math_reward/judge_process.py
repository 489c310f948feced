"""The process that compares expressions: one JSON question per line on stdin, one JSON verdict per line on stdout.

Needs nothing of this project, so that it starts fast. Ends when stdin ends, and by SIGALRM when a question takes longer
than it may: the signal's default action ends even a loop in C that no Python handler could interrupt.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable

MEMORY_LIMIT_BYTES = 2 * 1024**3

Compare = Callable[[str, str], bool]


def main() -> int:
    """Answers questions until stdin ends; returns 3 if math-verify is missing."""
    timeout_s = float(sys.argv[1])
    try:
        are_equal = _load_comparison()
    except ImportError as error:
        _say({"error": str(error)})
        return 3
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    _say({"ready": are_equal("4", "2 + 2")})
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        _say({"equal": _verdict(are_equal, question["label"], question["answer"])})
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def _verdict(are_equal: Compare, label: str, answer: str) -> bool:
    try:
        return are_equal(label, answer)
    except Exception:  # noqa: BLE001 - an expression that no library can make sense of is a wrong answer
        return False


def _load_comparison() -> Compare:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def are_equal(label: str, answer: str) -> bool:
        # The library's own timeouts are handlers of the same alarm that ends this process; they are switched off.
        gold, given = (math_verify.parse(f"\\boxed{{{_bare(text)}}}", parsing_timeout=None) for text in (label, answer))
        return bool(math_verify.verify(gold, given, timeout_seconds=None))

    return are_equal


def _bare(text: str) -> str:
    """Takes a box off that a label may already have."""
    inside = text.strip()
    return inside[len("\\boxed{") : -1] if inside.startswith("\\boxed{") and inside.endswith("}") else inside


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
