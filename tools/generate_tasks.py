"""Writes the input file of Android World training: every task times its parameter variations, shuffled.

    python tools/generate_tasks.py                                  # data/tasks.jsonl: 116 tasks x 20 = 2320 lines
    python tools/generate_tasks.py --tasks ContactsAddContact ClockTimerEntry --params 5 --output few.jsonl

The order comes from a fixed seed: the same tasks give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["generate", "main"]

DATA = Path(__file__).resolve().parent.parent / "data"
PARAMS_PER_TASK = 20
SHUFFLE_SEED = 42


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after a sentence that says what to mend."""
    options = _parse(arguments)
    try:
        known = _read_task_list(options.task_list)
        tasks = _chosen(known, options.tasks, options.task_list)
        lines = generate(tasks, options.params)
        _write_whole(options.output, lines)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"generate_tasks: {error}\n")
        return 2
    sys.stdout.write(f"{len(lines)} lines of {len(tasks)} tasks written to {options.output}\n")
    return 0


def generate(tasks: Sequence[str], params: int) -> list[dict[str, Any]]:
    """Returns one line per task and parameter variation, in shuffled order."""
    lines = [_line(task, index) for task in tasks for index in range(params)]
    random.Random(SHUFFLE_SEED).shuffle(lines)
    return lines


def _line(task: str, index: int) -> dict[str, Any]:
    return {
        "instance_id": f"{task}-{index}",
        "prompt": "Complete a task on Android",
        "label": "",
        "metadata": {"task_name": task, "params_idx": index},
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="generate_tasks", description=description)
    parser.add_argument("--task-list", type=Path, default=DATA / "task_list.txt", help="one task name per line")
    parser.add_argument("--output", type=Path, default=DATA / "tasks.jsonl", help="default: data/tasks.jsonl")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="only these tasks of the list")
    parser.add_argument("--params", type=int, default=PARAMS_PER_TASK, help="variations per task, 1 to 20 (default)")
    options = parser.parse_args(arguments)
    if not 1 <= options.params <= PARAMS_PER_TASK:
        parser.error(f"--params must be between 1 and {PARAMS_PER_TASK}")
    return options


def _read_task_list(path: Path) -> list[str]:
    """Returns the names in the file; empty lines and lines that begin with # do not count."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    if len(set(names)) != len(names):
        raise ValueError(f"{path} names a task twice: {next(name for name in names if names.count(name) > 1)}")
    if not names:
        raise ValueError(f"{path} names no task")
    return names


def _chosen(known: Sequence[str], wanted: Sequence[str] | None, path: Path) -> list[str]:
    if wanted is None:
        return list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not in {path}")
    return list(dict.fromkeys(wanted))


def _write_whole(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes the file in one step, so that nobody ever reads half of it."""
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
