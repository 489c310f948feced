"""slime's own replay of experts and of kept ids, on a tiny Qwen3-MoE without a GPU, of what Samples of a buffer carry.

Needs what ``test_slime_train_step`` needs, and replaces what that test replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.rollout.agent_rollout_sample_fields import fill_records
from slime.utils.types import Sample
from tests.slime_step.batches import Row, mixed_rewards, recorded, with_dummies
from tests.slime_step.running import (
    EXPERTS,
    MODEL,
    NEEDS_MEGATRON,
    NEEDS_SLIME,
    OF_QWEN3_MOE,
    Batch,
    checkout_with_overlay,
    make_model_with_experts,
    train,
)

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), NEEDS_SLIME, NEEDS_MEGATRON]

LAYERS, TOP_K = 2, 2
ARGS = SimpleNamespace(use_rollout_routing_replay=True, num_layers=LAYERS, moe_router_topk=TOP_K)
ONE_POLICY = {"get_mismatch_metrics": True, "custom_tis_function_path": "megatron_layer.no_correction"}
DUMMY = 2


def with_experts(rows: Sequence[Row], *, moved: int = 0) -> list[Row]:
    """Each row with experts as a rollout hands them over: two different ones of each layer for each pass."""
    filled = []
    for number, row in enumerate(rows):
        passes = len(row["tokens"]) - 1
        first = np.random.default_rng(number).integers(0, EXPERTS, (passes, LAYERS))
        experts = np.stack([first, (first + 1 + np.arange(LAYERS)) % EXPERTS], axis=-1).reshape(passes, -1)
        experts = np.roll(experts, moved, axis=0).astype(np.uint8)
        sample = Sample(
            tokens=row["tokens"],
            response_length=row["response_length"],
            rollout_routed_experts=None if row["remove_sample"] else experts,
        )
        fill_records([sample], ARGS)
        filled.append({**row, "rollout_routed_experts": sample.rollout_routed_experts.tolist()})
    return filled


def with_kept_ids(rows: Sequence[Row]) -> list[Row]:
    """Each row as if ``top_p`` had kept every id at every second token, and the sampled one alone at the others."""
    filled = []
    for row in rows:
        response = row["tokens"][len(row["tokens"]) - row["response_length"] :]
        spans = [_kept(token, number) for number, token in enumerate(response)]
        spans = [span if trained else [] for span, trained in zip(spans, row["loss_mask"], strict=True)]
        sample = Sample(tokens=row["tokens"], response_length=row["response_length"])
        if not row["remove_sample"]:
            sample.rollout_top_p_token_ids = np.array([one for span in spans for one in span], np.int32)
            sample.rollout_top_p_token_offsets = np.cumsum([0, *map(len, spans)], dtype=np.int32)
        fill_records([sample], SimpleNamespace(rollout_top_p=0.9))
        names = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
        filled.append({**row, **{name: getattr(sample, name).tolist() for name in names}})
    return filled


def _kept(token: int, number: int) -> Sequence[int]:
    return [token] if number % 2 else range(int(MODEL["vocab_size"]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("routing_replay")
    checkout = checkout_with_overlay(folder / "slime")
    model = make_model_with_experts(folder / "model")
    rows = with_dummies(mixed_rewards(recorded("math")), [DUMMY])
    batches = [
        Batch(name="told", rows=with_experts(rows), changes=ONE_POLICY),
        Batch(name="again", rows=with_experts(rows), changes=ONE_POLICY),
        Batch(name="moved", rows=with_experts(rows, moved=1), changes=ONE_POLICY),
        Batch(name="kept", rows=with_kept_ids(with_experts(rows)), changes={**ONE_POLICY, "rollout_top_p": 0.9}),
    ]
    (report,) = train(checkout, model, Path(folder / "run"), batches, arguments=OF_QWEN3_MOE)
    return {"rows": batches[0].rows, **report}


def test_every_pass_of_every_layer_is_routed_by_the_experts_that_were_told(seen: dict[str, Any]) -> None:
    routed = [tuple(map(tuple, one)) for one in seen["told"]["routes"]]
    assert routed
    for row in seen["rows"]:
        for layer in range(LAYERS):
            told = tuple(tuple(one[layer]) for one in row["rollout_routed_experts"])
            assert any(told == one[at : at + len(told)] for one in routed for at in range(len(one) - len(told) + 1))


def test_log_probs_are_those_of_the_experts_that_were_told(seen: dict[str, Any]) -> None:
    told, again, moved = (seen[name]["data"]["log_probs"] for name in ("told", "again", "moved"))
    assert told == again
    for number, (one, other) in enumerate(zip(told, moved, strict=True)):
        if number != DUMMY:
            assert max(abs(before - after) for before, after in zip(one, other, strict=True)) > 1e-3


def test_the_step_moves_the_routers_and_the_experts(seen: dict[str, Any]) -> None:
    (step,) = seen["told"]["steps"]
    assert step["grad_norm"] > 0
    assert any("router" in name and size > 0 for name, size in seen["told"]["gradients"].items())
    assert any("experts" in name and size > 0 for name, size in seen["told"]["gradients"].items())


def test_log_probs_are_those_among_the_ids_that_were_kept_for_each_token(seen: dict[str, Any]) -> None:
    plain, kept, masks = (
        seen["told"]["data"]["log_probs"],
        seen["kept"]["data"]["log_probs"],
        seen["kept"]["data"]["loss_masks"],
    )
    compared = 0
    for of_all, of_kept, mask in zip(plain, kept, masks, strict=True):
        for number, trained in enumerate(mask):
            if trained:
                assert of_kept[number] == pytest.approx(0.0 if number % 2 else of_all[number], abs=1e-5)
                compared += abs(of_all[number]) > 1e-3
    assert compared > 100
