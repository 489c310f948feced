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
    NONE = "none"  # not written; the rows hold their sha256


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
    """One export: the job that is read, which of its trajectories are written, and where their screenshots go."""

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
        this_export = _Export(
            client=connect(url),
            job_id=job_id,
            include_undelivered=include_undelivered,
            images=images,
            images_folder=output.with_name(f"{output.name}.images"),
            inline=file_format is Format.JSONL and images is Images.EMBED,
        )
        this_export.client.job(job_id)
        _write_whole(this_export, output, write)
    tally = this_export.tally
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


def _write_whole(export: _Export, output: Path, write: Callable[[_Export, Path], None]) -> None:
    """Writes to a temporary file and renames it when it is complete.

    Raises:
        ConfigError: there are trajectories, but none was delivered.
    """
    partial = output.with_name(f"{output.name}.partial")
    _remove(partial)
    try:
        write(export, partial)
        tally = export.tally
        if tally.not_delivered and not tally.written + tally.purged + tally.damaged:
            raise ConfigError(
                f"none of {tally.not_delivered} trajectories of {export.job_id} was delivered: --all takes them too"
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


def _trajectories(export: _Export) -> Iterator[dict[str, Any]]:
    """Yields full trajectories one at a time."""
    for entry in _selected_entries(export):
        try:
            form = "inline" if export.inline else "hash"
            trajectory = export.client.trajectory(entry["uid"], job_id=export.job_id, images=form)
        except NotFoundError:
            export.tally.purged += 1
            continue
        except DamagedError:
            export.tally.damaged += 1
            continue
        export.tally.written += 1
        yield trajectory


def _selected_entries(export: _Export) -> Iterator[dict[str, Any]]:
    @functools.lru_cache(maxsize=GROUPS_REMEMBERED)
    def delivered_uids(group_index: int) -> frozenset[str]:
        return frozenset(member["source_uid"] for member in export.client.group(group_index)["delivered"])

    def was_delivered(entry: Mapping[str, Any]) -> bool:
        return entry["group_state"] == "delivered" and entry["uid"] in delivered_uids(entry["group_index"])

    cursor: int | None = None
    while True:
        page = export.client.trajectories(job_id=export.job_id, limit=PAGE, cursor=cursor)
        for entry in page["trajectories"]:
            if export.include_undelivered or was_delivered(entry):
                yield entry
            else:
                export.tally.not_delivered += 1
        cursor = page["next_cursor"]
        if cursor is None:
            return


def _screenshots(export: _Export, trajectory: Mapping[str, Any]) -> Iterator[tuple[str, str, bytes | None]]:
    """Yields (hash, path, bytes) of a trajectory's screenshots; bytes only if they are embedded."""
    for sha256 in trajectory.get("images") or []:
        if export.images is Images.NONE or export.inline:
            yield sha256, sha256, None
            continue
        try:
            path, content = _fetched(export, sha256)
        except (NotFoundError, DamagedError):
            export.tally.missing_images += 1
            path, content = sha256, None
        yield sha256, path, content


def _fetched(export: _Export, sha256: str) -> tuple[str, bytes | None]:
    if export.images is Images.FILES:
        existing = next(export.images_folder.glob(f"{sha256}.*"), None)
        if existing is not None:
            return f"{export.images_folder.name}/{existing.name}", None
    content = export.client.get_image(sha256)
    name = f"{sha256}.{(image_media_type(content) or 'image/bin').removeprefix('image/')}"
    if export.images is Images.EMBED:
        return name, content
    export.images_folder.mkdir(parents=True, exist_ok=True)
    partial = export.images_folder / f".{name}"  # a file that an aborted export left behind is written again
    partial.write_bytes(content)
    partial.replace(export.images_folder / name)
    return f"{export.images_folder.name}/{name}", None


# --- writing ---------------------------------------------------------------------------------------------------------


def _writer(file_format: Format) -> Callable[[_Export, Path], None]:
    """Returns the writer of a format; if its library is missing, raises before any trajectory is read."""
    if file_format is Format.JSONL:
        return _write_jsonl
    _require_library("pyarrow", file_format.value)
    if file_format is Format.PARQUET:
        return _write_parquet
    _require_library("datasets", file_format.value)
    return _write_data_set


def _require_library(library: str, extra: str) -> None:
    try:
        __import__(library)
    except ImportError as error:
        raise ConfigError(f"--format {extra} needs the extra {extra!r}: {install_extra(extra)}") from error


def _write_jsonl(export: _Export, path: Path) -> None:
    with path.open("wb") as file:
        for trajectory in _trajectories(export):
            images = [{"sha256": sha256, "path": name} for sha256, name, _ in _screenshots(export, trajectory)]
            line = trajectory if export.inline or export.images is Images.NONE else {**trajectory, "images": images}
            file.write(orjson.dumps(line) + b"\n")


def _row(export: _Export, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    images = [{"bytes": content, "path": path} for _, path, content in _screenshots(export, trajectory)]
    texts = {name: orjson.dumps(trajectory.get(name)).decode() for name in AS_JSON}
    return {**{name: trajectory.get(name) for name in (*TEXTS, *INTEGERS, *NUMBERS, "late")}, **texts, "images": images}


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


def _write_parquet(export: _Export, path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    schema = _schema()
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batched(_trajectories(export)):
            writer.write_table(pyarrow.Table.from_pylist([_row(export, each) for each in batch], schema=schema))


def _batched(trajectories: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for trajectory in trajectories:
        batch.append(trajectory)
        if len(batch) == ROWS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _write_data_set(export: _Export, path: Path) -> None:
    """Writes a temporary Parquet file and converts it, because the library reads Parquet without filling the memory."""
    import datasets

    features = datasets.Features.from_arrow_schema(_schema())
    if export.images is Images.EMBED:
        features["images"] = datasets.List(datasets.Image())
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        rows = Path(folder) / "rows.parquet"
        _write_parquet(export, rows)
        data_set = datasets.Dataset.from_parquet(str(rows), features=features, cache_dir=folder)
        data_set.save_to_disk(str(path))
