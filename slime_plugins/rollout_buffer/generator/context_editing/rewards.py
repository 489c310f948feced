"""Rewards of answers, by rules. Pure functions.

===============================================================  ======================
the answer                                                       score
===============================================================  ======================
is the label, or one of its ``aliases``                          1
is the label's number, in another format                         1
holds the label (or its number, and no other) among other words  ``partial_credit``
names some of several right items                                ``partial_credit`` · F1
anything else                                                    0
===============================================================  ======================

Texts are compared without case, articles, punctuation and extra spaces. A list as label requires all its items, in any
order. A number as label is compared exactly.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_WORDS = 60
"""Maximum number of words of an answer that only contains the label, for partial credit."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w]|\.\d)")
_NUMBER_FORMATTING = " \t\n$€£%"
_ARTICLES = frozenset({"a", "an", "the"})
_BETWEEN_ITEMS = re.compile(r"[,;\n]|\band\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """The right answer: ``texts`` are alternatives, ``items`` must all be named."""

    texts: tuple[str, ...] = ()
    items: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A score in [0, 1] and the rule that gave it: exact, number, contained, items or none."""

    value: float
    match: str


def read_label(value: Any, aliases: Any = ()) -> Label | None:
    """Returns the label of an input line; None if it is no text, no number, and no list of texts and numbers."""
    if isinstance(value, list | tuple):
        items = [text for item in value if (text := _as_text(item))]
        return Label(items=tuple(items)) if items and len(items) == len(value) else None
    first = _as_text(value)
    others = [text for alias in aliases or () if (text := _as_text(alias))] if isinstance(aliases, list | tuple) else []
    return Label(texts=(first, *others)) if first else None


def score_answer(answer: str, label: Label, *, partial_credit: float = 0.5) -> Score:
    """Returns the score of ``answer``, by the table of this module."""
    if label.items:
        return _score_items(answer, label.items, partial_credit)
    return max((_score_text(answer, text, partial_credit) for text in label.texts), key=lambda score: score.value)


def normalized(text: str) -> str:
    """Returns the words of a text: without case, articles and punctuation."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = re.findall(r"\w+", plain)
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)


def _score_text(answer: str, label: str, partial_credit: float) -> Score:
    wanted = _number(label)
    if wanted is not None:
        return _score_number(answer, wanted, partial_credit)
    given, right = normalized(answer), normalized(label)
    if right and given == right:
        return Score(value=1.0, match="exact")
    is_short = len(given.split()) <= MAX_WORDS
    if right and is_short and f" {right} " in f" {given} ":
        return Score(value=partial_credit, match="contained")
    return Score(value=0.0, match="none")


def _score_number(answer: str, wanted: Decimal, partial_credit: float) -> Score:
    given = _number(answer)
    if given is not None:
        return Score(value=1.0, match="number") if given == wanted else Score(value=0.0, match="none")
    numbers = {_number(text) for text in _NUMBER.findall(answer)}
    if numbers == {wanted} and len(answer.split()) <= MAX_WORDS:
        return Score(value=partial_credit, match="contained")
    return Score(value=0.0, match="none")


def _score_items(answer: str, items: Sequence[str], partial_credit: float) -> Score:
    right = _parts(*items)  # an item may hold a comma, as 1,234 does
    given = _parts(answer)
    hits = len(given & right)
    if not hits:
        return Score(value=0.0, match="none")
    if given == right:
        return Score(value=1.0, match="exact")
    return Score(value=partial_credit * 2 * hits / (len(given) + len(right)), match="items")


def _parts(*texts: str) -> set[str]:
    """Returns the normalized items of enumerations, which commas, semicolons, line ends and "and" separate."""
    return {normalized(part) for text in texts for part in _BETWEEN_ITEMS.split(text)} - {""}


def _number(text: str) -> Decimal | None:
    """Returns the number if the whole text is one; else None."""
    bare = unicodedata.normalize("NFKC", text).strip(_NUMBER_FORMATTING).rstrip(". ")
    if len(bare) > 64 or not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare.replace(",", ""))
    except InvalidOperation:
        return None


def _as_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value).strip()
