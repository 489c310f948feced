"""The command line: one app, whose larger commands have files of their own. Exit codes: see ``cli/common.py``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slime_plugins.rollout_buffer.cli import (
    commands_eval,
    commands_export,
    commands_inspect,
    commands_of_packages,
    commands_prune,
    commands_rescore,
    commands_serve,
    commands_skip_list,
    commands_start,
)
from slime_plugins.rollout_buffer.cli.commands_serve import set_android_settings
from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    EXIT_CODES,
    AndroidConfig,
    AndroidSetting,
    AsJson,
    CommandLine,
    ExitCode,
    JobId,
    Url,
    answer_in_json,
    connect,
    console,
    ended,
    errors,
    local_time,
    print_json,
    print_page,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.status_table import job_table
from slime_plugins.rollout_buffer.errors import ConfigError, UnavailableError
from slime_plugins.rollout_buffer.types import GroupState

app = typer.Typer(
    name="rollout-buffer",
    cls=CommandLine,
    help="A durable rollout buffer for training agents with slime.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        try:
            typer.echo(f"rollout-buffer {importlib.metadata.version('slime-rollout-buffer')}")
        except importlib.metadata.PackageNotFoundError as error:
            typer.echo("rollout-buffer, from files that were not installed: their version is what their checkout says")
            raise typer.Exit from error
        raise typer.Exit


@app.callback()
def _before_any_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None: ...


commands_serve.register(app)


def main() -> None:
    """Runs the command line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called: what is said then goes nowhere
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
    try:
        app()
    except OSError as error:
        errors.print(f"rollout-buffer: the output cannot be written: {error.strerror or error}", style="red")
        os._exit(ExitCode.NO.value)  # leaving in order would try to write the rest, and say so at length


@app.command()
def jobs(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the jobs, newest first."""
    with report_errors():
        found = connect(url).jobs()
    if as_json:
        print_json({"jobs": found})
        return
    states = [state.value for state in GroupState]
    table = Table("job", "task type", "state", "groups", *states, "cause", box=None)
    for job in found:
        groups = job["groups"]
        total = sum(groups.values())
        numbers = [str(groups[state]) for state in states]
        table.add_row(job["job_id"], job["task_type"], job["state"], str(total), *numbers, job["cause"])
    console.print(table if found else "no jobs yet")


@app.command()
def status(
    job_id: Annotated[
        str | None, typer.Argument(help="One job; all open ones and the last that ended when left out.")
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it until Ctrl-C; with --json one line a second.")
    ] = False,
) -> None:
    """Show how far jobs are, every slot in exactly one state, and why nothing moves."""
    client = connect(url)

    def read() -> list[dict[str, Any]]:
        shown = [client.job(job_id)] if job_id is not None else _open_and_last(client.jobs())
        return [{**job, "now": client.explanation(job["job_id"])} for job in shown]

    with report_errors():
        if as_json:
            _print_json(read, watch=watch)
        elif watch:
            _watch(read)
        else:
            console.print(job_table(read()))


def _open_and_last(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of jobs, newest first: the open ones, and the one that ended last, for how it ended."""
    is_open = [job["state"] in ("running", "paused") for job in jobs]
    ended = [job for job, still in zip(jobs, is_open, strict=True) if not still]
    return [job for job, still in zip(jobs, is_open, strict=True) if still] + ended[:1]


def _print_json(read: Callable[[], list[dict[str, Any]]], *, watch: bool) -> None:
    """Prints it once, or again every second as one line each."""
    while watch:
        typer.echo(orjson.dumps({"jobs": read()}))
        time.sleep(1.0)
    print_json({"jobs": read()})


def _watch(read: Callable[[], list[dict[str, Any]]]) -> None:
    """Shows it again every second; a buffer that goes away is waited for, once it has answered."""
    from requests import RequestException

    with Live(job_table(read()), console=console, refresh_per_second=4) as live, suppress(KeyboardInterrupt):
        while True:
            time.sleep(1.0)
            try:
                live.update(job_table(read()))
            except (RequestException, UnavailableError):
                live.update(Text(f"no answer from the buffer since {local_time(time.time())}; asking again"))
                time.sleep(4.0)


def _change(verb: str) -> Callable[[str, str, bool], None]:
    def command(job_id: JobId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
        with report_errors():
            job = getattr(connect(url), verb)(job_id)
        if as_json:
            print_json(job)
        else:
            console.print(f"{job['job_id']} is {job['state']}")

    return command


app.command("cancel", help="End a job; what is finished stays and can still be fetched.")(_change("cancel"))
app.command("pause", help="Let running episodes end and start no new ones.")(_change("pause"))
app.command("resume", help="Go on after pause or drain.")(_change("resume"))


@app.command()
def drain(
    job_id: JobId,
    stop: Annotated[bool, typer.Option("--stop", help="End what runs; it is played again after resume.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Pause a job and wait until nothing of it runs."""
    with report_errors():
        while (job := connect(url).drain(job_id, stop=stop))["attempts"].get("running"):
            time.sleep(0.5)
    if as_json:
        print_json(job)
    else:
        console.print(f"{job['job_id']} is {job['state']}, and nothing of it runs")


@app.command()
def deliveries(
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    cursor: Annotated[int | None, typer.Option(help="Where the page before ended.")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List what was handed out of a job, newest first."""
    with report_errors():
        page = connect(url).deliveries(job_id, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    table = Table("delivery", "state", "groups", "samples", "handed out", "consumer")
    for entry in page["deliveries"]:
        numbers = (str(entry["groups"]), str(entry["samples"]), local_time(entry["created_at"]))
        table.add_row(entry["delivery_id"], entry["state"], *numbers, entry["consumer_id"] or "")
    print_page(table if page["deliveries"] else "nothing was handed out yet", page)


@app.command()
def replay(
    delivery_id: Annotated[str, typer.Argument(help="A delivery's id, as `rollout-buffer deliveries` lists it.")],
    output: Annotated[Path, typer.Option(help="File that gets the reply, byte for byte as its poll got it.")],
    images: Annotated[str, typer.Option(help="Screenshots `inline` as data URIs, or by `hash`.")] = "inline",
    reward_version: Annotated[
        int | None, typer.Option(min=0, help="Rewards that `rescore` gave, by the number of their version.")
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
        console.print(f"{samples} samples, {len(body)} bytes, in {output}")


@app.command()
def trajectories(
    job_id: Annotated[str | None, typer.Option(help="Only those of this job.")] = None,
    instance_id: Annotated[str | None, typer.Option(help="Only those of this instance.")] = None,
    outcome: Annotated[str | None, typer.Option(help="Only those that ended so, like `truncated`.")] = None,
    stop_reason: Annotated[str | None, typer.Option(help="Only those that stopped for this reason.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only those with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only those with at most this reward.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at most.")] = 20,
    cursor: Annotated[int | None, typer.Option(help="Where the page before ended.")] = None,
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
    table = Table("uid", "instance", "job", "outcome", "stop reason", "reward", "group", "written")
    for entry in page["trajectories"]:
        ended = (entry["outcome"], entry["stop_reason"], f"{entry['reward']:g}")
        group = "late" if entry["late"] else entry["group_state"] or ""
        names = (entry["uid"], entry["instance_id"], entry["job_id"])
        table.add_row(*names, *ended, group, local_time(entry["created_at"]))
    print_page(table if page["trajectories"] else "no such trajectory", page)


@app.command()
def health(url: Url = DEFAULT_URL, as_json: AsJson = True) -> None:
    """Ask the buffer how it is; the answer is JSON in any case. Exit code 1 when it is not well."""
    answer_in_json(as_json)
    with report_errors():
        try:
            print_json(connect(url).health())
        except UnavailableError as error:
            raise ended(error, ExitCode.NO) from error


@app.command()
def doctor(
    data_dir: Annotated[Path, typer.Option(help="Folder that `serve` is to keep its data in.")] = Path(
        "rollout_buffer_data"
    ),
    engine_url: Annotated[
        str | None, typer.Option(help="Inference engine that must answer. [default: not asked]")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of the engine's model: says what the engine does to prompts. [default: not asked]"),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster that this environment must be able to join. [default: not asked]")
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Say instead what a training of this kind lacks: math, android_world, android_world_history or "
            "android_world_opt, with the variables that its script reads.",
        ),
    ] = None,
    android_config: AndroidConfig = None,
    android: AndroidSetting = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine lacks for the devices that the Android World settings ask for. Exit code 1 when it does."""
    from slime_plugins.rollout_buffer.cli.doctor import Examination, State, check_launch, examine, verdict
    from slime_plugins.rollout_buffer.generator.android_world.config import load_settings

    if launch is not None:
        code, lines = check_launch(launch, quietly=as_json)
        if as_json:
            print_json({"launch": launch, "well": code == 0, "lines": lines})
        raise typer.Exit(code)
    with report_errors():
        set_android_settings(android_config, android)
        settings = load_settings({})
    findings = examine(
        Examination(
            settings=settings,
            data_dir=data_dir,
            engine_url=engine_url,
            tokenizer_path=tokenizer,
            ray_address=ray_address,
        )
    )
    if as_json:
        print_json(
            {
                "device": settings.device,
                "verdict": verdict(findings, settings.device),
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        table = Table("what", "state", "found", "remedy", title=f"device: {settings.device}")
        for finding in findings:
            table.add_row(*map(escape, (finding.name, finding.state.value, finding.detail, finding.remedy)))
        console.print(table)
        console.print(verdict(findings, settings.device))
    if any(finding.state is State.MISSING for finding in findings):
        raise typer.Exit(1)


for commands in (
    commands_start,
    commands_inspect,
    commands_export,
    commands_skip_list,
    commands_prune,
    commands_rescore,
    commands_eval,
):
    commands.register(app)
commands_of_packages.register(app)
