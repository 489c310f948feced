"""Is an incoming ``response_mask`` what really changed? Pure; every refusal is a sentence that names the turn.

The mask is never used for training: what was sampled is known here. It is the other side's statement of how many
tokens entered, and a wrong one shows another tokenizer, an edited context nobody counted, or a bug. So there is nothing
to fall back to: a wrong mask refuses the turn, and the session stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slime_plugins.rollout_buffer.remote_rollout.errors import WrongMaskError


class CountMethod(StrEnum):
    """How the other side must have counted for its mask to have that length."""

    IDS = "ids"  # the tokens that really entered
    TEXT = "text"  # the whole conversation rendered again, minus what was held: off where sampled ids were re-tokenised


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedTokens:
    """What entered the sequence since the last turn: ``count`` tokens, exactly.

    ``how`` is for sentences. ``others`` are counts that are accepted as well, each worked out only when it is needed.
    """

    count: int
    how: str = ""
    others: tuple[tuple[CountMethod, Callable[[], int]], ...] = ()


def check_mask(mask: Any, turn: int, entered: AddedTokens) -> CountMethod:
    """Returns how the mask was counted, when it is one 0 for each token that entered.

    Raises:
        WrongMaskError: names the turn, what was expected and what was given.
    """
    detail = {"turn": turn, "expected": entered.count, "given": len(mask) if isinstance(mask, list) else None}
    zeros = _zeros(mask, turn, detail)
    if turn == 1 and zeros:
        raise WrongMaskError(
            f"turn 1: response_mask has {zeros} values, but on the first turn nothing has entered yet: send null. "
            "(A session that expired or was ended starts at turn 1, too.)",
            detail,
        )
    if mask is None and entered.count:
        raise WrongMaskError(
            f"turn {turn}: response_mask is missing, but {_tokens(entered.count)} entered since turn {turn - 1}"
            f"{entered.how}: send one 0 for each",
            detail,
        )
    if zeros == entered.count:
        return CountMethod.IDS
    for count, count_tokens in entered.others:
        if zeros and zeros == count_tokens():
            return count
    raise WrongMaskError(
        f"turn {turn}: response_mask has {zeros} values, but {_tokens(entered.count)} entered since turn {turn - 1}"
        f"{entered.how}: expected {entered.count}, given {zeros}",
        detail,
    )


def _zeros(mask: Any, turn: int, detail: dict[str, Any]) -> int:
    """How many zeros the mask is; it may be nothing else."""
    if mask is None:
        return 0
    if not isinstance(mask, list):
        raise WrongMaskError(
            f"turn {turn}: response_mask must be a list of zeros or null, not {type(mask).__name__}", detail
        )
    wrong = _first_that_is_no_zero(mask)
    if wrong is None:
        return len(mask)
    if mask[wrong] == 1 and type(mask[wrong]) is int:
        ones = sum(1 for value in mask if value == 1)
        raise WrongMaskError(
            f"turn {turn}: response_mask says 1 at {ones} of {len(mask)} positions, first at {wrong}, but it covers "
            "only tokens that entered between two turns, and none of them was sampled: expected "
            f"{detail['expected']} zeros, given {len(mask)} values with {ones} ones",
            detail,
        )
    shown = repr(mask[wrong])[:40]
    raise WrongMaskError(
        f"turn {turn}: response_mask holds {shown} at position {wrong}; every value must be the integer 0", detail
    )


def _first_that_is_no_zero(mask: Sequence[Any]) -> int | None:
    return next((at for at, value in enumerate(mask) if type(value) is not int or value != 0), None)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
