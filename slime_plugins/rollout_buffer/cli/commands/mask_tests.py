"""``rollout-buffer mask-tests``: runs a user's tests of response masks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from slime_plugins.rollout_buffer.cli.common import console, report_errors


def mask_tests(
    file: Annotated[Path, typer.Argument(help="A Python file with test_… functions, async or plain.")],
    engine_url: Annotated[
        str | None,
        typer.Option(help="SGLang server to sample with. [default: a scripted engine that calls the calculator]"),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the engine's tokenizer. [default: that of the scripted engine]")
    ] = None,
) -> None:
    """Run a file with tests of response masks against this rollout server, its trainer, and an engine."""
    from slime_plugins.rollout_buffer.cli.mask_tests import run_mask_tests

    def print_result(message: str, passed: bool) -> None:
        console.print(message, style=None if passed else "red", highlight=False)

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with report_errors():
        failed = run_mask_tests(file, engine_url, tokenizer, print_result)
    if failed:
        raise typer.Exit(1)
