"""The packer's invariants, over random scripts of an agent that edits its context."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from slime.utils.mask_utils import Generation, TrainingRow, pack_training_rows, pack_training_rows_within
from tests.example_counts import examples

tokens = st.lists(st.integers(0, 3), max_size=4)  # few ids, so that unlike things often look alike


@dataclass
class Script:
    """Plays an agent: its context grows, is edited, and every generation is kept as it was sampled."""

    with_log_probs: bool
    context: list[int] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    def sample(self, output: list[int], *, trained: bool, first_log_prob: float) -> None:
        """Samples an output in the present context."""
        log_probs = [first_log_prob - at for at in range(len(output))] if self.with_log_probs else None
        self.generations.append(Generation(list(self.context), output, log_probs, trained=trained))
        self.context += output

    def edit(self, start: int, end: int, stub: list[int]) -> None:
        """Replaces a stretch of the context; with an equal stub it is a no-op."""
        self.context[start:end] = stub


@st.composite
def scripts(draw: st.DrawFn) -> list[Generation]:
    """Draws what an agent sampled over observations, deletions, no-op edits, forks and cuts."""
    script = Script(with_log_probs=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 12))):
        match draw(st.sampled_from(["observe", "sample", "sample", "delete", "touch", "swap", "rewind", "return"])):
            case "observe":
                script.context += draw(tokens)
            case "sample":
                log_prob = draw(st.floats(-9, 0))
                script.sample(draw(tokens), trained=draw(st.integers(0, 4)) > 0, first_log_prob=log_prob)
            case "delete":
                start = draw(st.integers(0, len(script.context)))
                script.edit(start, draw(st.integers(start, len(script.context))), draw(tokens))
            case "touch":
                start = draw(st.integers(0, len(script.context)))
                script.edit(start, len(script.context), script.context[start:])
            case "swap" if script.context:
                start = draw(st.integers(0, len(script.context) - 1))
                script.edit(start, start + 1, [draw(st.integers(0, 3))])
            case "rewind":
                script.context = script.context[: draw(st.integers(0, len(script.context)))]
            case "return" if script.generations:
                left = draw(st.sampled_from(script.generations))
                script.context = [*left.prompt_ids, *left.output_ids, *draw(tokens)]
    return script.generations


few = examples(200)


def places(row: TrainingRow, generations: list[Generation]) -> list[tuple[int, int, int]]:
    """Gives (generation, start, end) of each output in a row, from the lengths alone."""
    return [
        (at, len(generations[at].prompt_ids), len(generations[at].prompt_ids) + len(generations[at].output_ids))
        for at in row.generation_indices
    ]


@few
@given(scripts())
def test_each_sampled_token_is_trained_once_after_what_it_was_sampled_after(generations: list[Generation]) -> None:
    """There is one row for each trained output, its prompt before it, its ids at it."""
    rows = pack_training_rows(generations)
    seen: list[int] = []
    for row in rows:
        for at, start, end in places(row, generations):
            assert row.token_ids[:start] == generations[at].prompt_ids
            assert row.token_ids[start:end] == generations[at].output_ids
            assert row.loss_mask[start:end] == [int(generations[at].trained)] * (end - start)
        seen += row.generation_indices
    assert len(seen) == len(set(seen))
    assert {at for at, one in enumerate(generations) if one.trained and one.output_ids} <= set(seen)


@few
@given(scripts())
def test_nothing_but_sampled_tokens_is_trained(generations: list[Generation]) -> None:
    """The ones add up to the trained outputs, lie on them only, and no row is without any."""
    rows = pack_training_rows(generations)
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.output_ids) for one in generations if one.trained)
    for row in rows:
        inside = {at for _, start, end in places(row, generations) for at in range(start, end)}
        assert {at for at, value in enumerate(row.loss_mask) if value} <= inside
        assert 1 in row.loss_mask
        assert row.response_length == len(row.loss_mask) - row.loss_mask.index(1)


@few
@given(scripts())
def test_a_row_opens_exactly_where_the_prefix_breaks(generations: list[Generation]) -> None:
    """Against a packer that a reader can check in one look."""
    stretches: list[list[int]] = []
    held: list[int] = []
    for at, one in enumerate(generations):
        if at == 0 or list(one.prompt_ids)[: len(held)] != held:
            stretches.append([])
        stretches[-1].append(at)
        held = [*one.prompt_ids, *one.output_ids]
    kept = [tuple(s) for s in stretches if any(generations[at].trained and generations[at].output_ids for at in s)]

    assert [row.generation_indices for row in pack_training_rows(generations)] == kept


@few
@given(scripts())
def test_log_probs_stay_with_their_tokens(generations: list[Generation]) -> None:
    """Recorded ones at the ones, finite, 0.0 elsewhere; none where none were recorded."""
    carried = any(one.output_log_probs is not None for one in generations)
    for row in pack_training_rows(generations):
        if not carried:
            assert row.log_probs is None
            continue
        assert row.log_probs is not None
        wanted = [0.0] * len(row.token_ids)
        for at, start, end in places(row, generations):
            if generations[at].trained:
                wanted[start:end] = generations[at].output_log_probs or []
        assert row.log_probs == wanted
        assert all(math.isfinite(value) for value in row.log_probs)


@few
@given(scripts(), st.integers(0, 12))
def test_truncation_drops_whole_generations_and_names_them(generations: list[Generation], limit: int) -> None:
    """Rows fit, dropped ones are told, kept ones are whole."""
    rows, dropped = pack_training_rows_within(generations, limit)
    kept = [one for at, one in enumerate(generations) if at not in dropped]

    assert all(len(row.token_ids) <= limit for row in rows)
    assert all(len(generations[at].prompt_ids) + len(generations[at].output_ids) > limit for at in dropped)
    assert sum(sum(row.loss_mask) for row in rows) == sum(len(one.output_ids) for one in kept if one.trained)
    assert not set(dropped) & {at for row in rows for at in row.generation_indices}


@few
@given(scripts())
def test_the_same_script_gives_the_same_rows_in_order(generations: list[Generation]) -> None:
    """Deterministic, inputs untouched, indices ascend within and between rows."""
    before = copy.deepcopy(generations)
    rows = pack_training_rows(generations)
    order = [at for row in rows for at in row.generation_indices]

    assert rows == pack_training_rows(before)
    assert generations == before
    assert order == sorted(order)
