"""The demo: all processes on one machine (``rollout-buffer demo``).

Starts the scripted engine and ``rollout-buffer serve`` as processes of their own, lets a trainer ask for rollouts with
the function that slime calls, shows the progress, and checks the trainer's batches at the end. All output is in one
folder; all processes are stopped at the end.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rollout_buffer_lab.documents import generate
from rollout_buffer_lab.mock_trainer import MockTrainer, RolloutRecord, flat_samples, trainer_args
from rollout_buffer_lab.run_processes import PACKAGE, buffer_and_engine, refuse_if_served
from rollout_buffer_lab.scripted_engine.conversation import END_OF_TURN
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.cli.job_status import draw_job_status
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import RolloutBufferError
from slime_plugins.rollout_buffer.generator.context_editing.document import require_search_library
from slime_plugins.rollout_buffer.generator.miniwob.browser import find_chromium
from slime_plugins.rollout_buffer.generator.miniwob.package import find_pages
from slime_plugins.rollout_buffer.reporting.inspection import Inspection
from slime_plugins.rollout_buffer.serve_settings import DEFAULT_PORT
from slime_plugins.rollout_buffer.storage.store import Store
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer

ASSETS = DEMO_TOKENIZER_PATH.parent
GROUPS_PER_ROLLOUT = 4
SAMPLES_PER_GROUP = 4
REFRESH_S = 0.5
NUM_EPOCH = 20
"""Epochs of the input file's tasks: enough for the most rollouts that the command takes, with some groups filtered."""
JOB_ID = "demo"

ANDROID_WORLD, STATELM, MINIWOB = "android_world", "statelm", "miniwob"
INPUT_FILES = {task: ASSETS / f"demo_{task}.jsonl" for task in (ANDROID_WORLD, MINIWOB)}
MIN_DOCUMENT, MAX_DOCUMENT = 4_000, 200_000


class DemoError(RolloutBufferError):
    """The demo failed; the message names the logs."""

    code = "demo"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """How large the demo is and where it writes.

    ``phones`` is the number of web pages for ``miniwob``. ``statelm`` uses neither ``phones`` nor ``rollout_mode``.
    """

    folder: Path
    task: str = ANDROID_WORLD
    rollouts: int = 3
    skill: float = 0.7
    phones: int = 4
    rollout_mode: str = "incremental"
    timeout_s: float = 900.0


@dataclass(slots=True)
class _Trainer:
    """What the trainer's thread runs: its batches so far, and its error."""

    settings: DemoSettings
    args: Namespace
    records: list[RolloutRecord] = field(default_factory=list)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            MockTrainer(self.args).train(self.settings.rollouts, on_rollout=self.records.append)
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which reports it
            self.error = error


def run_demo(settings: DemoSettings, console: Console) -> None:
    """Runs the demo to its end.

    Raises:
        DemoError: a process did not start, the trainer failed, or its batches are wrong.
        ConfigError: what the task needs is not installed, or a server still serves an earlier run; the message has the
            remedy.
    """
    if settings.task == MINIWOB:
        find_pages()
        find_chromium()
    if settings.task == STATELM:
        require_search_library()
    folder = settings.folder.resolve()
    run = folder / "run"
    refuse_if_served(run / "data")
    if run.exists():
        console.print(f"{run} of an earlier demo is replaced; --folder names another place", soft_wrap=True)
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    console.print(
        f"[bold]Rollout Buffer demo[/]: {_what_is_played(settings)}, a scripted engine of skill "
        f"{settings.skill:g} (a script, no model), {settings.rollouts} rollouts of "
        f"{GROUPS_PER_ROLLOUT} groups × {SAMPLES_PER_GROUP} samples",
        markup=True,
    )
    started = time.monotonic()
    input_file = _input_file(settings, run)
    try:
        with _processes(settings, run, input_file, console) as (engine_port, buffer_url):
            args = _trainer_args(settings, run, input_file, engine_port, buffer_url)
            trainer = _Trainer(settings, args)
            client = RolloutBufferClient(buffer_url)
            _watch(trainer, client, console, settings)
            job = client.job(JOB_ID)
            client.cancel(JOB_ID)  # a later serve on this folder shows the job, and plays no further episodes
    except KeyboardInterrupt:
        console.print(f"stopped before its end; logs: {_logs(run)}", soft_wrap=True)
        raise
    result_file = _write_results(trainer.records, run)
    console.print(_summary(trainer.records))
    _check(trainer, job)
    seconds = time.monotonic() - started
    message = f"{_samples_and_rows(trainer.records)} in {seconds:.0f} s; masks decode to exactly the policy's replies."
    console.print(f"[green]All well[/]: {message}", markup=True)
    _print_paths(console, run, result_file, job["slots"])


def _what_is_played(settings: DemoSettings) -> str:
    if settings.task == STATELM:
        return f"questions over documents of {MIN_DOCUMENT:,} to {MAX_DOCUMENT:,} tokens"
    devices = "web pages in a Chromium" if settings.task == MINIWOB else "simulated phones"
    return f"{settings.phones} {devices}, mode {settings.rollout_mode}"


def _input_file(settings: DemoSettings, run: Path) -> Path:
    """Returns the shipped input file of phones or pages; for documents writes one with more lines than are needed."""
    if settings.task in INPUT_FILES:
        return INPUT_FILES[settings.task]
    path = run / "documents.jsonl"
    lines = generate(4 * settings.rollouts * GROUPS_PER_ROLLOUT, (MIN_DOCUMENT, MAX_DOCUMENT))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def _options(settings: DemoSettings) -> dict[str, Any]:
    """Returns the job's options for its generator."""
    if settings.task == STATELM:
        return {"statelm": {"max_model_length": 8192}}
    if settings.task == MINIWOB:  # the policy reads the elements; screenshots are for the dashboard
        return {"miniwob": {"rollout_mode": settings.rollout_mode, "observation": "both"}}
    return {"android_world": {"rollout_mode": settings.rollout_mode}}


@contextmanager
def _processes(settings: DemoSettings, run: Path, input_file: Path, console: Console) -> Iterator[tuple[int, str]]:
    """Runs engine and buffer; yields the engine's port and the buffer's URL, and stops both."""
    config = run / "android_world.yaml"
    config.write_text(f"device: simulated\nnum_workers: {settings.phones}\n", encoding="utf-8")
    environment = {"ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG": str(config), "HF_HUB_OFFLINE": "1"}
    environment["ROLLOUT_BUFFER_MINIWOB__NUM_WORKERS"] = str(settings.phones)
    serve = ["--data-root", str(input_file.parent), "--ray-num-cpus", "2"]
    with ExitStack() as processes:
        with console.status("starting the scripted engine and the buffer …"):
            buffer_url, engine_url = processes.enter_context(
                buffer_and_engine(
                    run,
                    serve=serve,
                    engine=["--skill", str(settings.skill)],
                    error=DemoError,
                    environment=environment,
                )
            )
        console.print(f"engine  {engine_url}   log {run / 'engine.log'}", soft_wrap=True)
        console.print(f"buffer  {buffer_url}   log {run / 'buffer.log'}", soft_wrap=True)
        console.print(f"while it runs: open {buffer_url} in a browser, or {_command_line()} status --watch --url "
                      f"{buffer_url}", soft_wrap=True)  # fmt: skip
        try:
            yield int(engine_url.rpartition(":")[2]), buffer_url
        finally:
            with console.status("stopping …"):
                processes.close()


def _trainer_args(settings: DemoSettings, run: Path, input_file: Path, engine_port: int, buffer_url: str) -> Namespace:
    return trainer_args(
        rollout_buffer_url=buffer_url,
        rollout_buffer_job_id=JOB_ID,
        rollout_task_type=settings.task,
        prompt_data=str(input_file),
        num_epoch=NUM_EPOCH,
        rollout_batch_size=GROUPS_PER_ROLLOUT,
        n_samples_per_prompt=SAMPLES_PER_GROUP,
        rollout_num_process=16,
        rollout_max_response_len=1024,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=engine_port,
        hf_checkpoint=str(DEMO_TOKENIZER_PATH),
        save=str(run / "checkpoints"),
        loss_mask_type="qwen",
        rollout_buffer_options=_options(settings),
    )


# --- watching --------------------------------------------------------------------------------------------------------


def _watch(trainer: _Trainer, client: RolloutBufferClient, console: Console, settings: DemoSettings) -> None:
    """Shows progress bars until the trainer is finished; raises ``DemoError`` if it fails or exceeds ``timeout_s``."""
    thread = threading.Thread(target=trainer.run, name="trainer", daemon=True)
    progress = Progress(
        TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    rollouts = progress.add_task("rollouts the trainer has", total=settings.rollouts)
    groups = progress.add_task("groups ready for it", total=settings.rollouts * GROUPS_PER_ROLLOUT)
    episodes = progress.add_task("episodes played", total=None)
    deadline = time.monotonic() + settings.timeout_s
    thread.start()
    with Live(progress, console=console, refresh_per_second=4) as live, _logs_silenced_on_interrupt():
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(REFRESH_S)
            job = _job_or_none(client)
            progress.update(rollouts, completed=len(trainer.records))
            if job is not None:
                progress.update(groups, completed=_groups_for_trainer(job, settings))
                progress.update(episodes, completed=sum(job["outcomes"].values()))
                live.update(Group(draw_job_status([job]), progress))
    if not console.is_terminal:
        console.line()  # Live ends its last line only on a terminal
    if thread.is_alive():
        raise DemoError(f"the trainer has not finished after {settings.timeout_s:.0f} s: see {settings.folder}/run")
    if trainer.error is not None:
        raise DemoError(f"the trainer failed: {type(trainer.error).__name__}: {trainer.error}") from trainer.error


@contextmanager
def _logs_silenced_on_interrupt() -> Iterator[None]:
    """On an interrupt silences the log: the trainer's thread retries against the stopped buffer until the process
    exits."""
    try:
        yield
    except KeyboardInterrupt:
        logging.getLogger(PACKAGE).setLevel(logging.ERROR)
        raise


def _groups_for_trainer(job: dict[str, Any], settings: DemoSettings) -> int:
    groups = job["groups"]
    for_the_trainer: int = groups["ready"] + groups["leased"] + groups["delivered"]
    return min(settings.rollouts * GROUPS_PER_ROLLOUT, for_the_trainer)


def _job_or_none(client: RolloutBufferClient) -> dict[str, Any] | None:
    try:
        return client.job(JOB_ID)
    except (requests.RequestException, RolloutBufferError):
        return None


# --- the results -----------------------------------------------------------------------------------------------------


def _summary(records: list[RolloutRecord]) -> Table:
    table = Table(title="what the trainer got", title_justify="left")
    for name in ("rollout", "instance", "rewards", "actions", "tokens", "trained"):
        table.add_column(name, justify="right" if name in ("tokens", "trained") else "left", no_wrap=True)
    for record in records:
        for group in record.groups:
            samples = flat_samples(group)
            first_rows = [flat_samples(member)[0] for member in group]
            table.add_row(
                str(record.rollout_id),
                str(samples[0].index),
                "  ".join(f"{_raw_reward(sample):+.2f}" for sample in first_rows),
                " ".join(str(sample.metadata.get("steps", "?")) for sample in first_rows),
                str(sum(len(sample.tokens) for sample in samples)),
                str(sum(sum(sample.loss_mask or []) for sample in samples)),
            )
        table.add_section()
    return table


def _trajectories(records: list[RolloutRecord]) -> list[list[Sample]]:
    """Returns the rows of each trajectory; in mode history a trajectory has one row per turn."""
    return [flat_samples(member) for record in records for group in record.groups for member in group]


def _samples_and_rows(records: list[RolloutRecord]) -> str:
    trajectories = _trajectories(records)
    rows = sum(map(len, trajectories))
    return f"{len(trajectories)} samples" + (f" ({rows} rows)" if rows > len(trajectories) else "")


def _raw_reward(sample: Sample) -> float:
    reward = sample.metadata.get("raw_reward")
    return float(reward) if reward is not None else 0.0


def _check(trainer: _Trainer, job: dict[str, Any]) -> None:
    """Checks the number of samples, and that every mask decodes to the policy's replies."""
    expected = trainer.settings.rollouts * GROUPS_PER_ROLLOUT * SAMPLES_PER_GROUP
    trajectories = _trajectories(trainer.records)
    samples = [rows[0] for rows in trajectories]
    if len(samples) != expected:
        raise DemoError(f"the trainer got {len(samples)} samples, not {expected}")
    groups = [str(sample.group_index) for sample in samples]
    if any(groups.count(name) != SAMPLES_PER_GROUP for name in set(groups)):
        raise DemoError("a group was delivered twice")
    if len({_raw_reward(sample) for sample in samples}) < 2:
        raise DemoError("all rewards are the same: there is nothing to learn from")
    if job["slots"]["failed"] or job["attempts"].get("failed"):
        raise DemoError(
            f"some attempts failed: {job['attempts']}; the runner's log is in {trainer.settings.folder}/run"
        )
    _check_masks(trajectories, trainer.settings)


def _check_masks(trajectories: list[list[Sample]], settings: DemoSettings) -> None:
    """Compares the decoded trained tokens of a trajectory with the policy's replies in the stored conversation.

    For ``statelm`` only replies after the last deletion are trained (``train_before_deletion``).
    """
    tokenizer = load_tokenizer(DEMO_TOKENIZER_PATH)
    with closing(Store(settings.folder.resolve() / "run" / "data")) as store:  # of the server, which has stopped
        for rows in trajectories:
            if rows[0].remove_sample:
                continue
            trained, uid = "".join(tokenizer.decode(_trained_ids(row)) for row in rows), str(rows[0].prompt)
            expected = _assistant_text(json.loads(Inspection(store).trajectory(uid, JOB_ID).body)["messages"])
            is_right = trained == expected
            if settings.task == STATELM:
                is_right = trained != "" and expected.endswith(trained)
            if not is_right:
                raise DemoError(f"the masks of {uid} train tokens that the policy did not sample: {trained[:300]!r}")


def _trained_ids(sample: Sample) -> list[int]:
    mask = [0] * (len(sample.tokens) - sample.response_length) + list(sample.loss_mask or [])
    return [token for token, flag in zip(sample.tokens, mask, strict=True) if flag]


def _assistant_text(messages: list[dict[str, Any]]) -> str:
    return "".join(message["content"] + END_OF_TURN for message in messages if message["role"] == "assistant")


def _write_results(records: list[RolloutRecord], run: Path) -> Path:
    path = run / "samples.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        for record in records:
            for sample in record.samples:
                entry = {
                    "rollout_id": record.rollout_id,
                    "uid": sample.prompt,
                    "instance_id": sample.index,
                    "group_index": sample.group_index,
                    "reward": sample.reward,
                    "status": sample.status.value,
                    "tokens": sample.tokens,
                    "response_length": sample.response_length,
                    "loss_mask": sample.loss_mask,
                    "rollout_log_probs": sample.rollout_log_probs,
                    "metadata": sample.metadata,
                }
                lines.write(json.dumps(entry, default=str) + "\n")
    return path


def _print_paths(console: Console, run: Path, result_file: Path, slots: dict[str, int]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("samples", str(result_file))
    if (run / "documents.jsonl").exists():
        table.add_row("questions", str(run / "documents.jsonl"))
    else:
        table.add_row("screenshots", "in the dashboard; rollout-buffer export writes them as files")
    table.add_row("logs", _logs(run))
    console.print(table, soft_wrap=True)
    command = f"{_command_line()} serve --data-dir {shlex.quote(str(run / 'data'))}"
    console.print(f"look at it again: {command}", soft_wrap=True, highlight=False)
    console.print(f"and open http://127.0.0.1:{DEFAULT_PORT} in a browser", soft_wrap=True, highlight=False)
    console.print(
        f"its job is cancelled there, with {slots['submitted'] - slots['open']} of {slots['submitted']} episodes "
        "played: its input is longer than this demo's rollouts",
        soft_wrap=True,
        highlight=False,
    )


def _logs(run: Path) -> str:
    return f"{run}/*.log and {run / 'data' / 'logs'}"


def _command_line() -> str:
    """Returns what a user types to run this installation: the bare name if a shell finds it there, else its path."""
    script = Path(sys.executable).with_name("rollout-buffer")
    on_path = shutil.which(script.name)
    if on_path is not None and Path(on_path).resolve() == script.resolve():
        return script.name
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m {PACKAGE}"
