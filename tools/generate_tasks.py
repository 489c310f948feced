"""Writes the input file of Android World training: every task times its parameter variations, shuffled.

    python tools/generate_tasks.py                                  # data/tasks.jsonl: 116 tasks x 20 = 2320 lines
    python tools/generate_tasks.py --tasks ContactsAddContact ClockTimerEntry --params 5 --output few.jsonl
    python tools/generate_tasks.py --curriculum data/curriculum_example.txt --output curriculum.jsonl

A curriculum lists the tasks to train on, their parameter variations, and their weights. One line per task, or per
pattern of tasks; a later line replaces an earlier one for the same task:

    *                                                   # all tasks once,
    SystemWifi*            weight=0.5                   # Wi-Fi tasks half as often,
    ContactsAddContact     weight=3     params=0-4,7    # six variations of this task three times,
    BrowserDraw            weight=0                     # this task never

``weight`` is the number of repetitions of a task's variations, 1 by default. A fraction selects that share of the
variations, always the same. ``params`` are the variations, all 20 by default. A repeated variation has its own
``instance_id`` (``ContactsAddContact-3-again-1``), so that it is another group.

The order comes from a fixed seed: the same tasks give the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "data"
PARAMS_PER_TASK = 20
SHUFFLE_SEED = 42
MAX_TIMES = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after printing an error."""
    options = _parse(arguments)
    try:
        all_tasks = _read_task_list(options.task_list)
        if options.curriculum is not None:
            entries = read_curriculum(options.curriculum, all_tasks, options.params)
        else:
            every = tuple(range(options.params))
            entries = [Entry(task=task, params=every) for task in _chosen(all_tasks, options.tasks, options.task_list)]
        lines = generate(entries)
        _write_whole(options.output, lines)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"generate_tasks: {error}\n")
        return 2
    sys.stdout.write(f"{len(lines)} lines of {len(entries)} tasks written to {options.output}\n")
    return 0


def generate(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Returns one line per task and parameter variation, repeated by weight, in shuffled order."""
    lines = [_line(entry.task, *each) for entry in entries for each in occurrences(entry, SHUFFLE_SEED)]
    random.Random(SHUFFLE_SEED).shuffle(lines)
    return lines


def _line(task: str, index: int, turn: int) -> dict[str, Any]:
    return {
        "instance_id": f"{task}-{index}" + (f"-again-{turn}" if turn else ""),
        "prompt": "Complete a task on Android",
        "label": "",
        "metadata": {"task_name": task, "params_idx": index},
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="generate_tasks", description=description)
    parser.add_argument("--task-list", type=Path, default=DATA / "task_list.txt", help="one task name per line")
    parser.add_argument("--output", type=Path, default=DATA / "tasks.jsonl", help="default: data/tasks.jsonl")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tasks", nargs="+", metavar="NAME", help="only these tasks of the list")
    which.add_argument("--curriculum", type=Path, help="file with tasks, weights and variations")
    parser.add_argument("--params", type=int, default=PARAMS_PER_TASK, help="variations per task, 1 to 20 (default)")
    options = parser.parse_args(arguments)
    if not 1 <= options.params <= PARAMS_PER_TASK:
        parser.error(f"--params must be between 1 and {PARAMS_PER_TASK}")
    return options


def _read_task_list(path: Path) -> list[str]:
    """Returns the names in the file; empty lines and lines that begin with # are ignored."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    if len(set(names)) != len(names):
        raise ValueError(f"{path} names a task twice: {next(name for name in names if names.count(name) > 1)}")
    if not names:
        raise ValueError(f"{path} names no task")
    return names


def _chosen(all_tasks: Sequence[str], wanted: Sequence[str] | None, path: Path) -> list[str]:
    if wanted is None:
        return list(all_tasks)
    unknown = [name for name in wanted if name not in all_tasks]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not in {path}")
    return list(dict.fromkeys(wanted))


def _write_whole(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes the file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    part.replace(path)


# ---- the curriculum --------------------------------------------------------------------------------------------------


class CurriculumError(ValueError):
    """A line of the file is invalid; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One task of a curriculum."""

    task: str
    weight: float = 1.0
    params: tuple[int, ...]


def read_curriculum(path: Path, all_tasks: Sequence[str], variations: int) -> list[Entry]:
    """Returns the tasks in a file, in the order of ``all_tasks``, without those of weight 0.

    Raises:
        OSError: the file cannot be read.
        CurriculumError: a line names an unknown task, or an invalid weight or variation.
    """
    entries: dict[str, Entry] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = text.partition("#")[0].split()
        if words:
            try:
                entries |= {entry.task: entry for entry in _entries_of(words, all_tasks, variations)}
            except CurriculumError as error:
                raise CurriculumError(f"{path.name}, line {number}: {error}") from error
    chosen = [entries[task] for task in all_tasks if task in entries and entries[task].weight > 0]
    if not chosen:
        raise CurriculumError(f"{path.name} asks for no task")
    return chosen


def occurrences(entry: Entry, seed: int) -> list[tuple[int, int]]:
    """Returns (variation, earlier repetitions) for every line of a task.

    If a weight is fractional, the seed selects the remaining variations.
    """
    whole, rest = divmod(round(entry.weight * len(entry.params)), len(entry.params))
    chosen = sorted(random.Random(f"{seed} {entry.task}").sample(entry.params, rest))
    return [(index, turn) for turn in range(whole) for index in entry.params] + [(index, whole) for index in chosen]


def _entries_of(words: Sequence[str], all_tasks: Sequence[str], variations: int) -> list[Entry]:
    pattern, *settings = words
    values = dict(_setting(word) for word in settings)
    if len(values) != len(settings):
        raise CurriculumError(f"{pattern} is given a setting twice")
    weight = _weight(values.get("weight", "1"))
    params = _params(values.get("params", f"0-{variations - 1}"), variations)
    if weight > 0 and round(weight * len(params)) == 0:
        raise CurriculumError(f"weight={weight:g} of {len(params)} variations leaves nothing: take 0 to leave it out")
    return [Entry(task=task, weight=weight, params=params) for task in _tasks(pattern, all_tasks)]


def _setting(word: str) -> tuple[str, str]:
    key, sign, value = word.partition("=")
    if not sign or key not in ("weight", "params"):
        raise CurriculumError(f"{word!r} is neither weight=NUMBER nor params=NUMBERS")
    return key, value


def _tasks(pattern: str, all_tasks: Sequence[str]) -> list[str]:
    matches = [task for task in all_tasks if fnmatch.fnmatchcase(task, pattern)]
    if not matches:
        close = difflib.get_close_matches(pattern, all_tasks, n=1)
        raise CurriculumError(f"no task is called {pattern}" + (f"; did you mean {close[0]}?" if close else ""))
    return matches


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_TIMES:
        raise CurriculumError(f"weight={text}: must be a number from 0 to {MAX_TIMES}")
    return weight


def _params(text: str, variations: int) -> tuple[int, ...]:
    """Returns the variations in ``0-4,7``."""
    params: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or part.endswith("-"):
            raise CurriculumError(f"params={text}: must be numbers and ranges, like 0-4,7")
        begin, end = int(first), int(last or first)
        if begin > end or end >= variations:
            raise CurriculumError(f"params={text}: {part} is not within 0-{variations - 1}")
        params += range(begin, end + 1)
    if len(set(params)) != len(params):
        raise CurriculumError(f"params={text} names a variation twice")
    return tuple(sorted(params))


if __name__ == "__main__":
    sys.exit(main())
