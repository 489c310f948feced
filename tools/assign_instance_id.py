"""Gives every line of a JSONL file an ``instance_id``. Runs the program of that name in the package.

python tools/assign_instance_id.py --input_path problems.jsonl --task_type math --output_path out.jsonl
"""

from __future__ import annotations

import runpy
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "slime_plugins/rollout_buffer/tools/assign_instance_id.py"

if __name__ == "__main__":
    runpy.run_path(str(PROGRAM), run_name="__main__")
