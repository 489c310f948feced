"""Steps of the reference trainer against a second one that is written from the formulas: item by item, token by token.

It calls nothing of ``learning``. Delivered items go in on one side, weights come out on the other, so that whatever
mixes up rewards, weights, log-probs, versions or advantages in between moves the weights elsewhere.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the reference trainer needs torch")

from lab.tests.tiny_policy import VOCABULARY, policy  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.grpo import GrpoSettings, GrpoTrainer  # noqa: E402 - below the skip
from slime.utils.mask_utils import Generation  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.settings import RowSettings  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.wire import RolloutItem  # noqa: E402 - below the skip

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, GROUPS, MEMBERS = 3, 3, 5
LEARNING_RATE, WARMUP, MINIBATCHES, SEED = 1e-2, 6, 4, 5
CLIP, CLIP_HIGH, CAP, NORM = 0.2, 0.28, 1.25, 1.0
BETAS, EPSILON = (0.9, 0.98), 1e-8
ROWS = RowSettings(
    samples_per_group=MEMBERS, masks=MaskSettings(tokenizer_path=None, loss_mask_type="qwen", source=None)
)


# --- episodes --------------------------------------------------------------------------------------------------------


def turn(model: Any, version: int, prompt: list[int], rng: random.Random) -> Generation:
    ids, log_probs = list(prompt), []
    for _ in range(rng.randint(1, 4)):
        with torch.no_grad():
            distribution = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
        ids.append(rng.choices(range(VOCABULARY), distribution.exp().tolist())[0])
        log_probs.append(float(distribution[ids[-1]]))
    return Generation(
        prompt_ids=prompt, output_ids=ids[len(prompt) :], output_log_probs=log_probs, weight_version=str(version)
    )


def episodes(models: Sequence[Any], rng: random.Random) -> list[RolloutItem]:
    """Groups of one step: members of one turn or two, in one row or two, by the newest weights, those before or both.

    One member of each group could not be played.
    """
    newest = len(models) - 1
    items = []
    for group in range(GROUPS):
        for slot in range(MEMBERS):
            dummy = slot == group
            older = max(0, newest - rng.randint(0, 1))
            generations = [turn(models[older], older, [group, 1], rng)]
            if rng.random() < 0.7:
                before = [*generations[0].prompt_ids, *generations[0].output_ids] if rng.random() < 0.5 else [slot]
                generations.append(turn(models[newest], newest, [*before, 2, 3], rng))
            reward = rng.random()
            items.append(
                RolloutItem(
                    uid=f"{group} {slot}",
                    instance_id=str(group),
                    reward=reward,
                    raw_reward=reward,
                    generations=() if dummy else generations,
                    group_index=group,
                    slot=slot,
                    weight_version=older,
                    remove_sample=dummy,
                )
            )
    return items


# --- the formulas ----------------------------------------------------------------------------------------------------


@dataclass
class Expected:
    loss: float
    clipped: float
    importance: float
    importance_cut: float
    norm: float


class Formulas:
    """DeepSeekMath's advantages, PPO's clip, truncated importance weights and AdamW, each as it is written down."""

    def __init__(self) -> None:
        self.model, self.updates = policy(), 0
        self.order = torch.Generator().manual_seed(SEED)
        self.first = [torch.zeros_like(each) for each in self.model.parameters()]
        self.second = [torch.zeros_like(each) for each in self.model.parameters()]

    def step(self, items: Sequence[RolloutItem]) -> Expected:
        start = copy.deepcopy(self.model)
        played = [item for item in items if item.generations]
        parts = torch.randperm(len(played), generator=self.order).chunk(MINIBATCHES)
        return _mean([self._update(start, [played[at] for at in part.tolist()], played) for part in parts])

    def _update(self, start: Any, part: Sequence[RolloutItem], played: Sequence[RolloutItem]) -> Expected:
        loss, clipped, weights, cut = torch.zeros(()), [], [], []
        for item in part:
            siblings = [float(each.reward or 0.0) for each in played if each.group_index == item.group_index]
            advantage = (float(item.reward or 0.0) - fmean(siblings)) / (stdev(siblings) + 1e-6)
            tokens = sum(len(generation.output_ids) for generation in item.generations)
            for generation in item.generations:
                now, before = _log_probs(self.model, generation), _log_probs(start, generation).detach()
                for at, engine in enumerate(generation.output_log_probs or ()):
                    weight = min(math.exp(float(before[at]) - engine), CAP)
                    ratio = torch.exp(now[at] - before[at])
                    inside = torch.clamp(ratio.detach(), 1 - CLIP, 1 + CLIP_HIGH)
                    is_cut = float((inside - ratio.detach()) * advantage) < 0  # else the free gain is the smaller one
                    gain = (inside if is_cut else ratio) * advantage
                    loss = loss - gain * weight / tokens / len(part)
                    clipped.append(float(is_cut))
                    weights.append(weight)
                    cut.append(float(weight == CAP))
        return Expected(loss.item(), fmean(clipped), fmean(weights), fmean(cut), self._adam(loss))

    def _adam(self, loss: Any) -> float:
        """AdamW without decay, of a gradient that is shortened to ``NORM``; the rate rises over ``WARMUP`` updates."""
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float((each**2).sum()) for each in gradients))
        rate = LEARNING_RATE * (1 / WARMUP + (1 - 1 / WARMUP) * min(self.updates, WARMUP) / WARMUP)
        self.updates += 1
        with torch.no_grad():
            for at, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
                shortened = gradient * min(1.0, NORM / (norm + 1e-6))
                self.first[at] = BETAS[0] * self.first[at] + (1 - BETAS[0]) * shortened
                self.second[at] = BETAS[1] * self.second[at] + (1 - BETAS[1]) * shortened**2
                mean = self.first[at] / (1 - BETAS[0] ** self.updates)
                square = self.second[at] / (1 - BETAS[1] ** self.updates)
                parameter -= rate * mean / (square.sqrt() + EPSILON)
        return norm


def _log_probs(model: Any, generation: Generation) -> Any:
    ids = [*generation.prompt_ids, *generation.output_ids]
    logits = model(torch.tensor([ids])).logits[0]
    begin = len(generation.prompt_ids)
    return torch.stack([torch.log_softmax(logits[at - 1], -1)[ids[at]] for at in range(begin, len(ids))])


def _mean(updates: Sequence[Expected]) -> Expected:
    return Expected(*(fmean(values) for values in zip(*(vars(each).values() for each in updates), strict=True)))


# --- the claim -------------------------------------------------------------------------------------------------------


def flat(model: Any) -> Any:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.timeout(300)
def test_steps_on_delivered_items_move_the_weights_where_the_formulas_say() -> None:
    rng, formulas, rows = random.Random(2), Formulas(), RowBuilder(ROWS)
    settings = GrpoSettings(
        learning_rate=LEARNING_RATE,
        warmup_updates=WARMUP,
        minibatches=MINIBATCHES,
        clip=CLIP,
        clip_high=CLIP_HIGH,
        importance_cap=CAP,
        max_gradient_norm=NORM,
        max_log_prob_gap=1e-4,
    )
    trainer = GrpoTrainer(policy(), settings, seed=SEED)
    models, seen = [copy.deepcopy(formulas.model)], []

    for step in range(STEPS):
        items = episodes(models, rng)
        groups = rows.groups(items, trainer_version=step)
        report = trainer.step([each for group in groups for each in group.trajectories])
        expected = formulas.step(items)

        assert report.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
        assert report.clipped == pytest.approx(expected.clipped, abs=1e-6)
        assert report.importance == pytest.approx(expected.importance, rel=1e-4)
        assert report.importance_cut == pytest.approx(expected.importance_cut, abs=1e-6)
        assert report.gradient_norm == pytest.approx(expected.norm, rel=1e-3)
        moved = flat(formulas.model) - flat(models[-1])
        off = flat(trainer.policy) - flat(formulas.model)
        assert float(off.norm()) < 1e-3 * float(moved.norm())
        models.append(copy.deepcopy(formulas.model))
        seen.append(report)

    # The episodes are such that each formula matters.
    assert max(report.clipped for report in seen) > 0
    assert max(report.importance_cut for report in seen) > 0
    assert max(report.largest_lag for report in seen) == 1
    assert 0 < seen[-1].lag < 1
    assert all(report.checked == pytest.approx(1.0) for report in seen)
