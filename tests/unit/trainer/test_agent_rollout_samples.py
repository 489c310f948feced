"""Delivered items become exactly the samples that slime can train."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.mock_trainer import check_batch, flat_samples, trainer_args
from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH
from slime.rollout.agent_rollout_sample_fields import (
    check_weighs_trajectories,
    execution_field,
    execution_of,
    set_execution,
)
from slime.rollout.agent_rollout_samples import (
    SampleConverter,
    finish_batch,
    rows_of,
    samples_of_group,
    trajectories_of,
)
from slime.rollout.agent_rollout_settings import read_row_settings
from slime.utils.mask_utils import Generation, WeightVersionSpan
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.wire import RolloutItem
from tests.demo_tokens import chat_ids, ids_of, trained_text

TWO_TURNS = (
    Generation([1, 2, 3], [10, 11], [-0.5, -0.25], weight_version="7"),
    Generation([1, 2, 3, 10, 11, 4, 5], [12], [-1.0], weight_version="8"),
)
BROKEN_PREFIX = (TWO_TURNS[0], Generation([1, 2, 9], [12], [-1.0], weight_version="8"))
MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def item(**changes: Any) -> RolloutItem:
    values: dict[str, Any] = {
        "uid": "u-0",
        "instance_id": "task",
        "messages": MESSAGES,
        "reward": 1.0,
        "generations": TWO_TURNS,
        "group_index": 3,
    }
    return RolloutItem(**{**values, **changes})


def group_of(*items: RolloutItem, size: int | None = None) -> list[Any]:
    (group,) = converter(size or len(items)).groups(items)
    return group


def converter(size: int, **changes: Any) -> SampleConverter:
    return SampleConverter(arguments(size, **changes), samples_per_group=size)


def arguments(size: int, **changes: Any) -> Any:
    return trainer_args(**{"hf_checkpoint": str(DEMO_TOKENIZER_PATH), "n_samples_per_prompt": size, **changes})


def only_sample(**changes: Any) -> Sample:
    (sample,) = flat_samples(group_of(item(**changes)))
    return sample


def test_generations_become_one_row_with_what_was_sampled_trained() -> None:
    sample = only_sample()

    assert sample.tokens == [1, 2, 3, 10, 11, 4, 5, 12]
    assert sample.response_length == 5
    assert sample.loss_mask == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -1.0]
    assert sample.weight_versions == ["7", "8"]
    assert sample.metadata["token_source"] == "generations"


def test_the_sample_says_where_it_came_from() -> None:
    sample = only_sample(extra_info={"steps": 2}, raw_reward=0.5, epoch=1, slot=2)

    assert (sample.index, sample.prompt, sample.reward) == ("task", "u-0", 1.0)
    assert sample.metadata["raw_reward"] == 0.5
    assert sample.metadata["steps"] == 2
    assert (sample.metadata["instance_id"], sample.metadata["epoch"], sample.metadata["slot"]) == ("task", 1, 2)


def test_extra_info_cannot_replace_what_the_trainer_relies_on() -> None:
    sample = only_sample(extra_info={"raw_reward": "many", "instance_id": None, "token_source": 3})

    assert sample.metadata["raw_reward"] == 1.0
    assert sample.metadata["instance_id"] == "task"
    assert sample.metadata["token_source"] == "generations"


def test_messages_are_used_where_there_are_no_generations() -> None:
    sample = only_sample(generations=())
    assert trained_text(sample.tokens[-sample.response_length :], sample.loss_mask) == "4<|im_end|>"
    assert sample.rollout_log_probs is None
    assert sample.metadata["token_source"] == "messages"


def test_drift_is_counted_and_changes_nothing() -> None:
    prompt = chat_ids("2 + 2?")
    said, other = (ids_of(f"{text}<|im_end|>") for text in "45")
    items = [item(generations=(Generation(prompt, said),)), item(uid="b", generations=(Generation(prompt, other),))]
    worker = converter(2)
    (group,) = worker.groups(items)

    assert (worker.counts["token_drift/clean"], worker.counts["token_drift/text"]) == (1, 1)
    assert [sample.tokens for sample in group] == [[*prompt, *said], [*prompt, *other]]


def test_the_first_token_of_all_is_never_trained() -> None:
    """Nothing before it could predict it, and slime would read its log-prob from before the sequence."""
    sample = only_sample(generations=(Generation([], [5, 6, 7], [-0.5, -1.0, -2.0]),))

    assert (sample.response_length, sample.loss_mask, sample.rollout_log_probs) == (2, [1, 1], [-1.0, -2.0])


def test_ids_are_unique_in_the_run_whatever_sizes_its_batches_have() -> None:
    sizes = {0: [4, 4], 1: [2, 3], 2: [1], 3: [4, 4, 4]}
    batches = [
        finish_batch([group_of(item(uid=f"{number}"), size=size) for size in of_rollout], number)
        for number, of_rollout in sizes.items()
    ]
    samples = [sample for batch in batches for sample in flat_samples(batch)]
    assert len({sample.rollout_id for sample in samples}) == len(samples) == 26
    assert len({sample.group_index for sample in samples}) == 8


def test_a_broken_prefix_gives_rows_that_share_reward_and_trajectory() -> None:
    group = group_of(item(generations=BROKEN_PREFIX), item(uid="u-1"))
    (batch,) = finish_batch([group], 2)

    assert [len(rows_of(member)) for member in batch] == [2, 1]
    assert all(isinstance(member, list) for member in batch)
    first, second = rows_of(batch[0])
    assert (first.tokens, second.tokens) == ([1, 2, 3, 10, 11], [1, 2, 9, 12])
    assert first.rollout_id == second.rollout_id != batch[1][0].rollout_id
    assert (first.metadata["row"], second.metadata["row"], second.metadata["rows"]) == (0, 1, 2)
    assert first.weight_versions == ["7"]
    assert second.weight_versions == ["8"]


def test_a_resumed_turn_lists_all_its_weight_versions() -> None:
    spans = (WeightVersionSpan("3", 0, 1), WeightVersionSpan("4", 1, 2))
    turn = Generation([1, 2], [5, 6], None, weight_version="4", weight_version_spans=spans)

    assert only_sample(generations=(turn,)).weight_versions == ["3", "4"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, Sample.Status.COMPLETED),
        ({"outcome": "truncated"}, Sample.Status.TRUNCATED),
        ({"extra_info": {"finish_reason": "length"}}, Sample.Status.TRUNCATED),
        ({"outcome": "aborted"}, Sample.Status.ABORTED),
    ],
)
def test_status_follows_the_outcome(changes: dict[str, Any], status: Sample.Status) -> None:
    assert only_sample(**changes).status is status


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remove_sample": True, "reward": None, "generations": ()}, "could not fill"),
        ({"error": "reward is missing", "reward": None}, "reward is missing"),
        ({"outcome": "failed"}, "outcome is failed"),
        ({"outcome": "aborted"}, "outcome is aborted"),
        ({"reward": None}, "no reward"),
        ({"generations": (Generation([1], [2], trained=False),)}, "no token of it is trained"),
        ({"generations": (), "messages": [{"role": "user", "content": "hello"}]}, "no token of it is trained"),
        ({"generations": (), "messages": [{"role": "assistant", "content": 5}]}, ""),
    ],
)
def test_what_cannot_be_trained_becomes_a_dummy_that_says_why(changes: dict[str, Any], reason: str) -> None:
    good, bad = flat_samples(group_of(item(reward=0.25), item(uid="u-1", **changes)))

    assert not good.remove_sample
    assert bad.remove_sample
    assert (len(bad.tokens), bad.response_length, bad.loss_mask) == (2, 1, [0])
    assert bad.status is Sample.Status.ABORTED
    assert reason in bad.metadata["dummy_reason"]


def with_lag(lag: int, trainer_version: int | None) -> tuple[Sample, Sample, Any]:
    """A trajectory of version 7 and one of versions 7 and 8, and what was counted of them."""
    worker = RowBuilder(read_row_settings(arguments(2, rollout_buffer_max_token_lag=lag), 2))
    items = [item(generations=TWO_TURNS[:1]), item(uid="b", reward=0.25)]
    (group,) = worker.groups(items, trainer_version=trainer_version)
    old, newer = flat_samples(finish_batch([samples_of_group(group)], 0))
    return old, newer, worker.counts


def test_a_trajectory_of_which_every_token_is_too_old_is_a_dummy_that_is_counted_and_says_why() -> None:
    dummy, newer, counts = with_lag(2, 10)

    assert (dummy.remove_sample, dummy.reward) == (True, 0.25)
    assert "more than 2 weight versions older than the trainer's version 10" in dummy.metadata["dummy_reason"]
    assert (newer.remove_sample, newer.loss_mask) == (False, [1])
    assert (counts["old_trajectories"], counts["dummies"]) == (1, 1)


def test_where_the_trainers_version_is_not_known_nothing_is_too_old() -> None:
    old, newer, counts = with_lag(0, None)

    assert (sum(old.loss_mask or ()), sum(newer.loss_mask or ()), counts["old_tokens"]) == (2, 3, 0)


@pytest.mark.parametrize("token", [-1, 12_288, 2**24, 2**31, 10**12])
def test_an_id_that_the_model_does_not_have_costs_its_own_trajectory_alone(token: int) -> None:
    """It would end the training of the whole batch on the device, and as a tensor even before."""
    odd = item(uid="odd", generations=(Generation([1, 2, 3], [10, token], [-0.5, -0.25]),))
    worker = converter(2)
    (group,) = worker.groups([item(), odd])

    fine, dummy = flat_samples(group)
    assert (fine.remove_sample, dummy.remove_sample) == (False, True)
    assert f"the token id {token} is not in the vocabulary" in dummy.metadata["dummy_reason"]
    assert max(dummy.tokens) < 12_288
    assert worker.counts["malformed_items"] == 1


def test_a_group_is_padded_or_cut_to_exactly_n() -> None:
    short = group_of(item(), size=3)
    long = group_of(*[item(uid=f"u-{slot}") for slot in range(5)], size=3)

    assert [sample.remove_sample for sample in flat_samples(short)] == [False, True, True]
    assert len({sample.prompt for sample in flat_samples(short)}) == 3
    assert [sample.prompt for sample in flat_samples(long)] == ["u-0", "u-1", "u-2"]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, [3, 2, 3]),
        ({"tensor_model_parallel_size": 2, "micro_batch_size": 3}, [3, 2, 7]),
        ({"tensor_model_parallel_size": 4}, [3, 2, 2]),
        ({"use_dynamic_batch_size": True}, [3, 2, 2]),
        ({"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 3}, [3, 2, 4]),
        ({"virtual_pipeline_model_parallel_size": 2, "global_batch_size": None}, [3, 2, 2]),
    ],
)
def test_rows_of_fixed_micro_batches_go_evenly_into_the_ranks(changes: dict[str, Any], rows: list[int]) -> None:
    """slime asserts it of each step, after everything was played and acknowledged. Seven rows; four ranks."""
    sizes = {"global_batch_size": 3, "use_dynamic_batch_size": False}
    args = trainer_args(**{**sizes, "actor_num_nodes": 1, "actor_num_gpus_per_node": 4, **changes})
    three_rows = (*BROKEN_PREFIX, Generation([7], [8], [-1.0]))
    parts = [three_rows, BROKEN_PREFIX, BROKEN_PREFIX]
    group = group_of(*(item(uid=f"u-{at}", generations=turns) for at, turns in enumerate(parts)))
    (batch,) = finish_batch([group], 1, args)

    assert [len(member) for member in batch] == rows
    fillers = batch[2][2:]
    assert all((row.loss_mask, row.remove_sample, row.rollout_log_probs) == ([0], True, [0.0]) for row in fillers)
    assert len({row.rollout_id for row in batch[2]}) == 1
    assert len({tuple(row.metadata) for member in batch for row in member}) == 1


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ([3, None, 4], [3, 4, 4]),
        ([None, 1, None], [1, 1, 1]),
        ([2.5, None, 1], [2.5, 1.75, 1.0]),
        ([2, "many", float("nan")], [2, 2, 2]),
    ],
)
def test_a_dummy_has_the_round_number_that_slime_sums(given: list[Any], filled: list[Any]) -> None:
    members = [item(uid=f"u-{at}", extra_info={"round_number": value}) for at, value in enumerate(given)]
    samples = flat_samples(finish_batch([group_of(*members, size=4)], 0))
    numbers = [sample.metadata["round_number"] for sample in samples]

    assert numbers[:3] == filled
    assert len({type(number) for number in numbers}) == 1
    assert sum(numbers) > 0


WITHOUT_LOG_PROBS = tuple(dataclasses.replace(turn, output_log_probs=None) for turn in TWO_TURNS)


@pytest.mark.parametrize("flag", ["use_rollout_logprobs", "use_tis", "get_mismatch_metrics"])
def test_what_slime_would_compute_the_loss_of_is_never_made_up(flag: str) -> None:
    worker = converter(2, **{flag: True})
    (group,) = worker.groups([item(), item(uid="b", generations=WITHOUT_LOG_PROBS)])
    good, bad = flat_samples(finish_batch([group], 0, trainer_args(**{flag: True})))

    assert good.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -1.0]
    assert bad.remove_sample
    assert bad.rollout_log_probs == [0.0]
    assert flag.replace("_", "-") in bad.metadata["dummy_reason"]
    assert worker.counts["without_log_probs"] == 1


ONE_STEP = {"loss_type": "policy_loss", "kl_coef": 0, "rollout_batch_size": 1, "n_samples_per_prompt": 2}


@pytest.mark.parametrize(
    ("changes", "is_wanted"),
    [
        ({"global_batch_size": 2}, True),
        ({"global_batch_size": 1}, False),
        ({"global_batch_size": 2, "kl_coef": 0.01}, False),
        ({"global_batch_size": 2, "use_critic": True}, False),
    ],
)
def test_where_slime_wants_the_shape_of_log_probs_nobody_recorded_it_gets_no_number(
    changes: dict[str, Any], is_wanted: bool
) -> None:
    """NaN, where the training ranks' hook takes it out again."""
    args = trainer_args(**{**ONE_STEP, **changes}, rollout_data_postprocess_path=POSTPROCESS_PATH)
    (group,) = converter(2).groups([item(generations=WITHOUT_LOG_PROBS), item(uid="b", remove_sample=True)])
    played, dummy = flat_samples(finish_batch([group], 0, args))

    if is_wanted:
        assert len(played.rollout_log_probs or []) == played.response_length
        assert all(value != value for value in played.rollout_log_probs or [])
        assert dummy.rollout_log_probs == [0.0]
    else:
        assert (played.rollout_log_probs, dummy.rollout_log_probs) == (None, None)


@pytest.mark.parametrize(("model_type", "is_even"), [("qwen3_5", True), ("qwen3_5_moe", True), ("qwen3_vl", False)])
def test_rows_of_odd_length_get_an_untrained_token_where_slime_stops_at_them(
    model_type: str, is_even: bool, tmp_path: Path
) -> None:
    """slime's own Qwen3.5 with vision: "Packed sequence length 11 must be divisible by 2 * CP size 1"."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vision_config": {}}))
    odd = item(generations=[Generation([1, 2], [3], [-0.5])])
    (group,) = converter(2).groups([odd, item(uid="b", generations=[Generation([1, 2], [3, 4], [-0.5, -0.25])])])
    first, second = flat_samples(finish_batch([group], 0, trainer_args(hf_checkpoint=str(tmp_path))))

    assert second.tokens == [1, 2, 3, 4]
    if is_even:
        assert (first.tokens, first.loss_mask) == ([1, 2, 3, 0], [1, 0])
        assert (first.response_length, first.rollout_log_probs) == (2, [-0.5, 0.0])
    else:
        assert (first.tokens, first.loss_mask, first.response_length) == ([1, 2, 3], [1], 1)


generations = st.lists(
    st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.lists(st.integers(0, 50), max_size=5)),
    min_size=1,
    max_size=4,
)


@st.composite
def items_of_a_group(draw: st.DrawFn) -> list[RolloutItem]:
    """Members as bad as they come: no generations, prefixes that break, empty outputs, dummies, mixed log-probs."""
    members = []
    for slot in range(draw(st.integers(1, 4))):
        turns = []
        held: list[int] = []
        for new_ids, output in draw(generations):
            prompt = [*held, *new_ids] if draw(st.booleans()) else new_ids
            log_probs = [-0.5] * len(output) if draw(st.booleans()) else None
            turns.append(Generation(prompt, output, log_probs))
            held = [*prompt, *output]
        dummy = draw(st.booleans())
        reward = None if dummy else draw(st.floats(-1, 1))
        members.append(item(uid=f"u-{slot}", generations=tuple(turns), reward=reward, remove_sample=dummy))
    return members


@given(st.lists(items_of_a_group(), min_size=1, max_size=3), st.integers(0, 5))
def test_any_batch_is_one_that_slime_takes(groups: list[list[RolloutItem]], rollout_id: int) -> None:
    numbered = [
        dataclasses.replace(member, group_index=number) for number, members in enumerate(groups) for member in members
    ]
    batch = finish_batch(converter(4).groups(numbered), rollout_id)

    check_batch(trainer_args(n_samples_per_prompt=4, rollout_batch_size=len(groups)), batch)
    assert len({isinstance(member, list) for group in batch for member in group}) == 1
    indices = [{row.group_index for rows in trajectories_of([group]) for row in rows} for group in batch]
    assert all(len(index) == 1 for index in indices)
    assert len(set.union(*indices)) == len(batch)


@dataclass
class SampleOfV030:
    """Its ``rollout_id`` can be written and not read, as in v0.3.0."""

    group_id: int | None = None

    @property
    def rollout_id(self) -> int:
        raise AttributeError("deprecated")


@dataclass
class SampleOfV022:
    """Each row is weighed alone."""

    index: int = 0


@pytest.mark.parametrize(
    ("kind", "field", "number"), [(Sample, "rollout_id", 3), (SampleOfV030, "group_id", 3), (SampleOfV022, None, None)]
)
def test_rows_share_the_field_that_this_slime_has(kind: type, field: str | None, number: int | None) -> None:
    sample = kind()
    assert execution_of(sample) is None
    set_execution(sample, 3)

    assert execution_field(kind) == field
    assert execution_of(sample) == number


def test_several_rows_are_refused_only_where_each_would_weigh_alone() -> None:
    check_weighs_trajectories([1, 2], Sample)
    check_weighs_trajectories([1, 1], SampleOfV022)
    with pytest.raises(ConfigError, match="rollout_mode incremental"):
        check_weighs_trajectories([1, 2], SampleOfV022)
