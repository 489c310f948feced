"""Time to rebuild loss masks, compared with slime's per-message algorithm, reimplemented here.

    python tests/fetch_tokenizers.py && python -m benchmarks.bench_masks --json masks.json

Four cases, each for four pairs of template and type: a new conversation; the same one again; a mask after each turn of
a growing conversation, as an episode requests them; and a batch of conversations. Then packing rows from generations.
Contenders alternate within each round, every round with new conversations; the table has medians, their range (lowest
to highest round) and the ratio of the medians.

Caveats: the baseline's masks are wrong in known ways, so this compares time, not quality. Texts are random words of
about five characters a token. On a busy machine use the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ratios import spread
from slime.utils.mask_utils import Generation, MultiTurnLossMaskGenerator, pack_training_rows
from tests import chat_tokenizers

Message = dict[str, Any]
IdsAndMask = tuple[list[int], list[int]]
PAIRS = {"qwen2.5": "qwen", "qwen3-2507": "qwen3", "qwen3-hybrid": "qwen3", "qwen3.5": "qwen3_5"}
WORDS = re.findall(
    r"\w+",
    """
    the quick settings screen opens and shows a list of networks tap on button value result error message contact
    please find where it says that information about account number before going back to main menu then scroll
    down again until you see what was expected coordinate window application notification permission storage
    """,
)
TURNS = 30
TOKENS = 19_000


class PerMessageMask:
    """Renders and tokenises every message separately and joins the parts, as slime's ``qwen`` and ``qwen3`` do."""

    def __init__(self, tokenizer: Any, *, with_prefix: bool) -> None:
        self._tokenizer = tokenizer
        self._prefix = [{"role": "user", "content": "a message to be cut off again"}] if with_prefix else []
        probe = {"role": "user", "content": "probe text"}
        twice, text = self._ids([probe, probe]), self._ids([probe])
        self._system_length = 2 * len(text) - len(twice)
        self._header_length = len(self._ids([probe], add_generation_prompt=True)) - len(text)
        self._prefix_ids = self._ids(self._prefix) if self._prefix else []

    def __call__(self, messages: Sequence[Message]) -> IdsAndMask:
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for index, message in enumerate(messages):
            ids = self._ids_of(index, message)
            token_ids += ids
            if message["role"] == "assistant":
                loss_mask += [0] * self._header_length + [1] * (len(ids) - self._header_length)
            else:
                loss_mask += [0] * len(ids)
        return token_ids, loss_mask

    def _ids_of(self, index: int, message: Message) -> list[int]:
        if not self._prefix:
            return self._ids([message])[0 if index == 0 or message["role"] == "system" else self._system_length :]

        if index == 0:
            return self._ids([message, *self._prefix])[: -len(self._prefix_ids)]

        return self._ids([*self._prefix, message])[len(self._prefix_ids) :]

    def _ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        return ids


class SearchedTextMask:
    """Renders the whole conversation, tokenises it twice, and searches it for headers, as slime's ``qwen3_5`` does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[Message]) -> IdsAndMask:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        again = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        if encoding["input_ids"] != again:
            raise ValueError("the render tokenises in two ways")

        ones_before = [0]
        for value in self._character_mask(text, messages):
            ones_before.append(ones_before[-1] + value)
        mask = [int(ones_before[end] > ones_before[start]) for start, end in encoding["offset_mapping"]]
        return encoding["input_ids"], mask

    @staticmethod
    def _character_mask(text: str, messages: Sequence[Message]) -> list[int]:
        mask = [0] * len(text)
        cursor = 0
        for _ in filter(lambda message: message["role"] == "assistant", messages):
            start = text.index("<|im_start|>assistant\n", cursor) + len("<|im_start|>assistant\n")
            cursor = text.index("<|im_end|>", start) + len("<|im_end|>") + 1
            start += len("<think>\n") if text.startswith("<think>\n", start) else 0
            for index in range(start, cursor):
                mask[index] = 1
        return mask


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of both contenders, round by round, for one case of one pair."""

    question: str
    pair: str
    ancestor_s: list[float]
    ours_s: list[float]
    note: str = ""

    @property
    def ratio(self) -> float:
        """How many times faster ours is, by medians."""
        return statistics.median(self.ancestor_s) / statistics.median(self.ours_s)

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers for the recorded file."""
        return {
            "question": self.question,
            "pair": self.pair,
            "ancestor_s": self.ancestor_s,
            "ours_s": self.ours_s,
            "ratio_of_medians": round(self.ratio, 2),
            "note": self.note,
        }


def make_conversation(seed: str, turns: int = TURNS, tokens: int = TOKENS) -> list[Message]:
    """Returns a conversation of ``turns`` turns and about ``tokens`` tokens."""
    rng = random.Random(seed)
    per_message = tokens // (2 * turns)

    def write() -> str:
        count = int(per_message / 1.55 * rng.uniform(0.6, 1.4))  # a word has 1.55 tokens
        return " ".join(rng.choice(WORDS) + rng.choice(["", "", "", ",", ".", ".\n"]) for _ in range(count))

    messages: list[Message] = [{"role": "system", "content": "You are an agent on a phone."}]
    for _ in range(turns):
        messages += [{"role": "user", "content": write()}, {"role": "assistant", "content": write()}]
    return messages


def ancestor_of(tokenizer: Any, tokenizer_type: str) -> Callable[[Sequence[Message]], IdsAndMask]:
    """Returns slime's algorithm for one type."""
    if tokenizer_type == "qwen3_5":
        return SearchedTextMask(tokenizer)

    return PerMessageMask(tokenizer, with_prefix=tokenizer_type == "qwen3")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def prefixes(messages: list[Message]) -> list[list[Message]]:
    """Returns the conversation after each of its turns."""
    return [messages[: end + 1] for end, message in enumerate(messages) if message["role"] == "assistant"]


def measure_pair(pair: str, tokenizer_type: str, rounds: int, batch: int) -> list[Measured]:
    """Measures all cases for one pair; without the batch if ``batch`` is 0."""
    tokenizer = chat_tokenizers.load(pair)
    ancestor = ancestor_of(tokenizer, tokenizer_type)
    ours = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type)
    ours.get_loss_mask(make_conversation("warming up", 2, 200))
    ancestor(make_conversation("warming up", 2, 200))
    names = ["one, never seen", "one, seen before", f"after each of {TURNS} turns"]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in names}
    tokens = 0
    for index in range(rounds):
        conversation, growing = make_conversation(f"one {index}"), prefixes(make_conversation(f"grown {index}"))
        tokens = len(ours.get_loss_mask(make_conversation(f"count {index}"))[0])
        for name, conversations in zip(names, ([conversation], [conversation], growing), strict=True):
            old, new = times[name]
            old.append(seconds(lambda: [ancestor(messages) for messages in conversations]))  # noqa: B023 - called at once
            new.append(seconds(lambda: [ours.get_loss_mask(messages) for messages in conversations]))  # noqa: B023 - as above
    measured = [Measured(name, pair, *times[name], note=f"{tokens} tokens") for name in names]
    return [*measured, measure_batch(pair, tokenizer_type, ancestor, batch)] if batch else measured


def measure_batch(
    pair: str, tokenizer_type: str, ancestor: Callable[[Sequence[Message]], IdsAndMask], batch: int
) -> Measured:
    """Measures a batch, and the number of busy cores. The ancestor's time is that of an eighth, times 8."""
    ours = MultiTurnLossMaskGenerator(chat_tokenizers.load(pair), tokenizer_type)
    conversations = [make_conversation(f"batch {index}") for index in range(batch)]
    sample = conversations[: max(1, batch // 8)]
    old = seconds(lambda: [ancestor(messages) for messages in sample]) * len(conversations) / len(sample)
    processor = time.process_time()
    new = seconds(lambda: ours.get_loss_masks(conversations))
    cores = (time.process_time() - processor) / new
    cache = ours.cache_bytes / 2**20
    note = f"{cores:.1f} of {os.cpu_count()} cores busy, cache {cache:.0f} MiB, ancestor from {len(sample)} of them"
    return Measured(f"{batch} at once", pair, [old], [new], note)


def measure_rows(trajectories: int, rounds: int, turns: int = 50, tokens: int = 30_000) -> dict[str, Any]:
    """Measures packing of append-only trajectories, with prompts as full lists."""
    step = tokens // turns
    whole = [index % 150_000 for index in range(tokens)]
    generations = [
        Generation(whole[: end - 200], whole[end - 200 : end], [-0.5] * 200)
        for end in range(step, turns * step + 1, step)
    ]
    times = [seconds(lambda: [pack_training_rows(generations) for _ in range(trajectories)]) for _ in range(rounds)]
    return {"trajectories": trajectories, "turns": turns, "tokens": tokens, "seconds": times}


def show(results: list[Measured], rows: dict[str, Any]) -> None:
    table = Table(title=f"Loss masks, {TURNS} turns, about {TOKENS} tokens: milliseconds, median (lowest to highest)")
    for column in ("template", "question", "per message", "ours", "times faster", "note"):
        table.add_column(column, justify="right" if column in ("per message", "ours", "times faster") else "left")
    for result in results:
        table.add_row(
            *(result.pair, result.question, _milliseconds(result.ancestor_s), _milliseconds(result.ours_s)),
            *(f"{result.ratio:.1f}", result.note),
        )
    console = Console(width=150)
    console.print(table)
    console.print(
        f"packing rows: {rows['trajectories']} trajectories of {rows['turns']} turns and {rows['tokens']} tokens "
        f"in {statistics.median(rows['seconds']):.2f} s"
    )


def _milliseconds(seconds: Sequence[float]) -> str:
    return spread([1000 * value for value in seconds], "{:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each case")
    parser.add_argument("--batch", type=int, default=256, help="size of the batch; 0 skips that case")
    parser.add_argument("--pairs", nargs="+", choices=sorted(PAIRS), default=list(PAIRS), help="templates to measure")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # both contenders may use all cores, as in a trainer
    results: list[Measured] = []
    for pair in options.pairs:
        results += measure_pair(pair, PAIRS[pair], options.rounds, options.batch)
    rows = measure_rows(256, min(3, options.rounds))
    show(results, rows)
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
        report = {"machine": machine, "results": [result.as_json() for result in results], "packing": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
