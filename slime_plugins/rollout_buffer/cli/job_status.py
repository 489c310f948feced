"""Renders the status of jobs as tables and bars for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slime_plugins.rollout_buffer.rules.job_states import OPEN_STATES
from slime_plugins.rollout_buffer.types import GroupState

_COLORS = {
    GroupState.OPEN: "dim",
    GroupState.READY: "cyan",
    GroupState.LEASED: "yellow",
    GroupState.DELIVERED: "green",
    GroupState.FILTERED: "magenta",
    GroupState.FAILED: "red",
    GroupState.SKIPPED: "dim",
}
_UNUSABLE_STATES = ("quarantined", "booting")
"""States of devices that are shown one by one, with their last error."""


def draw_job_status(jobs: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Renders each job: a bar, its slots by state, and the causes of filtered and failed groups.

    A job is a reply of ``GET /jobs/<id>``; its ``now``, if present, is the reply of ``GET /jobs/<id>/explanation``.
    """
    if not jobs:
        return Text("no open job")
    return Group(*(_job(job) for job in jobs))


def _job(job: Mapping[str, Any]) -> RenderableType:
    slots = job["slots"]
    closed = slots["submitted"] - slots["open"]
    now = job.get("now") or {}
    style = _bar_style(job["state"], now)
    bar = ProgressBar(total=slots["submitted"], completed=closed, width=40, complete_style=style, finished_style=style)
    grid = Table.grid(padding=(0, 1))
    progress = Text(f"{closed}/{slots['submitted']} slots closed")
    grid.add_row(Text(job["job_id"], style="bold"), Text(job["state"]), bar, progress)
    lines: list[RenderableType] = [grid, _accounting(slots), *_now(now)]
    explained = "".join(entry["message"] for entry in now.get("explanation", ()))
    cause, _, traceback = job["cause"].partition("\n")
    if cause and cause not in explained:
        lines.append(Text(f"  cause: {cause}", style="red"))
    if traceback:
        lines.append(Text(traceback, style="red"))
    for state, causes in job["causes"].items():
        lines.extend(Text(f"  {state}: {count} × {why}", style="dim") for why, count in causes.items())
    lines.extend(_bias(job.get("bias") or ()))
    report = job.get("devices")
    if report and report["devices"] and job["state"] in OPEN_STATES:  # a job that has ended has returned its devices
        lines.extend(_devices(report))
    return Group(*lines)


def _bar_style(state: str, now: Mapping[str, Any]) -> str:
    """Returns red for a job that failed, or that delivers nothing until an operator acts."""
    stopped = any(entry["severity"] == "stopped" for entry in now.get("explanation", ()))
    return "red" if stopped or state == "failed" else "green"


def _bias(rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Returns a line with the share of members that were trained, by quarter of duration; none for a single quarter."""
    shares = [f"{row['name']} {row['trained'] / row['submitted']:.0%}" for row in rows if row["by"] == "duration"]
    return [Text(f"  trained, by duration: {', '.join(shares)}", style="dim")] if len(shares) > 1 else []


_SEVERITY_STYLES = {"ok": "green", "wait": "yellow", "attention": "yellow", "stopped": "bold red"}


def _now(now: Mapping[str, Any]) -> list[Text]:
    """Returns the explanations of the job, its concurrency, and the results of its latest episodes."""
    lines = []
    for entry in now.get("explanation", ()):
        lines.append(Text(f"  {entry['message']}", style=_SEVERITY_STYLES.get(entry["severity"], "")))
        if entry["advice"]:
            lines.append(Text(f"    {entry['advice']}"))
    if concurrency := now.get("concurrency"):
        reason = f" (auto: {concurrency['reason']})" if concurrency.get("auto") else ""
        lines.append(Text(f"  episodes at once: {concurrency['limit']}{reason}", style="dim"))
    newest = now.get("newest") or {}
    if newest.get("episodes"):
        success = "" if newest["success"] is None else f", success {newest['success']:.0%}"
        rewards = f"reward {newest['reward_mean']:+.3f} ({newest['reward_min']:+.3f} to {newest['reward_max']:+.3f})"
        lines.append(Text(f"  newest {newest['episodes']} episodes: {rewards}{success}", style="dim"))
    return lines


def _devices(report: Mapping[str, Any]) -> list[Text]:
    """Returns a line for the pool, and one for each quarantined or booting device with the reason."""
    states = Counter(device["state"] for device in report["devices"])
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    unusable = [device for device in report["devices"] if device["state"] in _UNUSABLE_STATES and device["last_error"]]
    return [
        Text(f"  devices of {report['pool']}, {report['age_s']:.0f} s ago: {counted}", style="dim"),
        *(Text(f"  {each['device_id']} is {each['state']}: {each['last_error']}", style="yellow") for each in unusable),
    ]


def _accounting(slots: Mapping[str, int]) -> Text:
    text = Text(f"  submitted {slots['submitted']} = ")
    for position, state in enumerate(GroupState):
        text.append(" + " if position else "")
        text.append(f"{slots[state.value]} {state.value}", style=_COLORS[state])
    return text
