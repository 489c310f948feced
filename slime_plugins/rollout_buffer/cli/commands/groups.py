"""``rollout-buffer groups``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    JobId,
    Url,
    connect,
    print_json,
    print_page,
    report_errors,
)
from slime_plugins.rollout_buffer.types import GroupState


def groups(
    job_id: JobId,
    state: Annotated[GroupState | None, typer.Option(help="Only groups in this state.")] = None,
    cause: Annotated[str | None, typer.Option(help="Only groups with this text in their cause.")] = None,
    search: Annotated[str | None, typer.Option(help="Only groups with this text in their instance id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Maximum number of groups.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="The cursor that the previous page printed.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List a job's groups, most recently changed first, with their outcome and its cause."""
    wanted = None if state is None else state.value
    with report_errors():
        page = connect(url).groups(job_id, state=wanted, cause=cause, search=search, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    table = Table("group", "epoch", "instance", "state", "members", "rewards", "outcome")
    for group in page["groups"]:
        members = [member for member in group["members"] if not member["late"]]
        rewards = " ".join(f"{member['reward']:g}" for member in members)
        numbers = (f"{len(members)}/{group['group_size']}", rewards)
        names = (str(group["group_index"]), str(group["epoch"]), group["instance_id"], group["state"])
        table.add_row(*names, *numbers, group["message"])
    print_page(table if page["groups"] else "no such group", page)
