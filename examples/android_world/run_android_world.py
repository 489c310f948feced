"""The same as ``scripts/run_android_world.py``, where guides look for it."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).resolve().parents[2] / "scripts" / "run_android_world.py"
    runpy.run_path(str(program), run_name="__main__")
