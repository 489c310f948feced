"""``rollout-buffer export``: writes a job's trajectories as JSON lines, Parquet, or a Hugging Face data set.

Trajectories are fetched page by page and written one by one or in small row groups, so memory does not grow with the
job. The output is moved to its name when it is complete.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Url,
    connect,
    console,
    print_json,
    refuse_existing,
    report_errors,
)
from slime_plugins.rollout_buffer.errors import ConfigError, DamagedError, NotFoundError
from slime_plugins.rollout_buffer.install_hints import install_extra
from slime_plugins.rollout_buffer.wire import image_media_type

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.client import RolloutBufferClient

PAGE = 100
ROWS_AT_ONCE = 16
GROUPS_REMEMBERED = 256
INTEGERS = ("epoch", "slot", "attempt", "group_index", "turns", "sampled_tokens", "oldest_version", "versions_behind")
NUMBERS = ("reward", "raw_reward", "created_at", "success", "generate_s", "played_s")
TEXTS = ("job_id", "uid", "instance_id", "outcome", "stop_reason", "group_state", "delivery_id")
AS_JSON = ("messages", "extra_info", "generations", "timings_s", "turn_rewards", "token_rewards")
"""Columns encoded as JSON, because their structure depends on the task."""


class Format(StrEnum):
    JSONL = "jsonl"  # one trajectory a line
    PARQUET = "parquet"  # one row each; columns without a schema as JSON
    DATASETS = "datasets"  # the same rows as a folder for datasets.load_from_disk


class Images(StrEnum):
    FILES = "files"  # into the folder OUTPUT.images, each once, named by its sha256
    EMBED = "embed"  # into the rows
    NONE = "none"  # not written: rows name them by sha256


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Counts of exported and skipped trajectories."""

    written: int = 0
    purged: int = 0
    damaged: int = 0
    missing_images: int = 0
    not_delivered: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Export:
    """Source, filters and image handling of one export."""

    client: RolloutBufferClient
    job_id: str
    include_undelivered: bool
    images: Images
    images_folder: Path
    inline: bool
    """Screenshots are embedded in the messages as data URIs."""
    tally: _Tally = field(default_factory=_Tally)


def export(
    job_id: JobId,
    output: Annotated[Path, typer.Option(help="Output file; a folder with --format datasets.")],
    file_format: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.JSONL,
    include_undelivered: Annotated[
        bool, typer.Option("--all/--delivered", help="Every trajectory, or those that were delivered to the trainer.")
    ] = False,
    images: Annotated[
        Images, typer.Option(help="Screenshots as files next to the output, embedded in the rows, or by hash only.")
    ] = Images.FILES,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output if it exists.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Write a job's trajectories to a file, newest first. Changes nothing in the buffer."""
    with report_errors():
        write = _writer(file_format)
        refuse_existing(output, overwrite=overwrite)
        if output.is_dir() and not (output / "dataset_info.json").is_file():
            raise ConfigError(f"--output {output} is a folder that holds no data set, and is not replaced")
        work = _Export(
            client=connect(url),
            job_id=job_id,
            include_undelivered=include_undelivered,
            images=images,
            images_folder=output.with_name(f"{output.name}.images"),
            inline=file_format is Format.JSONL and images is Images.EMBED,
        )
        work.client.job(job_id)
        _write_whole(work, output, write)
    tally = work.tally
    if as_json:
        print_json({"job_id": job_id, "format": file_format.value, "output": str(output), **asdict(tally)})
        return
    console.print(f"{tally.written} trajectories in {output}")
    if tally.purged:
        console.print(f"{tally.purged} were left out: retention has purged their payloads")
    if tally.damaged:
        console.print(f"{tally.damaged} were left out: their payloads are damaged")
    if tally.missing_images:
        console.print(f"{tally.missing_images} screenshots are missing: they are purged or damaged")
    if tally.not_delivered:
        console.print(f"{tally.not_delivered} were left out because they were not delivered; --all takes them too")


def _write_whole(work: _Export, output: Path, write: Callable[[_Export, Path], None]) -> None:
    """Writes to a temporary file and renames it when it is complete.

    Raises:
        ConfigError: there are trajectories, but none was delivered.
    """
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    try:
        write(work, partial)
        tally = work.tally
        if tally.not_delivered and not tally.written + tally.purged + tally.damaged:
            raise ConfigError(
                f"none of {tally.not_delivered} trajectories of {work.job_id} was delivered: --all takes them too"
            )
        if output.is_dir() or partial.is_dir():
            _remove(output)
        partial.replace(output)
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# --- reading ---------------------------------------------------------------------------------------------------------


def _trajectories(work: _Export) -> Iterator[dict[str, Any]]:
    """Yields full trajectories one at a time."""
    for entry in _listed(work):
        try:
            form = "inline" if work.inline else "hash"
            found = work.client.trajectory(entry["uid"], job_id=work.job_id, images=form)
        except NotFoundError:
            work.tally.purged += 1
            continue
        except DamagedError:
            work.tally.damaged += 1
            continue
        work.tally.written += 1
        yield found


def _listed(work: _Export) -> Iterator[dict[str, Any]]:
    @functools.lru_cache(maxsize=GROUPS_REMEMBERED)
    def delivered_uids(group_index: int) -> frozenset[str]:
        return frozenset(one["source_uid"] for one in work.client.group(group_index)["delivered"])

    def was_delivered(entry: Mapping[str, Any]) -> bool:
        return entry["group_state"] == "delivered" and entry["uid"] in delivered_uids(entry["group_index"])

    cursor: int | None = None
    while True:
        page = work.client.trajectories(job_id=work.job_id, limit=PAGE, cursor=cursor)
        for entry in page["trajectories"]:
            if work.include_undelivered or was_delivered(entry):
                yield entry
            else:
                work.tally.not_delivered += 1
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _screenshots(work: _Export, found: Mapping[str, Any]) -> Iterator[tuple[str, str, bytes | None]]:
    """Yields (hash, path, bytes) of a trajectory's screenshots; bytes only if they are embedded."""
    for sha256 in found.get("images") or []:
        if work.images is Images.NONE or work.inline:
            yield sha256, sha256, None
            continue
        try:
            path, content = _fetched(work, sha256)
        except (NotFoundError, DamagedError):
            work.tally.missing_images += 1
            path, content = sha256, None
        yield sha256, path, content


def _fetched(work: _Export, sha256: str) -> tuple[str, bytes | None]:
    if work.images is Images.FILES:
        there = next(work.images_folder.glob(f"{sha256}.*"), None)
        if there is not None:
            return f"{work.images_folder.name}/{there.name}", None
    content = work.client.get_image(sha256)
    name = f"{sha256}.{(image_media_type(content) or 'image/bin').removeprefix('image/')}"
    if work.images is Images.EMBED:
        return name, content
    work.images_folder.mkdir(parents=True, exist_ok=True)
    partial = work.images_folder / f".{name}"  # a file that an aborted export left behind is written again
    partial.write_bytes(content)
    partial.replace(work.images_folder / name)
    return f"{work.images_folder.name}/{name}", None


# --- writing ---------------------------------------------------------------------------------------------------------


def _writer(file_format: Format) -> Callable[[_Export, Path], None]:
    """Returns the writer of a format; fails before anything is read if its library is missing."""
    if file_format is Format.JSONL:
        return _write_jsonl
    _need("pyarrow", "parquet")
    if file_format is Format.PARQUET:
        return _write_parquet
    _need("datasets", "datasets")
    return _write_data_set


def _need(library: str, extra: str) -> None:
    try:
        __import__(library)
    except ImportError as error:
        raise ConfigError(f"--format {extra} needs the extra {extra!r}: {install_extra(extra)}") from error


def _write_jsonl(work: _Export, path: Path) -> None:
    with path.open("wb") as file:
        for found in _trajectories(work):
            shots = [{"sha256": sha256, "path": where} for sha256, where, _ in _screenshots(work, found)]
            line = found if work.inline or work.images is Images.NONE else {**found, "images": shots}
            file.write(orjson.dumps(line) + b"\n")


def _row(work: _Export, found: Mapping[str, Any]) -> dict[str, Any]:
    shots = [{"bytes": content, "path": path} for _, path, content in _screenshots(work, found)]
    texts = {name: orjson.dumps(found.get(name)).decode() for name in AS_JSON}
    return {**{name: found.get(name) for name in (*TEXTS, *INTEGERS, *NUMBERS, "late")}, **texts, "images": shots}


def _schema() -> Any:
    import pyarrow

    screenshot = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    return pyarrow.schema(
        [
            *((name, pyarrow.string()) for name in (*TEXTS, *AS_JSON)),
            *((name, pyarrow.int64()) for name in INTEGERS),
            *((name, pyarrow.float64()) for name in NUMBERS),
            ("late", pyarrow.bool_()),
            ("images", pyarrow.list_(screenshot)),
        ]
    )


def _write_parquet(work: _Export, path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = _schema()
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for rows in _batched(_trajectories(work)):
            writer.write_table(pyarrow.Table.from_pylist([_row(work, found) for found in rows], schema=schema))


def _batched(found: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for one in found:
        batch.append(one)
        if len(batch) == ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _write_data_set(work: _Export, path: Path) -> None:
    """Converts a temporary Parquet file, which the library reads without loading it into memory."""
    import datasets

    features = datasets.Features.from_arrow_schema(_schema())
    if work.images is Images.EMBED:
        features["images"] = datasets.List(datasets.Image())
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        rows = Path(folder) / "rows.parquet"
        _write_parquet(work, rows)
        found = datasets.Dataset.from_parquet(str(rows), features=features, cache_dir=folder)
        found.save_to_disk(str(path))
