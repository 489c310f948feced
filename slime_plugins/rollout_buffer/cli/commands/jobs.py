"""Commands that list, show and change jobs. ``start`` starts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.live import Live
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
    print_json,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.job_status import draw_job_status
from slime_plugins.rollout_buffer.errors import UnavailableError
from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES
from slime_plugins.rollout_buffer.types import GroupState

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.client import RolloutBufferClient

MAX_CAUSE = 120
"""Characters of a cause in the list of jobs."""


def jobs(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the jobs, newest first."""
    with report_errors():
        client = connect(url)
        listed = client.jobs()
        causes = [] if as_json else [_cause(client, job) for job in listed]
    if as_json:
        print_json({"jobs": listed})
        return
    states = [state.value for state in GroupState if any(job["groups"][state.value] for job in listed)]
    table = Table("job", "task type", "state", "groups", *states, "cause", box=None)
    table.columns[0].no_wrap, table.columns[0].overflow = True, "fold"
    for job, cause in zip(listed, causes, strict=True):
        groups = job["groups"]
        total = sum(groups.values())
        numbers = [str(groups[state]) for state in states]
        table.add_row(job["job_id"], job["task_type"], job["state"], str(total), *numbers, _shortened(cause))
    console.print(table if listed else "no jobs yet")


def _cause(client: RolloutBufferClient, job: Mapping[str, Any]) -> str:
    """Returns the cause of a job's state; for an open job without one, why it does not progress."""
    if job["cause"] or job["state"] not in OPEN_STATES:
        return str(job["cause"])
    first = client.explanation(job["job_id"])["explanation"][0]
    return "" if first["severity"] == "ok" else str(first["message"])


def _shortened(cause: str) -> str:
    """Returns the beginning of the first line of a cause; ``status`` prints all of it."""
    first = cause.partition("\n")[0]
    return first if len(first) <= MAX_CAUSE else f"{first[:MAX_CAUSE]}…"


def status(
    job_id: Annotated[
        str | None, typer.Argument(help="One job. [default: all open ones and the last that ended]")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it until Ctrl-C; with --json one line a second.")
    ] = False,
) -> None:
    """Show the progress of jobs, the state of every slot, and why a job does not progress."""

    def read() -> list[dict[str, Any]]:
        client = connect(url)
        shown = [client.job(job_id)] if job_id is not None else _open_and_last(client.jobs())
        return [{**job, "now": client.explanation(job["job_id"])} for job in shown]

    with report_errors():
        if as_json:
            _print_json(read, watch=watch)
        elif watch:
            _watch(read)
        else:
            console.print(draw_job_status(read()))


def _open_and_last(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the open jobs and the one that ended last; ``jobs`` are newest first."""
    ended = [job for job in jobs if job["state"] not in OPEN_STATES]
    return [job for job in jobs if job["state"] in OPEN_STATES] + ended[:1]


def _print_json(read: Callable[[], list[dict[str, Any]]], *, watch: bool) -> None:
    """Prints the jobs once as indented JSON; with ``watch``, as one line every second until Ctrl-C."""
    while watch:
        typer.echo(orjson.dumps({"jobs": read()}))
        time.sleep(1.0)
    print_json({"jobs": read()})


def _watch(read: Callable[[], list[dict[str, Any]]]) -> None:
    """Shows the jobs every second; if the buffer becomes unreachable, says so and tries again."""
    from requests import RequestException

    shown = draw_job_status(read())
    live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
    show = console.print if live is None else live.update  # Live writes into a pipe only when it ends
    with live or nullcontext(), suppress(KeyboardInterrupt):
        while True:
            show(shown)
            time.sleep(1.0)
            try:
                shown = draw_job_status(read())
            except (RequestException, UnavailableError):
                shown = Text(f"no answer from the buffer since {local_time(time.time())}; retrying")
                time.sleep(4.0)


def _command_of(method: str, help_text: str) -> Callable[[str, str, bool], None]:
    def command(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
        with report_errors():
            job = getattr(connect(url), method)(job_id)
        if as_json:
            print_json(job)
        else:
            console.print(f"{job['job_id']} is {job['state']}")

    command.__doc__ = help_text
    return command


cancel = _command_of("cancel", "Cancel a job; its finished groups can still be fetched.")
pause = _command_of("pause", "Finish running episodes and start no new ones.")
resume = _command_of("resume", "Continue after pause or drain.")


def drain(
    job_id: JobId,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop running attempts; they are played again after resume.")
    ] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Pause a job and wait until no attempt is running."""
    with report_errors():
        while (job := connect(url).drain(job_id, stop=stop))["attempts"].get("running"):
            time.sleep(0.5)
    if as_json:
        print_json(job)
    else:
        console.print(f"{job['job_id']} is {job['state']}, with no running attempts")
