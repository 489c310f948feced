"""The reference trainer's formulas by hand and against slime's own; whole steps: ``test_steps_against_formulas``."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the reference trainer needs torch")

from rollout_buffer_lab.learning.losses import (  # noqa: E402 - they need torch
    entropies,
    importance_weights,
    policy_loss,
    token_log_probs,
)


def test_log_probs_and_entropy_are_those_of_the_softmax_at_a_temperature() -> None:
    logits = torch.tensor([[math.log(1.0), math.log(3.0)], [0.0, 0.0]])

    assert token_log_probs(logits, torch.tensor([1, 0])).exp().tolist() == pytest.approx([0.75, 0.5])
    assert token_log_probs(logits, torch.tensor([1, 0]), temperature=0.5).exp().tolist() == pytest.approx([0.9, 0.5])
    assert entropies(logits).tolist() == pytest.approx([-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2)])


def test_importance_weights_carry_no_gradient() -> None:
    trainer = torch.tensor([0.0, -1.0]).requires_grad_()
    assert not importance_weights(trainer, torch.tensor([-3.0, -1.0])).requires_grad


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
