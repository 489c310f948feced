"""A policy learns through the service, and does not when the signal is spoilt: ``rollout-buffer learn`` as a process.

The large tests assert both sides. A control arm is called a rise with a chance of 1 in 1000 (``verdict.ALPHA``) if its
groups are alike: for the twelve runs that no assertion stops, 1 in 84.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from tests.miniwob_browsers import needs_a_browser

pytest.importorskip("torch", reason="the policy and its engine need torch")

ROOT = Path(__file__).resolve().parents[3]
SEEDS = (301, 302, 303)
PHONES = ("--task phone --mode incremental", "--task phone --mode history")
PAGE = "--task miniwob_page"
CAUGHT = ("late-mask", "environment", "other-version", "old-denominators", "frozen")
"""Arms whose log-probs are not those of what would be trained, or of weights that are gone: refused by step 4."""
BLIND = ("shuffled-rewards", "swapped-siblings")
"""Arms that no assertion can see: only the reward tells."""


@dataclass(frozen=True)
class Run:
    """A run that has ended: its exit code, what it said, and its metrics."""

    code: int
    said: str
    folder: Path

    @property
    def steps(self) -> list[dict[str, object]]:
        path = self.folder / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def largest_gap(self) -> float:
        """Between a log-prob of the engine and the trainer's own; infinite where none was compared."""
        gaps = [float(str(step["log_prob_gap"])) for step in self.steps if step["log_prob_gap"] is not None]
        return max(gaps, default=math.inf)

    @property
    def last_reward(self) -> float:
        return float(str(self.steps[-1]["reward"]))


def learn(folder: Path, *arguments: str, timeout_s: float) -> Run:
    command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "learn", "--folder", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
    return Run(done.returncode, done.stdout + done.stderr, folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_steps_go_through_the_service_and_leave_metrics_and_a_curve(tmp_path: Path) -> None:
    run = learn(tmp_path, "--steps", "3", "--groups", "4", "--samples", "4", "--warm-up", "120", timeout_s=280)

    assert "The reward" in run.said, run.said
    assert [step["step"] for step in run.steps] == [0, 1, 2]
    assert all(step["groups_trained"] == 4 for step in run.steps)
    assert run.largest_gap < 1e-4
    assert (tmp_path / "run" / "curve.svg").read_text().startswith("<svg")
    assert (tmp_path / "run" / "weights" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_with_one_seed_earn_the_same_rewards(tmp_path: Path) -> None:
    sizes = ("--steps", "2", "--groups", "4", "--samples", "4", "--warm-up", "60")
    first, second = (learn(tmp_path / name, *sizes, timeout_s=290) for name in ("first", "second"))

    assert len(first.steps) == 2, first.said
    assert [step["reward"] for step in first.steps] == [step["reward"] for step in second.steps]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_playing_goes_on_while_a_step_trains_and_stays_within_the_lag(tmp_path: Path) -> None:
    sizes = ("--steps", "5", "--groups", "4", "--samples", "4", "--warm-up", "120")
    run = learn(tmp_path, "--lag", "1", *sizes, timeout_s=280)

    assert len(run.steps) == 5, run.said
    assert max(float(str(step["lag"])) for step in run.steps) > 0
    check_what_overlaps(run, lag=1)


def check_what_overlaps(run: Run, lag: int) -> None:
    """No trained token is too old, and those of older weights were compared as well."""
    assert {step["largest_lag"] for step in run.steps} <= set(range(lag + 1))
    assert all(step["checked"] == pytest.approx(1.0) for step in run.steps)
    assert run.largest_gap < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *((f"{phone} --groups 3 --samples 8 --warm-up 90", "a Qwen3-VL of") for phone in PHONES),
        pytest.param(f"{PAGE} --groups 2 --samples 6 --warm-up 250", "", marks=needs_a_browser),
    ],
)
def test_what_the_trainer_gets_of_a_phone_or_a_page_is_what_the_engine_saw(
    tmp_path: Path, arguments: str, said: str
) -> None:
    run = learn(tmp_path, *arguments.split(), "--steps", "2", timeout_s=280)

    assert said in run.said
    assert run.largest_gap < 1e-4, run.said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mask_that_is_one_token_late_is_caught_before_anything_is_trained(tmp_path: Path) -> None:
    run = learn(tmp_path, "--arm", "late-mask", "--steps", "3", "--groups", "4", "--warm-up", "60", timeout_s=280)

    assert run.code == 1, run.said
    assert "refused before step 0 trained anything" in run.said
    assert run.steps == []


@pytest.mark.timeout(300)
def test_what_cannot_be_run_is_said_before_anything_starts(tmp_path: Path) -> None:
    unknown_task = learn(tmp_path, "--task", "nothing", timeout_s=90)
    unknown_arm = learn(tmp_path, "--arm", "nothing", timeout_s=90)
    unknown_mode = learn(tmp_path, "--task", "phone", "--mode", "nothing", timeout_s=90)

    assert unknown_task.code == 2, unknown_task.said
    assert "the tasks there: miniwob_page, next_digit, phone" in unknown_task.said
    assert unknown_arm.code == 2
    assert "late-mask" in unknown_arm.said
    assert unknown_mode.code == 2, unknown_mode.said
    assert "its modes: incremental, history" in unknown_mode.said


@pytest.mark.large
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("arguments", "reward"),
    [
        *((f"--steps 20 --seed {seed}", 0.7) for seed in SEEDS),
        *((f"{phone} --seed 301", 0.7) for phone in PHONES),
        *(pytest.param(f"{PAGE} --steps 14 --groups 8 --seed {seed}", 0.4, marks=needs_a_browser) for seed in SEEDS),
    ],
)
def test_a_true_signal_is_learned_of_digits_a_phone_and_a_page(tmp_path: Path, arguments: str, reward: float) -> None:
    run = learn(tmp_path, *arguments.split(), timeout_s=1100)

    assert run.code == 0, run.said
    assert run.last_reward > reward


@pytest.mark.large
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_true_signal_is_learned_while_playing_is_ahead_of_training(tmp_path: Path, seed: int) -> None:
    run = learn(tmp_path, "--seed", str(seed), "--lag", "2", timeout_s=1100)

    assert run.code == 0, run.said
    assert run.last_reward > 0.7
    assert fmean(float(str(step["lag"])) for step in run.steps) > 0.3
    check_what_overlaps(run, lag=2)


@pytest.mark.large
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arm", CAUGHT + BLIND)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_spoilt_signal_is_not_learned(tmp_path: Path, seed: int, arm: str) -> None:
    run = learn(tmp_path, "--seed", str(seed), "--steps", "14", "--arm", arm, timeout_s=1100)

    assert run.code == 1, run.said
    assert ("The run was refused" in run.said) is (arm in CAUGHT), run.said
    assert arm in CAUGHT or len(run.steps) == 14


@pytest.mark.large
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "arguments",
    [
        *(f"{phone} --steps 14" for phone in PHONES),
        pytest.param(f"{PAGE} --steps 14 --groups 8", marks=needs_a_browser),
    ],
)
def test_neither_a_phone_nor_a_page_is_learned_from_shuffled_rewards(tmp_path: Path, arguments: str) -> None:
    run = learn(tmp_path, *arguments.split(), "--arm", "shuffled-rewards", "--seed", "301", timeout_s=1100)

    assert (run.code, len(run.steps)) == (1, 14), run.said
