"""Offline runs of W&B: making one in a folder, and reading back what it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE_HEADER_BYTES = 7
RECORD_HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
WHOLE, LAST = 1, 4
"""Kinds of LevelDB's records that end an entry: one that is whole, and the last of several parts."""
TIMEOUT_S = 20.0


@contextmanager
def offline_run(folder: Path) -> Iterator[Any]:
    """Makes a run of this process that writes below ``folder`` and needs no network; ends it."""
    import wandb

    settings = wandb.Settings(mode="offline", console="off", silent=True, disable_git=True)
    run = wandb.init(project="test", dir=str(folder), settings=settings)
    try:
        yield run
    finally:
        run.finish()


def logged_in(folder: Path) -> list[dict[str, Any]]:
    """Returns what was logged, one dictionary for each call."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in _records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def metrics_defined_in(folder: Path) -> dict[str, str]:
    """Returns each defined metric, or pattern, with its step metric."""
    defined = (record.metric for record in _records(folder) if record.WhichOneof("record_type") == "metric")
    return {metric.glob_name or metric.name: metric.step_metric for metric in defined}


def artifact_files_in(folder: Path) -> list[str]:
    """Returns the paths of all files in the run's artifacts: tables, and the pictures in them."""
    artifacts = [record.artifact for record in _records(folder) if record.WhichOneof("record_type") == "artifact"]
    return [entry.path for artifact in artifacts for entry in artifact.manifest.contents]


def _records(folder: Path) -> list[Any]:
    """Returns the run's records. W&B's process writes them, so this waits up to ``TIMEOUT_S`` for the last."""
    (path,) = folder.glob("**/*.wandb")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        records = list(_parsed(path.read_bytes()))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.05)


def _parsed(data: bytes) -> Iterator[Any]:
    """Reads LevelDB's log format, with seven bytes of W&B's own before it."""
    from wandb.proto import wandb_internal_pb2

    at, content = FILE_HEADER_BYTES, b""
    while at + RECORD_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += RECORD_HEADER_BYTES
        if at + size > len(data):
            return  # the writer is at this record
        content += data[at : at + size]
        at += size
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            content = b""
            yield record
