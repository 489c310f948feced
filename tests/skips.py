"""Which tests may be skipped where the environment is complete: those that need what no package index has.

Every reason that is not in this list names something that could have been installed. Where ``CI`` is set such a skip
fails the run: a check that silently did not happen is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXPECTED = {
    r"ROLLOUT_BUFFER_TEST_(SLIME|MEGATRON)|this slime": "a checkout of slime, with Megatron-LM for its train step",
    r"ROLLOUT_BUFFER_TEST_(ENGINE|TEXT|VISION)|_URL=|_URL and .*_MODEL|SLIME_TEST_MODEL": "a running SGLang server",
    r"\btorch\b": "torch, which no process of this project needs",
    r"android_world|ANDROID_WORLD": "the android_world package, which is on no package index",
    r"ROLLOUT_BUFFER_TEST_(AGENTS_PYTHON|NPM|WHEEL)": "an environment of its own: agent frameworks, npm, the wheel",
    r"[Pp]rometheus|systemd-analyze|chromedriver|Debian's adb|nginx": "a Debian package: prometheus, adb, nginx …",
    r"mount|tmpfs|loop device": "the right to mount a file system",
    r"is played by the buffer alone|is installed here": "nothing: the case does not apply here",
}
"""What the reason of a skip says, as a regular expression, and what the test would need: ten entries at most."""


def lacking(reasons: Iterable[str]) -> list[str]:
    """Returns what each skipped test would need, or its reason where that is not in the list."""
    return [
        next((need for pattern, need in EXPECTED.items() if re.search(pattern, reason)), reason) for reason in reasons
    ]


def unexpected(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons that name something this machine could have had."""
    return sorted({reason for reason in reasons if not any(re.search(pattern, reason) for pattern in EXPECTED)})
