"""Adds an ``instance_id``, the buffer's key of an instance, to every line of a JSONL file.

    python slime_plugins/rollout_buffer/tools/assign_instance_id.py --input_path problems.jsonl [--task_type math]
    python -m slime_plugins.rollout_buffer.tools.assign_instance_id --input_path problems.jsonl

Existing ids are kept (numbers become strings); lines without an id get ``<task_type>_<n>``. A file that has an id twice
is refused. The result goes to ``--output_path``, by default ``problems_instance_id.jsonl`` next to the input, all of
it or nothing. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 after a message that says what to correct."""
    options = _parse(arguments)
    output_path = options.output_path or options.input_path.with_name(f"{options.input_path.stem}_instance_id.jsonl")
    try:
        lines = _read(options.input_path)
        numbered = assign_instance_ids(lines, options.task_type)
        _write_whole(output_path, numbered)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"assign_instance_id: {error}\n")
        return 2
    new = sum(not _has_id(line) for line in lines)
    sys.stdout.write(f"{len(lines)} lines, {new} of them with a new instance_id, written to {output_path}\n")
    return 0


def assign_instance_ids(lines: Sequence[Line], task_type: str) -> list[Line]:
    """Returns copies of ``lines`` that all have a string ``instance_id``, no two of them the same.

    Raises:
        ValueError: two lines bring the same id, or one brings something that is neither text nor a whole number.
    """
    taken = _ids_in_use(lines)
    new_ids = (name for number in itertools.count() if (name := f"{task_type}_{number}") not in taken)
    return [{**line, "instance_id": str(line["instance_id"]) if _has_id(line) else next(new_ids)} for line in lines]


def _ids_in_use(lines: Sequence[Line]) -> dict[str, int]:
    """Returns the line number of each id that is there already."""
    taken: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not _has_id(line):
            continue
        given = line["instance_id"]
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise ValueError(f"line {number}: instance_id must be text or a whole number, not {given!r}")
        if str(given) in taken:
            raise ValueError(f"line {number}: instance_id {str(given)!r} is that of line {taken[str(given)]} already")
        taken[str(given)] = number
    return taken


def _has_id(line: Line) -> bool:
    return line.get("instance_id") not in (None, "")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="assign_instance_id", description=description)
    parser.add_argument("--input_path", type=Path, required=True, help="a JSONL file, one object per line")
    parser.add_argument("--task_type", default="math", help="what new ids begin with (default: math)")
    parser.add_argument("--output_path", type=Path, help="default: <input>_instance_id.jsonl next to the input")
    return parser.parse_args(arguments)


def _read(path: Path) -> list[Line]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file; only JSONL is read") from error
    lines = [_load(path, number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no lines")
    return lines


def _load(path: Path, number: int, line: str) -> Line:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} line {number} is not a JSON object")
    return value


def _write_whole(path: Path, lines: Sequence[Line]) -> None:
    """Writes the file in one step, so that no reader sees half of it; it may be the input itself."""
    if not path.parent.is_dir():
        raise ValueError(f"the folder {path.parent} does not exist")
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as part:
        part_path = Path(part.name)
        try:
            part.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            part.flush()
            os.fsync(part.fileno())
            part_path.chmod(0o644)
            part_path.replace(path)
        except BaseException:
            part_path.unlink(missing_ok=True)
            raise


if __name__ == "__main__":
    sys.exit(main())
