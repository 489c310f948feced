"""``rollout-buffer mismatch`` compares the log-probs of trainer and engine."""

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
    console,
    print_json,
    report_errors,
)


def mismatch(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many of the worst turns.")] = 20,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the mismatch of log-probs between a job's trainer and engine: by turn, by weight lag, the worst turns."""
    with report_errors():
        report = connect(url).mismatch(job_id, limit=limit)
    if as_json:
        print_json(report)
        return
    if report["mean"] is None:
        console.print("no trainer reported log-probs of this job: see docs/trainer.md")
        return
    console.print(
        f"|train - rollout log-prob| over {report['tokens']} tokens of {report['rows']} rows: "
        f"mean {report['mean']:.2g}, max {report['max']:.2g}"
    )
    for name in ("turn", "weight_lag"):
        table = Table(name.replace("_", " "), "tokens", "mean", "max", box=None)
        for entry in report[f"by_{name}"]:
            key = "unknown" if entry[name] is None else str(entry[name])
            table.add_row(key, str(entry["tokens"]), f"{entry['mean']:.2g}", f"{entry['max']:.2g}")
        console.print(table)
    table = Table("trajectory", "row", "turn", "token", "gap", "lag", "advantage", box=None)
    for entry in report["worst"]:
        lag, advantage = ("–" if entry[key] is None else f"{entry[key]:.3g}" for key in ("weight_lag", "advantage"))
        position = (str(entry["row"]), str(entry["turn"]), str(entry["at"]))
        table.add_row(entry["uid"], *position, f"{entry['gap']:.2g}", lag, advantage)
    console.print(table)
