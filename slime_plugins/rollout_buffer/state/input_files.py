"""Reads a job's input file into instances: JSONL or Parquet, with slime's ``path@[a:b]`` slices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.errors import InputFileError, InvalidPayloadError
from slime_plugins.rollout_buffer.install_hints import install_extra
from slime_plugins.rollout_buffer.types import Instance

_SLICED = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)


def read_instances(input_file: str, data_roots: Sequence[Path]) -> list[Instance]:
    """Returns the instances of a file under one of the data roots, in file order.

    Raises:
        InputFileError: the file is outside the roots, unreadable or empty, or a line has no valid ``instance_id`` or
            repeats one.
    """
    path_text, line_slice = split_slice(input_file)
    path = _resolve_under(path_text, data_roots)
    lines = _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_lines(path)
    return _instances(list(lines)[line_slice], source=path.name)


def split_slice(input_file: str) -> tuple[str, slice]:
    """Splits ``path@[a:b]`` into the path and the slice; a plain path takes everything."""
    match = _SLICED.fullmatch(input_file)
    if match is None:
        return input_file, slice(None)
    # The pattern also matches a lone minus, which is no number.
    start, stop = (None if text in ("", "-") else int(text) for text in match.group("start", "stop"))
    return match["path"], slice(start, stop)


def instances_from_lines(lines: Iterable[Any]) -> list[Instance]:
    """Converts parsed lines to instances.

    Raises:
        InputFileError: there is no line, a line is no object, or an ``instance_id`` is missing, invalid or repeated.
    """
    return _instances(enumerate(lines, start=1), source="instances")


def _instances(numbered_lines: Iterable[tuple[int, Any]], *, source: str) -> list[Instance]:
    instances: list[Instance] = []
    line_of_id: dict[str, int] = {}
    for number, line in numbered_lines:
        instance = _instance(line, f"{source}, line {number}")
        first_number = line_of_id.setdefault(instance.instance_id, number)
        if first_number != number:
            raise InputFileError(
                f"{source}, line {number}: instance_id {instance.instance_id!r} is already on line {first_number}; "
                "every line needs its own (tools/assign_instance_id.py assigns them)"
            )
        instances.append(instance)
    if not instances:
        raise InputFileError(f"{source} holds no instance")
    return instances


def _instance(line: Any, where: str) -> Instance:
    if not isinstance(line, Mapping):
        raise InputFileError(f"{where}: must be a JSON object")
    if line.get("instance_id") is None:
        raise InputFileError(f"{where}: instance_id is missing; tools/assign_instance_id.py adds it to every line")
    try:
        orjson.dumps(line)
    except orjson.JSONEncodeError as error:
        raise InputFileError(f"{where}: cannot be stored as JSON ({error})") from error
    try:
        return Instance(instance_id=wire.identifier(line["instance_id"], "instance_id"), data=dict(line))
    except InvalidPayloadError as error:
        raise InputFileError(f"{where}: {error}") from error


def _resolve_under(path_text: str, data_roots: Sequence[Path]) -> Path:
    """Returns the file of that path, absolute or relative to a data root, if it lies under a (resolved) data root."""
    roots = ", ".join(str(root) for root in data_roots)
    try:
        candidates = [path for root in data_roots if (path := (root / path_text).resolve()).is_relative_to(root)]
        file = next((path for path in candidates if path.is_file()), None)
    except (OSError, RuntimeError) as error:
        raise InputFileError(f"input_file {path_text[:200]} is no usable path: {error}") from error
    if file is not None:
        return file
    if candidates:
        raise InputFileError(f"input_file {path_text} is not a file the buffer host can see (looked under {roots})")
    raise InputFileError(
        f"input_file {path_text} lies outside the data roots ({roots}): start serve with --data-root "
        f"{Path(path_text).parent}, or send the lines as instances"
    )


def _jsonl_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the lines that are not blank, parsed, with their numbers in the file."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parsed(line, f"{path.name}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(f"input_file {path.name} cannot be read: {error}") from error


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputFileError(f"{where}: not valid JSON ({error.msg}: character {error.pos})") from error
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{where}: not valid JSON ({error})") from error


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputFileError(
            f"reading {path.name} needs pyarrow on the buffer host: {install_extra('parquet')}"
        ) from error
    try:
        yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputFileError(f"input_file {path.name} cannot be read as Parquet: {error}") from error
