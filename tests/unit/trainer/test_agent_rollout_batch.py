"""A batch is filled with trajectories that were played; dummies stay only where nothing is left, and never alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import trainer_args
from slime.rollout.agent_rollout_batch import (
    OWN_REWARDS_PATH,
    BatchRule,
    played,
    replace_trajectories_without_log_probs,
    rule_of,
)
from slime.rollout.agent_rollout_samples import Group, rows_of, trajectories_of
from slime.rollout.agent_rollout_settings import ShortGroups
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import GeneratorError

RULE = BatchRule(groups=3, members=4, step=6, short_groups=ShortGroups.REFILL, whole_groups=False, min_played=2)
WHOLE = BatchRule(groups=3, members=4, step=6, short_groups=ShortGroups.REFILL, whole_groups=True, min_played=2)

WEIGHTLESS = replace(RULE, weightless_dummies=True)
HOOK = "slime.rollout.agent_rollout.post_process_rollout_data"


def member(name: str, *, dummy: bool = False, log_probs: bool = True) -> Sample:
    return Sample(
        prompt=name,
        tokens=[1, 2, 3],
        response_length=2,
        loss_mask=[0, 0] if dummy else [1, 1],
        reward=1.0,
        rollout_log_probs=[-0.5, -0.5] if log_probs and not dummy else None,
        remove_sample=dummy,
        metadata={"raw_reward": 1.0, "instance_id": name},
    )


def group(name: str, played_count: int, size: int = 4) -> Group:
    return [member(f"{name}-{slot}", dummy=slot >= played_count) for slot in range(size)]


def sizes(groups: list[Group]) -> list[tuple[int, int]]:
    """Members and played members of each group."""
    return [(len(entry), played(entry)) for entry in groups]


def test_the_members_of_one_more_group_take_the_places_of_those_that_were_not_played() -> None:
    groups = [group("a", 4), group("b", 3), group("c", 2)]
    assert RULE.missing(groups) == 1

    groups.append(group("d", 4))
    assert RULE.missing(groups) == 0
    assert sorted(sizes(RULE.batch(groups))) == [(2, 2), (3, 3), (3, 3), (4, 4)]


def test_where_dummies_have_no_weight_no_finished_member_is_left_out_for_a_few_places() -> None:
    groups = [group("a", 4), group("b", 3), group("c", 3)]
    assert RULE.missing(groups) == 1
    assert WEIGHTLESS.missing(groups) == 0
    members = trajectories_of(WEIGHTLESS.batch(groups))
    assert [rows[0].remove_sample for rows in members].count(True) == 2
    assert len(members) == 12

    more_than_half_a_group_is_missing = [group("a", 4), group("b", 3), group("c", 2)]
    assert WEIGHTLESS.missing(more_than_half_a_group_is_missing) == 1


OWN = {"custom_reward_post_process_path": OWN_REWARDS_PATH}
OF_SLIME = {"custom_reward_post_process_path": None}


@pytest.mark.parametrize(
    ("changes", "weightless", "whole"),
    [
        (OWN, True, False),
        (OWN | {"use_kl_loss": True}, False, False),
        (OWN | {"entropy_coef": 0.01}, False, False),
        (OWN | {"advantage_estimator": "ppo"}, False, False),
        (OWN | {"rewards_normalization": False}, False, False),
        (OF_SLIME, False, True),
        (OF_SLIME | {"rewards_normalization": False}, False, False),
        (OF_SLIME | {"advantage_estimator": "ppo"}, False, False),
        ({"custom_reward_post_process_path": "mine.rewards"}, False, True),
        (OWN | {"rollout_data_postprocess_path": HOOK}, True, False),
        (OWN | {"rollout_data_postprocess_path": HOOK, "advantage_estimator": "reinforce_plus_plus"}, False, False),
        (OWN | {"rollout_data_postprocess_path": HOOK, "advantage_estimator": "ppo", "use_kl_loss": True}, True, False),
        (OWN | {"calculate_per_token_loss": True}, True, False),
    ],
)
def test_dummies_fill_places_only_where_they_change_no_term_of_the_loss_and_groups_are_whole_where_slime_reads_places(
    changes: dict[str, Any], weightless: bool, whole: bool
) -> None:
    rule = rule_of(trainer_args(**changes))
    assert (rule.weightless_dummies, rule.whole_groups) == (weightless, whole)


def test_who_is_left_out_of_a_full_batch_depends_on_no_order() -> None:
    """Members stand in the order in which they ended, groups as well: long ones last."""
    left_out: list[tuple[int, int]] = []
    for number in range(60):
        groups = [group(f"{number}-{name}", count) for name, count in (("a", 4), ("b", 3), ("c", 3), ("d", 4))]
        kept = {member.prompt for entry in RULE.batch(groups) for member in entry}
        backwards = [list(reversed(entry)) for entry in reversed(groups)]
        assert kept == {member.prompt for entry in RULE.batch(backwards) for member in entry}
        left_out += [
            (at, slot)
            for at, entry in enumerate(groups)
            for slot, one in enumerate(entry)
            if not one.remove_sample and one.prompt not in kept
        ]
    assert {at for at, _ in left_out} == {0, 3}
    assert {slot for _, slot in left_out} == {0, 1, 2, 3}


def test_a_group_of_one_has_no_baseline_and_takes_no_place() -> None:
    groups = [group("a", 4), group("b", 4), group("c", 1), group("d", 4)]

    assert RULE.missing(groups[:3]) == 1
    assert [entry[0].prompt for entry in RULE.batch(groups)] == ["a-0", "b-0", "d-0"]


def test_where_slime_normalises_by_position_a_short_group_is_left_out() -> None:
    groups = [group("a", 4), group("b", 3), group("c", 4)]
    assert WHOLE.missing(groups) == 1

    groups.append(group("d", 4))
    assert [entry[0].prompt for entry in WHOLE.batch(groups)] == ["a-0", "c-0", "d-0"]


@given(st.lists(st.integers(0, 4), min_size=3, max_size=9), st.sampled_from([RULE, WEIGHTLESS]))
def test_a_batch_has_every_place_filled_and_no_more_dummies_than_it_must(counts: list[int], rule: BatchRule) -> None:
    groups = [group(str(number), count) for number, count in enumerate(counts)]
    try:
        batch = rule.batch(groups)
    except GeneratorError:
        assert rule.missing(groups) > 0
        return

    members = trajectories_of(batch)
    assert len(members) == 12
    assert len({rows[0].prompt for rows in members}) == 12
    assert sum(map(played, batch)) == min(12, sum(counts))
    if RULE.missing(groups) == 0:  # of every group there are two members or more, and no dummy
        assert all(len(entry) >= 2 for entry in batch)


def test_odd_trajectories_without_log_probs_become_dummies_and_the_others_keep_theirs() -> None:
    odd = [member("odd", log_probs=False), [member("rows"), member("rows", log_probs=False)]]
    groups: list[Group] = [[member("a"), member("b"), member("c"), odd[0]], [member("d"), odd[1], member("e")]]

    assert replace_trajectories_without_log_probs(groups) == 2
    assert [rows_of(entry)[0].remove_sample for entry in groups[0]] == [False, False, False, True]
    metadata = groups[1][1].metadata
    assert "no log-probs" in metadata["dummy_reason"]
    assert (metadata["row_source"], metadata["rows"]) == ("dummy", 1)
    assert replace_trajectories_without_log_probs(groups) == 0
