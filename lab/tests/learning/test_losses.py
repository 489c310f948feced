"""The reference trainer's formulas: by hand, as properties, and against slime's own where a checkout of it is there."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch", reason="the reference trainer needs torch")

from rollout_buffer_lab.learning.losses import (  # noqa: E402 - they need torch
    entropies,
    importance_weights,
    policy_loss,
    token_log_probs,
    token_weights,
)


def vector(*values: float) -> Any:
    return torch.tensor(values)


def test_log_probs_and_entropy_are_those_of_the_softmax_at_a_temperature() -> None:
    logits = torch.tensor([[math.log(1.0), math.log(3.0)], [0.0, 0.0]])

    assert token_log_probs(logits, torch.tensor([1, 0])).exp().tolist() == pytest.approx([0.75, 0.5])
    assert token_log_probs(logits, torch.tensor([1, 0]), temperature=0.5).exp().tolist() == pytest.approx([0.9, 0.5])
    assert entropies(logits).tolist() == pytest.approx([-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2)])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_every_trajectory_weighs_the_same_however_many_tokens_it_has(of: list[int]) -> None:
    weights, trajectories = token_weights(torch.tensor(of)), set(of)

    for trajectory in trajectories:
        assert float(weights[torch.tensor(of) == trajectory].sum()) == pytest.approx(1 / len(trajectories), rel=1e-5)


def test_importance_weights_are_cut_above_only_and_carry_no_gradient() -> None:
    trainer = vector(0.0, -1.0, -1.0).requires_grad_()

    found = importance_weights(trainer, vector(-3.0, -1.0, 0.0), cap=2.0)

    assert found.tolist() == pytest.approx([2.0, 1.0, math.exp(-1)])
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.0, 1.0, True),  # inside
        (1.25, 1.0, True),  # above 1 + clip, below 1 + clip_high
        (1.3, 1.0, False),  # good, and far enough
        (0.7, 1.0, True),  # good, and less likely than before: may come back
        (0.7, -1.0, False),  # bad, and far enough
        (1.5, -1.0, True),  # bad, and more likely than before: must come back
    ],
)
def test_the_clip_stops_a_token_only_in_the_direction_it_is_pushed(
    ratio: float, advantage: float, gradient: bool
) -> None:
    new = vector(math.log(ratio)).requires_grad_()

    found = policy_loss(new, vector(0.0), vector(advantage), vector(1.0), clip=0.2, clip_high=0.28)
    found.loss.backward()

    assert (float(new.grad.abs()) > 0) is gradient
    assert found.clipped == (0.0 if gradient else 1.0)


# --- against slime -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slimes() -> ModuleType:
    checkout = os.environ.get("ROLLOUT_BUFFER_TEST_SLIME")
    path = Path(checkout or "") / "slime" / "utils" / "ppo_utils.py"
    if not checkout or not path.is_file():
        pytest.skip("ROLLOUT_BUFFER_TEST_SLIME names no checkout of slime")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    spec = importlib.util.spec_from_file_location("slimes_ppo_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slime
def test_the_clipped_loss_is_slimes(slimes: ModuleType) -> None:
    torch.manual_seed(0)
    old, new, advantages = -3 * torch.rand(500), -3 * torch.rand(500), torch.randn(500)

    theirs, clipped = slimes.compute_policy_loss(old - new, advantages, 0.2, 0.28)
    ours = policy_loss(new, old, advantages, torch.full((500,), 1 / 500), clip=0.2, clip_high=0.28)

    assert float(ours.loss) == pytest.approx(float(theirs.mean()), rel=1e-5)
    assert ours.clipped == pytest.approx(float(clipped.mean()), rel=1e-5)


@pytest.mark.slime
def test_the_advantage_of_a_token_is_slimes(slimes: ModuleType) -> None:
    rewards = vector(-1, 1, 0)
    tokens = [torch.zeros(4), torch.zeros(2), torch.zeros(1)]

    theirs = slimes.get_grpo_returns(rewards, tokens)

    assert [float(one[0]) for one in theirs] == rewards.tolist()
    assert all(bool((one == one[0]).all()) for one in theirs)
