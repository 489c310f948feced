"""``rollout-buffer deliveries`` and ``replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import orjson
import typer
from rich.table import Table

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Url,
    connect,
    console,
    local_time,
    print_json,
    print_page,
    report_errors,
)
from slime_plugins.rollout_buffer.errors import ConfigError


def deliveries(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of deliveries.")] = 20,
    cursor: Annotated[int | None, typer.Option(help="The cursor that the previous page printed.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List a job's deliveries, newest first."""
    with report_errors():
        page = connect(url).deliveries(job_id, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    table = Table("delivery", "state", "groups", "samples", "created", "consumer")
    for entry in page["deliveries"]:
        numbers = (str(entry["groups"]), str(entry["samples"]), local_time(entry["created_at"]))
        table.add_row(entry["delivery_id"], entry["state"], *numbers, entry["consumer_id"] or "")
    print_page(table if page["deliveries"] else "no deliveries yet", page)


def replay(
    delivery_id: Annotated[str, typer.Argument(help="A delivery's id, as `rollout-buffer deliveries` lists it.")],
    output: Annotated[Path, typer.Option(help="Output file for the delivery's JSON.")],
    images: Annotated[
        Literal["inline", "hash"], typer.Option(help="Screenshots `inline` as data URIs, or by `hash`.")
    ] = "inline",
    reward_version: Annotated[
        int | None, typer.Option(min=0, help="Use the rewards of this version, from `rescore`.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Write the groups of a past delivery to a file. Changes nothing in the buffer."""
    with report_errors():
        body = connect(url).delivery_body(delivery_id, images=images, reward_version=reward_version)
        try:
            output.write_bytes(body)
        except OSError as error:
            raise ConfigError(f"--output {output} cannot be written: {error.strerror}") from error
    samples = len(orjson.loads(body)["data"]["data"])
    if as_json:
        print_json({"delivery_id": delivery_id, "samples": samples, "bytes": len(body), "output": str(output)})
    else:
        console.print(f"{samples} samples, {len(body)} bytes, in {output}", soft_wrap=True)
