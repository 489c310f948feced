"""Writes an input file for the ``statelm`` task type: made-up questions over long, made-up documents.

    python tools/generate_documents.py [--lines 24] [--min_tokens 4000] [--max_tokens 200000] [--output FILE]

There are three kinds of questions, in turn. The answer to a *needle* is in one place; a *sum* and a *list* need
facts from several places. Each document is the log of a harbour: small talk, the facts that answer the question, and
facts that look like them. Lengths are spread evenly on a log scale. The same arguments give the same file, byte for
byte. ``--tokenizer_path`` needs transformers; without it a token counts as 4.7 characters, the mean of Qwen3's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_OUTPUT = Path("data") / "documents.jsonl"
SEED = 7
CHARACTERS_PER_TOKEN = 4.7  # what Qwen3's tokenizer makes of these documents
SENTENCES_PER_PARAGRAPH = 5

SHIPS = (
    "Grey Heron", "Blue Lantern", "Old Margaret", "Northern Star", "Quiet Anna", "Red Kestrel", "Salt Maiden",
    "Western Gull", "Iron Thistle", "Silver Eel", "Brave Otter", "Distant Bell", "Green Harrow", "Lucky Tern",
)  # fmt: skip
GOODS = (
    "saffron", "copper", "linen", "barley", "amber", "pepper", "indigo", "tin", "walnuts", "resin", "wool", "sugar",
    "tobacco", "porcelain", "oranges", "candles",
)  # fmt: skip
PLACES = (
    "Eastgate", "Millbrook", "Stonehaven", "Larkfield", "Oakmere", "Fenwick", "Harrowdale", "Thornbury", "Westmarch",
    "Ashcombe", "Kingsferry", "Dunmore", "Redcliff", "Silverton",
)  # fmt: skip
WHO = (
    "the harbour master", "a young clerk", "the pilot", "an old sailor", "the baker", "the night watch",
    "a customs man", "the lighthouse keeper", "the rope maker", "a stranger from the hills",
)  # fmt: skip
DID = (
    "spoke about the weather", "mended a torn net", "waited for the ferry", "counted the gulls on the roof",
    "drank tea", "complained about the price of coal", "swept the stairs", "wrote a long letter",
    "looked for a lost key", "told a story nobody believed", "painted the door of the shed",
    "slept through the morning bell",
)  # fmt: skip
WHERE = (
    "at the north pier", "behind the fish market", "near the old crane", "in the reading room", "on the sea wall",
    "beside the well", "under the arches", "in front of the town hall", "by the drying racks",
)  # fmt: skip
WHEN = (
    "before sunrise", "in the afternoon", "after the rain", "while the tide went out", "at noon",
    "late in the evening", "on market day", "during the fog", "when the bells had stopped",
)  # fmt: skip
CLOSINGS = (
    "Nothing came of it.", "Nobody wrote it down at the time.", "It was soon forgotten.", "The dog barked twice.",
    "The matter was left at that.", "People talked about it for a while.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question with its answer; ``facts`` answer it, ``decoys`` only look as if they did."""

    text: str
    label: str | int | list[str]
    facts: tuple[str, ...]
    decoys: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns 0."""
    options = _parse(arguments)
    count = _token_counter(options.tokenizer_path)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for line in generate(options.lines, (options.min_tokens, options.max_tokens), seed=options.seed, count=count):
            file.write(json.dumps(line) + "\n")
    sys.stdout.write(f"{options.lines} questions over documents written to {options.output}\n")
    return 0


def generate(
    lines: int,
    tokens: tuple[int, int] = (4_000, 200_000),
    *,
    seed: int = SEED,
    count: Callable[[str], int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields input lines; their documents have from ``tokens[0]`` to ``tokens[1]`` tokens, as ``count`` counts them."""
    kinds = list(KINDS)
    for number in range(lines):
        rng = random.Random(f"{seed}/{number}")
        kind = kinds[number % len(kinds)]
        length = _document_length(number, lines, tokens)
        yield _line(f"{kind}_{number}", kind, KINDS[kind](rng), length, rng, count or _estimate)


def _line(
    instance_id: str, kind: str, question: Question, length: int, rng: random.Random, count: Callable[[str], int]
) -> dict[str, Any]:
    document, depths = _document(question, length, rng, count)
    extra_info = {"kind": kind, "tokens": count(document), "evidence": len(question.facts), "depths": depths}
    return {
        "instance_id": instance_id,
        "raw_prompt": [{"role": "user", "content": question.text}],
        "document_content": document,
        "label": question.label,
        "extra_info": extra_info,
    }


def _document(
    question: Question, length: int, rng: random.Random, count: Callable[[str], int]
) -> tuple[str, list[float]]:
    """Returns a text of about ``length`` tokens, and where in it the question's facts are: 0 start, 1 end."""
    facts = [*question.facts, *question.decoys]
    paragraphs: list[list[str]] = []
    total = count(" ".join(facts))
    while total < length or len(paragraphs) < len(facts):
        paragraph = [_small_talk(rng) for _ in range(SENTENCES_PER_PARAGRAPH)]
        total += count(" ".join(paragraph)) + 1  # for the blank line between two paragraphs
        paragraphs.append(paragraph)
    while count(_text_of(paragraphs)) + count(" ".join(facts)) < length:  # the paragraphs alone may have more
        paragraphs.append([_small_talk(rng) for _ in range(SENTENCES_PER_PARAGRAPH)])
    places = rng.sample(range(len(paragraphs)), len(facts))
    for place, fact in zip(places, facts, strict=True):
        paragraphs[place].insert(rng.randrange(SENTENCES_PER_PARAGRAPH + 1), fact)
    depths = sorted(round(place / len(paragraphs), 3) for place in places[: len(question.facts)])
    return _text_of(paragraphs), depths


def _text_of(paragraphs: Sequence[Sequence[str]]) -> str:
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs)


def _small_talk(rng: random.Random) -> str:
    who, did = rng.choice(WHO), rng.choice(DID)
    sentence = f"{who[0].upper()}{who[1:]} {did} {rng.choice(WHERE)} {rng.choice(WHEN)}."
    return f"{sentence} {rng.choice(CLOSINGS)}" if rng.random() < 0.3 else sentence


# --- questions -------------------------------------------------------------------------------------------------------


def _needle(rng: random.Random) -> Question:
    place, *other_places = rng.sample(PLACES, 5)
    codes = rng.sample(range(1000, 10_000), 5)
    written = [f"{rng.choice('KLMNPRTX')}{rng.choice('AEHJ')}-{code}" for code in codes]
    facts = [
        f"The access code of the {name} archive is {code}."
        for name, code in zip((place, *other_places), written, strict=True)
    ]
    return Question(
        text=f"What is the access code of the {place} archive?",
        label=written[0],
        facts=(facts[0],),
        decoys=tuple(facts[1:]),
    )


def _sum(rng: random.Random) -> Question:
    ship, *other_ships = rng.sample(SHIPS, 5)
    good, *other_goods = rng.sample(GOODS, 5)
    entries = iter(rng.sample(range(1000, 10_000), 20))
    crates = [rng.randint(2, 99) for _ in range(rng.randint(3, 5))]
    decoys = [(ship, other) for other in other_goods[:3]] + [(other, good) for other in other_ships[:3]]
    return Question(
        text=f"How many crates of {good} did the {ship} unload in total? Answer with the number.",
        label=sum(crates),
        facts=tuple(_entry(next(entries), ship, number, good) for number in crates),
        decoys=tuple(_entry(next(entries), who, rng.randint(2, 99), what) for who, what in decoys),
    )


def _list(rng: random.Random) -> Question:
    ships = rng.sample(SHIPS, rng.randint(2, 4))
    good, *other_goods = rng.sample(GOODS, 5)
    entries = iter(rng.sample(range(1000, 10_000), 20))
    decoys = [(rng.choice(SHIPS), other) for other in other_goods]
    return Question(
        text=f"Which ships unloaded crates of {good}? Answer with their names, separated by commas.",
        label=sorted(ships),
        facts=tuple(_entry(next(entries), ship, rng.randint(2, 99), good) for ship in ships),
        decoys=tuple(_entry(next(entries), ship, rng.randint(2, 99), other) for ship, other in decoys),
    )


KINDS: dict[str, Callable[[random.Random], Question]] = {"needle": _needle, "sum": _sum, "list": _list}


def _entry(number: int, ship: str, crates: int, good: str) -> str:
    return f"Entry {number}: the {ship} unloaded {crates} crates of {good}."


# --- the command -----------------------------------------------------------------------------------------------------


def _document_length(number: int, lines: int, tokens: tuple[int, int]) -> int:
    """Returns the tokens of one document; each document is longer than the one before by the same factor."""
    low, high = tokens
    share = number / max(lines - 1, 1)
    return round(math.exp(math.log(low) * (1 - share) + math.log(high) * share))


def _estimate(text: str) -> int:
    return int(len(text) / CHARACTERS_PER_TOKEN)


def _token_counter(tokenizer_path: Path | None) -> Callable[[str], int]:
    if tokenizer_path is None:
        return _estimate
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)

    def count(text: str) -> int:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return len(ids)

    return count


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate_documents", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=24, help="how many questions (default: 24)")
    parser.add_argument("--min_tokens", type=int, default=4_000, help="length of the shortest document (4000)")
    parser.add_argument("--max_tokens", type=int, default=200_000, help="length of the longest document (200000)")
    parser.add_argument("--seed", type=int, default=SEED, help="another seed gives other questions (default: 7)")
    parser.add_argument("--tokenizer_path", type=Path, help="folder of a tokenizer to count with")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="default: data/documents.jsonl")
    options = parser.parse_args(arguments)
    if options.lines < 1 or not 1 <= options.min_tokens <= options.max_tokens:
        parser.error("--lines must be at least 1, and --min_tokens from 1 to --max_tokens")
    return options


if __name__ == "__main__":
    sys.exit(main())
