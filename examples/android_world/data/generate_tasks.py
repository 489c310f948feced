"""Runs ``tools/generate_tasks.py``, at the path of the guides."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).resolve().parents[3] / "tools" / "generate_tasks.py"
    runpy.run_path(str(program), run_name="__main__")
