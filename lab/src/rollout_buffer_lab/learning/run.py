"""One run of ``rollout-buffer learn``: makes a policy, warms it up, trains it through the service, judges the rewards.

A step takes a batch of the job's groups, trains on it, pushes the weights to the engine, and acknowledges the batch.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import torch
from transformers import AddedToken, AutoTokenizer

from rollout_buffer_lab.learning.arms import Arm, corruption_of, trainer_of
from rollout_buffer_lab.learning.curve import Curve, draw, name_of_run
from rollout_buffer_lab.learning.grpo import GrpoSettings, LogProbGapError, StepReport
from rollout_buffer_lab.learning.policy import (
    PolicySize,
    imitate,
    load_policy,
    new_policy,
    save_policy,
    save_processors,
)
from rollout_buffer_lab.learning.service import EngineWeights, LearnError, LearningJob, PlayedGroup, write_lines
from rollout_buffer_lab.learning.task_file import TaskFile, find_task
from rollout_buffer_lab.learning.verdict import Verdict, judge
from rollout_buffer_lab.run_processes import buffer_and_engine, refuse_if_served
from slime_plugins.rollout_buffer import ImageSettings, RolloutFeed, RolloutTrajectory, RowSettings
from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.install_hints import install_extra
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.vision import load_vision

JOB_ID = "learn"
NUM_EPOCH = 4
"""Epochs of the job: more than one, because groups with equal rewards are filtered and further groups replace them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnSettings:
    """Settings of a run. All output goes to ``folder``.

    ``model`` is trained instead of a new policy. ``engine_url`` is an SGLang that serves the model already. ``mode``,
    ``warm_up_updates`` and ``max_new_tokens`` are the task's own where they are None. ``lag`` is how many steps playing
    may be ahead of training, and how many weight versions a trained token may be behind; with 0 playing and training
    alternate. The files ``beside`` are metrics of earlier runs, whose curves are drawn beside this run's.
    """

    folder: Path
    task: str = "next_digit"
    generator_dir: Path | None = None
    input_file: Path | None = None
    arm: Arm = Arm.TRUE
    seed: int = 0
    steps: int = 20
    groups: int = 12
    samples: int = 8
    model: Path | None = None
    engine_url: str | None = None
    device: str = "cpu"
    size: PolicySize = field(default_factory=PolicySize)
    grpo: GrpoSettings = field(default_factory=GrpoSettings)
    mode: str | None = None
    warm_up_updates: int | None = None
    lag: int = 0
    max_new_tokens: int | None = None
    wandb: bool = False
    beside: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Metrics of a step. Rewards are of all played groups, delivered or filtered.

    ``reward_by_turn`` is empty unless the generator returns ``turn_rewards``.
    """

    step: int
    reward: float
    group_rewards: tuple[float, ...]
    groups_trained: int
    report: StepReport
    reward_by_turn: tuple[float, ...]
    waited_s: float
    trained_s: float

    def metrics(self) -> dict[str, Any]:
        """Returns one line of the metrics file: the fields of the step and those of its report."""
        return {**{key: value for key, value in asdict(self).items() if key != "report"}, **asdict(self.report)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a run. ``stopped`` is the reason of an early end, ``refused`` the trainer's reason to refuse a step.

    A refused run has no verdict, whatever its reward did until then.
    """

    steps: tuple[Step, ...]
    verdict: Verdict | None
    stopped: str | None = None
    refused: str | None = None

    @property
    def rose(self) -> bool:
        """True if the reward rose, in a run that was not refused."""
        return self.verdict is not None and self.verdict.rose


OnMessage = Callable[[str], None]


def learn(settings: LearnSettings, on_message: OnMessage, on_step: Callable[[Step], None]) -> Outcome:
    """Runs to the end, and writes ``metrics.jsonl`` and ``curve.svg`` into the folder's ``run``.

    Raises:
        ConfigError: the task, the model or an input file cannot be used.
        LearnError: a process did not start.
    """
    torch.manual_seed(settings.seed)
    if settings.device == "cpu":
        torch.set_num_threads(1)  # a tiny model is slower on several, and engine and buffer need the others
    task = find_task(settings.task, settings.generator_dir)
    job_options = task.options(settings.mode)
    task.check_generator()
    earlier_curves = [_curve_of(path) for path in settings.beside]  # read before the folder is emptied
    run = _empty_run_folder(settings)
    policy = _initial_policy(settings, task, run / "model", on_message)
    write_lines(run / "instances.jsonl", _instances(settings, task))
    engine = ["--model", str(run / "model"), "--device", settings.device, "--seed", str(settings.seed)]
    engine += ["--threads", "1", "--max-running", "96"] if settings.device == "cpu" else ["--max-running", "256"]
    on_message("starting the buffer and the engine …")
    with buffer_and_engine(
        run,
        serve=["--workers", "1", "--data-root", str(run), "--generator-dir", str(task.path.parent)],
        engine=engine if settings.engine_url is None else None,
        error=LearnError,
        environment={"HF_HUB_OFFLINE": "1"},
    ) as (buffer_url, own_engine_url):
        engine_url = settings.engine_url or own_engine_url
        on_message(f"engine {engine_url}, buffer {buffer_url} (its dashboard), logs in {run}")
        payload = {**_payload(settings, task, run, engine_url), **job_options}
        with RolloutFeed(
            buffer_url,
            payload,
            rows=_row_settings(settings.samples, run / "model", lag=settings.lag),
            images=ImageSettings() if hasattr(policy.config, "vision_config") else None,
            max_failures=20,
        ) as feed:
            client = RolloutBufferClient(buffer_url)
            training = _Training(settings, run, policy, feed, client, earlier_curves, on_step)
            return training.play(EngineWeights(engine_url))


def _empty_run_folder(settings: LearnSettings) -> Path:
    """Deletes what an earlier run left in the folder of the run, and returns the folder.

    Raises:
        ConfigError: this run would read something in the folder, or a ``serve`` uses it.
    """
    run = settings.folder.resolve() / "run"
    for flag, path in (("--model", settings.model), ("--input", settings.input_file)):
        if path is not None and path.resolve().is_relative_to(run):
            raise ConfigError(f"{flag} {path} lies in {run}, which a run empties first: give another --folder")
    refuse_if_served(run / "data")
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    return run


def make_policy(settings: LearnSettings, folder: Path, on_message: OnMessage) -> None:
    """Creates only the initial policy, in ``folder``, for an engine that is started by hand.

    Raises:
        ConfigError: the task cannot be used.
    """
    torch.manual_seed(settings.seed)
    _new_policy(settings, find_task(settings.task, settings.generator_dir), folder, on_message)
    on_message(f"the policy is in {folder}: serve it, and give --model {folder} --engine URL")


def _initial_policy(settings: LearnSettings, task: TaskFile, folder: Path, on_message: OnMessage) -> Any:
    """Returns the initial policy, also stored in ``folder``: the given one, or a new one after imitation."""
    if settings.model is None:
        return _new_policy(settings, task, folder, on_message)
    if not (settings.model / "config.json").is_file():
        raise ConfigError(f"--model {settings.model} holds no config.json: give a model's folder")
    policy, tokenizer = load_policy(settings.model)
    save_processors(tokenizer, folder, model=settings.model)
    save_policy(policy, folder)
    return policy.to(settings.device)


def _new_policy(settings: LearnSettings, task: TaskFile, folder: Path, on_message: OnMessage) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH, local_files_only=True)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in task.phrases])
    save_processors(tokenizer, folder, patch_size=task.patch_size)
    policy = new_policy(tokenizer, settings.size, settings.seed, patch_size=task.patch_size)
    policy.to(settings.device)
    _warm_up(settings, task, policy, tokenizer, folder, on_message)
    save_policy(policy, folder)
    return policy


def _warm_up(
    settings: LearnSettings, task: TaskFile, policy: Any, tokenizer: Any, folder: Path, on_message: OnMessage
) -> None:
    parameters = sum(each.numel() for each in policy.parameters())
    name = "Qwen3" if task.patch_size is None else "Qwen3-VL"
    description = f"a {name} of {parameters / 1e6:.2f} million parameters, random"
    rng = random.Random(f"warm-up {settings.seed}")
    plan = task.warm_up_plan
    warm_up = task.warm_up(tokenizer, rng, plan.episodes, task.options(settings.mode))
    if not warm_up.items:
        on_message(
            f"policy: {description}; {task.path.name} has no scripted_reply and no warm_up_traces to warm it up on"
        )
        return
    rows = RowBuilder(_row_settings(1, folder, wants_log_probs=False))
    vision = load_vision(str(folder)) if warm_up.images else None
    groups = rows.groups(warm_up.items, vision, FetchedImages(data=warm_up.images))
    episodes = [each for group in groups for each in group.trajectories if not each.is_dummy]
    if not episodes:
        raise ConfigError(f"nothing of the warm-up of {task.path} can be trained")
    on_message(f"policy: {description}; warming it up on {len(episodes)} scripted episodes …")
    if settings.warm_up_updates is not None:
        plan = replace(plan, updates=settings.warm_up_updates)
    loss = imitate(policy, episodes, plan, seed=settings.seed)
    on_message(f"warm-up: {loss:.3f} nats a token after {plan.updates} updates")


def _instances(settings: LearnSettings, task: TaskFile) -> list[Mapping[str, Any]]:
    if settings.input_file is not None:
        try:
            lines = settings.input_file.read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--input {settings.input_file} cannot be read: {error}") from error
    return list(task.instances(random.Random(f"instances {settings.seed}"), 2 * settings.steps * settings.groups))


def _row_settings(samples: int, model: Path, *, wants_log_probs: bool = True, lag: int = 0) -> RowSettings:
    masks = MaskSettings(tokenizer_path=str(model), loss_mask_type="qwen", source=None)
    wanted_by = "the reference trainer" if wants_log_probs else None
    return RowSettings(
        samples_per_group=samples,
        masks=masks,
        report_drift=False,
        log_probs_wanted_by=wanted_by,
        max_token_lag=lag or None,
    )


def _payload(settings: LearnSettings, task: TaskFile, run: Path, engine_url: str) -> dict[str, Any]:
    return {
        "job_id": JOB_ID,
        "task_type": settings.task,
        "input_file": str(run / "instances.jsonl"),
        "num_epoch": NUM_EPOCH,
        "num_repeat_per_sample": settings.samples,
        "num_process": settings.groups * settings.samples,
        "max_groups_ahead": (settings.lag + 1) * settings.groups,
        "tokenizer_path": str(run / "model"),
        "remote_engine_url": engine_url,
        "sampling_seed": settings.seed,
        "sampling_params": {
            "max_new_tokens": settings.max_new_tokens or task.max_new_tokens,
            "temperature": settings.grpo.temperature,
        },
        "max_weight_version_lag": settings.lag or None,
    }


class _Training:
    """The steps of one run, and their output."""

    def __init__(
        self,
        settings: LearnSettings,
        run: Path,
        policy: Any,
        feed: RolloutFeed,
        client: RolloutBufferClient,
        earlier_curves: Sequence[Curve],
        on_step: Callable[[Step], None],
    ) -> None:
        self._settings, self._run, self._feed, self._client = settings, run, feed, client
        self._earlier_curves = earlier_curves
        self._corrupt = corruption_of(settings.arm, policy, settings.seed)
        grpo = replace(settings.grpo, kept_versions=max(1, settings.lag))
        self._trainer = trainer_of(settings.arm, policy, grpo, seed=settings.seed)
        self._on_step = on_step
        self._steps: list[Step] = []
        self._wandb = _wandb_run(settings, run) if settings.wandb else None

    def play(self, weights: EngineWeights) -> Outcome:
        """Trains step by step, and returns the result."""
        weights.push(self._run / "model", 0)
        self._feed.start(fresh=True)
        refused = stopped = None
        try:
            stopped = self._train(weights)
        except LogProbGapError as error:
            refused = f"before step {len(self._steps)} trained anything: {error.message}"
        self._client.cancel(self._feed.job_id)
        if self._wandb is not None:
            self._wandb.finish()
        if self._steps:
            self._draw()
        return outcome_of(self._steps, self._settings.seed, stopped=stopped, refused=refused)

    def _train(self, weights: EngineWeights) -> str | None:
        job = LearningJob(self._feed, self._client, groups_per_step=self._settings.groups)
        folder = self._run / "weights"
        shutil.copytree(self._run / "model", folder)  # with the tokenizer, so that an engine can serve the folder
        for step in range(self._settings.steps):
            began = time.monotonic()
            batch = job.next_batch(self._trainer.version)
            played = job.played()
            if batch is None:
                return "every group that was played has equal rewards: there is nothing left to learn from"
            trajectories = [each for each in batch.trajectories if not each.is_dummy]
            if not trajectories:
                reason = batch.groups[0].trajectories[0].dummy_reason
                return f"no trajectory of step {step} can be trained: {reason}"
            received = time.monotonic()
            report = self._trainer.step(self._corrupt(trajectories))
            save_policy(self._trainer.policy, folder)
            if self._settings.arm is not Arm.FROZEN:
                weights.push(folder, self._trainer.version)
            self._feed.ack(batch)
            self._feed.report(self._trainer.row_reports, step=step)
            self._record(step, played, trajectories, report, received - began, time.monotonic() - received)
        return None

    def _record(
        self,
        number: int,
        played: Sequence[PlayedGroup],
        trained: Sequence[RolloutTrajectory],
        report: StepReport,
        waited_s: float,
        trained_s: float,
    ) -> None:
        turns = [each.extra_info["turn_rewards"] for each in trained if each.extra_info.get("turn_rewards")]
        means = tuple(group.mean for group in played)
        step = Step(
            step=number,
            reward=fmean(means) if means else 0.0,
            group_rewards=means,
            groups_trained=len({each.group_index for each in trained}),
            report=report,
            reward_by_turn=tuple(fmean(turn) for turn in zip(*turns, strict=False)),
            waited_s=waited_s,
            trained_s=trained_s,
        )
        self._steps.append(step)
        with (self._run / "metrics.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(step.metrics()) + "\n")
        if self._wandb is not None:
            self._wandb.log({f"learn/{key}": value for key, value in step.metrics().items() if key != "group_rewards"})
        self._on_step(step)

    def _draw(self) -> None:
        own = Curve(
            name="reward" if self._settings.arm is Arm.TRUE else self._settings.arm.value,
            means=[step.reward for step in self._steps],
            quartiles=[_quartiles(step.group_rewards) for step in self._steps],
        )
        title = f"Reward of all groups played: {self._settings.task}"
        (self._run / "curve.svg").write_text(draw([own, *self._earlier_curves], title), encoding="utf-8")


def outcome_of(steps: Sequence[Step], seed: int, *, stopped: str | None, refused: str | None) -> Outcome:
    """Judges the rewards of the last steps against those of the first, unless the run was refused."""
    if not steps:
        stopped = stopped or "no step was trained"
    num_steps = max(1, min(4, len(steps) // 3))
    first = [reward for step in steps[:num_steps] for reward in step.group_rewards]
    last = [reward for step in steps[-num_steps:] for reward in step.group_rewards]
    can_be_judged = refused is None and len(steps) > 1 and first and last
    verdict = judge(first, last, seed) if can_be_judged else None
    return Outcome(steps=tuple(steps), verdict=verdict, stopped=stopped, refused=refused)


def _quartiles(rewards: Sequence[float]) -> tuple[float, float]:
    if len(rewards) < 2:
        return (rewards[0], rewards[0]) if rewards else (0.0, 0.0)
    low, _, high = quantiles(rewards, n=4, method="inclusive")
    return low, high


def _curve_of(path: Path) -> Curve:
    """Returns the curve of an earlier run, from its metrics file."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Curve(name=name_of_run(path), means=[float(line["reward"]) for line in lines])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--beside {path} is no metrics.jsonl of an earlier run: {error!r}") from error


def _wandb_run(settings: LearnSettings, run: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise LearnError(f"--wandb needs the extra 'wandb': {install_extra('wandb')}") from error
    config = {"task": settings.task, "arm": settings.arm.value, "seed": settings.seed}
    return wandb.init(project="rollout-buffer-learn", mode="offline", dir=str(run), config=config)
