"""Commands that look closely: the groups of a job with what became of them, and one trajectory, turn by turn."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from slime.utils.mask_template import with_reasoning_content
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
from slime_plugins.rollout_buffer.errors import ConfigError, RequestError
from slime_plugins.rollout_buffer.install_hints import install_extra
from slime_plugins.rollout_buffer.types import GroupState
from slime_plugins.rollout_buffer.wire import IMAGE_URL_PREFIX

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.client import RolloutBufferClient

LONG_TEXT = 4000
IMAGE_WIDTH = 32
_OPENING = re.compile(r"<(thinking|think|tool_call|conclusion)>")
_STYLES = {"thinking": "italic dim", "think": "italic dim", "conclusion": "cyan"}
_ROLES = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    app.command()(groups)
    app.command("inspect")(inspect_trajectory)
    app.command()(mismatch)
    app.command()(attempts)


def attempts(
    job_id: JobId,
    error_code: Annotated[str | None, typer.Option(help="Only those with this error code, like `engine`.")] = None,
    search: Annotated[str | None, typer.Option(help="Only those with this text in their instance id or error.")] = None,
    transcripts: Annotated[
        bool, typer.Option("--transcripts/--no-transcripts", help="What was said in each, where it was kept.")
    ] = True,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many at most.")] = 10,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Read this data directory of `serve`, on this host, instead of asking --url.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the attempts of a job that failed, the last first: their errors, tracebacks, and what was said before."""
    with report_errors():
        filters: dict[str, Any] = {"error_code": error_code, "search": search, "limit": limit, "cursor": cursor}
        if data_dir is None:
            page = connect(url).attempts(job_id, transcripts=transcripts, **filters)
        else:
            page = _attempts_in(data_dir, job_id, {**filters, "transcripts": transcripts})
    if as_json:
        print_json(page)
        return
    shown: set[str] = set()
    for failed in page["attempts"]:
        console.print(_failed_head(failed))
        if traceback := failed["traceback"]:
            again = "(the same traceback as above)"
            console.print(Padding(Text(again if traceback in shown else traceback, style="red"), (1, 0, 0, 2)))
            shown.add(traceback)
        for message in failed["messages"] or ():
            for line in _message(message, _named_only, LONG_TEXT):
                console.print(line)
        console.print()
    none = "no such attempt failed" if error_code or search else f"no attempt of {job_id} failed"
    print_page("" if page["attempts"] else none, page)
    if page["attempts"] and page["log"]:
        console.print(f"The runner's log: {page['log']}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _attempts_in(data_dir: Path, job_id: str, query: Mapping[str, Any]) -> dict[str, Any]:
    """As the route, from a data directory that need not be served."""
    from slime_plugins.rollout_buffer.protocol import request_models
    from slime_plugins.rollout_buffer.protocol.query_params import AttemptPageQuery
    from slime_plugins.rollout_buffer.reporting.failed_attempts import failed_attempts
    from slime_plugins.rollout_buffer.storage.store import Store

    if not (data_dir / "buffer.sqlite3").is_file():
        raise ConfigError(f"--data-dir {data_dir} holds no buffer: give the folder that `serve` was given")
    store = Store(data_dir)
    try:
        given = {key: value for key, value in query.items() if value is not None}
        return failed_attempts(store, job_id, request_models.parse(AttemptPageQuery, given))
    finally:
        store.close()


def _failed_head(failed: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    place = (
        f"slot {failed['slot']}, attempt {failed['attempt']}, group {failed['group_index']}, epoch {failed['epoch']}"
    )
    seconds = failed["ended_at"] - failed["started_at"]
    for name, value, style in (
        ("attempt", failed["uid"], ""),
        ("instance", f"{failed['instance_id']} ({place})", ""),
        ("failed", f"{local_time(failed['ended_at'])}, after {seconds:.1f} s", ""),
        ("error", f"{failed['error_code']}: {failed['error_message']}", "red"),
        ("said", "" if failed["has_transcript"] else "nothing that was kept", "dim"),
    ):
        grid.add_row(Text(name, style="bold"), Text(value, style=style))
    return grid


def _named_only(url: str) -> RenderableType:
    """A picture of an attempt that failed: it was seen, and not kept."""
    return Text(f"[screenshot {url.removeprefix(IMAGE_URL_PREFIX)[:80]}]", style="dim")


def mismatch(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many of the worst turns.")] = 20,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show how far the log-probs of a job's trainer and engine are apart: by turn, by weight lag, the worst turns."""
    with report_errors():
        found = connect(url).mismatch(job_id, limit=limit)
    if as_json:
        print_json(found)
        return
    if found["mean"] is None:
        console.print("no trainer reported log-probs of this job: docs/trainer.md says how one does")
        return
    console.print(
        f"|train - rollout log-prob| over {found['tokens']} tokens of {found['rows']} rows: mean {found['mean']:.2g}, "
        f"max {found['max']:.2g}"
    )
    for name in ("turn", "weight_lag"):
        table = Table(name.replace("_", " "), "tokens", "mean", "max", box=None)
        for entry in found[f"by_{name}"]:
            key = "unknown" if entry[name] is None else str(entry[name])
            table.add_row(key, str(entry["tokens"]), f"{entry['mean']:.2g}", f"{entry['max']:.2g}")
        console.print(table)
    table = Table("trajectory", "row", "turn", "token", "gap", "lag", "advantage", box=None)
    for entry in found["worst"]:
        lag, advantage = ("–" if entry[key] is None else f"{entry[key]:.3g}" for key in ("weight_lag", "advantage"))
        place = (str(entry["row"]), str(entry["turn"]), str(entry["at"]))
        table.add_row(escape(entry["uid"]), *place, f"{entry['gap']:.2g}", lag, advantage)
    console.print(table)


def groups(
    job_id: JobId,
    state: Annotated[GroupState | None, typer.Option(help="Only those in this state.")] = None,
    cause: Annotated[str | None, typer.Option(help="Only those with this text in their cause.")] = None,
    search: Annotated[str | None, typer.Option(help="Only those with this text in their instance id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many at most.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List a job's groups, the last touched first, and say what became of each."""
    wanted = None if state is None else state.value
    with report_errors():
        page = connect(url).groups(job_id, state=wanted, cause=cause, search=search, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    table = Table("group", "epoch", "instance", "state", "members", "rewards", "what became of it")
    for group in page["groups"]:
        members = [member for member in group["members"] if not member["late"]]
        rewards = " ".join(f"{member['reward']:g}" for member in members)
        numbers = (f"{len(members)}/{group['group_size']}", rewards)
        names = (str(group["group_index"]), str(group["epoch"]), escape(group["instance_id"]), group["state"])
        table.add_row(*names, *numbers, escape(group["message"]))
    print_page(table if page["groups"] else "no such group", page)


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
        found = client.trajectory(uid, job_id=job_id)
        if as_json:
            print_json(found)
            return
        draw = _Screenshots(client, width if images and console.is_terminal else None)
        console.print(_head(found))
        for message in found.get("messages") or []:
            for line in _message(message, draw, None if full else LONG_TEXT):
                console.print(line)
        console.print(_numbers(found))


def _head(found: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    late = ", late" if found["late"] else ""
    group = f"group {found['group_index']} ({found['group_state']}), slot {found['slot']}, epoch {found['epoch']}"
    for name, value in (
        ("trajectory", f"{found['uid']} of {found['job_id']}"),
        ("instance", found["instance_id"]),
        ("ended", f"{found['outcome']}, {found['stop_reason']}{late}, {local_time(found['created_at'])}"),
        ("reward", _reward(found)),
        ("place", group if found["group_index"] is not None else "in no group"),
    ):
        grid.add_row(Text(name, style="bold"), Text(str(value)))
    return grid


def _reward(found: Mapping[str, Any]) -> str:
    raw = "" if found["raw_reward"] is None else f" (raw {found['raw_reward']:+.4f})"
    return f"{found['reward']:+.4f}{raw}"


def _message(
    message: Mapping[str, Any], draw: Callable[[str], RenderableType], most: int | None
) -> Iterator[RenderableType]:
    role = str(message.get("role", "?"))
    yield Text(f"\n{role}", style=f"bold {_ROLES.get(role, '')}")
    content = message.get("content")
    parts: list[dict[str, Any]] = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    thought = with_reasoning_content(message).get("reasoning_content")
    if thought:
        yield _indented(_shortened(Text(str(thought), style=_STYLES["thinking"]), most))
    for part in parts:
        if part.get("type") == "image_url":
            yield _indented(draw(str(part["image_url"]["url"])))
        else:
            yield from _text(str(part.get("text", "")), role, most)
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        yield _indented(Text(f"→ {function.get('name')} {function.get('arguments')}", style="bold yellow"))


def _text(text: str, role: str, most: int | None) -> Iterator[RenderableType]:
    """The parts of an answer each in its own style; what others wrote as it is."""
    at = 0
    for name, start, end in tagged_parts(text) if role == "assistant" else ():
        if before := text[at:start].strip():
            yield _indented(_shortened(Text(before), most))
        inside = text[start + len(f"<{name}>") : end - len(f"</{name}>")].removeprefix("\n").removesuffix("\n")
        if name == "tool_call":
            yield _indented(Syntax(inside, "json", word_wrap=True, background_color="default"))
        else:
            yield _indented(_shortened(Text(inside, style=_STYLES[name]), most))
        at = end
    if rest := text[at:].strip():
        yield _indented(_shortened(Text(rest), most))


def tagged_parts(text: str) -> Iterator[tuple[str, int, int]]:
    """Yields name, start and end of what is tagged; a tag that nothing closes is looked for once."""
    at, unclosed = 0, set[str]()
    for opening in _OPENING.finditer(text):
        name = opening[1]
        if opening.start() < at or name in unclosed:
            continue
        closing = text.find(f"</{name}>", opening.end())
        if closing < 0:
            unclosed.add(name)
        else:
            at = closing + len(f"</{name}>")
            yield name, opening.start(), at


def _shortened(text: Text, most: int | None) -> Text:
    if most is None or len(text) <= most:
        return text
    return Text.assemble(text[:most], (f"… {len(text) - most} more characters (--full shows them)", "dim"))


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _numbers(found: Mapping[str, Any]) -> RenderableType:
    """Reward breakdown, timings and sampled tokens, side by side with their names."""
    info = found.get("extra_info") or {}
    grid = Table.grid(padding=(0, 2))
    grid.add_row("")
    for title, values in (("reward breakdown", info.get("reward_breakdown")), ("timings", found.get("timings_s"))):
        if values:
            unit = " s" if title == "timings" else ""
            summary = "  ".join(f"{name} {_number(value)}{unit}" for name, value in values.items())
            grid.add_row(Text(title, style="bold"), Text(summary))
    generations: Sequence[Mapping[str, Any]] = found.get("generations") or []
    if generations:
        sampled = sum(len(one["output_ids"]) for one in generations)
        versions = ", ".join(sorted({str(one.get("weight_version")) for one in generations}))
        summary = f"{len(generations)} generations, {sampled} sampled tokens, weight version {versions}"
        grid.add_row(Text("engine", style="bold"), Text(summary))
    return grid


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _Screenshots:
    """Draws screenshots in the terminal, or names them where it cannot."""

    def __init__(self, client: RolloutBufferClient, width: int | None) -> None:
        """``width`` in columns; None names every screenshot and draws none."""
        self._client = client
        self._width = width
        self._kind = None if width is None else _renderable()

    def __call__(self, url: str) -> RenderableType:
        """Returns what to print for one image."""
        if not url.startswith(IMAGE_URL_PREFIX):
            return Text(f"[image {url[:80]}]", style="dim")
        sha256 = url.removeprefix(IMAGE_URL_PREFIX)
        if self._kind is None:
            return Text(f"[screenshot {sha256}]", style="dim")
        try:
            content = self._client.get_image(sha256)
        except RequestError as error:
            return Text(f"[screenshot {sha256}: {error.message}]", style="red")
        drawn: RenderableType = self._kind(io.BytesIO(content), width=self._width, height="auto")
        return drawn


def _renderable() -> Any:
    """The best way this terminal can show a picture: sixel, kitty's protocol, or half blocks."""
    # It asks the terminal what it can, and logs a traceback when there is no answer: half blocks it is, then.
    logging.getLogger("textual_image").setLevel(logging.CRITICAL)
    try:
        from textual_image.renderable import Image
    except ImportError as error:
        raise ConfigError(
            f"drawing screenshots needs the extra 'terminal': {install_extra('terminal')}, or give --no-images"
        ) from error
    return Image
