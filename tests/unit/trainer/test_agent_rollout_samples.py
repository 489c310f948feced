"""Delivered items become exactly the samples that slime can train."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_buffer_lab.trainer_stand_in import check_batch, flat_samples, trainer_args
from slime.rollout import agent_rollout_samples
from slime.rollout.agent_rollout_postprocess import POSTPROCESS_PATH
from slime.rollout.agent_rollout_samples import (
    SampleConverter,
    consumed_ids,
    finish_batch,
    is_agent_group,
    rows_of,
    trajectories_of,
)
from slime.utils.mask_utils import Generation, WeightVersionSpan
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.trainer import rows
from slime_plugins.rollout_buffer.trainer.masks import MaskSettings, mask_generator
from slime_plugins.rollout_buffer.wire import RolloutItem, decode_item
from tests import chat_tokenizers

TWO_TURNS = (
    Generation([1, 2, 3], [10, 11], [-0.5, -0.25], weight_version="7"),
    Generation([1, 2, 3, 10, 11, 4, 5], [12], [-1.0], weight_version="8"),
)
BROKEN_PREFIX = (TWO_TURNS[0], Generation([1, 2, 9], [12], [-1.0], weight_version="8"))
MESSAGES = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def masks(path: str) -> Any:
    """The mask generator of a tokenizer, as the trainer loads it."""
    return mask_generator(MaskSettings(tokenizer_path=path, loss_mask_type="qwen", source=None))


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
    args = trainer_args(**{"hf_checkpoint": str(DEMO_TOKENIZER_PATH), "n_samples_per_prompt": size, **changes})
    return SampleConverter(args, samples_per_group=size)


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
    tokenizer = masks(str(DEMO_TOKENIZER_PATH)).tokenizer
    assert sample.loss_mask is not None
    response = sample.tokens[-sample.response_length :]
    trained = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]

    assert tokenizer.decode(trained) == "4<|im_end|>"
    assert sample.rollout_log_probs is None
    assert sample.metadata["token_source"] == "messages"


def test_the_tokenizer_is_loaded_once() -> None:
    assert masks(str(DEMO_TOKENIZER_PATH)) is masks(str(DEMO_TOKENIZER_PATH))


def test_drift_is_counted_and_changes_nothing() -> None:
    tokenizer = masks(str(DEMO_TOKENIZER_PATH)).tokenizer
    prompt = tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, return_dict=False)
    said, other = (tokenizer(f"{text}<|im_end|>")["input_ids"] for text in "45")
    items = [item(generations=(Generation(prompt, said),)), item(uid="b", generations=(Generation(prompt, other),))]
    worker = converter(2)
    (group,) = worker.groups(items)

    assert (worker.counts["token_drift/clean"], worker.counts["token_drift/text"]) == (1, 1)
    assert [sample.tokens for sample in group] == [[*prompt, *said], [*prompt, *other]]


def test_drift_is_not_measured_where_nobody_wants_it_and_never_costs_a_trajectory() -> None:
    unreadable = item(messages=[{"role": "assistant", "content": 5}])
    silent, asked = converter(1, rollout_buffer_report_drift=False), converter(1)

    assert not flat_samples([silent.groups([unreadable]), asked.groups([unreadable])])[1].remove_sample
    assert (silent.counts["token_drift/unknown"], asked.counts["token_drift/unknown"]) == (0, 1)


def test_a_tokenizer_that_cannot_be_loaded_is_tried_once_and_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    workers = [converter(2, hf_checkpoint="/nowhere/at/all") for _ in range(2)]
    groups = [group for worker in workers for group in worker.groups([item(), item(uid="b")])]

    assert not any(sample.remove_sample for sample in flat_samples(groups))
    assert [worker.counts["token_drift/unknown"] for worker in workers] == [2, 2]
    assert caplog.text.count("token drift is not measured") == 1


def test_without_a_tokenizer_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "mask_generator", lambda *_: pytest.fail("nothing was to be loaded"))
    worker = converter(1, hf_checkpoint=None)

    assert not flat_samples(worker.groups([item()]))[0].remove_sample
    assert worker.counts["token_drift/unknown"] == 1


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


def test_a_dummy_carries_the_mean_of_its_group() -> None:
    """So it moves neither slime's own baseline, which counts it, nor the logged mean."""
    members = [item(reward=1.0, raw_reward=3.0), item(uid="b", reward=0.0), item(uid="c", error="broken", reward=None)]
    *_, dummy = flat_samples(group_of(*members))

    assert dummy.reward == 0.5
    assert dummy.metadata["raw_reward"] == 1.5


@pytest.mark.parametrize("token", [12_288, 2**24, 2**31, 10**12])
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


def test_an_id_of_the_models_padding_is_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}', encoding="utf-8")
    padded = item(generations=(Generation([1, 2, 3], [151_935], [-0.5]),))
    worker = converter(1, hf_checkpoint=str(tmp_path), rollout_buffer_report_drift=False)
    (sample,) = flat_samples(worker.groups([padded])[0])

    assert not sample.remove_sample


def test_a_malformed_item_from_the_wire_costs_nobody_else() -> None:
    wire = {"uid": "x", "instance_id": "task", "messages": 5, "reward": 1.0, "extra_info": {}, "group_index": 3}
    worker = converter(2)
    (group,) = worker.groups([item(), decode_item(wire)])

    assert [sample.remove_sample for sample in flat_samples(group)] == [False, True]
    assert worker.counts["malformed_items"] == 1


def test_a_malformed_item_without_a_group_fills_the_short_one() -> None:
    worker = converter(2)
    groups = worker.groups([item(), item(uid="b", group_index=4), item(uid="c", group_index=4), decode_item("junk")])

    assert [len(group) for group in groups] == [2, 2]
    assert "must be an object" in flat_samples(groups[0])[1].metadata["dummy_reason"]


def test_a_group_is_padded_or_cut_to_exactly_n() -> None:
    short = group_of(item(), size=3)
    long = group_of(*[item(uid=f"u-{slot}") for slot in range(5)], size=3)

    assert [sample.remove_sample for sample in flat_samples(short)] == [False, True, True]
    assert len({sample.prompt for sample in flat_samples(short)}) == 3
    assert [sample.prompt for sample in flat_samples(long)] == ["u-0", "u-1", "u-2"]


def test_groups_are_kept_apart_by_number_not_by_instance() -> None:
    """The same instance comes once per epoch."""
    groups = converter(1).groups([item(group_index=1, epoch=0), item(group_index=2, epoch=1, uid="b")])

    assert len(groups) == 2
    assert consumed_ids(groups) == ["task", "task"]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, [3, 2, 3]),
        ({"tensor_model_parallel_size": 2, "micro_batch_size": 3}, [3, 2, 7]),
        ({"tensor_model_parallel_size": 4}, [3, 2, 2]),
        ({"use_dynamic_batch_size": True}, [3, 2, 2]),
        ({"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 3}, [3, 2, 4]),
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


def test_metadata_has_the_same_keys_on_every_sample() -> None:
    group = group_of(item(extra_info={"tool": 1}), item(uid="b", extra_info={"other": 2}))
    first, second = flat_samples(finish_batch([group], 0))

    assert first.metadata.keys() == second.metadata.keys()
    assert second.metadata["tool"] is None


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


def test_round_numbers_that_no_trajectory_tells_are_not_forwarded() -> None:
    samples = flat_samples(finish_batch([group_of(item(extra_info={"round_number": "many"}), size=2)], 0))

    assert not any("round_number" in sample.metadata for sample in samples)


def test_the_source_of_a_dummy_is_that_of_its_group() -> None:
    members = [item(extra_info={"source_name": "math"}), item(group_index=4, uid="b", extra_info={"source_name": 7})]
    groups = converter(2).groups([*members, item(group_index=5, uid="c")])

    names = [sample.metadata["source_name"] for sample in flat_samples(finish_batch(groups, 0))]
    assert names == ["math", "math", "7", "7", "unknown", "unknown"]


def test_rewards_are_numbers_of_one_type() -> None:
    members = [item(reward=1, raw_reward=True), item(uid="b", reward=0.5), item(uid="c", reward=True, raw_reward=None)]
    samples = flat_samples(finish_batch([group_of(*members, size=4)], 0))

    assert {type(sample.reward) for sample in samples} == {float}
    assert {type(sample.metadata["raw_reward"]) for sample in samples} == {float}


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


def test_without_the_hook_no_nan_reaches_the_training(caplog: pytest.LogCaptureFixture) -> None:
    agent_rollout_samples._warn_of_unknown_log_probs.cache_clear()
    (group,) = converter(2).groups([item(generations=WITHOUT_LOG_PROBS), item(uid="b", generations=WITHOUT_LOG_PROBS)])
    samples = flat_samples(finish_batch([group], 0, trainer_args(**ONE_STEP)))

    assert [set(sample.rollout_log_probs or []) for sample in samples] == [{0.0}, {0.0}]
    assert POSTPROCESS_PATH in caplog.text


def test_log_probs_are_on_all_samples_or_on_none() -> None:
    without = tuple(dataclasses.replace(turn, output_log_probs=None) for turn in TWO_TURNS)
    mixed = flat_samples(finish_batch([group_of(item(), item(uid="b", generations=without))], 0))
    padded = flat_samples(finish_batch([group_of(item(), size=2)], 0))

    assert [sample.rollout_log_probs for sample in mixed] == [None, None]
    assert padded[1].rollout_log_probs == [0.0]


def test_bare_prompts_are_not_taken_for_agent_groups() -> None:
    assert is_agent_group(group_of(item(generations=BROKEN_PREFIX)))
    assert not is_agent_group([Sample(), Sample()])
    assert not is_agent_group([])


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


# Trajectories that come as messages only.


def checkpoint(name: str, folder: Path) -> str:
    """A folder with a tokenizer and its chat template, as ``--hf-checkpoint`` names one."""
    chat_tokenizers.load(name).save_pretrained(folder)
    return str(folder)


def trained_texts(path: str, samples: Sequence[Sample]) -> list[str]:
    """What each row trains, its stretches joined."""
    decode = masks(path).tokenizer.decode
    texts = []
    for sample in samples:
        response = zip(sample.tokens[-sample.response_length :], sample.loss_mask or (), strict=True)
        texts.append(decode([token for token, mask in response if mask]))
    return texts


@pytest.mark.parametrize("name", ["small-deepseek", "deepseek-r1-distill"])
def test_a_finished_answer_pushes_its_thinking_as_a_cut_one_does(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    worker = converter(2, hf_checkpoint=path, loss_mask_type="distill_qwen")
    thinking = "Two and two. " * 40
    right, wrong = (f"{thinking}\n</think>\n\n4", thinking)
    cut = {"extra_info": {"finish_reason": "length"}, "reward": 0.0}
    ask = MESSAGES[:1]
    messages = [[*ask, {"role": "assistant", "content": text}] for text in (right, wrong)]
    (group,) = worker.groups(
        [
            item(generations=(), messages=messages[0]),
            item(uid="b", generations=(), messages=messages[1], **cut),
        ]
    )

    assert trained_texts(path, flat_samples(group)) == [f"{right}<｜end▁of▁sentence｜>", wrong]
    assert [sample.metadata["row_source"] for sample in flat_samples(group)] == ["turns", "turns"]
    assert worker.counts["token_drift/rebuilt_turns"] == 2
    assert worker.counts["row_tokens"] == sum(len(sample.tokens) for sample in flat_samples(group))


@pytest.mark.parametrize("name", ["small-hybrid", "qwen3-hybrid"])
def test_every_thought_of_a_conversation_is_trained_in_a_row_of_its_own(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    replies = [f"<think>\nthought {at}\n</think>\n\nanswer {at}" for at in range(2)]
    messages = [message for text in replies for message in (MESSAGES[0], {"role": "assistant", "content": text})]
    worker = converter(1, hf_checkpoint=path, loss_mask_type="qwen3")
    samples = flat_samples(finish_batch(worker.groups([item(generations=(), messages=messages)]), 0))

    assert trained_texts(path, samples) == [f"{text}<|im_end|>" for text in replies]
    assert {sample.rollout_id for sample in samples} == {0}
    assert [sample.metadata["rows"] for sample in samples] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "is_cut"),
    [
        ({"extra_info": {"finish_reason": "length"}}, True),
        ({"extra_info": {"finish_reason": "length"}, "stop_reason": "max_tokens", "outcome": "truncated"}, True),
        ({"extra_info": {"finish_reason": "length"}, "stop_reason": "max_turns", "outcome": "truncated"}, False),
        ({"extra_info": {"finish_reason": "stop"}}, False),
        ({}, False),
    ],
)
def test_only_a_reply_that_was_cut_itself_lacks_its_end_of_turn(changes: dict[str, Any], is_cut: bool) -> None:
    sample = only_sample(generations=(), **changes)

    assert trained_texts(str(DEMO_TOKENIZER_PATH), [sample]) == ["4" if is_cut else "4<|im_end|>"]


def test_options_of_the_chat_template_reach_the_rebuilt_rows(tmp_path: Path) -> None:
    path = checkpoint("small-thinking", tmp_path)
    cut = item(generations=(), extra_info={"finish_reason": "length"})
    prompts = []
    for options in ({}, {"enable_thinking": False}):
        worker = converter(1, hf_checkpoint=path, loss_mask_type="qwen3_5", apply_chat_template_kwargs=options)
        (sample,) = flat_samples(worker.groups([cut]))
        prompts.append(masks(path).tokenizer.decode(sample.tokens[: -sample.response_length]))

    assert prompts[0].endswith("<think>\n")
    assert prompts[1].endswith("<think>\n\n</think>\n\n")


def test_rows_that_would_be_too_long_give_way_to_one_and_say_so(tmp_path: Path) -> None:
    path = checkpoint("small-hybrid", tmp_path)
    reply = {"role": "assistant", "content": "<think>\nso\n</think>\n\ntwo"}
    long = item(generations=(), messages=[MESSAGES[0], reply] * 5)
    worker = converter(1, hf_checkpoint=path, loss_mask_type="qwen3", rollout_buffer_max_row_tokens=100)
    (sample,) = flat_samples(worker.groups([long]))

    assert sample.metadata["row_source"] == "conversation"
    assert worker.counts["token_drift/rebuilt_conversation"] == 1
