"""``rollout-buffer eval``: measures the success rate of a policy."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.live import Live
from rich.table import Table

from slime_plugins.rollout_buffer.cli.common import (
    AndroidConfig,
    AndroidSetting,
    AsJson,
    GeneratorDirs,
    RayAddress,
    RayCpus,
    assignments,
    console,
    errors,
    print_json,
    report_errors,
)
from slime_plugins.rollout_buffer.cli.job_status import draw_job_status
from slime_plugins.rollout_buffer.cli.settings_options import with_options
from slime_plugins.rollout_buffer.errors import ConfigError

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.evaluation.plan import EvaluationSettings

ANDROID_WORLD = "android_world"
DEMO_TASKS = Path(__file__).resolve().parents[2] / "assets" / "demo_android_world.jsonl"
PROGRESS_INTERVAL_S = 30.0
"""Seconds between two lines of progress where stderr is no terminal."""
Report = Mapping[str, Any]


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """The command's options."""

    engine_url: Annotated[
        str, typer.Option(help="SGLang server or router; for --api openai the base URL, like https://host/v1.")
    ]
    task_type: Annotated[str, typer.Option(help="Which generator plays the tasks.")] = ANDROID_WORLD
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSONL or Parquet, one task a line, or a slice of it as for start_rollout. [default: the demo's]",
        ),
    ] = None
    output: Annotated[
        Path, typer.Option(help="Folder of this evaluation: plan, trajectories, report; the same command continues it.")
    ] = Path("rollout_eval")
    samples_per_task: Annotated[int, typer.Option(min=1, max=4096, help="Samples of each task.")] = 1
    pass_k: Annotated[
        list[int] | None, typer.Option(help="A k of pass@k to report; repeatable. [default: powers of two]")
    ] = None
    api: Annotated[Literal["sglang", "openai"], typer.Option(help="SGLang's /generate, or chat completions.")] = (
        "sglang"
    )
    model: Annotated[str | None, typer.Option(help="The model. [default: the one that the engine names]")] = None
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key of an OpenAI-compatible server.")
    ] = "OPENAI_API_KEY"
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            "--tokenizer-path",
            help="The model's tokenizer folder, for --api sglang. [default: what the engine names]",
        ),
    ] = None
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.7
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0
    max_tokens: Annotated[int, typer.Option(min=1, help="Token limit of one reply.")] = 4096
    sampling: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="Another sampling parameter; repeatable.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Each slot samples with a seed derived from it.")] = None
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=JSON", help="An option of the generator; repeatable.")
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes played at once.")] = 16
    max_attempts: Annotated[
        int, typer.Option(min=1, max=100, help="Attempts at a slot whose device, engine or environment fails.")
    ] = 5
    retry_given_up: Annotated[
        bool,
        typer.Option(
            "--retry-given-up", help="Play slots that were given up, with --max-attempts more attempts at each."
        ),
    ] = False
    success_threshold: Annotated[
        float, typer.Option(help="Minimum success of a solved sample, or minimum reward where no success is reported.")
    ] = 1.0
    group_by: Annotated[
        list[str] | None,
        typer.Option(help="Key of a task's metadata to report by, beside app and difficulty; repeatable."),
    ] = None
    generator_dir: GeneratorDirs = None
    ray_address: RayAddress = None
    ray_num_cpus: RayCpus = None
    android_config: AndroidConfig = None
    android: AndroidSetting = None
    buffer_url: Annotated[
        str | None, typer.Option(help="A running buffer to use. [default: one of its own, in --output]")
    ] = None
    compare: Annotated[
        Path | None, typer.Option(help="An earlier report.json: report the difference, paired by task.")
    ] = None

    def settings(self) -> EvaluationSettings:
        """Returns the settings that the options ask for.

        Raises:
            ConfigError: an option is missing for this task type, or invalid.
        """
        from slime_plugins.rollout_buffer.evaluation.plan import EvaluationSettings
        from slime_plugins.rollout_buffer.generator.android_world.config import environment_for

        return EvaluationSettings(
            output=self.output,
            task_type=self.task_type,
            tasks=self.tasks or _demo_tasks(self.task_type),
            engine_url=self.engine_url.rstrip("/"),
            api=self.api,
            model=self.model,
            api_key=os.environ.get(self.api_key_env) if self.api == "openai" else None,
            tokenizer=self.tokenizer,
            samples_per_task=self.samples_per_task,
            sampling_params={
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                **assignments("--sampling", self.sampling),
            },
            seed=self.seed,
            options=assignments("--option", self.option),
            concurrency=self.concurrency,
            max_attempts=self.max_attempts,
            retry_given_up=self.retry_given_up,
            success_threshold=self.success_threshold,
            group_by=tuple(self.group_by or ()),
            buffer_url=self.buffer_url,
            serve_arguments=_serve_arguments(self.generator_dir, self.ray_address, self.ray_num_cpus),
            environment=environment_for(self.android_config, self.android or []),
        )


# --- the command -----------------------------------------------------------------------------------------------------


@with_options(EvaluationOptions)
def evaluate_policy(options: EvaluationOptions, as_json: AsJson = False) -> None:
    """Measure a policy: samples of each task of a list, pass@k, success by task and app, with intervals.

    Played samples are stored: after Ctrl-C, a crash or a reboot the same command continues with the missing ones.
    """
    from slime_plugins.rollout_buffer.evaluation.report import compare_reports

    with report_errors():
        settings = options.settings()
        ks = _checked_ks(options.pass_k, settings.samples_per_task)
        earlier = None if options.compare is None else _earlier_report(options.compare, settings)
        report = _measure(settings, ks, as_json=as_json)
        try:
            comparison = None if earlier is None else compare_reports(dict(report), dict(earlier))
        except ValueError as error:
            if not as_json:
                _print_report(report, None, settings.output)
            raise ConfigError(f"--compare: {error}", {"report": report}) from error
        if as_json:
            print_json(dict(report) if comparison is None else {**report, "comparison": comparison})
        else:
            _print_report(report, comparison, settings.output)


def _measure(settings: EvaluationSettings, ks: Sequence[int], *, as_json: bool) -> Report:
    """Plays missing samples and returns the report.

    If the evaluation ends early, prints the report so far and raises; with ``--json`` the error's ``detail`` holds it.
    """
    from slime_plugins.rollout_buffer.evaluation.evaluate import EvaluationError, evaluate

    try:
        with _stopped_by_sigterm(), _shown_progress() as watch:
            return evaluate(settings, ks, watch)
    except EvaluationError as error:
        if "report" in error.detail and not as_json:
            _print_report(error.detail["report"], None, settings.output)
        raise


# --- settings from options --------------------------------------------------------------------------------------------


def _demo_tasks(task_type: str) -> str:
    if task_type != ANDROID_WORLD:
        raise ConfigError(f"--tasks is missing: the file with the tasks of type {task_type}")
    return str(DEMO_TASKS)


def _checked_ks(pass_k: Sequence[int] | None, samples_per_task: int) -> list[int]:
    from slime_plugins.rollout_buffer.evaluation.report import default_pass_at_ks

    ks = sorted(set(pass_k)) if pass_k else default_pass_at_ks(samples_per_task)
    if ks[0] < 1 or ks[-1] > samples_per_task:
        raise ConfigError(f"--pass-k must be between 1 and {samples_per_task}, the value of --samples-per-task")
    return ks


def _serve_arguments(folders: Sequence[Path] | None, ray_address: str | None, ray_num_cpus: int | None) -> list[str]:
    arguments = [word for folder in folders or () for word in ("--generator-dir", str(folder.resolve()))]
    if ray_address is not None:
        arguments += ["--ray-address", ray_address]
    if ray_num_cpus is not None:
        arguments += ["--ray-num-cpus", str(ray_num_cpus)]
    return arguments


def _earlier_report(path: Path, settings: EvaluationSettings) -> Report:
    from slime_plugins.rollout_buffer.evaluation.plan import read_tasks
    from slime_plugins.rollout_buffer.evaluation.report import solved_shares

    try:
        report: Report = json.loads(path.read_text(encoding="utf-8"))
        played_ids = solved_shares(dict(report)).keys()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--compare {path} is no report of an evaluation: {error}") from error
    except KeyError as error:
        raise ConfigError(f"--compare {path} is no report of an evaluation: it has no {error}") from error
    if played_ids.isdisjoint(task.instance_id for task in read_tasks(settings)):
        raise ConfigError(f"--compare {path} has played none of these tasks")
    return report


# --- while it runs ---------------------------------------------------------------------------------------------------


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown_progress() -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that shows a job on stderr: live in a terminal, else a line every ``PROGRESS_INTERVAL_S``."""
    if errors.is_terminal:
        with Live(console=errors, refresh_per_second=4, transient=True) as live:
            yield lambda job: live.update(draw_job_status([job]))
        return
    next_line_at = time.monotonic() + PROGRESS_INTERVAL_S

    def print_progress(job: Mapping[str, Any]) -> None:
        nonlocal next_line_at
        if time.monotonic() >= next_line_at:
            next_line_at = time.monotonic() + PROGRESS_INTERVAL_S
            slots = job["slots"]
            errors.print(f"{slots['submitted'] - slots['open']} of {slots['submitted']} slots are closed")

    yield print_progress


# --- results ----------------------------------------------------------------------------------------------------------


def _print_report(report: Report, comparison: Report | None, output: Path) -> None:
    from slime_plugins.rollout_buffer.evaluation.evaluate import REPORT_FILE

    console.print(_summary(report))
    console.print(report["weight_versions"]["message"], soft_wrap=True)
    for key in report:
        if key.startswith("by_") and report[key]:
            console.print(_group_table(key.removeprefix("by_"), report[key]))
    if comparison is not None:
        console.print(_comparison(comparison))
    if report["complete"] and report["slots"]["not_played"]:
        console.print("the same command with --retry-given-up plays the slots that were given up", soft_wrap=True)
    console.print(f"every sample: {output / REPORT_FILE}", soft_wrap=True)


def _summary(report: Report) -> Table:
    slots = report["slots"]
    state = "" if report["complete"] else ", not complete"
    table = Table(title=f"{report['work']['task_type']}, {report['work']['model'] or 'model unknown'}{state}")
    for column in ("", "value", "95 % interval", "of"):
        table.add_column(column, justify="right" if column in ("value", "95 % interval") else "left")
    counted = f"{report['solved']} of {slots['played']} samples of {report['tasks']} tasks"
    table.add_row("success rate", *_cells_of(report["success"]), counted)
    if slots["not_played"]:
        table.add_row("with failures as zero", *_cells_of(report["success_failures_as_zero"]),
                      f"{slots['not_played']} slots not played")  # fmt: skip
    for k, estimate in report["pass_at_k"].items():
        left_out = f", {estimate['left_out']} with fewer samples left out" if estimate["left_out"] else ""
        table.add_row(f"pass@{k}", *_cells_of(estimate), f"{estimate['tasks']} tasks{left_out}")
    for name, unit in (("reward_mean", "reward"), ("turns_mean", "turns"), ("played_s_mean", "seconds")):
        if report[name] is not None:
            table.add_row(f"mean {unit}", f"{report[name]:.3g}", "", "")
    for code, count in report["failed_tries"].items():
        table.add_row(f"failed: {code}", str(count), "", "failed attempts, not counted against the policy")
    return table


def _group_table(name: str, groups: Mapping[str, Report]) -> Table:
    table = Table(name, "success", "95 % interval", "solved", "samples", "not played", "mean turns")
    for value, summary in groups.items():
        slots, turns = summary["slots"], summary["turns_mean"]
        numbers = (str(summary["solved"]), str(slots["played"]), str(slots["not_played"]))
        table.add_row(value, *_cells_of(summary["success"]), *numbers, "" if turns is None else f"{turns:.1f}")
    return table


def _comparison(comparison: Report) -> str:
    difference = comparison["difference"]
    return (
        f"compared on {comparison['tasks']} tasks: {comparison['new']:.1%}, earlier {comparison['old']:.1%}; "
        f"difference {difference['value']:+.1%} ({difference['low']:+.1%} to {difference['high']:+.1%}); "
        f"{comparison['better']} better, {comparison['equal']} equal, {comparison['worse']} worse"
    )


def _cells_of(estimate: Report | None) -> tuple[str, str]:
    """Returns value and interval as the texts of two cells."""
    if estimate is None or estimate["value"] is None:
        return "–", ""
    return f"{estimate['value']:.1%}", f"{estimate['low']:.1%} – {estimate['high']:.1%}"
