"""Installed as ``slime_plugins/rollout_buffer/buffer.py`` by ``--trainer-only``: prints how to start the buffer."""

from __future__ import annotations

import sys

ADVICE = (
    "this slime checkout holds only the trainer's side of the rollout buffer. Start the buffer in an environment of "
    "its own: pip install . in a checkout of the rollout buffer, rollout-buffer serve --data-dir DIR; and pass its URL "
    "to the trainer: --rollout-buffer-url http://HOST:8889, or SLIME_SCRIPT_BUFFER_URL for scripts/run_agent.sh. To "
    "start it from this checkout, install the overlay without --trainer-only"
)

if __name__ == "__main__":
    sys.exit(f"buffer.py: {ADVICE}")
