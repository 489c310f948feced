"""The reference trainer: what it reports, and that it refuses log-probs that are not its own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the reference trainer needs torch")

from lab.tests.tiny_policy import VOCABULARY, policy  # noqa: E402 - below the skip
from rollout_buffer_lab.learning import grpo  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.arms import Arm, corruption_of  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.batches import batch_of, trained_logits  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.grpo import GrpoSettings, GrpoTrainer, LogProbGapError  # noqa: E402 - below the skip
from rollout_buffer_lab.learning.losses import token_log_probs  # noqa: E402 - below the skip
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutRow, RolloutTrajectory  # noqa: E402 - below the skip

pytestmark = pytest.mark.usefixtures("one_thread")

LOOSE = GrpoSettings(max_log_prob_gap=None)


def row(ids: list[int], mask: list[int], log_probs: list[float] | None = None, number: int = 0) -> RolloutRow:
    return RolloutRow(
        uid="u",
        group_index=0,
        number=number,
        token_ids=ids,
        loss_mask=mask,
        log_probs=log_probs,
        response_start=mask.index(1),
        reward=0.0,
    )


def trajectory(*rows: RolloutRow, reward: float = 0.0, group: int = 0, version: int = 0) -> RolloutTrajectory:
    return RolloutTrajectory(
        uid="u",
        instance_id="i",
        group_index=group,
        epoch=0,
        slot=0,
        reward=reward,
        raw_reward=reward,
        rows=rows,
        weight_version=version,
        dummy_reason=None if rows else "nothing was played",
    )


def played(model: Any, count: int, rng: random.Random, version: int = 0) -> list[RolloutTrajectory]:
    """Groups of four: a prompt of two ids, three sampled tokens with the model's own log-probs. 7 earns a reward."""
    found = []
    for number in range(count):
        prompt = [rng.randrange(VOCABULARY), 1]
        for _ in range(4):
            ids, log_probs = list(prompt), [0.0, 0.0]
            for _ in range(3):
                with torch.no_grad():
                    distribution = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
                token = int(torch.multinomial(distribution.exp(), 1))
                ids.append(token)
                log_probs.append(float(distribution[token]))
            one = row(ids, [0, 0, 1, 1, 1], log_probs)
            found.append(trajectory(one, reward=ids[2:].count(7) / 3, group=number, version=version))
    return found


def of_turns(ids: list[int], mask: list[int], returns: list[float], version_spans: Any = ()) -> RolloutRow:
    """A row whose turns earned rewards, or that several weights sampled."""
    return replace(row(ids, mask, [0.0] * len(ids)), returns=returns, version_spans=version_spans)


def weights(model: Any) -> Any:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


# --- steps -----------------------------------------------------------------------------------------------------------


def test_each_row_is_reported_with_its_own_log_probs_and_the_advantage_of_its_trajectory() -> None:
    two_rows = trajectory(row([2, 5], [0, 1], [0.0, -1.0]), row([3, 6, 7], [0, 1, 1], [0.0, -2.0, -3.0], 1), reward=1.0)
    other = trajectory(row([4, 8], [0, 1], [0.0, -4.0]), reward=0.0)
    model = policy()
    expected = {
        tuple(each.token_ids): token_log_probs(trained_logits(model, one), one.targets).tolist()
        for of in (two_rows, other)
        for each in of.rows
        for one in [batch_of([replace(of, rows=(each,))])]
    }
    trainer = GrpoTrainer(model, LOOSE)

    trainer.step([two_rows, other])

    said = {tuple(each.rollout_log_probs or ()): each for each in trainer.row_reports}
    assert set(said) == {(-1.0,), (-2.0, -3.0), (-4.0,)}
    assert said[-1.0,].log_probs == pytest.approx(expected[2, 5], abs=1e-5)
    assert said[-2.0, -3.0].log_probs == pytest.approx(expected[3, 6, 7], abs=1e-5)
    assert said[-2.0, -3.0].row == 1
    assert said[-1.0,].advantage == said[-2.0, -3.0].advantage == -(said[-4.0,].advantage or 0.0)


def test_log_probs_of_other_weights_stop_the_step_before_anything_is_trained() -> None:
    model = policy()
    trainer, before = GrpoTrainer(model, GrpoSettings()), weights(model)

    with pytest.raises(LogProbGapError, match="the mask, the ids or the weights"):
        trainer.step(played(policy(seed=9), 2, random.Random(0)))

    assert torch.equal(weights(model), before)
    assert trainer.version == 0


def test_a_step_without_a_trajectory_to_train_is_refused_in_a_sentence() -> None:
    trainer = GrpoTrainer(policy(), LOOSE)

    with pytest.raises(ValueError, match="a step needs a trajectory that is no dummy"):
        trainer.step([trajectory(), trajectory()])

    assert trainer.version == 0


def late(trajectories: list[RolloutTrajectory]) -> list[RolloutTrajectory]:
    return corruption_of(Arm.LATE_MASK, policy(), 0)(trajectories)


def test_log_probs_of_older_weights_are_compared_with_those_weights() -> None:
    rng, first = random.Random(0), policy()
    fast = GrpoSettings(learning_rate=1e-2, warmup_updates=0, kept_versions=2)
    trainer = GrpoTrainer(policy(), fast)
    for version in range(2):
        trainer.step(played(trainer.policy, 2, rng, version=version))
    old = played(first, 2, rng, version=0)

    with pytest.raises(LogProbGapError):
        trainer.step(late(old))
    with pytest.raises(LogProbGapError):  # they are not of the weights that they name
        trainer.step([replace(each, weight_version=1) for each in old])
    report = trainer.step(old)

    assert report.log_prob_gap is not None
    assert report.log_prob_gap < 1e-5
    assert (report.checked, report.lag, report.largest_lag) == (1.0, 2.0, 2)
    assert report.importance != pytest.approx(1.0, abs=1e-3)


def test_a_late_mask_of_a_few_old_tokens_is_not_lost_among_the_new_ones() -> None:
    rng, first = random.Random(0), policy()
    trainer = GrpoTrainer(policy(), GrpoSettings())
    trainer.step(played(trainer.policy, 2, rng))
    new = played(trainer.policy, 6, rng, version=1)

    with pytest.raises(LogProbGapError):
        trainer.step([*new, *late(played(first, 1, rng, version=0))])


def test_tokens_of_a_version_that_the_trainer_has_not_made_are_refused() -> None:
    model = policy()

    with pytest.raises(LogProbGapError, match="weight version 1, and the trainer's newest is 0"):
        GrpoTrainer(policy(), GrpoSettings()).step(played(model, 2, random.Random(0), version=1))


# --- control arms ----------------------------------------------------------------------------------------------------

BATCH = [
    trajectory(row([1, 2, 3, 4, 5], [0, 1, 0, 1, 1], [0.0, -1.0, 0.0, -2.0, -3.0]), reward=1.0, group=0),
    trajectory(row([1, 2, 3], [0, 1, 1], [0.0, -4.0, -5.0]), reward=0.0, group=1),
]


def test_a_late_mask_trains_the_token_after_each_sampled_one() -> None:
    (late, _) = corruption_of(Arm.LATE_MASK, policy(), 0)(BATCH)

    assert late.rows[0].loss_mask == [0, 0, 1, 0, 1]
    assert late.rows[0].log_probs == [0.0, 0.0, -1.0, 0.0, -2.0]


def test_log_probs_of_another_version_are_those_of_the_first_weights() -> None:
    model = policy()
    spoil = corruption_of(Arm.OTHER_VERSION, model, 0)
    first = policy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)

    (spoilt, _) = spoil(BATCH)

    batch = batch_of([BATCH[0]])
    expected = token_log_probs(trained_logits(first, batch), batch.targets).tolist()
    log_probs = spoilt.rows[0].log_probs
    assert log_probs is not None
    assert [log_probs[place] for place in (1, 3, 4)] == pytest.approx(expected, abs=1e-6)


# --- rewards of turns ------------------------------------------------------------------------------------------------


def test_tokens_of_turns_that_earned_rewards_have_the_advantage_of_their_return() -> None:
    """In their group alone; another group of the same step is compared by trajectory."""
    first = replace(trajectory(of_turns([1, 2, 3], [0, 1, 1], [0.0, 3.0, 1.0])), turn_returns=(3.0, 1.0))
    others = [trajectory(row([1, 4], [0, 1]), reward=reward, group=group) for reward, group in ((0, 0), (1, 1), (0, 1))]
    played = [first, *others]
    batch = batch_of(played)

    found = grpo._token_advantages(batch, played, grpo._baselines(played))
    mean, deviation = 1.0, (((2.0**2 + 0.0) / 2 + 1.0) / 1) ** 0.5
    expected = [(3.0 - mean) / deviation, 0.0, -mean / deviation, 0.5**0.5, -(0.5**0.5)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
