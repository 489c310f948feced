"""The trainer side inside a real slime checkout, with our files laid over it.

Needs ``ROLLOUT_BUFFER_TEST_SLIME``: the path of a slime checkout; and a Python with slime's CPU requirements (torch,
ray, transformers, ...), named by ``ROLLOUT_BUFFER_TEST_SLIME_PYTHON`` where it is not the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from tests.slime_step.running import NEEDS_SLIME, PYTHON, SLIME
from tools.install_into_slime import Overlay

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300), NEEDS_SLIME]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the trainer's end in place: what works with it works with the whole."""
    if subprocess.run([PYTHON, "-c", "import torch, ray, transformers"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no torch, ray or transformers: set ROLLOUT_BUFFER_TEST_SLIME_PYTHON")
    target = tmp_path_factory.mktemp("slime")
    for folder in ("slime", "slime_plugins", "tests/plugin_contracts", "tests/utils"):
        shutil.copytree(Path(SLIME) / folder, target / folder)
    Overlay(target).install(trainer_only=True)
    return target


def run_in(checkout: Path, *command: str, **environment: str) -> str:
    """Returns what a Python program says on standard output; the whole of its output when it fails."""
    finished = subprocess.run(
        [PYTHON, *command],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": f"{checkout}:{ROOT / 'tests'}", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-5000:]
    return finished.stdout


@pytest.fixture(scope="session")
def manager_report(checkout: Path) -> dict[str, Any]:
    program = ROOT / "tests" / "integration" / "slime_manager_program.py"
    report: dict[str, Any] = json.loads(
        run_in(checkout, str(program), DEMO_TOKENIZER=str(DEMO_TOKENIZER_PATH)).splitlines()[-1]
    )
    return report


def test_slimes_contract_for_rollout_functions_holds(checkout: Path) -> None:
    output = run_in(
        checkout,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/plugin_contracts/test_plugin_rollout_contracts.py"),
        SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH="loopback_buffer.generate_rollout",
    )

    assert "6 passed" in output


def test_slimes_other_users_of_masks_get_slimes(checkout: Path) -> None:
    tests = "tests/utils/test_loss_mask_type_qwen35.py"  # 3 tests in June 2026, 4 later

    assert " passed" in run_in(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)


def test_the_real_entry_has_the_signature_of_slimes_own(checkout: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from plugin_contracts import test_plugin_rollout_contracts as contract\n"
        "from slime.rollout.agent_rollout import generate_rollout\n"
        "contract.assert_rollout_function_signature_matches_default(generate_rollout)\n"
    )

    run_in(checkout, "-c", program)


def test_the_stand_in_sample_has_slimes_fields_and_defaults(checkout: Path) -> None:
    program = (
        "import json\n"
        "from dataclasses import MISSING, fields\n"
        "from slime.utils.types import Sample\n"
        "plain = lambda e: repr(e.default) if e.default is not MISSING else repr(e.default_factory())\n"
        "print(json.dumps([[(e.name, plain(e)) for e in fields(Sample)], {s.name: s.value for s in Sample.Status}]))\n"
    )
    theirs, their_states = json.loads(run_in(checkout, "-c", program).splitlines()[-1])

    assert [[entry.name, _default(entry)] for entry in fields(Sample)] == theirs
    assert {state.name: state.value for state in Sample.Status} == their_states


def _default(entry: Any) -> str:
    return repr(entry.default) if entry.default is not MISSING else repr(entry.default_factory())


def test_slimes_manager_trains_exactly_what_was_sampled(manager_report: dict[str, Any]) -> None:
    plain = manager_report["plain"]

    assert plain["instances"] == ["task-0"] * 4 + ["task-1"] * 4
    assert plain["loss_masks"] == [[1, 1, 0, 0, 1, 1, 1]] * 8
    assert plain["log_probs"] == [[-0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -0.125]] * 8
    assert plain["rewards"] == pytest.approx([-0.866024, 0.866024] * 4, abs=1e-4)
    assert plain["shard_sizes"] == [4, 4]
    assert plain["shards_have_log_probs"]
    assert plain["metrics"]["rollout/no_filter/total_samples"] == 8


def test_slimes_own_checkpoint_brings_a_resumed_trainer_the_rest(manager_report: dict[str, Any]) -> None:
    assert manager_report["resumed"]["instances"] == ["task-2"] * 4 + ["task-3"] * 4


def test_rows_of_one_trajectory_and_dummies_do_not_change_the_baseline(manager_report: dict[str, Any]) -> None:
    """Slot 0 has two rows, slot 1 is a dummy; rewards are 0, -, 0, 1, and make up for two dummies in eight."""
    rows = manager_report["several_rows"]

    assert rows["rollout_ids"] == [0, 0, 1, 2, 3, 4, 4, 5, 6, 7]
    normalized = [-0.57735, -0.57735, 0.0, -0.57735, 1.1547]
    assert rows["rewards"][:5] == pytest.approx([reward * 8 / 6 for reward in normalized], abs=1e-4)
    assert rows["mask_sums"][:5] == [5, 5, 0, 5, 5]
    assert rows["metrics"]["rollout/buffer/dummies"] == 2


def test_an_odd_number_of_rows_goes_evenly_into_the_ranks(manager_report: dict[str, Any]) -> None:
    """Nine rows of eight trajectories, in micro-batches of one, for two ranks."""
    rows = manager_report["odd_rows"]

    assert rows["shard_sizes"] == [5, 5]
    assert rows["rollout_ids"] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert rows["mask_sums"] == [5, 5, 0, 5, 5, 5, 5, 5, 5, 5]
    assert (rows["loss_masks"][-1], rows["rewards"][-1]) == ([0], 0.0)


def test_each_row_reaches_its_rank_with_its_own_images_and_a_dummy_with_none(manager_report: dict[str, Any]) -> None:
    """Two groups of five rows each (slot 0 has two), the dummy of each among them."""
    images = manager_report["images"]

    assert len(images["dummies"]) == 2
    expected = [[number, None if number in images["dummies"] else float(number)] for number in range(10)]
    assert images["pairs"] == expected


def test_groups_of_one_have_finite_rewards(manager_report: dict[str, Any]) -> None:
    assert manager_report["groups_of_one"]["rewards"] == [0.0] * 4


@pytest.mark.parametrize("kind", ["plain", "phone", "external", "one_step", "tis"])
def test_slime_logs_every_batch_with_dummies_in_it(manager_report: dict[str, Any], kind: str) -> None:
    """Each key that it forwards has values of one type, which it sums on every rank."""
    log = manager_report["logs"][kind]

    may_be_missing = {"multimodal_train_inputs"}
    assert {key: types for key, types in log["types"].items() if len(types) > 1 and key not in may_be_missing} == {}
    assert all("rollout/raw_reward" in logged for logged in log["logged"])


def test_a_dummy_moves_no_round_number(manager_report: dict[str, Any]) -> None:
    """Slots 1 to 3 took so many rounds; slot 0 is a dummy."""
    logs = manager_report["logs"]

    rounds = [logged["multi_turn/multi_turn_metric/round_number_mean"] for logged in logs["plain"]["logged"]]
    assert sum(rounds) / len(rounds) == 2
    assert "round_number" in logs["external"]["types"]
    assert "round_number" not in logs["phone"]["types"]


def test_log_probs_reach_slime_whole_or_not_at_all(manager_report: dict[str, Any]) -> None:
    """Where a few trajectories have none, those are not trained; where all have none, the batch goes without."""
    logs = manager_report["logs"]

    with_log_probs = [kind for kind in logs if "rollout_log_probs" in logs[kind]["types"]]
    assert with_log_probs == ["phone", "external", "one_step", "tis"]
