"""The command line: the app and the commands of its files. Exit codes: see ``cli/common.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from slime_plugins.rollout_buffer.cli.commands import (
    attempts,
    deliveries,
    eval,
    export,
    extensions,
    groups,
    health,
    jobs,
    mask_tests,
    mismatch,
    prune,
    rescore,
    serve,
    skip_list,
    start,
    trajectories,
)
from slime_plugins.rollout_buffer.cli.common import EXIT_CODES, CommandLine, ExitCode, errors
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.install_hints import OUR_DISTRIBUTION

COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve.serve,
    "gateway": serve.gateway,
    "remote-rollout": serve.remote_rollout,
    "mask-tests": mask_tests.mask_tests,
    "start": start.start,
    "jobs": jobs.jobs,
    "status": jobs.status,
    "cancel": jobs.cancel,
    "pause": jobs.pause,
    "resume": jobs.resume,
    "drain": jobs.drain,
    "groups": groups.groups,
    "attempts": attempts.attempts,
    "deliveries": deliveries.deliveries,
    "replay": deliveries.replay,
    "trajectories": trajectories.trajectories,
    "inspect": trajectories.inspect_trajectory,
    "export": export.export,
    "prune": prune.prune,
    "rescore": rescore.rescore,
    "eval": eval.evaluate_policy,
    "mismatch": mismatch.mismatch,
    "health": health.health,
    "doctor": health.doctor,
}

app = typer.Typer(
    name="rollout-buffer",
    cls=CommandLine,
    help="A durable rollout buffer for training agents with slime.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _print_demo_tokenizer(wanted: bool) -> None:
    if wanted:
        typer.echo(DEMO_TOKENIZER_PATH)
        raise typer.Exit


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        try:
            version = f" {importlib.metadata.version(OUR_DISTRIBUTION)}"
        except importlib.metadata.PackageNotFoundError:
            version = ", not installed: see the version of its checkout"
        typer.echo(f"rollout-buffer{version}")
        raise typer.Exit


@app.callback()
def _before_any_command(
    _demo_tokenizer: Annotated[
        bool,
        typer.Option(
            "--demo-tokenizer",
            callback=_print_demo_tokenizer,
            is_eager=True,
            help="Print the folder of the included tokenizer, which the scripted engine uses.",
        ),
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(skip_list.skip_list, name="skip-list")
extensions.register(app)  # last: an extension replaces no command of this project


def main() -> None:
    """Runs the command of ``sys.argv``, and exits with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it: what is printed there is dropped
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
    try:
        app()
    except OSError as error:
        errors.print(f"rollout-buffer: the output cannot be written: {error.strerror or error}", style="red")
        os._exit(ExitCode.NO.value)  # a normal exit would flush the output again, and print a traceback
