"""Checks the ``response_mask`` of a call against the tokens that were added. Pure; every error names the turn.

The mask is not used for training: this side knows the sampled tokens. The mask is the other side's count of added
tokens. A wrong count shows another tokenizer, an edited context that was not counted, or a bug. A call with a wrong
mask is refused and does not change the session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod
from slime_plugins.rollout_buffer.remote_rollout.errors import WrongMaskError


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedTokens:
    """The exact number of tokens that were added to the sequence since the last turn.

    ``how`` is a suffix for error messages. ``others`` are further accepted counts, each computed only when needed.
    """

    count: int
    how: str = ""
    others: tuple[tuple[CountMethod, Callable[[], int]], ...] = ()


def check_entered_mask(mask: Any, turn: int, entered: AddedTokens) -> CountMethod:
    """Returns the counting method of a mask that is one 0 for each added token.

    Raises:
        WrongMaskError: names the turn, the expected and the given length.
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
    for method, count_tokens in entered.others:
        if zeros and zeros == count_tokens():
            return method
    raise WrongMaskError(
        f"turn {turn}: response_mask has {zeros} values, but {_tokens(entered.count)} entered since turn {turn - 1}"
        f"{entered.how}: expected {entered.count}, given {zeros}",
        detail,
    )


def _zeros(mask: Any, turn: int, detail: dict[str, Any]) -> int:
    """Returns the number of zeros in the mask; other values are refused."""
    if mask is None:
        return 0
    if not isinstance(mask, list):
        raise WrongMaskError(
            f"turn {turn}: response_mask must be a list of zeros or null, not {type(mask).__name__}", detail
        )
    wrong = next((at for at, value in enumerate(mask) if type(value) is not int or value != 0), None)
    if wrong is None:
        return len(mask)
    if mask[wrong] == 1 and type(mask[wrong]) is int:
        ones = sum(1 for value in mask if value == 1)
        raise WrongMaskError(
            f"turn {turn}: response_mask is 1 at {ones} of {len(mask)} positions, first at {wrong}, but it covers "
            "only tokens that entered between two turns, and none of them was sampled: expected "
            f"{detail['expected']} zeros, given {len(mask)} values with {ones} ones",
            detail,
        )
    shown = repr(mask[wrong])[:40]
    raise WrongMaskError(
        f"turn {turn}: response_mask holds {shown} at position {wrong}; every value must be the integer 0", detail
    )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
