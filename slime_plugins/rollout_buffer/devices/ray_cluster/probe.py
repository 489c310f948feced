"""A program that checks whether this environment can join a Ray cluster.

    python -m slime_plugins.rollout_buffer.devices.ray_cluster.probe ADDRESS

The program joins the cluster, leaves it, and prints the versions; the exit code is 0. If it cannot join, it prints the
reason; the exit code is 1. ``rollout-buffer doctor`` calls the program, and so does the launch script before it serves
a buffer on a running cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slime_plugins.rollout_buffer.devices.ray_cluster.pool import try_cluster
from slime_plugins.rollout_buffer.devices.ray_cluster.versions import own_versions
from slime_plugins.rollout_buffer.errors import RolloutBufferError


def main(arguments: Sequence[str] | None = None) -> int:
    """Joins the cluster and leaves it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ray_cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT of the head, or auto for this machine's cluster")
    options = parser.parse_args(arguments)
    try:
        try_cluster(options.address)
    except RolloutBufferError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.write(f"{own_versions()}, as the cluster at {options.address}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
