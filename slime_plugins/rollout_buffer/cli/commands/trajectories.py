"""``rollout-buffer trajectories`` and ``inspect``."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AsJson,
    Url,
    connect,
    console,
    errors,
    local_time,
    print_json,
    print_page,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.transcript_view import LONG_TEXT, message_lines
from slime_plugins.rollout_buffer.errors import RequestError
from slime_plugins.rollout_buffer.install_hints import install_extra
from slime_plugins.rollout_buffer.wire import IMAGE_URL_PREFIX

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.client import RolloutBufferClient

IMAGE_WIDTH = 32


def trajectories(
    job_id: Annotated[str | None, typer.Option(help="Only trajectories of this job.")] = None,
    instance_id: Annotated[str | None, typer.Option(help="Only trajectories of this instance.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only trajectories with this outcome, like `truncated`.")] = None,
    stop_reason: Annotated[str | None, typer.Option(help="Only trajectories that stopped for this reason.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only trajectories with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only trajectories with at most this reward.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of trajectories.")] = 20,
    cursor: Annotated[int | None, typer.Option(help="The cursor that the previous page printed.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Search trajectories, newest first."""
    with report_errors():
        page = connect(url).trajectories(
            job_id=job_id,
            instance_id=instance_id,
            outcome=outcome,
            stop_reason=stop_reason,
            min_reward=min_reward,
            max_reward=max_reward,
            limit=limit,
            cursor=cursor,
        )
    if as_json:
        print_json(page)
        return
    table = Table("uid", "instance", "job", "outcome", "stop reason", "reward", "group state", "written")
    for entry in page["trajectories"]:
        ended = (entry["outcome"], entry["stop_reason"], f"{entry['reward']:g}")
        group_state = "late" if entry["late"] else entry["group_state"] or ""
        names = (entry["uid"], entry["instance_id"], entry["job_id"])
        table.add_row(*names, *ended, group_state, local_time(entry["created_at"]))
    print_page(table if page["trajectories"] else "no such trajectory", page)


def inspect_trajectory(
    uid: Annotated[str, typer.Argument(help="The trajectory's uid, as `rollout-buffer trajectories` lists it.")],
    job_id: Annotated[str | None, typer.Option(help="Its job; needed only when several have that uid.")] = None,
    images: Annotated[
        bool, typer.Option(help="Draw screenshots: as pictures where the terminal can, else in half blocks.")
    ] = True,
    width: Annotated[int, typer.Option(min=8, max=200, help="Columns of a screenshot.")] = IMAGE_WIDTH,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: what the agent saw, thought and did, its reward and its timings."""
    with report_errors():
        client = connect(url)
        trajectory = client.trajectory(uid, job_id=job_id)
        if as_json:
            print_json(trajectory)
            return
        draw = _Screenshots(client, width if images and console.is_terminal else None)
        console.print(_summary(trajectory))
        for message in trajectory.get("messages") or []:
            for line in message_lines(message, draw, None if full else LONG_TEXT):
                console.print(line)
        console.print(_numbers(trajectory))


def _summary(trajectory: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    late = ", late" if trajectory["late"] else ""
    group = "{group_index} ({group_state}), slot {slot}, epoch {epoch}".format_map(trajectory)
    for name, value in (
        ("trajectory", f"{trajectory['uid']} of {trajectory['job_id']}"),
        ("instance", trajectory["instance_id"]),
        (
            "ended",
            f"{trajectory['outcome']}, {trajectory['stop_reason']}{late}, {local_time(trajectory['created_at'])}",
        ),
        ("reward", _reward(trajectory)),
        ("group", group if trajectory["group_index"] is not None else "none"),
    ):
        grid.add_row(Text(name, style="bold"), Text(str(value)))
    return grid


def _reward(trajectory: Mapping[str, Any]) -> str:
    raw = "" if trajectory["raw_reward"] is None else f" (raw {trajectory['raw_reward']:+.4f})"
    return f"{trajectory['reward']:+.4f}{raw}"


def _numbers(trajectory: Mapping[str, Any]) -> RenderableType:
    """Returns a grid with reward breakdown, timings and sampled tokens."""
    info = trajectory.get("extra_info") or {}
    grid = Table.grid(padding=(0, 2))
    grid.add_row("")
    for title, values in (("reward breakdown", info.get("reward_breakdown")), ("timings", trajectory.get("timings_s"))):
        if values:
            unit = " s" if title == "timings" else ""
            named = values.items() if isinstance(values, Mapping) else [("", values)]
            summary = "  ".join(f"{name} {_number(value)}{unit}".lstrip() for name, value in named)
            grid.add_row(Text(title, style="bold"), Text(summary))
    generations: Sequence[Mapping[str, Any]] = trajectory.get("generations") or []
    if generations:
        sampled = sum(len(generation["output_ids"]) for generation in generations)
        versions = {str(version) for each in generations if (version := each.get("weight_version")) is not None}
        in_order = ", ".join(sorted(versions, key=lambda version: (len(version), version))) or "unknown"
        summary = f"{len(generations)} generations, {sampled} sampled tokens, weight version {in_order}"
        grid.add_row(Text("engine", style="bold"), Text(summary))
    for name in ("engine_s", "environment_s"):
        seconds = [(each[name], turn) for turn, each in enumerate(generations, start=1) if each.get(name) is not None]
        if seconds:
            longest, turn = max(seconds)
            mean = sum(duration for duration, _ in seconds) / len(seconds)
            summary = f"{mean:.3g} s a turn, longest {longest:.3g} s in turn {turn}"
            grid.add_row(Text(name.removesuffix("_s") + " time", style="bold"), Text(summary))
    return grid


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Screenshots:
    """Draws screenshots in the terminal, or prints their names."""

    def __init__(self, client: RolloutBufferClient, width: int | None) -> None:
        """``width`` in columns; None names every screenshot and draws none."""
        self._client = client
        self._width = width

    def __call__(self, url: str) -> RenderableType:
        """Returns what to print for one image."""
        if not url.startswith(IMAGE_URL_PREFIX):
            return Text(f"[image {url[:80]}]", style="dim")
        sha256 = url.removeprefix(IMAGE_URL_PREFIX)
        if self._width is None or self._image_class is None:
            return Text(f"[screenshot {sha256}]", style="dim")
        try:
            content = self._client.get_image(sha256)
        except RequestError as error:
            return Text(f"[screenshot {sha256}: {error.message}]", style="red")
        drawn: RenderableType = self._image_class(io.BytesIO(content), width=self._width, height="auto")
        return drawn

    @cached_property
    def _image_class(self) -> Any:
        """The class that draws an image with the best method of this terminal: sixel, kitty, or half blocks.

        None if the extra is not installed; an error message is then printed.
        """
        # The library queries the terminal. Without an answer it logs a traceback and uses half blocks.
        logging.getLogger("textual_image").setLevel(logging.CRITICAL)
        try:
            from textual_image.renderable import Image
        except ImportError:
            errors.print(f"drawing screenshots needs the extra 'terminal': {install_extra('terminal')}", soft_wrap=True)
            return None
        return Image
