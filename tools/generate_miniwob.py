"""Writes an input file of MiniWoB++: every page times its seeds, shuffled.

    python tools/generate_miniwob.py                                   # data/miniwob.jsonl: 130 pages x 4 seeds
    python tools/generate_miniwob.py --tasks click-button login-user --seeds 100 --output few.jsonl

The pages are those of the installed package ``miniwob``. The order comes from a fixed seed: the same tasks give the
same file, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.miniwob.package import find_pages, task_names

OUTPUT = Path(__file__).resolve().parent.parent / "data" / "miniwob.jsonl"
SEEDS = 4
SHUFFLE_SEED = 42


def generate(tasks: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    """Returns one input line for each task and seed from 0 on, shuffled."""
    lines = [
        {"instance_id": f"{task}-{seed}", "metadata": {"task_name": task, "params_idx": seed}}
        for task in tasks
        for seed in range(seeds)
    ]
    random.Random(SHUFFLE_SEED).shuffle(lines)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", help="these pages only")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many seeds of each page, from 0 on")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    try:
        pages = task_names(find_pages())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    unknown = sorted(set(options.tasks or ()) - set(pages))
    if unknown or options.seeds < 1:
        sys.stderr.write(f"no such page: {', '.join(unknown)}\n" if unknown else "--seeds must be 1 or more\n")
        return 1
    lines = generate(options.tasks or pages, options.seeds)
    options.output.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    sys.stdout.write(f"{options.output}: {len(lines)} lines\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
