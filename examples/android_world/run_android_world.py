"""Trains Android World where Ray runs and the model is fetched already: composes slime's arguments and submits the job.

SLIME_SCRIPT_MODEL_NAME=Qwen3-VL-8B-Instruct python examples/android_world/run_android_world.py --dry-run
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.launch_training import main

if __name__ == "__main__":
    sys.exit(main(["android_world", "--only-train", *sys.argv[1:]]))
