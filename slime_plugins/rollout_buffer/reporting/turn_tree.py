"""The turns of an episode as a tree: a turn's parent is the turn whose prompt and sampled tokens its prompt continues.

The parent is searched for among the previous turn and its ancestors. This finds every parent where branches are stored
one after the other, as the gateway stores them. A turn whose prompt continues none of these is a root; an episode with
an edited context has several roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.utils.mask_rows import Generation, pack_training_rows
from slime_plugins.rollout_buffer.reporting.token_rows import Tokenizer, text_of
from slime_plugins.rollout_buffer.wire.trajectory_replies import TurnOfTree


def emission_order(extra_info: Any) -> list[int] | None:
    """Returns the number of each turn in the order of sampling, as the recorder stored it; None if it did not."""
    known = extra_info if isinstance(extra_info, dict) else {}
    recorded = known.get("gateway", known.get("remote_rollout"))
    numbers = recorded.get("emission_order") if isinstance(recorded, dict) else None
    usable = isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)
    return numbers if usable else None


def describe_turn_tree(
    generations: Sequence[Generation], emission_order: Sequence[int] | None, tokenizer: Tokenizer | None
) -> list[TurnOfTree]:
    """Returns each turn with its parent, what its prompt added and what was sampled.

    ``emission_order`` has the number of each turn in the order of sampling, from 1; None if unknown. Texts are None
    without a tokenizer.
    """
    rows = pack_training_rows(generations)
    row_of = {index: number for number, row in enumerate(rows) for index in row.generation_indices}
    numbers = emission_order if emission_order is not None and len(emission_order) == len(generations) else None
    path: list[int] = []  # the turns from the root to the previous turn
    turns: list[TurnOfTree] = []
    for index, turn in enumerate(generations):
        while path and not _continues(turn, generations[path[-1]]):
            path.pop()
        parent = path[-1] if path else None
        held = 0 if parent is None else len(generations[parent].prompt_ids) + len(generations[parent].output_ids)
        log_probs = turn.output_log_probs
        turns.append(
            TurnOfTree(
                turn=index,
                parent=parent,
                sampled_as=None if numbers is None else numbers[index],
                new_tokens=len(turn.prompt_ids) - held,
                output_tokens=len(turn.output_ids),
                mean_log_prob=sum(log_probs) / len(log_probs) if log_probs else None,
                finish_reason=turn.finish_reason,
                row=row_of.get(index),
                context=text_of(tokenizer, turn.prompt_ids[held:]),
                output=text_of(tokenizer, turn.output_ids),
            )
        )
        path.append(index)
    return turns


def _continues(later: Generation, earlier: Generation) -> bool:
    """Returns True if a prompt begins with an earlier prompt and its sampled tokens."""
    held = [*earlier.prompt_ids, *earlier.output_ids]
    return list(later.prompt_ids[: len(held)]) == held
