"""Runs ``scripts/run_android_world.py``, at the path of the guides."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).resolve().parents[2] / "scripts" / "run_android_world.py"
    runpy.run_path(str(program), run_name="__main__")
