"""Skip lists: the instances that a trainer has consumed of a job, as a file for ``start_rollout``.

A file is JSON, ``{"skip_instance_ids": [...]}``, with an id once per consumed epoch; a JSON list of ids, or a text with
one id a line, is also accepted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Url,
    connect,
    console,
    errors,
    print_json,
    refuse_existing,
    report_errors,
)
from slime_plugins.rollout_buffer.credentials import holds_redacted
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.rules.causes import CauseCode
from slime_plugins.rollout_buffer.types import GroupState

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.client import RolloutBufferClient

PAGE = 500
FIELD = "skip_instance_ids"
ListFile = Annotated[Path, typer.Argument(help="A skip list: JSON, or one instance id a line.")]

skip_list = typer.Typer(
    help="The groups that a trainer has consumed of a job: write them to a file, edit it, continue a job from it.",
    no_args_is_help=True,
)


@skip_list.command("export")
def export_list(
    job_id: JobId,
    output: Annotated[Path | None, typer.Option(help="Output file. [default: the terminal]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output if it exists.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Write the instances of delivered, skipped, and reported filtered or failed groups; leased groups are
    excluded."""
    with report_errors():
        if output is not None:
            refuse_existing(output, overwrite=overwrite)
        counts, ids = count_consumed_groups(connect(url), job_id)
        states = dict(sorted(counts.items()))
        document = {"job_id": job_id, "counts": states, FIELD: sorted(ids.elements())}
        if output is not None:
            output.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
        return
    if output is None:
        _print_ids(ids)
    summary = ", ".join(f"{count} {state}" for state, count in states.items()) or "nothing consumed yet"
    console.print(f"{ids.total()} entries of {len(ids)} instances ({summary}){f' in {output}' if output else ''}")


@skip_list.command("edit")
def edit_list(
    file: ListFile,
    add: Annotated[list[str] | None, typer.Option(help="Instance id to add one entry of; repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Instance id to remove one entry of; repeatable.")] = None,
    remove_all: Annotated[list[str] | None, typer.Option(help="Instance id to remove every entry of.")] = None,
    output: Annotated[Path | None, typer.Option(help="Output file. [default: the same file]")] = None,
    as_json: AsJson = False,
) -> None:
    """Add ids to a skip list file or remove ids; without options, print the file. Works without a buffer."""
    with report_errors():
        ids = read_skip_list(file)
        for name in add or ():
            ids[name] += 1
        for name in [*(remove or ()), *(remove_all or ())]:
            if not ids[name]:
                raise ConfigError(f"{file} has no entry of {name!r} to remove: nothing was changed")
            ids[name] -= ids[name] if name in (remove_all or ()) else 1
        ids = +ids
        changed = bool(add or remove or remove_all)
        if changed or output is not None:
            document = {FIELD: sorted(ids.elements())}
            (output or file).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json({FIELD: sorted(ids.elements())})
        return
    if not changed:
        _print_ids(ids)
    console.print(f"{ids.total()} entries of {len(ids)} instances")


@skip_list.command("import")
def import_list(
    job_id: JobId,
    file: ListFile,
    payload: Annotated[
        Path | None, typer.Option(help="The job's start payload, JSON. [default: the settings that the job reports]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the start payload with the list here, and change no job.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --output if it exists.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Continue a job from a skip list: attach to it like a trainer that restarts with this list. Delivered groups that
    are not in the list become ready again; future groups that are in it are skipped."""
    with report_errors():
        ids = read_skip_list(file)
        client = connect(url)
        job = client.job(job_id)  # fails if the job does not exist, instead of starting it
        start = {**_start_payload(job, payload), "job_id": job_id, FIELD: sorted(ids.elements())}
        if output is not None:
            refuse_existing(output, overwrite=overwrite)
            output.write_text(json.dumps(start, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            if as_json:
                print_json({"entries": ids.total(), "output": str(output)})
            else:
                console.print(f"a start payload with {ids.total()} entries is in {output}; no job was changed")
            return
        if not yes:
            errors.print(
                f"Job {job_id} will count these {ids.total()} entries as consumed, and nothing else. Other delivered "
                "groups will be delivered again."
            )
            typer.confirm("Continue? (--yes skips this question)", abort=True, err=True)
        client.start_rollout(start)
        after = client.job(job_id)
    if as_json:
        print_json({"job_id": job_id, "entries": ids.total(), "before": job["groups"], "after": after["groups"]})
        return
    changes = [f"{state} {job['groups'][state]} → {count}" for state, count in after["groups"].items()]
    console.print(f"groups: {', '.join(changes)}")


def count_consumed_groups(client: RolloutBufferClient, job_id: str) -> tuple[Counter[str], Counter[str]]:
    """Returns the number of consumed groups by state and by instance.

    Filtered and failed groups count after a delivery has reported them to the trainer.
    """
    counts: Counter[str] = Counter()
    ids: Counter[str] = Counter()
    client.job(job_id)
    for state in (GroupState.DELIVERED, GroupState.FILTERED, GroupState.FAILED, GroupState.SKIPPED):
        seen: set[int] = set()
        for group in _groups(client, job_id, state):
            if group["group_index"] in seen or not _is_consumed(group, state):
                continue
            seen.add(group["group_index"])
            counts[state.value] += 1
            ids[group["instance_id"]] += 1
    return counts, ids


def _is_consumed(group: Mapping[str, Any], state: GroupState) -> bool:
    if state is GroupState.SKIPPED:
        return bool(group["cause_code"] == CauseCode.SKIP_LIST)
    return group["delivery_id"] is not None


def _groups(client: RolloutBufferClient, job_id: str, state: GroupState) -> Iterator[dict[str, Any]]:
    cursor: str | None = None
    while True:
        page = client.groups(job_id, state=state.value, limit=PAGE, cursor=cursor)
        yield from page["groups"]
        cursor = page["next_cursor"]
        if cursor is None:
            return


def read_skip_list(file: Path) -> Counter[str]:
    """Reads a skip list; returns how often each instance id occurs.

    Raises:
        ConfigError: the file cannot be read, or is no skip list.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the skip list {file} cannot be read: {error}") from error
    if not text.lstrip().startswith(("{", "[")):
        return Counter(line.strip() for line in text.splitlines() if line.strip())
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the skip list {file} is no JSON: {error}") from error
    entries = value.get(FIELD) if isinstance(value, dict) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) or type(entry) is int for entry in entries):
        raise ConfigError(f'{file} is no skip list: it needs {{"{FIELD}": [instance ids]}}, or a list of them')
    return Counter(str(entry) for entry in entries)


def _start_payload(job: Mapping[str, Any], file: Path | None) -> dict[str, Any]:
    if file is None:
        start = {**job["settings"], "remote_engine_url": job["engine_url"]}
        if holds_redacted(start):
            raise ConfigError("no reply shows the job's password, key or header: give its start with --payload")
        return start
    try:
        start = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--payload {file} cannot be read: {error}") from error
    if not isinstance(start, dict):
        raise ConfigError(f"--payload {file} is no start payload: it must be a JSON object")
    if start.get("fresh"):
        raise ConfigError(f"--payload {file} has fresh: true, which would end the job: take it out to attach")
    return start


def _print_ids(ids: Counter[str]) -> None:
    table = Table("instance", "entries")
    for name, count in sorted(ids.items()):
        table.add_row(name, str(count))
    if ids:
        console.print(table)
