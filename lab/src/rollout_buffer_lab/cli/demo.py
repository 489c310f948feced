"""The command ``demo``."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slime_plugins.rollout_buffer.cli.common import console, report_errors


class DemoTask(StrEnum):
    """What the demo plays."""

    ANDROID_WORLD = "android_world"
    STATELM = "statelm"
    MINIWOB = "miniwob"


class RolloutModeName(StrEnum):
    """How an episode on a phone or a web page becomes prompts."""

    INCREMENTAL = "incremental"
    HISTORY = "history"


def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo keeps its data, logs and results.")] = Path(".demo"),
    task: Annotated[
        DemoTask, typer.Option(help="Simulated phones, questions over long documents, or web pages in a Chromium.")
    ] = DemoTask.ANDROID_WORLD,
    rollouts: Annotated[int, typer.Option(min=1, max=20, help="How many rollouts the trainer asks for.")] = 3,
    skill: Annotated[float, typer.Option(min=0.0, max=1.0, help="Skill of the scripted engine's policy.")] = 0.7,
    phones: Annotated[int, typer.Option(min=1, max=64, help="Simulated phones, or web pages.")] = 4,
    rollout_mode: Annotated[
        RolloutModeName, typer.Option(help="One growing sequence per episode, or a prompt and a row for every turn.")
    ] = RolloutModeName.INCREMENTAL,
) -> None:
    """Run server, scripted engine, simulated phones or web pages, and a trainer that polls, all on this machine."""
    from rollout_buffer_lab.cli.demo_run import DemoSettings, run_demo

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # without torch, which is not needed, it would warn
    with report_errors():
        settings = DemoSettings(
            folder=folder,
            task=task.value,
            rollouts=rollouts,
            skill=skill,
            phones=phones,
            rollout_mode=rollout_mode.value,
        )
        run_demo(settings, console)
