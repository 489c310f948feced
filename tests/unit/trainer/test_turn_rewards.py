"""Rewards of turns become returns of their tokens, and these become advantages within a group."""

from __future__ import annotations

import pickle
import types
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout import post_process_rewards
from slime.rollout.agent_rollout_advantages import give_turn_advantages, set_advantages
from slime.rollout.agent_rollout_samples import finish_batch, rows_of, samples_of_group
from slime.rollout.agent_rollout_settings import ADVANTAGE_PATH, read_row_settings
from slime.utils.mask_utils import Generation
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.rules.reward_normalization import group_baseline, token_returns
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.types import Outcome, StopReason, Trajectory
from slime_plugins.rollout_buffer.wire import RolloutItem, decode_item
from slime_plugins.rollout_buffer.wire.written_items import decode_written_item, encode_body

GROWING = (Generation([1, 2], [10, 11], [-0.5, -0.5]), Generation([1, 2, 10, 11, 3], [12], [-1.0]))
OF_TURNS = (Generation([1, 2], [10, 11], [-0.5, -0.5]), Generation([1, 9], [12, 13, 14], [-1.0, -1.0, -1.0]))
WITH_HOOK = {"custom_advantage_function_path": ADVANTAGE_PATH, "grpo_std_normalization": False}

rewards = st.floats(-8, 8, width=16)


def item(uid: str, turn_rewards: Sequence[float] | None, **changes: Any) -> RolloutItem:
    earned = None if turn_rewards is None else tuple(turn_rewards)
    values: dict[str, Any] = {"generations": GROWING, "reward": 0.5, "group_index": 3, **changes}
    return RolloutItem(uid=uid, instance_id="task", turn_rewards=earned, **values)


def samples(*items: RolloutItem, **changes: Any) -> list[Sample]:
    """The rows of one group as a rollout hands them to slime, with their advantages."""
    args = arguments(len(items), **changes)
    (group,) = RowBuilder(read_row_settings(args, len(items))).groups(items)
    batch = finish_batch([samples_of_group(group)], 0, args)
    flat = [row for group in batch for member in group for row in rows_of(member)]
    give_turn_advantages(args, flat)
    return flat


def arguments(members: int, **changes: Any) -> Any:
    values = {"hf_checkpoint": str(DEMO_TOKENIZER_PATH), "n_samples_per_prompt": members, **WITH_HOOK, **changes}
    return trainer_args(**values)


def advantages(sample: Sample) -> Any:
    return getattr(sample.index, "advantages", None)


# --- formulas --------------------------------------------------------------------------------------------------------


@given(earned=st.lists(rewards, min_size=1, max_size=5), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_a_token_returns_what_is_earned_from_its_turn_on(earned: list[float], discount: float) -> None:
    returns = token_returns(earned, None, [2] * len(earned), discount)

    for turn, tokens in enumerate(returns):
        expected = sum(discount ** (later - turn) * earned[later] for later in range(turn, len(earned)))
        assert tokens == pytest.approx([expected, expected], rel=1e-6, abs=1e-6)


def test_rewards_of_tokens_count_from_their_token_on() -> None:
    returns = token_returns([1.0, 2.0], [None, (0.0, -4.0, 0.0)], [2, 3], 0.5)

    assert returns == [[1.0 + 0.5 * -2.0] * 2, [-2.0, -2.0, 2.0]]


def test_a_trajectory_counts_once_and_its_turns_a_share_of_it() -> None:
    mean, scale = group_baseline([[4.0, 0.0], [1.0]])

    assert mean == 1.5
    assert scale == pytest.approx(1 / (((2.5**2 + 1.5**2) / 2 + 0.5**2) ** 0.5), rel=1e-5)


@given(earned=st.lists(rewards, min_size=2, max_size=6))
def test_advantages_of_single_turns_are_those_of_grpo_by_trajectory(earned: list[float]) -> None:
    plain = [Sample(reward=reward, group_index=0, rollout_id=number) for number, reward in enumerate(earned)]
    mean, scale = group_baseline([[reward] for reward in earned])

    assert [(reward - mean) * scale for reward in earned] == post_process_rewards(trainer_args(), plain)[1]


# --- rows and samples ------------------------------------------------------------------------------------------------


def test_each_token_of_a_growing_row_has_the_advantage_of_its_turn() -> None:
    first, second = samples(item("a", [1.0, 2.0]), item("b", [0.0, 0.0]))

    assert first.loss_mask == [1, 1, 0, 1]
    assert advantages(first) == [3.0 - 1.25, 3.0 - 1.25, 0.0, 2.0 - 1.25]
    assert advantages(second) == [-1.25, -1.25, 0.0, -1.25]


def test_a_trajectory_that_says_nothing_is_one_turn_that_earned_its_reward() -> None:
    first, second = samples(item("a", [1.0, 2.0]), item("b", None, reward=0.5))

    assert advantages(second) == [0.5 - 1.5, 0.5 - 1.5, 0.0, 0.5 - 1.5]
    assert advantages(first)[3] == 2.0 - 1.5


def test_dummies_and_what_is_left_alone_in_its_group_get_no_advantage() -> None:
    broken = item("b", None, remove_sample=True, reward=None, generations=())
    played, dummy = samples(item("a", [1.0, 2.0]), broken)

    assert advantages(dummy) is None
    assert advantages(played) == [0.0, 0.0, 0.0, 0.0]


def test_rewards_of_turns_that_fit_no_row_are_a_dummy_that_says_so() -> None:
    """Of messages alone, where the template renders one row of the whole conversation."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cut = {"rollout_buffer_loss_mask": "tests.unit.trainer.test_turn_rewards:OneMask"}
    odd, _ = samples(item("a", [1.0], generations=(), messages=messages), item("b", [0.0, 0.0]), **cut)

    assert odd.remove_sample
    assert "1 turns have rewards, but 0 turns are trained" in odd.metadata["dummy_reason"]


class OneMask:
    """A loss mask of one's own, which does not tell turns."""

    def __init__(self, tokenizer: Any, tokenizer_type: str) -> None: ...

    def get_loss_mask(self, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
        return [1, 2, 3], [0, 1, 1]


def test_turns_of_messages_alone_are_found_where_each_is_rebuilt() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages += [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    one, _ = samples(
        *(item(uid, [4.0, earned], generations=(), messages=messages) for uid, earned in (("a", 2), ("b", 0)))
    )

    assert one.loss_mask is not None
    worth = [value for value, trained in zip(advantages(one), one.loss_mask, strict=True) if trained]
    assert sorted(set(worth)) == [2.0 - 3.0, 6.0 - 3.0]
    assert worth == sorted(worth, reverse=True)


def test_each_row_of_a_trajectory_says_how_many_there_are() -> None:
    rows = samples(item("a", [1.0, 2.0], generations=OF_TURNS), item("b", [0.0, 0.0]))

    assert [(getattr(row.index, "rows", 1), advantages(row)) for row in rows[:2]] == [
        (2, [1.75, 1.75]),
        (2, [0.75, 0.75, 0.75]),
    ]
    assert pickle.loads(pickle.dumps(rows[0].index)).advantages == [1.75, 1.75]


# --- the ranks -------------------------------------------------------------------------------------------------------


def test_a_rank_takes_the_advantages_of_its_rows_and_weighs_the_rows_of_a_trajectory_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    whole = types.SimpleNamespace(slice_log_prob_with_cp=lambda values, *_: values)
    monkeypatch.setattr("slime.rollout.agent_rollout_advantages.import_module", lambda _: whole)
    rows = samples(item("a", [1.0, 2.0], generations=OF_TURNS), item("b", None, reward=0.0))
    data = {
        "kl": [torch.zeros(row.response_length) for row in rows],
        "rewards": [0.1, 0.1, -0.1],
        "sample_indices": [rows[0].index, rows[1].index, "a name"],
        "loss_masks": [torch.tensor(row.loss_mask) for row in rows],
        "rollout_mask_sums": torch.tensor([5.0, 5.0, 3.0]),
        "response_lengths": [row.response_length for row in rows],
        "total_lengths": [len(row.tokens) for row in rows],
    }
    set_advantages(trainer_args(), data)

    assert [values.tolist() for values in data["advantages"][:2]] == [[1.75, 1.75], [0.75, 0.75, 0.75]]
    assert torch.equal(data["advantages"][2], torch.ones(4) * torch.tensor(-0.1))
    assert data["rollout_mask_sums"].tolist() == [2 * 2.0, 2 * 3.0, 3.0]

    data["kl"][0] = torch.zeros(9)
    with pytest.raises(ValueError, match="has 2 advantages for 9 tokens"):
        set_advantages(trainer_args(), data)


# --- the wire --------------------------------------------------------------------------------------------------------


def written(**changes: Any) -> dict[str, Any]:
    generations = wire.encode_generations(GROWING)
    return {"uid": "u", "instance_id": "i", "messages": [], "reward": 1, "generations": generations, **changes}


def test_rewards_of_turns_come_through_the_wire_as_they_went_in() -> None:
    stored = decode_written_item(written(turn_rewards=[1, -2], token_rewards=[None, [0.5]])).body
    delivered = decode_item({**stored, "uid": "u", "instance_id": "i", "reward": 1.0})

    assert (delivered.turn_rewards, delivered.token_rewards) == ((1.0, -2.0), (None, (0.5,)))
    assert delivered.error is None
    assert "turn_rewards" not in decode_written_item(written()).body


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"turn_rewards": [1]}, "item.turn_rewards has 1 entries for the 2 turns that are trained"),
        ({"turn_rewards": [1, "2"]}, r"item.turn_rewards\[1\] must be a finite number .*, not '2'"),
        ({"turn_rewards": [1, 1e999]}, r"item.turn_rewards\[1\] must be a finite number"),
        ({"turn_rewards": 5}, "item.turn_rewards must be a list"),
        ({"token_rewards": [[1.0], None]}, "item.token_rewards of turn 0 has 1 entries for the 2 sampled tokens"),
    ],
)
def test_what_does_not_fit_the_turns_is_refused_with_a_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidPayloadError, match=says):
        decode_written_item(written(**changes))


def test_turns_that_are_not_trained_earn_nothing() -> None:
    untrained = [*wire.encode_generations(GROWING[:1]), {**wire.encode_generations(GROWING)[1], "trained": False}]
    assert decode_written_item(written(generations=untrained, turn_rewards=[3])).body["turn_rewards"] == [3.0]
    messages: list[Any] = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages[1]["step_loss_mask"] = 0
    assert wire.trained_turns(messages, ()) == [None]


def test_a_trajectory_of_a_generator_is_stored_with_them() -> None:
    played = Trajectory(
        uid="u",
        instance_id="i",
        messages=[],
        reward=1.0,
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.STOP,
        generations=GROWING,
        turn_rewards=[0, 1],
    )
    assert encode_body(played)["turn_rewards"] == [0.0, 1.0]
    assert "token_rewards" not in encode_body(played)
