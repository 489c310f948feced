"""Names, numbers, sentences and file names that tasks draw their parameters from."""

from __future__ import annotations

import random
from collections.abc import Collection

_FIRST = [
    "Amara", "Bruno", "Chloe", "Daniel", "Elena", "Farid", "Grace", "Hugo", "Isla", "Jamal", "Katya", "Liam", "Mina",
    "Noah", "Olga", "Pedro", "Rosa", "Sven",
]  # fmt: skip
_LAST = [
    "Abbott", "Bauer", "Costa", "Diaz", "Eriksen", "Fischer", "Gupta", "Hansen", "Ito", "Jensen", "Khan", "Lopez",
    "Meyer", "Novak", "Okafor", "Park",
]  # fmt: skip
_OPENINGS = [
    "Please remember", "Do not forget", "Next week we plan", "I just finished", "We still need", "Tomorrow starts",
]  # fmt: skip
_MIDDLES = [
    "the garden plan", "our budget draft", "the train tickets", "the new recipe", "a spare key", "the team photos",
]  # fmt: skip
_ENDS = [
    "before noon.", "at the office.", "with Kim and Lee.", "for the party.", "on the blue shelf.",
    "if it does not rain.",
]  # fmt: skip
_STREETS = ["Cedar Lane", "Harbor Road", "Mill Street", "Park Avenue", "Sunset Drive", "Maple Court", "Bridge Street"]
_CITIES = ["Oakville", "Riverton", "Fairview", "Springfield", "Lakewood", "Ashford"]
_STEMS = [
    "budget", "diary", "errands", "garden", "ideas", "journal", "meeting", "packing", "recipe", "report", "shopping",
    "travel", "workout",
]  # fmt: skip
_SUBJECTS = [
    "Dentist", "Budget review", "Team lunch", "Yoga class", "Piano lesson", "Project call", "Book club",
    "Design review",
]  # fmt: skip


def full_name(rng: random.Random) -> str:
    """Returns a first and a last name."""
    return f"{rng.choice(_FIRST)} {rng.choice(_LAST)}"


def people(rng: random.Random, count: int, without: Collection[str] = ()) -> list[str]:
    """Returns ``count`` different names, none of them in ``without``."""
    all_names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    return rng.sample([name for name in all_names if name not in without], count)


def number(rng: random.Random) -> str:
    """Returns a telephone number."""
    return f"+1{rng.randint(200, 989)}{rng.randint(200, 989)}{rng.randint(0, 9999):04}"


def numbers(rng: random.Random, count: int, without: Collection[str] = ()) -> list[str]:
    """Returns ``count`` different numbers, none of them in ``without``."""
    drawn: list[str] = []
    while len(drawn) < count:
        candidate = number(rng)
        if candidate not in drawn and candidate not in without:
            drawn.append(candidate)
    return drawn


def sentence(rng: random.Random) -> str:
    """Returns one of a few hundred sentences."""
    return f"{rng.choice(_OPENINGS)} {rng.choice(_MIDDLES)} {rng.choice(_ENDS)}"


def address(rng: random.Random) -> str:
    """Returns a street address."""
    return f"{rng.randint(1, 980)} {rng.choice(_STREETS)}, {rng.choice(_CITIES)}"


def subject(rng: random.Random) -> str:
    """Returns the subject of an appointment."""
    return rng.choice(_SUBJECTS)


def file_name(rng: random.Random, extension: str, without: Collection[str] = ()) -> str:
    """Returns a file name that is not in ``without``."""
    while True:
        stem = f"{rng.choice(_STEMS)}_{''.join(rng.choices('abcdefghkmnprstuvwxyz23456789', k=4))}"
        if stem + extension not in without:
            return stem + extension
