"""Which tests may be skipped where the environment is complete: those that need what no package index has.

Every reason that is not in this list names something that could have been installed. Where ``CI`` is set such a skip
fails the run: a check that silently did not happen is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

EXPECTED = {
    r"ROLLOUT_BUFFER_TEST_(ENGINE|TEXT|VISION)|_URL=|_URL and .*_MODEL|SLIME_TEST_MODEL": "a running SGLang server",
    r"ROLLOUT_BUFFER_TEST_SLIME": "a checkout of slime and its requirements",
    r"ROLLOUT_BUFFER_TEST_MEGATRON": "a checkout of Megatron-LM, with slime's patch",
    r"android_world|ANDROID_WORLD": "the android_world package, which is on no package index",
    r"ROLLOUT_BUFFER_TEST_AGENTS_PYTHON": "an environment with agent frameworks",
    r"ROLLOUT_BUFFER_TEST_NPM": "a folder with OpenAI's client from npm, and node",
    r"ROLLOUT_BUFFER_TEST_WHEEL": "minutes for an environment of its own; scripts/verify wheel",
    r"\btorch\b": "torch, which no process of this project needs",
    r"[Pp]rometheus": "a Prometheus server",
    r"systemd-analyze": "systemd",
    r"nginx is not installed": "the package nginx-light, which only who opens the port to strangers needs",
    r"chromedriver": "the package chromium-driver, which only the comparison with MiniWoB's own environment needs",
    r"Debian's adb": "the package adb, which only packagers of Android and a test of its server need",
    r"is played by the buffer alone|is installed here": "nothing: the case does not apply here",
    r"mount|tmpfs|loop device": "the right to mount a file system",
}
"""What the reason of a skip says, as a regular expression, and what the test would need."""


def unexpected(reasons: Iterable[str]) -> list[str]:
    """Returns the reasons that name something this machine could have had."""
    return sorted({reason for reason in reasons if not any(re.search(pattern, reason) for pattern in EXPECTED)})
