"""``rollout-buffer eval``: measures the success rate of a policy."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from slime_plugins.rollout_buffer.errors import ConfigError

if TYPE_CHECKING:
    from slime_plugins.rollout_buffer.evaluation.plan import EvaluationSettings

ANDROID_WORLD = "android_world"
DEMO_TASKS = Path(__file__).resolve().parents[2] / "assets" / "demo_android_world.jsonl"
NOTE_INTERVAL_S = 30.0
Report = Mapping[str, Any]


class EngineApi(StrEnum):
    SGLANG = "sglang"
    OPENAI = "openai"


# --- options ---------------------------------------------------------------------------------------------------------

EngineUrl = Annotated[
    str, typer.Option(help="SGLang server or router; for --api openai the base URL, like https://host/v1.")
]
TaskType = Annotated[str, typer.Option(help="Which generator plays the tasks.")]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="JSONL or Parquet, one task a line, or a slice of it as for start_rollout. [default: the demo's]",
    ),
]
Output = Annotated[
    Path,
    typer.Option(help="Folder of this evaluation: plan, trajectories, report; the same command continues it."),
]
SamplesPerTask = Annotated[int, typer.Option(min=1, max=4096, help="Attempts at each task.")]
PassKs = Annotated[list[int] | None, typer.Option(help="A k of pass@k to report; repeatable. [default: powers of two]")]
Api = Annotated[EngineApi, typer.Option(help="SGLang's /generate, or chat completions.")]
Model = Annotated[str | None, typer.Option(help="The model. [default: the one that the engine names]")]
ApiKeyVariable = Annotated[str, typer.Option(help="Environment variable with the key of an OpenAI-compatible server.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        "--tokenizer-path",
        help="The model's tokenizer folder, for --api sglang. [default: what the engine names]",
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")]
TopP = Annotated[float, typer.Option(help="Nucleus sampling.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Token limit of one reply.")]
Sampling = Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="Another sampling parameter; repeatable.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Each slot samples with a seed derived from it.")]
Options = Annotated[list[str] | None, typer.Option(metavar="KEY=JSON", help="An option of the generator; repeatable.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Episodes played at once.")]
MaxAttempts = Annotated[
    int, typer.Option(min=1, max=100, help="Attempts at a slot whose device, engine or environment fails.")
]
RetryGivenUp = Annotated[
    bool,
    typer.Option("--retry-given-up", help="Play slots that were given up, with --max-attempts more attempts at each."),
]
SuccessThreshold = Annotated[
    float, typer.Option(help="Minimum success of a solved attempt, or minimum reward where no success is reported.")
]
GroupBy = Annotated[
    list[str] | None,
    typer.Option(help="Key of a task's metadata to report by, beside app and difficulty; repeatable."),
]
BufferUrl = Annotated[str | None, typer.Option(help="A running buffer to use. [default: one of its own, in --output]")]
Compare = Annotated[Path | None, typer.Option(help="An earlier report.json: report the difference, paired by task.")]

# --- the command -----------------------------------------------------------------------------------------------------


def evaluate_policy(
    engine_url: EngineUrl,
    task_type: TaskType = ANDROID_WORLD,
    tasks: Tasks = None,
    output: Output = Path("rollout_eval"),
    samples_per_task: SamplesPerTask = 1,
    pass_k: PassKs = None,
    api: Api = EngineApi.SGLANG,
    model: Model = None,
    api_key_env: ApiKeyVariable = "OPENAI_API_KEY",
    tokenizer: Tokenizer = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 4096,
    sampling: Sampling = None,
    seed: Seed = None,
    option: Options = None,
    concurrency: Concurrency = 16,
    max_attempts: MaxAttempts = 5,
    retry_given_up: RetryGivenUp = False,
    success_threshold: SuccessThreshold = 1.0,
    group_by: GroupBy = None,
    generator_dir: GeneratorDirs = None,
    ray_address: RayAddress = None,
    ray_num_cpus: RayCpus = None,
    android_config: AndroidConfig = None,
    android: AndroidSetting = None,
    buffer_url: BufferUrl = None,
    compare: Compare = None,
    as_json: AsJson = False,
) -> None:
    """Measure a policy: attempts at each task of a list, pass@k, success by task and app, with intervals.

    Played attempts are stored: after Ctrl-C, a crash or a reboot the same command continues with the missing ones.
    """
    from slime_plugins.rollout_buffer.evaluation.plan import EvaluationSettings
    from slime_plugins.rollout_buffer.generator.android_world.config import environment_for

    with report_errors():
        settings = EvaluationSettings(
            output=output,
            task_type=task_type,
            tasks=tasks or _demo_tasks(task_type),
            engine_url=engine_url.rstrip("/"),
            api=api.value,
            model=model,
            api_key=os.environ.get(api_key_env) if api is EngineApi.OPENAI else None,
            tokenizer=tokenizer,
            samples_per_task=samples_per_task,
            sampling_params=_sampling_params(max_tokens, temperature, top_p, sampling),
            seed=seed,
            options=assignments("--option", option),
            concurrency=concurrency,
            max_attempts=max_attempts,
            retry_given_up=retry_given_up,
            success_threshold=success_threshold,
            group_by=tuple(group_by or ()),
            buffer_url=buffer_url,
            serve_arguments=_serve_arguments(generator_dir, ray_address, ray_num_cpus),
            environment=environment_for(android_config, android or []),
        )
        _measure_and_print(settings, pass_k, compare, as_json=as_json)


def _measure_and_print(
    settings: EvaluationSettings, pass_k: Sequence[int] | None, compare: Path | None, *, as_json: bool
) -> None:
    earlier = None if compare is None else _read_report(compare)
    report = _measure(settings, _checked_ks(pass_k, settings.samples_per_task), as_json=as_json)
    comparison = None if earlier is None else _compared(report, earlier)
    _print_report(report, comparison, settings.output, as_json=as_json)


def _measure(settings: EvaluationSettings, ks: Sequence[int], *, as_json: bool) -> Report:
    """Plays missing attempts and returns the report; prints the report so far if it is stopped."""
    from slime_plugins.rollout_buffer.evaluation.evaluate import EvaluationStoppedError, evaluate

    try:
        with _stopped_by_sigterm(), _live_report() as watch:
            return evaluate(settings, ks, watch)
    except EvaluationStoppedError as stopped:
        _print_report(stopped.report, None, settings.output, as_json=as_json)
        raise


# --- the request ------------------------------------------------------------------------------------------------------


def _sampling_params(max_tokens: int, temperature: float, top_p: float, more: list[str] | None) -> dict[str, Any]:
    params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    return {**params, **assignments("--sampling", more)}


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
    arguments += [] if ray_address is None else ["--ray-address", ray_address]
    return arguments + ([] if ray_num_cpus is None else ["--ray-num-cpus", str(ray_num_cpus)])


def _read_report(path: Path) -> Report:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        instances = report["instances"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--compare {path} is no report of an evaluation: {error}") from error
    if not isinstance(instances, list):
        raise ConfigError(f"--compare {path} is no report of an evaluation")
    return dict(report)


def _compared(report: Report, earlier: Report) -> dict[str, Any]:
    from slime_plugins.rollout_buffer.evaluation.report import compare_reports

    try:
        return compare_reports(dict(report), dict(earlier))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--compare: {error}") from error


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
def _live_report() -> Iterator[Callable[[Report], None]]:
    """Shows progress on stderr: live in a terminal, else one message every ``NOTE_INTERVAL_S``."""
    if not errors.is_terminal:
        yield _Notes().note
        return
    with Live(console=errors, refresh_per_second=4, transient=True) as live:
        yield lambda job: live.update(draw_job_status([job]))


class _Notes:
    """Prints a job's progress at intervals."""

    def __init__(self) -> None:
        self._next = time.monotonic() + NOTE_INTERVAL_S

    def note(self, job: Report) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + NOTE_INTERVAL_S
            slots = job["slots"]
            errors.print(f"{slots['submitted'] - slots['open']} of {slots['submitted']} slots are closed")


# --- results ----------------------------------------------------------------------------------------------------------


def _print_report(report: Report, comparison: Report | None, output: Path, *, as_json: bool) -> None:
    from slime_plugins.rollout_buffer.evaluation.evaluate import REPORT_FILE

    if as_json:
        print_json(dict(report) if comparison is None else {**report, "comparison": comparison})
        return
    console.print(_summary(report))
    console.print(report["weight_versions"]["message"], soft_wrap=True)
    for name in [key for key in report if key.startswith("by_") and report[key]]:
        console.print(_group_table(name.removeprefix("by_"), report[name]))
    if comparison is not None:
        console.print(_comparison(comparison))
    if report["complete"] and report["slots"]["not_played"]:
        console.print("the same command with --retry-given-up plays the slots that were given up", soft_wrap=True)
    console.print(f"every attempt: {output / REPORT_FILE}", soft_wrap=True)


def _summary(report: Report) -> Table:
    slots = report["slots"]
    state = "" if report["complete"] else ", not complete"
    table = Table(title=f"{report['work']['task_type']}, {report['work']['model'] or 'model unknown'}{state}")
    for column in ("", "value", "95 % interval", "of"):
        table.add_column(column, justify="right" if column in ("value", "95 % interval") else "left")
    of = f"{report['solved']} of {slots['played']} attempts at {report['tasks']} tasks"
    table.add_row("success rate", *_cells_of(report["success"]), of)
    if slots["not_played"]:
        table.add_row("with failures as zero", *_cells_of(report["success_failures_as_zero"]),
                      f"{slots['not_played']} slots not played")  # fmt: skip
    for k, estimate in report["pass_at_k"].items():
        left_out = f", {estimate['left_out']} with fewer attempts left out" if estimate["left_out"] else ""
        table.add_row(f"pass@{k}", *_cells_of(estimate), f"{estimate['tasks']} tasks{left_out}")
    for name, unit in (("reward_mean", "reward"), ("turns_mean", "turns"), ("played_s_mean", "seconds")):
        if report[name] is not None:
            table.add_row(f"mean {unit}", f"{report[name]:.3g}", "", "")
    for code, count in report["failed_tries"].items():
        table.add_row(f"failed: {code}", str(count), "", "tries, not counted against the policy")
    return table


def _group_table(name: str, groups: Mapping[str, Report]) -> Table:
    table = Table(name, "success", "95 % interval", "solved", "attempts", "not played", "mean turns")
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
    if estimate is None or estimate["value"] is None:
        return "–", ""
    return f"{estimate['value']:.1%}", f"{estimate['low']:.1%} – {estimate['high']:.1%}"
