"""Compares an engine's tokenizer with the job's by encoding a text: with another tokenizer turns are nonsense or crash.

SGLang does not check ids before its embedding lookup: one id beyond its vocabulary crashes the scheduler and with it
the trainer's server (seen with 0.5.23). A vocabulary in another order gives nonsense without an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLAIN_TEXT = "Tap the 3rd button, then wait 12345 ms.\n\n\tdef f(x): return x\nnaïve façade — 你好, мир 🙂 "
SPECIAL_TOKENS = 8
"""Number of the tokenizer's special tokens in the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerProbe:
    """A text and the ids to which the job's tokenizer encodes it."""

    text: str
    ids: tuple[int, ...]

    def complaint(self, body: bytes) -> str:
        """Returns how the ids in a reply of ``/tokenize`` differ; empty if they are equal, or there are none in it."""
        try:
            theirs = json.loads(body)["tokens"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return ""
        if not isinstance(theirs, list) or tuple(theirs) == self.ids:
            return ""
        return f"{_first_difference(self.ids, theirs)} of the text {self.text!r}"


def tokenizer_probe(tokenizer: Any) -> TokenizerProbe:
    """Returns the probe of a transformers tokenizer; its text includes special tokens."""
    text = PLAIN_TEXT + "".join(map(str, tokenizer.all_special_tokens[:SPECIAL_TOKENS]))
    return TokenizerProbe(text=text, ids=tuple(tokenizer.encode(text, add_special_tokens=False)))


def _first_difference(ours: Sequence[int], theirs: Sequence[object]) -> str:
    position = next((index for index, (own, other) in enumerate(zip(ours, theirs, strict=False)) if own != other), None)
    if position is None:
        return f"{len(theirs)} tokens instead of {len(ours)}"
    return f"token {position} is {theirs[position]!r} instead of {ours[position]}"
