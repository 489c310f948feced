"""``python -m slime_plugins.rollout_buffer.generator [FOLDER …]``: writes what the registry finds as JSON to stdout.

The supervisor asks this way, so that a generator file which crashes, hangs or hoards memory cannot take it along. Which
file is being loaded it says as a heartbeat on ``--progress-fd``; files given with ``--skip`` are left out.
"""

import argparse
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

    def print_file(file: Path) -> None:
        """Says which file is loaded next."""
        if progress is not None:
            progress.beat(file=str(file))

    files = generator_files(options.folders)
    found = discover(options.folders, skip=options.skip, on_file=print_file)
    sys.stdout.write("\n" + describe(found, files) + "\n")
