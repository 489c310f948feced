"""What was consumed is remembered once per group, by the rollout that returned it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import CheckpointDataSource, trainer_args
from slime.rollout.agent_rollout_data_source import SlimeDataSource
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.trainer.consumed import (
    JobProgress,
    consumed_before,
    consumed_metadata,
    pass_before,
    skip_list,
)
from slime_plugins.rollout_buffer.wire import RolloutData, RolloutItem


def agent_group(name: str) -> list[Sample]:
    return [Sample(prompt=name, metadata={"token_source": "generations"}) for _ in range(2)]


def source(**changes: Any) -> CheckpointDataSource:
    return CheckpointDataSource(trainer_args(n_samples_per_prompt=2, **changes))


def names(groups: list[Any]) -> list[Any]:
    return [group[0].prompt for group in groups]


def test_earlier_groups_come_first() -> None:
    store = SlimeDataSource(source())
    store.add([agent_group("a"), agent_group("b")])
    store.add([agent_group("c")])

    assert store.waiting_count() == 3
    assert names(store.take(2)) == ["a", "b"]
    assert names(store.take(1)) == ["c"]


def test_a_data_source_that_only_gives_prompts_is_left_alone() -> None:
    class OnlyPrompts:
        def get_samples(self, num_samples: int) -> list[Any]:
            raise AssertionError("nothing is to be asked of it")

    store = SlimeDataSource(OnlyPrompts())
    store.add([agent_group("a"), agent_group("b")])
    store.update_metadata({"0": ["a"]})

    assert names(store.take(1)) == ["a"]
    assert store.waiting_count() == 1
    assert store.metadata() == {}


def test_only_the_last_pass_counts_for_its_job() -> None:
    metadata: dict[str, Any] = {}
    metadata |= consumed_metadata(metadata, 0, {0: ["a", "b"]}, 0)
    metadata |= consumed_metadata(metadata, 1, {0: ["c"], 1: ["a"]}, 1)
    metadata |= consumed_metadata(metadata, 2, {1: ["b"]}, 1)

    assert metadata["1"] == ["c", "a"]
    assert [pass_before(metadata, rollout_id) for rollout_id in range(4)] == [0, 0, 1, 1]
    assert skip_list(consumed_before(metadata, 1, 0)) == ["a", "b"]
    assert skip_list(consumed_before(metadata, 3, 1)) == ["a", "b"]


def test_a_list_of_finished_groups_is_a_skip_list() -> None:
    metadata = {"finished_groups": ["id1", 2], "0": ["a"]}

    assert skip_list(metadata) == ["id1", "2", "a"]
    assert skip_list(consumed_before(metadata, 1, 0)) == ["id1", "2", "a"]
    assert skip_list(consumed_before(metadata, 1, 1)) == []


def test_a_rollout_asked_for_again_means_going_back() -> None:
    progress = JobProgress(last_returned=3)

    assert [progress.went_back_to(rollout_id) for rollout_id in (2, 3, 4)] == [True, True, False]
    assert not JobProgress().went_back_to(0)


def delivery_of(*numbers: int, filtered: tuple[int, ...] = (100,)) -> RolloutData:
    items = tuple(RolloutItem(uid=f"u{n}", instance_id=f"i{n}", group_index=n) for n in numbers)
    finished = [*("filtered" for _ in filtered), *(f"i{n}" for n in numbers)]
    meta_info = {"delivery_id": f"d{numbers}", "ended_groups": list(filtered), "finished_groups": finished}
    return RolloutData(success=True, message="", items=items, meta_info=meta_info)


def test_groups_that_come_again_are_left_out_and_their_ids_are_not_consumed_again() -> None:
    progress = JobProgress()
    progress.remember(delivery_of(1))

    assert progress.new_part(delivery_of(1)) is None
    new = progress.new_part(delivery_of(1, 2))
    assert new is not None
    assert [item.uid for item in new.items] == ["u2"]
    assert new.meta_info["finished_groups"] == ["i2"]


@pytest.mark.parametrize(
    ("again", "consumed"),
    [
        (delivery_of(1, filtered=(100, 101)), ["filtered"]),
        (delivery_of(1, 2, filtered=(100, 101)), ["filtered", "i2"]),
        (delivery_of(1, filtered=(101,)), ["filtered"]),  # another consumer has acknowledged what named the first
        (delivery_of(2), ["i2"]),
    ],
)
def test_a_filtered_group_is_consumed_once_whatever_else_its_instance_had_filtered(
    again: RolloutData, consumed: list[str]
) -> None:
    progress = JobProgress()
    progress.remember(delivery_of(1))
    new = progress.new_part(again)
    assert new is not None
    assert new.meta_info["finished_groups"] == consumed


def test_groups_that_another_consumer_got_are_new_when_they_come_again() -> None:
    progress = JobProgress()
    progress.remember(delivery_of(1))
    lost = {"d(1,)": frozenset({1})}
    progress.lose(lost)

    assert progress.new_part(delivery_of(1, filtered=())) == delivery_of(1, filtered=())
    progress.remember(delivery_of(1))
    progress.lose(lost)  # what a feed lost is said with each of its polls
    assert progress.new_part(delivery_of(1)) is None


ids = st.lists(st.sampled_from("abc"), max_size=4)


@given(st.lists(st.tuples(ids, ids), max_size=6), st.integers(0, 6))
def test_skip_lists_hold_each_id_as_often_as_it_was_consumed(rollouts: list[Any], resumed_at: int) -> None:
    """Every rollout ends in the pass it began in, or one further."""
    metadata: dict[str, Any] = {}
    consumed: dict[int, list[tuple[int, str]]] = {}
    current = 0
    for rollout_id, (first, second) in enumerate(rollouts):
        by_pass = {current: first}
        if second:
            by_pass[current + 1] = second
        consumed[rollout_id] = [(number, name) for number, of_pass in by_pass.items() for name in of_pass]
        current += bool(second)
        metadata |= consumed_metadata(metadata, rollout_id, by_pass, current)

    reached = pass_before(metadata, resumed_at)
    earlier = [entry for rollout_id, entries in consumed.items() if rollout_id < resumed_at for entry in entries]
    expected = Counter(name for number, name in earlier if number == reached)
    assert Counter(skip_list(consumed_before(metadata, resumed_at, reached))) == expected
