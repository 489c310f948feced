"""Checks the ``response_mask`` of a call against the tokens that entered. Pure; every error names the turn.

The mask is not used for training: this side knows the sampled tokens. The mask is the other side's count of entered
tokens: those in the prompt of a turn after the part that repeats the last turn, its prompt and output. A wrong count
shows another tokenizer, an edited context that was not counted, or a bug. A call with a wrong mask is refused and does
not change the session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.remote_rollout.conversation import CountMethod
from slime_plugins.rollout_buffer.remote_rollout.errors import WrongMaskError


@dataclass(frozen=True, kw_only=True, slots=True)
class EnteredTokens:
    """The exact number of tokens that entered the sequence since the last turn.

    ``note`` follows the number in error messages: how an edited context was counted. ``others`` are further accepted
    counts, each computed only when needed.
    """

    count: int
    note: str = ""
    others: tuple[tuple[CountMethod, Callable[[], int]], ...] = ()


def check_entered_mask(mask: Any, turn: int, entered: EnteredTokens) -> CountMethod:
    """Returns the counting method of a mask that is one 0 for each entered token.

    Raises:
        WrongMaskError: names the turn, the expected and the given length.
    """
    detail = {"turn": turn, "expected": entered.count, "given": len(mask) if isinstance(mask, list) else None}

    def wrong(what: str) -> WrongMaskError:
        return WrongMaskError(f"turn {turn}: response_mask {what}", detail)

    zeros = _zeros(mask, entered.count, wrong)
    since = f"{_tokens(entered.count)} entered since turn {turn - 1}{entered.note}"
    if turn == 1 and zeros:
        raise wrong(
            f"has {zeros} values, but on the first turn nothing has entered yet: send null. (A session that expired or "
            "was ended starts at turn 1, too.)"
        )
    if mask is None and entered.count:
        raise wrong(f"is missing, but {since}: send one 0 for each")
    if zeros == entered.count:
        return CountMethod.IDS
    for method, count_tokens in entered.others:
        if zeros and zeros == count_tokens():  # without zeros nothing was counted
            return method
    raise wrong(f"has {zeros} values, but {since}: expected {entered.count}, given {zeros}")


def _zeros(mask: Any, expected: int, wrong: Callable[[str], WrongMaskError]) -> int:
    """Returns the number of zeros in the mask; raises ``wrong`` for other values."""
    if mask is None:
        return 0
    if not isinstance(mask, list):
        raise wrong(f"must be a list of zeros or null, not {type(mask).__name__}")
    first = next((index for index, value in enumerate(mask) if type(value) is not int or value != 0), None)
    if first is None:
        return len(mask)
    if mask[first] == 1 and type(mask[first]) is int:
        ones = sum(1 for value in mask if value == 1)
        raise wrong(
            f"is 1 at {ones} of {len(mask)} positions, first at {first}, but it covers only tokens that entered "
            f"between two turns, and none of them was sampled: expected {expected} zeros, given {len(mask)} values "
            f"with {ones} ones"
        )
    raise wrong(f"holds {repr(mask[first])[:40]} at position {first}; every value must be the integer 0")


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
