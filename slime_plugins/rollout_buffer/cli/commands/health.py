"""``rollout-buffer health`` asks a running server; ``rollout-buffer doctor`` examines this machine or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from slime_plugins.rollout_buffer.cli.commands.serve import set_android_settings
from slime_plugins.rollout_buffer.cli.common import (
    DEFAULT_URL,
    AndroidConfig,
    AndroidSetting,
    AsJson,
    ExitCode,
    Url,
    answer_in_json,
    connect,
    console,
    exit_after,
    print_json,
    report_errors,
)
from slime_plugins.rollout_buffer.errors import UnavailableError

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.cli.host_checks import Finding


def health(url: Url = DEFAULT_URL, as_json: AsJson = True) -> None:
    """Print the buffer's health as JSON. Exit code 0 also when `status` is `degraded`; 1 while no supervisor plays
    jobs; 3 when the buffer does not answer."""
    answer_in_json(as_json)
    with report_errors():
        try:
            print_json(connect(url).health())
        except UnavailableError as error:
            raise exit_after(error, ExitCode.NO) from error


def doctor(
    data_dir: Annotated[Path, typer.Option(help="Data directory of `serve`.")] = Path("rollout_buffer_data"),
    engine_url: Annotated[
        str | None, typer.Option(help="Inference engine that must answer. [default: not asked]")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the engine's model, to check whether the engine runs prompts exactly. [default: not asked]"
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster that this environment must be able to join, and whose nodes are examined for emulators. "
            "[default: not asked]"
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Check instead what a training of this kind lacks: math, android_world, android_world_history or "
            "android_world_opt, with the variables that its script reads.",
        ),
    ] = None,
    android_config: AndroidConfig = None,
    android: AndroidSetting = None,
    as_json: AsJson = False,
) -> None:
    """Check what this machine, or each node of a Ray cluster, lacks for the devices of the Android World settings.
    Exit code 1 when something is missing."""
    from slime_plugins.rollout_buffer.cli.doctor import Examination, check_launch, examine, verdict
    from slime_plugins.rollout_buffer.generator.android_world.config import load_settings

    if launch is not None:
        code, lines = check_launch(launch, quietly=as_json)
        if as_json:
            print_json({"launch": launch, "well": code == 0, "lines": lines})
        raise typer.Exit(code)
    with report_errors():
        set_android_settings(android_config, android)
        settings = load_settings({})
    examination = Examination(
        settings=settings, data_dir=data_dir, engine_url=engine_url, tokenizer_path=tokenizer, ray_address=ray_address
    )
    findings = examine(examination)
    conclusion = verdict(findings, settings.device)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"device": settings.device, "verdict": conclusion, "findings": rows})
    else:
        _print_findings(findings, settings.device)
        console.print(conclusion)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding], device: str) -> None:
    """Prints a table of the findings, then each remedy in a line of its own, so that a command in it can be pasted."""
    table = Table("what", "state", Column("found", overflow="fold"), title=f"device: {device}")
    for finding in findings:
        table.add_row(finding.name, finding.state.value, finding.detail)
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(f"{finding.name}: {finding.remedy}", soft_wrap=True, highlight=False)
