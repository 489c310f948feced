"""Keys that are nearly known ones: those are slips, and no options of somebody's own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_KEYS = 200
"""Keys of a record that are compared with the known ones, the first of it: with thousands that would take seconds."""
LIKENESS_OF_A_TYPO = 0.84
"""How alike an unknown key and a known one must be (``difflib``) for the first to be a slip."""


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Returns the known key that an unknown one was meant to be; None when it is like none of them."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=LIKENESS_OF_A_TYPO)
    return near[0] if near else None


def misspelt(given: Iterable[str], known: Iterable[str], prefix: str = "") -> list[str]:
    """Returns a sentence for each key that is nearly a known one; ``prefix`` stands before both.

    Of very many keys, the first alone are compared.
    """
    names = list(known)
    found = ((key, nearest(key, names)) for key in islice(given, MAX_KEYS) if key not in names)
    return [f"{prefix}{key} is not known; did you mean {prefix}{near}?" for key, near in found if near]
