"""Writes questions over long documents for the ``statelm`` task type. Runs the program of the lab.

python tools/generate_documents.py --lines 24 --output data/documents.jsonl
"""

from __future__ import annotations

import runpy
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "lab" / "src" / "rollout_buffer_lab" / "documents.py"

if __name__ == "__main__":
    runpy.run_path(str(PROGRAM), run_name="__main__")
