"""``rollout-buffer attempts`` lists failed attempts with their errors and transcripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Url,
    connect,
    console,
    local_time,
    opened_store,
    print_json,
    print_page,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.transcript_view import LONG_TEXT, message_lines
from slime_plugins.rollout_buffer.wire import IMAGE_URL_PREFIX


def attempts(
    job_id: JobId,
    error_code: Annotated[str | None, typer.Option(help="Only attempts with this error code, like `engine`.")] = None,
    search: Annotated[str | None, typer.Option(help="Only attempts with this text in instance id or error.")] = None,
    transcripts: Annotated[
        bool, typer.Option("--transcripts/--no-transcripts", help="Print the transcript of each, if it was stored.")
    ] = True,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Maximum number of attempts.")] = 10,
    cursor: Annotated[str | None, typer.Option(help="The cursor that the previous page printed.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Read this data directory of `serve`, on this host, instead of --url.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List a job's failed attempts, newest first, with errors, tracebacks and transcripts."""
    with report_errors():
        filters: dict[str, Any] = {"error_code": error_code, "search": search, "limit": limit, "cursor": cursor}
        if data_dir is None:
            page = connect(url).attempts(job_id, transcripts=transcripts, **filters)
        else:
            page = _attempts_in(data_dir, job_id, {**filters, "transcripts": transcripts})
    if as_json:
        print_json(page)
        return
    printed_tracebacks: set[str] = set()
    for attempt in page["attempts"]:
        console.print(_attempt_summary(attempt))
        if traceback := attempt["traceback"]:
            text = "(the same traceback as above)" if traceback in printed_tracebacks else traceback
            console.print(Padding(Text(text, style="red"), (1, 0, 0, 2)))
            printed_tracebacks.add(traceback)
        for message in attempt["messages"] or ():
            for line in message_lines(message, _image_name, LONG_TEXT):
                console.print(line)
        console.print()
    empty_page = "no such attempt failed" if error_code or search or cursor else f"no attempt of {job_id} failed"
    print_page("" if page["attempts"] else empty_page, page)
    if page["log"]:
        console.print(f"The runner's log: {page['log']}", style="dim", highlight=False, soft_wrap=True)


def _attempts_in(data_dir: Path, job_id: str, query: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same page as ``GET /jobs/<id>/attempts``, read from a data directory; needs no running server."""
    from slime_plugins.rollout_buffer.reporting.failed_attempts import failed_attempts
    from slime_plugins.rollout_buffer.wire.query_params import AttemptPageQuery
    from slime_plugins.rollout_buffer.wire.request_fields import parse

    parameters = {key: value for key, value in query.items() if value is not None}
    with opened_store(data_dir) as store:
        return {**failed_attempts(store, job_id, parse(AttemptPageQuery, parameters))}


def _attempt_summary(failed: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    position = (
        f"slot {failed['slot']}, attempt {failed['attempt']}, group {failed['group_index']}, epoch {failed['epoch']}"
    )
    seconds = failed["ended_at"] - failed["started_at"]
    for name, value, style in (
        ("attempt", failed["uid"], ""),
        ("instance", f"{failed['instance_id']} ({position})", ""),
        ("failed", f"{local_time(failed['ended_at'])}, after {seconds:.1f} s", ""),
        ("error", f"{failed['error_code']}: {failed['error_message']}", "red"),
        ("transcript", "stored" if failed["has_transcript"] else "not stored", "dim"),
    ):
        grid.add_row(Text(name, style="bold"), Text(value, style=style))
    return grid


def _image_name(url: str) -> RenderableType:
    """Returns the text to print for a screenshot: the server stores no screenshots of failed attempts."""
    return Text(f"[screenshot {url.removeprefix(IMAGE_URL_PREFIX)[:80]}]", style="dim")
