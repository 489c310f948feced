"""Every recorded batch and every odd one through slime's conversion, split, advantages and logging, under every flag.

At one, two and four ranks, with each advantage estimator and each ``--log-*`` flag, which needs
``ROLLOUT_BUFFER_TEST_SLIME``; ``tests/slime_step/sweep.py`` is the program that runs inside slime.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from tests.slime_step.batches import GENERATORS, ODD
from tests.slime_step.running import HERE, NEEDS_SLIME, PYTHON, checkout_with_overlay

pytestmark = [pytest.mark.slime, pytest.mark.timeout(600), NEEDS_SLIME]

BATCHES = [*GENERATORS, *ODD]
BY_TRAJECTORY = ("grpo", "gspo", "cispo")
"""Estimators whose advantage is the trajectory's reward."""

Said = Mapping[str, Any]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Said]:
    checkout = checkout_with_overlay(tmp_path_factory.mktemp("slime_sweep"))
    path = os.pathsep.join(map(str, (checkout, HERE, HERE.parent / "integration")))
    finished = subprocess.run(
        [PYTHON, str(HERE / "sweep.py")],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    said: dict[str, Said] = json.loads(finished.stdout.splitlines()[-1])
    return said


def of_batch(sweep: Mapping[str, Said], batch: str) -> dict[tuple[str, ...], Said]:
    """Each case of a batch by its ranks, estimator, steps, flags and hook."""
    return {tuple(name.split("-")[1:]): said for name, said in sweep.items() if name.split("-")[0] == batch}


@pytest.mark.parametrize("batch", BATCHES)
def test_what_is_not_refused_at_the_start_stops_nowhere(sweep: dict[str, Said], batch: str) -> None:
    cases = of_batch(sweep, batch)

    assert len(cases) > 40
    stopped = {case: said["stopped"] for case, said in cases.items() if "stopped" in said and "refused" not in said}
    assert stopped == {}


@pytest.mark.parametrize("batch", BATCHES)
def test_everything_that_slime_trains_and_logs_is_a_number(sweep: dict[str, Said], batch: str) -> None:
    taken = {case: said for case, said in of_batch(sweep, batch).items() if "logged" in said}

    assert all(said["finite"] for said in taken.values())
    odd = {
        case: key for case, said in taken.items() for key, value in said["logged"].items() if not math.isfinite(value)
    }
    assert odd == {}


@pytest.mark.parametrize("batch", BATCHES)
def test_all_rows_of_a_trajectory_have_one_advantage(sweep: dict[str, Said], batch: str) -> None:
    cases = {case: said for case, said in of_batch(sweep, batch).items() if case[1] in BY_TRAJECTORY}
    by_trajectory = [said["advantages"] for said in cases.values() if "advantages" in said]

    assert by_trajectory
    assert {len(values) for one in by_trajectory for values in one.values()} <= {0, 1}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("estimator", BY_TRAJECTORY)
def test_two_and_four_ranks_log_what_one_does(sweep: dict[str, Said], batch: str, estimator: str) -> None:
    """What is a mean over trajectories; slime's means over rows weigh ranks, not rows."""
    cases = of_batch(sweep, batch)
    one, two, four = (cases[ranks, estimator, "one_step", "log_multi_turn", "hook"] for ranks in "124")

    assert two["advantages"] == four["advantages"] == one["advantages"]
    means = [key for key in ("rollout/advantages", "rollout/rollout_log_probs") if key in one["logged"]]
    assert means
    for key in means:
        expected = pytest.approx(one["logged"][key], rel=1e-4, abs=1e-6)
        assert (two["logged"][key], four["logged"][key]) == (expected, expected)


def test_log_probs_that_nobody_knows_are_not_logged_where_the_hook_runs(sweep: dict[str, Said]) -> None:
    for batch in ("messages_alone", "some_messages_alone"):
        cases = of_batch(sweep, batch)
        logged = {hook: cases["2", "grpo", "one_step", "none", hook]["logged"] for hook in ("hook", "bare")}
        assert "rollout/rollout_log_probs" not in logged["hook"]
        assert "rollout/rollout_log_probs" in logged["bare"]


@pytest.mark.parametrize("flag", ["--log-passrate", "--log-correct-samples"])
def test_no_flag_is_refused_for_nothing(sweep: dict[str, Said], flag: str) -> None:
    """Slime stops at some batch under each reason that names the flag."""
    alone = [said for said in sweep.values() if said.get("refused", "").startswith(flag)]
    reasons = {said["refused"] for said in alone if "; --" not in said["refused"]}

    assert reasons
    for reason in reasons:
        assert any("stopped" in said for said in alone if said["refused"] == reason), reason
