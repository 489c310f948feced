"""``python -m slime_plugins.rollout_buffer.generator [FOLDER …]``: writes what the registry finds as JSON to stdout.

The supervisor asks this way, so that a generator file which crashes, hangs or hoards memory cannot take it along.
"""

import sys
from pathlib import Path

from slime_plugins.rollout_buffer.generator import describe, discover

if __name__ == "__main__":
    sys.stdout.write(describe(discover([Path(folder) for folder in sys.argv[1:]])) + "\n")
