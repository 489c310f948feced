"""Finds unknown keys that resemble known ones: misspelt settings, as opposed to options of a generator."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_KEYS = 200
"""Maximum of keys of a record that are compared: thousands would take seconds."""
MIN_SIMILARITY = 0.84
"""``difflib`` ratio from which on an unknown key counts as misspelt."""


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Returns the most similar known key; None if none is similar enough."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=MIN_SIMILARITY)
    return near[0] if near else None


def misspelt_key_messages(given: Iterable[str], known: Iterable[str], prefix: str = "") -> list[str]:
    """Returns a message for each misspelt key among the first ``MAX_KEYS``; ``prefix`` is prepended to key names."""
    names = list(known)
    found = ((key, nearest_key(key, names)) for key in islice(given, MAX_KEYS) if key not in names)
    return [f"{prefix}{key} is not known; did you mean {prefix}{near}?" for key, near in found if near]
