"""slime's own train step, forward and backward by Megatron, on recorded batches of every generator, without a GPU.

Needs ``ROLLOUT_BUFFER_TEST_SLIME`` and ``ROLLOUT_BUFFER_TEST_MEGATRON``; CONTRIBUTING says how to get them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.row_log_probs import recomputed
from tests.slime_step.batches import (
    GENERATORS,
    Row,
    mixed_rewards,
    recorded,
    turn_lengths,
    with_dummies,
    with_turn_rewards,
)
from tests.slime_step.record_batches import line_of, played
from tests.slime_step.running import (
    NEEDS_MEGATRON,
    NEEDS_SLIME,
    OF_QWEN3_5_VL,
    PYTHON,
    Batch,
    checkout_with_overlay,
    make_model,
    make_vision_rollout,
    train,
)

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), NEEDS_SLIME, NEEDS_MEGATRON]

ONE_POLICY = {"get_mismatch_metrics": True, "custom_tis_function_path": "megatron_layer.no_correction"}
"""slime computes log-probs before the step only where something asks for them."""
DUMMIES = (2, 5)
BFLOAT16 = 2.0**-8
"""Older slime takes log-probs by Megatron's fused cross entropy, which rounds the gradient of the logits to it."""
DISCOUNT = 0.5
HALF = ("turns_half", "android_world_history")
UNDONE = {"rollout_data_postprocess_path": "slime.rollout.agent_rollout.post_process_rollout_data"}

TURNS = {**ONE_POLICY, **UNDONE, "custom_advantage_function_path": "slime.rollout.agent_rollout.turn_advantages"}

Seen = dict[str, Any]


def batches() -> list[Batch]:
    """Every generator's rollout; one with dummies, the same without them, and with their weight undone."""
    math = mixed_rewards(recorded("math"))
    dummies = with_dummies(math, DUMMIES)
    played = [row for row in dummies if not row["remove_sample"]]
    return [
        *(Batch(name=name, rows=mixed_rewards(recorded(name)), changes=ONE_POLICY) for name in GENERATORS),
        Batch(name="dummies", rows=dummies),
        Batch(name="undone", rows=dummies, changes=UNDONE),
        Batch(name="unscaled", rows=dummies, changes={**UNDONE, "leave_hook_out": True}),
        Batch(name="played", rows=played, changes={"global_batch_size": len(played)}),
        *(Batch(name=f"turns_{name}", rows=rows, changes=TURNS) for name, rows in turn_batches().items()),
        Batch(name="no_turns", rows=mixed_rewards(recorded("android_world_history")), changes=TURNS),
    ]


def turn_batches() -> dict[str, list[Row]]:
    """Rewards of turns: in one growing row, in a row for each turn, with dummies, and of one of two groups."""
    growing, of_turns = (mixed_rewards(recorded(f"android_world_{mode}")) for mode in ("incremental", "history"))
    rewarded = with_turn_rewards(of_turns, earned, DISCOUNT)
    return {
        "growing": with_turn_rewards(growing, earned, DISCOUNT),
        "rows": rewarded,
        "dummies": with_dummies(rewarded, DUMMIES),
        "half": [new if new["rollout_id"] < 4 else old for new, old in zip(rewarded, of_turns, strict=True)],
    }


def earned(trajectory: int, turn: int) -> float:
    """The reward of a turn: a penalty or a gain, and progress that depends on the trajectory and the turn."""
    return (-0.25 if (trajectory + turn) % 3 == 0 else 0.5) + 0.125 * trajectory * turn


def hand_computed(rows: Sequence[Row]) -> dict[int, list[float]]:
    """The advantages of the turns of each played trajectory, by the formula as it is written."""
    turns = dict.fromkeys(dict.fromkeys(row["rollout_id"] for row in rows if not row["remove_sample"]), 0)
    for row in rows:
        if not row["remove_sample"]:
            turns[row["rollout_id"]] += len(turn_lengths(row))
    found: dict[int, list[float]] = {}
    for group in (range(4), range(4, 8)):
        returns = {
            number: [
                sum(DISCOUNT ** (later - turn) * earned(number, later) for later in range(turn, turns[number]))
                for turn in range(turns[number])
            ]
            for number in group
            if number in turns
        }
        mean = fmean(fmean(own) for own in returns.values())
        variance = sum(fmean((one - mean) ** 2 for one in own) for own in returns.values()) / (len(returns) - 1)
        found |= {number: [(one - mean) / (variance**0.5 + 1e-6) for one in own] for number, own in returns.items()}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slime_step")


@pytest.fixture(scope="module")
def checkout(folder: Path) -> Path:
    return checkout_with_overlay(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@pytest.fixture(scope="module")
def one_rank(checkout: Path, model: Path, folder: Path) -> dict[str, Seen]:
    return train(checkout, model, folder / "one", batches())[0]


@pytest.fixture(scope="module")
def two_ranks(checkout: Path, model: Path, folder: Path) -> list[dict[str, Seen]]:
    return train(checkout, model, folder / "two", [batch for batch in batches() if batch.name != "statelm"], ranks=2)


def rows_seen(seen: Seen) -> Iterator[dict[str, Any]]:
    data = seen["data"]
    for number in range(len(data["tokens"])):
        yield {key: values[number] for key, values in data.items()}


@pytest.mark.parametrize("name", GENERATORS)
def test_slimes_log_probs_are_those_of_the_model_itself(name: str, one_rank: dict[str, Seen], model: Path) -> None:
    rows = list(rows_seen(one_rank[name]))
    for row, expected in zip(rows, recomputed(PYTHON, str(model), [row["tokens"] for row in rows]), strict=True):
        assert row["log_probs"] == pytest.approx(expected[-row["response_lengths"] :], abs=1e-4)


def gradient_places(seen: Seen) -> list[list[int]]:
    return [[int(size > 0) for size in sizes] for sizes in seen["logit_gradients"]]


def masked_places(seen: Seen) -> list[list[int]]:
    """Where the logits of each micro-batch predict a token whose mask is 1."""
    rows = list(rows_seen(seen))
    places = []
    for sizes, members in zip(seen["logit_gradients"], seen["micro_batches"], strict=True):
        expected: list[int] = []
        for row in (rows[member] for member in members):
            before = len(row["tokens"]) - row["response_lengths"] - 1
            expected += [0] * before + list(row["loss_masks"]) + [0]
        places.append(expected + [0] * (len(sizes) - len(expected)))
    return places


@pytest.mark.parametrize("name", [*GENERATORS, "dummies"])
def test_the_gradient_is_on_the_masked_tokens_and_on_no_other(name: str, one_rank: dict[str, Seen]) -> None:
    """The logits that predict a token have a gradient exactly where its mask is 1."""
    assert gradient_places(one_rank[name]) == masked_places(one_rank[name])


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "statelm"] + ["dummies", "turns_rows"])
def test_two_ranks_train_what_one_does(name: str, one_rank: dict[str, Seen], two_ranks: list[dict[str, Seen]]) -> None:
    alone, (first, second) = one_rank[name], [seen[name] for seen in two_ranks]

    assert first["steps"] == second["steps"]
    assert first["steps"][0]["grad_norm"] == pytest.approx(alone["steps"][0]["grad_norm"], rel=1e-5)
    assert first["weights_moved"] == pytest.approx(alone["weights_moved"], rel=1e-5)
    both = sorted(tokens for seen in (first, second) for tokens in seen["data"]["tokens"])
    assert both == sorted(alone["data"]["tokens"])


def test_the_weight_of_dummies_is_taken_off(one_rank: dict[str, Seen], two_ranks: list[dict[str, Seen]]) -> None:
    """With the hook, on one rank and on two, every term is what the batch without them gives."""
    played = one_rank["played"]["steps"][0]

    for seen in (one_rank["undone"], two_ranks[0]["undone"]):
        step = seen["steps"][0]
        assert step["grad_norm"] == pytest.approx(played["grad_norm"], rel=1e-5)
        assert step["losses"]["entropy_loss"] == pytest.approx(played["losses"]["entropy_loss"], rel=1e-5)
    assert one_rank["undone"]["logged"]["rollout/rollout_log_probs"] == pytest.approx(
        one_rank["played"]["logged"]["rollout/rollout_log_probs"], rel=1e-5
    )


def test_without_the_hook_larger_rewards_make_up_for_dummies(one_rank: dict[str, Seen]) -> None:
    """The policy's gradient is that of the batch without them; what slime logs is not."""
    dummies, played = (one_rank[name]["steps"][0] for name in ("dummies", "played"))

    assert dummies["grad_norm"] == pytest.approx(played["grad_norm"], rel=1e-5)
    assert dummies["losses"]["entropy_loss"] / played["losses"]["entropy_loss"] == pytest.approx(6 / 8, rel=1e-5)


def test_a_dummy_weighs_as_a_trajectory_without_gradient(one_rank: dict[str, Seen]) -> None:
    """slime's mean is over all trajectories of a step: two dummies of eight leave three quarters of the gradient."""
    plain, played = (one_rank[name]["steps"][0] for name in ("unscaled", "played"))

    assert plain["grad_norm"] / played["grad_norm"] == pytest.approx(6 / 8, rel=BFLOAT16)


def advantages_of_turns(seen: Seen) -> dict[int, list[tuple[tuple[int, ...], list[tuple[float, int]]]]]:
    """By trajectory, its rows: their tokens, and the advantage and length of each turn in them."""
    found: dict[int, list[tuple[tuple[int, ...], list[tuple[float, int]]]]] = {}
    for row in rows_seen(seen):
        at, turns = 0, []
        for trained, run in groupby(row["loss_masks"]):
            length = len(list(run))
            values = row["advantages"][at : at + length]
            at += length
            if trained:
                assert len(set(values)) == 1
                turns.append((values[0], length))
            else:
                assert set(values) <= {0.0} or not any(row["loss_masks"])
        if turns:
            found.setdefault(row["rollout_ids"], []).append((tuple(row["tokens"]), turns))
    return found


@pytest.mark.parametrize("name", ["growing", "rows", "dummies"])
def test_rewards_of_turns_become_the_advantages_that_one_computes_by_hand(name: str, one_rank: dict[str, Seen]) -> None:
    """Discounted returns less the group's mean over its deviation, each trajectory once; dummies have no part in it."""
    rows, seen = turn_batches()[name], one_rank[f"turns_{name}"]
    by_trajectory = advantages_of_turns(seen)
    places = {(row["rollout_id"], tuple(row["tokens"])): at for at, row in enumerate(rows)}

    expected = hand_computed(rows)
    assert by_trajectory.keys() == expected.keys()
    for number, own in by_trajectory.items():
        in_order = sorted(own, key=lambda entry: places[number, entry[0]])
        assert [value for _, turns in in_order for value, _ in turns] == pytest.approx(expected[number], rel=1e-5)


@pytest.mark.parametrize("name", ["growing", "rows", "dummies"])
def test_the_rows_of_a_trajectory_with_rewards_of_turns_weigh_alike(name: str, one_rank: dict[str, Seen]) -> None:
    """For the weights that sampled the batch, slime's loss is minus the mean over trajectories, rows and tokens."""
    seen = one_rank[f"turns_{name}"]
    of_rows = {
        number: [
            sum(value * length for value, length in turns) / sum(length for _, length in turns) for _, turns in own
        ]
        for number, own in advantages_of_turns(seen).items()
    }

    expected = -fmean(fmean(values) for values in of_rows.values())
    assert seen["steps"][0]["losses"]["pg_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert seen["steps"][0]["grad_norm"] > 0


def test_a_batch_without_rewards_of_turns_is_trained_as_without_the_hook_bit_for_bit(one_rank: dict[str, Seen]) -> None:
    with_hook, without = one_rank["no_turns"], one_rank["android_world_history"]

    assert with_hook["data"]["advantages"] == without["data"]["advantages"]
    assert with_hook["steps"] == without["steps"]
    assert with_hook["weights_moved"] == without["weights_moved"]


def test_a_group_without_rewards_of_turns_is_trained_alike_beside_one_that_has_some(one_rank: dict[str, Seen]) -> None:
    half, without = (
        {(row["rollout_ids"], tuple(row["tokens"])): row["advantages"] for row in rows_seen(one_rank[name])}
        for name in HALF
    )

    assert {number for number, tokens in half if half[number, tokens] != without[number, tokens]} == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def vision(checkout: Path, folder: Path) -> Path:
    if not (checkout / "slime_plugins" / "models" / "qwen3_5_vl.py").is_file():
        pytest.skip("this slime trains vision models through Megatron-Bridge, which is not tried here")
    return make_vision_rollout(checkout, folder / "vision")


@pytest.fixture(scope="module")
def seeing(checkout: Path, vision: Path, folder: Path) -> Seen:
    batches = [Batch(name="vision", rows=vision / "rows.pt", changes={**ONE_POLICY, **UNDONE})]
    seen: Seen = train(checkout, vision / "model", folder / "seeing", batches, arguments=OF_QWEN3_5_VL)[0]["vision"]
    return seen


def test_rows_with_pictures_have_the_log_probs_of_the_model_itself(seeing: Seen, vision: Path) -> None:
    """Pictures of every size beside text alone and a dummy, rows of odd length, packed into one micro-batch."""
    said = json.loads((vision / "log_probs.json").read_text())
    rows = list(rows_seen(seeing))

    assert len(rows) == len(said)
    for row in rows:
        expected = [entry["log_probs"] for entry in said if entry["tokens"] == row["tokens"]]
        assert any(row["log_probs"] == pytest.approx(one, abs=1e-4) for one in expected)


def test_every_picture_reaches_the_model_beside_its_row(seeing: Seen, vision: Path) -> None:
    said = json.loads((vision / "log_probs.json").read_text())
    grids_of = {json.dumps(entry["tokens"]): entry["image_grid_thw"] for entry in said}
    rows = list(rows_seen(seeing))

    for grids, members in zip(seeing["images"], seeing["micro_batches"], strict=True):
        assert (grids or []) == [grid for member in members for grid in grids_of[json.dumps(rows[member]["tokens"])]]
    assert sum(len(grids or []) for grids in seeing["images"]) == 10


def test_the_vision_encoder_is_trained_too_and_the_gradient_is_on_tokens_with_mask_1(seeing: Seen) -> None:
    of_encoder = {name: size for name, size in seeing["gradients"].items() if ".visual." in name}

    assert any(size > 0 for size in of_encoder.values())
    assert gradient_places(seeing) == masked_places(seeing)


@pytest.fixture(scope="module")
def reported(checkout: Path, model: Path, folder: Path) -> tuple[Seen, dict[str, Any], str]:
    """A rollout that a served buffer played, trained by slime: what was seen, and what the buffer says of it after."""
    with played("math") as (url, samples):
        rows = [line_of(sample) | {"job_id": "math", "prompt": sample.prompt} for sample in samples]
        for row in rows:
            row["metadata"]["row"] = 0
        to_buffer = {"rollout_buffer_url": url, "rollout_buffer_job_id": "math", "use_rollout_entropy": True}
        batch = Batch(name="math", rows=rows, changes={**ONE_POLICY, **UNDONE, **to_buffer})
        seen = train(checkout, model, folder / "reported", [batch])[0]["math"]
        command = [sys.executable, "-m", "slime_plugins.rollout_buffer", "mismatch", "math", "--url", url]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    return seen, json.loads(as_json.stdout), listed.stdout


def test_what_slime_computed_of_each_row_is_back_at_the_buffer_that_played_it(
    reported: tuple[Seen, dict[str, Any], str],
) -> None:
    """The hook posts from slime's own step; ``rollout-buffer mismatch`` lists the same gaps that slime trained with."""
    seen, said, listed = reported
    gaps = [
        abs(own - engines)
        for row in rows_seen(seen)
        for own, engines, mask in zip(row["log_probs"], row["rollout_log_probs"], row["loss_masks"], strict=True)
        if mask
    ]

    assert (said["rows"], said["tokens"]) == (len(seen["data"]["tokens"]), len(gaps))
    assert said["mean"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-4)
    assert said["max"] == pytest.approx(max(gaps), abs=1e-4)
    assert said["worst"][0]["uid"] in listed


def test_advantage_entropy_and_shares_of_a_row_come_back_with_it(reported: tuple[Seen, dict[str, Any], str]) -> None:
    _, said, _ = reported

    worst = said["worst"][0]
    assert worst["advantage"] is not None
    assert worst["weight_lag"] is not None or worst["gap"] > 0
