"""What ``rollout-buffer`` runs: the command line, or one line where slime's own packages hide it.

It lies outside of both packages, because slime's ``slime_plugins`` has an ``__init__.py``: where that is found, nothing
of this project is, and only a module of another name can say so.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Runs the command line; returns 2 where it cannot be found."""
    try:
        from slime_plugins.rollout_buffer.cli.app import main as command_line
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("slime_plugins"):
            raise
        sys.stderr.write(
            "rollout-buffer: slime's own slime_plugins hides this project here: pip uninstall slime-rollout-buffer in "
            "slime's environment and lay the overlay over its checkout (python tools/install_into_slime.py CHECKOUT); "
            "the buffer itself runs from an environment without slime\n"
        )
        return 2
    command_line()
    return 0
