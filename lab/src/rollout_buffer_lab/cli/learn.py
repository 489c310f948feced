"""``rollout-buffer learn``: a small policy that learns through the service, on one machine."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Table

from slime_plugins.rollout_buffer.cli.common import ExitCode, console, errors, report_errors
from slime_plugins.rollout_buffer.cli.settings_options import with_options
from slime_plugins.rollout_buffer.install_hints import install_lab

if TYPE_CHECKING:
    from rollout_buffer_lab.learning.arms import Arm
    from rollout_buffer_lab.learning.run import LearnSettings, Outcome, Step

COLUMN_KEY = (
    "reward: mean of all groups played, by turn where a turn earns one; groups: trained / played; clipped: share of "
    "tokens clipped by PPO; gap: largest mean difference between the engine's log-probs and the trainer's; lag: weight "
    "versions that tokens are behind; weight, cut: mean importance weight, share of weights cut; waited: for groups"
)


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """Options of the command."""

    task: Annotated[str, typer.Option(help="TASK_TYPE of what is learned.")] = "next_digit"
    generator_dir: Annotated[
        Path | None,
        typer.Option(
            "--generator-dir",
            help="Folder with the task's file (docs/learning.md).",
            show_default="the tasks of the package",
        ),
    ] = None
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help="Input lines, JSONL.", show_default="those that the task's file makes"),
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(help="How episodes become prompts, where the task has modes.", show_default="the task's first"),
    ] = None
    arm: Annotated[
        str,
        typer.Option(
            "--arm",
            help="What is corrupted: true (nothing), late-mask, environment, shuffled-rewards, other-version, frozen, "
            "old-denominators, swapped-siblings or repeated.",
        ),
    ] = "true"
    seed: Annotated[int, typer.Option(help="Seed of policy, input and sampling.")] = 0
    steps: Annotated[int, typer.Option(min=2, help="How many steps are trained.")] = 20
    groups: Annotated[int, typer.Option(min=1, help="Groups of each step.")] = 12
    samples: Annotated[int, typer.Option(min=2, help="Members of each group.")] = 8
    model: Annotated[
        Path | None, typer.Option(help="Folder of a model to train.", show_default="a tiny new one, warmed up")
    ] = None
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="An SGLang that serves --model already.", show_default="the embedded engine"),
    ] = None
    only_model: Annotated[
        Path | None, typer.Option(help="Only make the warmed-up policy, into this folder, for an engine to serve.")
    ] = None
    folder: Annotated[Path, typer.Option(help="Where the run keeps its data, logs, metrics and curve.")] = Path(
        ".learn"
    )
    device: Annotated[str, typer.Option(help="Where policy and engine compute: cpu or cuda.")] = "cpu"
    hidden: Annotated[int, typer.Option(min=16, help="Width of the new policy, a multiple of 16.")] = 64
    layers: Annotated[int, typer.Option(min=1, help="Depth of the new policy.")] = 2
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 1e-3
    warm_up: Annotated[
        int | None,
        typer.Option(
            min=0, help="Updates of the new policy on scripted episodes.", show_default="the task's own, or 600"
        ),
    ] = None
    lag: Annotated[
        int,
        typer.Option(
            "--lag",
            "--max-lag",
            min=0,
            help="Steps that playing may be ahead of training, and weight versions that a trained token may be behind.",
            show_default="0: playing and training wait for each other",
        ),
    ] = 0
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest reply.", show_default="the task's own, or 16")
    ] = None
    tolerate_gap: Annotated[
        bool,
        typer.Option(help="Go on training although the engine's log-probs are not the trainer's."),
    ] = False
    wandb: Annotated[bool, typer.Option(help="Also write an offline run of W&B.")] = False
    beside: Annotated[
        list[Path] | None, typer.Option(help="metrics.jsonl of an earlier run, drawn beside this one; repeatable.")
    ] = None

    def settings(self) -> LearnSettings:
        """Returns the settings of the run."""
        from rollout_buffer_lab.learning.grpo import GrpoSettings
        from rollout_buffer_lab.learning.policy import PolicySize
        from rollout_buffer_lab.learning.run import LearnSettings

        grpo = GrpoSettings(learning_rate=self.learning_rate)
        return LearnSettings(
            folder=self.folder,
            task=self.task,
            generator_dir=self.generator_dir,
            input_file=self.input_file,
            mode=self.mode,
            arm=_arm_named(self.arm),
            seed=self.seed,
            steps=self.steps,
            groups=self.groups,
            samples=self.samples,
            model=self.model,
            engine_url=self.engine,
            device=self.device,
            size=PolicySize(hidden=self.hidden, layers=self.layers),
            grpo=replace(grpo, max_log_prob_gap=None) if self.tolerate_gap else grpo,
            warm_up_updates=self.warm_up,
            lag=self.lag,
            max_new_tokens=self.max_new_tokens,
            wandb=self.wandb,
            beside=tuple(self.beside or ()),
        )


@with_options(LearnOptions)
def learn(options: LearnOptions) -> None:
    """Train a small policy by GRPO through the buffer, and say whether its reward rose.

    Exit code 1 when it did not, or when the trainer refused a step.
    """
    _import_learning()
    with report_errors():
        succeeded = _make_policy_or_learn(options.settings(), options.only_model)
    if not succeeded:
        raise typer.Exit(ExitCode.NO)


def _import_learning() -> None:
    """Imports torch and transformers, without warnings and downloads; exits with an error if one is missing."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        importlib.import_module("rollout_buffer_lab.learning.run")
    except ImportError as error:
        message = f"rollout-buffer: learn needs the extra 'embedded-engine' ({error}): {install_lab('embedded-engine')}"
        errors.print(message, style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(ExitCode.NO) from error


def _arm_named(name: str) -> Arm:
    from rollout_buffer_lab.learning.arms import Arm

    if name not in set(Arm):
        raise typer.BadParameter(f"{name!r} is none of {', '.join(Arm)}", param_hint="--arm")
    return Arm(name)


def _make_policy_or_learn(settings: LearnSettings, only_model: Path | None) -> bool:
    """Returns whether the reward of a run rose. With ``only_model`` it only writes the warmed-up policy there."""
    from rollout_buffer_lab.learning import run

    if only_model is not None:
        run.make_policy(settings, only_model, _print_message)
        return True
    with _StepTable() as table:
        outcome = run.learn(settings, _print_message, table.add)
    _print_outcome(outcome, settings.folder / "run")
    return outcome.rose


def _print_outcome(outcome: Outcome, folder: Path) -> None:
    if outcome.refused is None and outcome.stopped:
        _print_message(f"The run ended early: {outcome.stopped}.")
    if outcome.steps:
        _print_message(f"curve {folder / 'curve.svg'}, metrics {folder / 'metrics.jsonl'}")
    if outcome.refused is not None:
        sentence = f"The run was refused {outcome.refused}."
    elif outcome.verdict is not None:
        sentence = outcome.verdict.sentence
    else:
        sentence = "The reward did not rise: too few steps were trained to tell."
    console.print(sentence, style="green" if outcome.rose else "red", highlight=False, soft_wrap=True)


def _print_message(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


class _StepTable:
    """A table that grows by a row for each step: live in a terminal, line by line elsewhere."""

    COLUMNS = (
        "step",
        "reward",
        "by turn",
        "groups",
        "entropy",
        "clipped",
        "gap",
        "lag",
        "weight",
        "cut",
        "|gradient|",
        "waited",
        "trained",
    )

    def __init__(self) -> None:
        self._rows: list[tuple[str, ...]] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> _StepTable:
        _print_message(COLUMN_KEY)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None and self._rows:
            self._live.stop()

    def add(self, step: Step) -> None:
        """Shows the row of a step."""
        report = step.report
        self._rows.append(
            (
                str(step.step),
                f"{step.reward:.3f}",
                " ".join(f"{reward:.2f}" for reward in step.reward_by_turn) or "-",
                f"{step.groups_trained}/{len(step.group_rewards)}",
                f"{report.entropy:.2f}",
                f"{report.clipped:.3f}",
                "-" if report.log_prob_gap is None else f"{report.log_prob_gap:.1e}",
                f"{report.lag:.2f}",
                f"{report.importance:.3f}",
                f"{report.importance_cut:.3f}",
                f"{report.gradient_norm:.2f}",
                f"{step.waited_s:.1f} s",
                f"{step.trained_s:.1f} s",
            )
        )
        if self._live is None:
            self._print_last()
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def _print_last(self) -> None:
        widths = [max(len(name), 8) for name in self.COLUMNS]
        lines = [self.COLUMNS, self._rows[-1]] if len(self._rows) == 1 else [self._rows[-1]]
        for line in lines:
            row_text = "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            console.print(row_text, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table()
        for name in self.COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table
