"""``python -m slime_plugins.rollout_buffer.generator [FOLDER …]``: prints the registry's catalog as JSON.

The supervisor runs it in a process of its own, because a generator file may crash, hang or use all memory. Before it
loads a file, it writes a heartbeat with the file's name to ``--progress-fd``. It does not load ``--skip`` files.
"""

import argparse
import os
import sys
from pathlib import Path

from slime_plugins.rollout_buffer.generator.registry import describe, discover
from slime_plugins.rollout_buffer.observability.liveness import Heartbeat
from slime_plugins.rollout_buffer.serve_settings import generator_files

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--skip", type=Path, action="append", default=[])
    parser.add_argument("--progress-fd", type=int)
    options = parser.parse_args()
    progress = None if options.progress_fd is None else Heartbeat(options.progress_fd)

    def report_file(file: Path) -> None:
        """Reports the next file to load."""
        if progress is not None:
            progress.beat(file=str(file))

    files = generator_files(options.folders)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the files print goes to stderr
        output.write(describe(discover(options.folders, skip=options.skip, on_file=report_file), files) + "\n")
