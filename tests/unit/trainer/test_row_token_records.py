"""Experts and kept ids reach the rows of a trainer, each at its own token; what was moved or is missing is noticed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_buffer_lab.scripted_engine.token_records import LAYERS, TOP_K, experts_of_passes, kept_ids
from slime.rollout.agent_rollout_samples import as_dummy, finish_batch, samples_of_group
from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS, RecordBytes, TokenRecords
from slime.utils.mask_utils import Generation, TrainingRow, expand_image_tokens, pack_training_rows
from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutTrajectory
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.settings import RowSettings
from slime_plugins.rollout_buffer.trainer.token_alignment import read_records, routed_experts_of_row
from slime_plugins.rollout_buffer.wire import RolloutItem

NO_MASKS = MaskSettings(tokenizer_path=None, loss_mask_type="qwen3", source="--loss-mask-type")
BOTH = (ROUTED_EXPERTS, TOP_P_TOKENS)
WIDTH = LAYERS * TOP_K


def int32(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


def turn(prompt: list[int], output: list[int], *, told: int = 0, version: str = "1") -> Generation:
    """A turn as an engine tells it that was asked for the experts of the passes from ``told`` on."""
    passes = experts_of_passes([*prompt, *output], version)[told:]
    spans = kept_ids(output)
    ends = [sum(map(len, spans[: at + 1])) for at in range(len(spans))]
    experts = TokenRecords.of_int32(told + 1, int32([one for own in passes for one in own]), width=WIDTH)
    kept = TokenRecords.of_int32(len(prompt), int32([one for own in spans for one in own]), ends=ends)
    return Generation(
        prompt_ids=prompt,
        output_ids=output,
        output_log_probs=[-0.5] * len(output),
        prompt_tokens=len(prompt),
        records={ROUTED_EXPERTS: RecordBytes.of(experts), TOP_P_TOKENS: RecordBytes.of(kept)},
    )


FIRST = turn([1, 2, 3], [11, 12])
GOES_ON = turn([1, 2, 3, 11, 12, 4, 5], [13], told=4)
EDITED = turn([1, 9, 3, 11, 12, 4], [14, 15])
BRANCH = turn([1, 2, 3, 11, 12, 6], [16], told=4)
"""A second child of the first turn, as a session of the gateway has it."""


def built(*generations: Generation, width: int = WIDTH, **settings: Any) -> tuple[RolloutTrajectory, RowBuilder]:
    """The trajectory as a trainer makes it of what came over the wire, with the bytes that the buffer kept."""
    encoded = wire.encode_generations(generations)
    kept = {one.sha256: one.data for each in generations for one in each.records.values() if one.data is not None}
    item = RolloutItem(
        uid="t",
        instance_id="i",
        reward=1.0,
        group_index=0,
        generations=wire.decode_generations(encoded),
        extra_info={"gateway": {"repeated_ids": 5}},
    )
    wanted = {"records": BOTH, "experts_width": width, **settings}
    rows = RowBuilder(RowSettings(samples_per_group=1, masks=NO_MASKS, report_drift=False, **wanted))
    (group,) = rows.groups([item], records=FetchedImages(data=kept))
    return group.trajectories[0], rows


def experts_along(records: TokenRecords) -> list[list[int]]:
    return [one.tolist() for one in records.split()]


@pytest.mark.parametrize(
    "generations",
    [(FIRST,), (FIRST, GOES_ON), (FIRST, EDITED), (FIRST, GOES_ON, BRANCH), (FIRST, GOES_ON, EDITED, BRANCH)],
)
def test_every_token_of_a_row_has_the_experts_of_its_own_pass(generations: tuple[Generation, ...]) -> None:
    trajectory, _ = built(*generations)
    assert len(trajectory.rows) == len(pack_training_rows(generations))
    for row in trajectory.rows:
        assert experts_along(row.records[ROUTED_EXPERTS]) == experts_of_passes(row.token_ids, "1")


def test_tokens_that_branches_of_a_session_repeat_are_counted() -> None:
    assert built(FIRST, BRANCH)[1].counts["repeated_tokens"] == 5


def test_a_sampled_token_keeps_the_experts_that_sampled_it_when_it_is_read_again_by_other_weights() -> None:
    """The engine tells nothing twice; what it told first is what sampled."""
    later = turn([1, 2, 3, 11, 12, 4, 5], [13], told=4, version="2")
    (row,) = built(FIRST, later)[0].rows
    before, after = (experts_of_passes(row.token_ids, version) for version in ("1", "2"))
    assert experts_along(row.records[ROUTED_EXPERTS]) == [*before[:4], *after[4:]]


def test_kept_ids_stand_at_trained_tokens_alone() -> None:
    (row,) = built(FIRST, GOES_ON)[0].rows
    records = row.records[TOP_P_TOKENS]
    assert (records.start, records.end) == (row.response_start, len(row.token_ids))
    for place, own in enumerate(records.split(), records.start):
        expected = kept_ids([row.token_ids[place]])[0] if row.loss_mask[place] else []
        assert own.tolist() == expected


def test_tokens_of_weights_too_old_have_no_kept_ids() -> None:
    old, new = replace(FIRST, weight_version="1"), replace(GOES_ON, weight_version="5")
    rows = RowBuilder(
        RowSettings(samples_per_group=1, masks=NO_MASKS, report_drift=False, records=BOTH, max_token_lag=2)
    )
    item = RolloutItem(uid="t", instance_id="i", reward=1.0, group_index=0, generations=(old, new))
    (group,) = rows.groups([item], trainer_version=5)
    (row,) = group.rows
    assert row.records[TOP_P_TOKENS].numbers().tolist() == kept_ids([13])[0]


def test_placeholders_are_counted_as_the_engine_expanded_them() -> None:
    image, pads = 7, 3
    sent, read = [1, image, 3], [1, *[image] * pads, 3]
    seen = turn(read, [11, 12])
    shown = replace(seen, prompt_ids=sent, images=("a" * 64,))
    later = turn([*read, 11, 12, 4], [13], told=len(read) + 1)
    later = replace(later, prompt_ids=[*sent, 11, 12, 4], images=("a" * 64,))
    generations = [shown, later]
    (row,) = pack_training_rows(generations)
    expanded = expand_image_tokens(row, image, [pads])
    records = read_records(generations, BOTH, FetchedImages())
    experts = routed_experts_of_row(row, expanded, generations, records, WIDTH)
    assert experts_along(experts) == experts_of_passes(expanded.token_ids, "1")


def moved(by: int) -> Callable[[TokenRecords], TokenRecords]:
    return lambda records: replace(records, start=records.start + by)


def without_last(records: TokenRecords) -> TokenRecords:
    return records.part(0, records.end - 1)


def without_first(records: TokenRecords) -> TokenRecords:
    return records.part(records.start + 1, records.end)


def spoilt(generation: Generation, kind: str, spoil: Callable[[TokenRecords], TokenRecords]) -> Generation:
    records = spoil(TokenRecords.decode(generation.records[kind].data or b""))
    return replace(generation, records={**generation.records, kind: RecordBytes.of(records)})


@pytest.mark.parametrize("spoil", [moved(1), moved(-1), without_last, without_first])
@pytest.mark.parametrize("at", [0, 1])
def test_experts_that_were_moved_by_one_token_at_a_turn_are_noticed(
    at: int, spoil: Callable[[TokenRecords], TokenRecords]
) -> None:
    turns = [FIRST, GOES_ON]
    turns[at] = spoilt(turns[at], ROUTED_EXPERTS, spoil)
    trajectory, rows = built(*turns)
    assert trajectory.is_dummy
    assert rows.counts["record_problems"] == 1


def test_kept_ids_of_the_token_before_are_noticed() -> None:
    long = turn([1, 2, 3], [100, 200, 300, 400, 500, 600, 700, 800, 900])
    assert not built(long)[0].is_dummy

    def shift(records: TokenRecords) -> TokenRecords:
        spans = [one.tolist() for one in records.split()]
        spans = [spans[-1], *spans[:-1]]
        ends = [sum(map(len, spans[: at + 1])) for at in range(len(spans))]
        return TokenRecords.of_int32(records.start, int32([one for own in spans for one in own]), ends=ends)

    trajectory, _ = built(spoilt(long, TOP_P_TOKENS, shift))
    assert "9 of 9 sampled tokens are not among their top-p ids" in (trajectory.dummy_reason or "")


@pytest.mark.parametrize(
    ("generations", "says"),
    [
        ((replace(FIRST, records={}),), "they were not requested"),
        ((GOES_ON,), "no turn has the experts of the first 5 tokens"),
    ],
)
def test_a_trajectory_without_its_experts_is_not_trained_and_says_why(
    generations: tuple[Generation, ...], says: str
) -> None:
    trajectory, _ = built(*generations)
    assert says in (trajectory.dummy_reason or "")


def test_bytes_that_nobody_has_or_that_are_cut_are_noticed() -> None:
    encoded = wire.decode_generations(wire.encode_generations([FIRST]))
    item = RolloutItem(uid="t", instance_id="i", reward=1.0, group_index=0, generations=encoded)
    name = encoded[0].records[ROUTED_EXPERTS].sha256
    settings = RowSettings(samples_per_group=1, masks=NO_MASKS, records=(ROUTED_EXPERTS,))
    for fetched, says in (
        (FetchedImages(missing={name: "purged"}), "are missing: purged"),
        (FetchedImages(data={name: (FIRST.records[ROUTED_EXPERTS].data or b"")[:-3]}), "cannot be read"),
    ):
        (group,) = RowBuilder(settings).groups([item], records=fetched)
        assert says in (group.trajectories[0].dummy_reason or "")


class TestSamples:
    args = SimpleNamespace(
        use_rollout_routing_replay=True,
        rollout_top_p=0.9,
        num_layers=LAYERS,
        moe_router_topk=TOP_K,
        rollout_batch_size=1,
        n_samples_per_prompt=1,
    )

    def batch(self, *generations: Generation) -> list[Any]:
        trajectory, rows = built(*generations)
        group = rows.groups(
            [RolloutItem(uid="t", instance_id="i", reward=1.0, group_index=0, generations=generations)]
        )[0]
        assert trajectory.rows
        ((member,),) = finish_batch([samples_of_group(group)], 0, self.args)
        return member if isinstance(member, list) else [member]

    def test_a_sample_has_experts_and_kept_ids_of_the_shape_that_slime_checks(self) -> None:
        for sample in self.batch(FIRST, GOES_ON, EDITED):
            experts = sample.rollout_routed_experts
            assert experts.shape == (len(sample.tokens) - 1, LAYERS, TOP_K)
            assert experts.dtype == np.int32
            assert experts.reshape(-1, WIDTH).tolist() == experts_of_passes(sample.tokens, "1")
            ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
            assert (len(offsets), offsets[0], offsets[-1]) == (sample.response_length + 1, 0, len(ids))
            response = sample.tokens[-sample.response_length :]
            for at, (token, trained) in enumerate(zip(response, sample.loss_mask, strict=True)):
                own = ids[offsets[at] : offsets[at + 1]].tolist()
                assert own == (kept_ids([token])[0] if trained else [])

    def test_a_dummy_and_a_token_that_fills_up_a_row_have_some_too(self) -> None:
        (sample,) = self.batch(FIRST)
        dummy = as_dummy(sample, "it broke")
        longer = replace(sample, tokens=[*sample.tokens, 0], response_length=sample.response_length + 1)
        longer.loss_mask = [*sample.loss_mask, 0]
        longer.rollout_log_probs = [*sample.rollout_log_probs, 0.0]
        for one in (dummy, longer):
            ((found,),) = finish_batch([[one]], 0, self.args)
            assert found.rollout_routed_experts.shape == (len(found.tokens) - 1, LAYERS, TOP_K)
            assert found.rollout_routed_experts.any()
            assert len(found.rollout_top_p_token_offsets) == found.response_length + 1
        assert longer.rollout_routed_experts[:-1].tolist() == sample.rollout_routed_experts.tolist()
        assert longer.rollout_routed_experts[-1].tolist() == sample.rollout_routed_experts[-1].tolist()


def test_a_row_that_was_expanded_otherwise_than_the_engine_did_is_noticed() -> None:
    row = TrainingRow([1, 2, 3, 11, 12], [0, 0, 0, 1, 1], None, 2, (0,))
    longer = TrainingRow([1, 2, 2, 3, 11, 12], [0, 0, 0, 0, 1, 1], None, 2, (0,))
    records = read_records([FIRST], BOTH, FetchedImages())
    assert routed_experts_of_row(row, row, [FIRST], records, None).end == 5
    with pytest.raises(ValueError, match="routed 5 tokens of a row of 6"):
        routed_experts_of_row(row, longer, [FIRST], records, None)
