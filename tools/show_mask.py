"""Shows which tokens of a conversation or a stored trajectory are trained, in the terminal or as HTML.

    python tools/show_mask.py conversation.json --tokenizer /path/to/model --type qwen3
    python tools/show_mask.py item.json --html mask.html

The file holds OpenAI messages (a list, or an object with ``messages`` and optionally ``tools``), or an item of the
server with ``generations``: then it shows the training rows packed from these, and the differences to a mask rebuilt
from the messages. A reply of ``GET /rollouts/<id>`` shows the rows of that remote rollout. ``--line N`` selects line N
of a JSONL file. Without ``--tokenizer`` the small tokenizer of this package is used, which shows the structure but not
a model's own tokens.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slime.utils.mask_utils import MultiTurnLossMaskGenerator, pack_training_rows
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.wire import decode_generations

Decode = Callable[[list[int]], str]


class Category(StrEnum):
    """Of a token."""

    TRAINED = "trained"  # the loss is computed on it
    CONTEXT = "not"  # the model only reads it
    IMAGE = "image"  # a placeholder of an image
    REPORTED = "reported"  # not trained: unknown whether it was sampled


STYLES = {
    Category.TRAINED: "bold black on green3",
    Category.CONTEXT: "dim",
    Category.IMAGE: "white on dodger_blue2",
    Category.REPORTED: "bold white on red3",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that form whole characters."""

    text: str
    category: Category
    position: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One training sequence with a title and warnings."""

    title: str
    pieces: list[Piece]
    remarks: list[str]


def pieces_of(
    token_ids: Sequence[int],
    categories: Sequence[Category],
    decode: Decode,
    log_probs: Sequence[float] | None = None,
) -> Iterator[Piece]:
    """Yields the shortest pieces of whole characters and one category."""
    start = 0
    for end in range(1, len(token_ids) + 1):
        ids = list(token_ids[start:end])
        text = decode(ids)
        ends_here = end == len(token_ids) or categories[end] is not categories[start]
        if ends_here or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            values = tuple(log_probs[start:end]) if log_probs and categories[start] is Category.TRAINED else ()
            yield Piece(text, categories[start], start, tuple(ids), values)
            start = end


def print_sections(sections: Sequence[Section], console: Console) -> None:
    legend = Text("legend: ")
    for category, style in STYLES.items():
        legend.append(f" {category.value} ", style).append(" ")
    console.print(legend)
    for section in sections:
        console.rule(Text(section.title), align="left")
        text = Text()
        for piece in section.pieces:
            shown = piece.text if piece.category is Category.CONTEXT else piece.text.replace("\n", "⏎\n")
            text.append(shown, STYLES[piece.category])
        if section.pieces:
            console.print(text)
        for remark in section.remarks:
            console.print(Text(f"! {remark}", "red3"))


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Loss mask</title>
<style>
:root {{ color-scheme: light dark; --trained: #9be7a4; --image: #9cc4ff; --reported: #ff9d9d; --dim: #777; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --trained: #1d6b2c; --image: #1f4f91; --reported: #8f2626; --dim: #999; }}
}}
body {{ font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.7 ui-monospace, monospace; }}
span {{ border-radius: 2px; }}
span:hover {{ outline: 1px solid currentColor; }}
.trained {{ background: var(--trained); }} .image {{ background: var(--image); }}
.reported {{ background: var(--reported); }} .not {{ color: var(--dim); }}
.remark {{ color: #c33; }}
</style>
<h1>Loss mask</h1>
<p>{legend}. Hold the pointer over a token for its place, id and log-prob.</p>
{sections}
</html>
"""


def page(sections: Sequence[Section]) -> str:
    """Returns a self-contained HTML page."""
    legend = " ".join(f'<span class="{category.value}">&nbsp;{category.value}&nbsp;</span>' for category in Category)
    return PAGE.format(legend=legend, sections="\n".join(_section_html(section) for section in sections))


def _section_html(section: Section) -> str:
    tokens = "".join(_piece_html(piece) for piece in section.pieces)
    remarks = "".join(f'<p class="remark">{html.escape(remark)}</p>' for remark in section.remarks)
    shown = f"<pre>{tokens}</pre>" if tokens else ""
    return f"<h2>{html.escape(section.title)}</h2>{remarks}{shown}"


def _piece_html(piece: Piece) -> str:
    title = f"token {piece.position}, id {' '.join(map(str, piece.token_ids))}"
    if piece.log_probs:
        title += f", log-prob {' '.join(f'{value:.4f}' for value in piece.log_probs)}"
    text = html.escape(piece.text).replace("\n", "⏎\n")
    return f'<span class="{piece.category.value}" title="{html.escape(title)}">{text}</span>'


def read_input(path: Path, line: int | None) -> dict[str, Any]:
    """Reads the file; a bare list holds messages."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text if line is None else text.splitlines()[line - 1])
    except (OSError, ValueError, IndexError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from error
    item = {"messages": content} if isinstance(content, list) else content
    if not isinstance(item, dict) or not isinstance(item.get("messages"), list):
        raise SystemExit(f"{path} holds neither a list of messages nor an object with messages")

    return item


def sections_of(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> list[Section]:
    """Returns the rows of a remote rollout, or those packed from generations, or else the conversation rebuilt from its
    messages."""
    if item.get("rows"):
        return list(_session_sections(item, generator))

    if item.get("generations"):
        return list(_row_sections(item, generator))

    return [_conversation_section(item, generator)]


def _conversation_section(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> Section:
    masked = generator.mask_conversation(item["messages"], item.get("tools"))
    reported = {each.position for each in masked.undecided if each.position is not None}
    pieces = list(_pieces(generator, masked.token_ids, masked.loss_mask, reported))
    remarks = [
        f"message {each.message_index}, token {each.position}: {each.detail or each.reason.value}"
        for each in masked.undecided
    ]
    title = f"rebuilt from {len(item['messages'])} messages: {_count(masked.loss_mask)}"
    return Section(title, pieces, remarks)


def _row_sections(item: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> Iterator[Section]:
    generations = decode_generations(item["generations"])
    for number, row in enumerate(pack_training_rows(generations), 1):
        pieces = list(_pieces(generator, row.token_ids, row.loss_mask, set(), row.log_probs))
        members = ", ".join(str(index) for index in row.generation_indices)
        yield Section(f"row {number}, generations {members}: {_count(row.loss_mask)}", pieces, [])
    drift = generator.report_drift(item["messages"], generations, item.get("tools"))
    if drift.is_clean:
        yield Section("rebuilding from messages would give the same ids and mask", [], [])
        return

    where = f"first in turn {drift.first_differing_turn}, {drift.tokens_affected} sampled tokens affected"
    yield Section(f"rebuilding from messages would differ: {', '.join(drift.kinds)} ({where})", [], [])


def _session_sections(session: dict[str, Any], generator: MultiTurnLossMaskGenerator) -> Iterator[Section]:
    for number, row in enumerate(session["rows"], 1):
        pieces = list(_pieces(generator, row["token_ids"], row["loss_mask"], set(), row["log_probs"]))
        remarks = [
            f"turn {turn['turn']}: the context was edited, {turn['kept_tokens']} tokens are unchanged"
            for turn in session["turn_list"]
            if turn["turn"] in row["turns"] and turn["kind"] == "edited"
        ]
        turns = ", ".join(map(str, row["turns"]))
        yield Section(f"row {number}, turns {turns}: {_count(row['loss_mask'])}", pieces, remarks)


def _count(loss_mask: Sequence[int]) -> str:
    return f"{sum(loss_mask)} of {len(loss_mask)} tokens trained"


def _pieces(
    generator: MultiTurnLossMaskGenerator,
    token_ids: Sequence[int],
    loss_mask: Sequence[int],
    reported: set[int],
    log_probs: Sequence[float] | None = None,
) -> Iterator[Piece]:
    categories = [
        _category(token_id, mask, position in reported, generator)
        for position, (token_id, mask) in enumerate(zip(token_ids, loss_mask, strict=True))
    ]
    return pieces_of(token_ids, categories, generator.tokenizer.decode, log_probs)


def _category(token_id: int, mask: int, reported: bool, generator: MultiTurnLossMaskGenerator) -> Category:
    if mask:
        return Category.TRAINED

    if reported:
        return Category.REPORTED

    return Category.IMAGE if token_id in generator.image_token_ids else Category.CONTEXT


def load_tokenizer(path: Path | str) -> Any:
    """Loads a tokenizer from a folder or by name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON: messages, or an item with generations")
    parser.add_argument("--line", type=int, help="line of a JSONL file, counted from 1")
    parser.add_argument("--tokenizer", default=DEMO_TOKENIZER_PATH, help="folder or name of a tokenizer")
    parser.add_argument("--type", default="qwen", help="value of --loss-mask-type in training (qwen)")
    parser.add_argument("--messages", action="store_true", help="rebuild from messages even if there are generations")
    parser.add_argument("--html", type=Path, help="write a page instead of colours in the terminal")
    options = parser.parse_args(arguments)
    item = read_input(options.file, options.line)
    if options.messages:
        item = {key: item.get(key) for key in ("messages", "tools")}
    generator = MultiTurnLossMaskGenerator(load_tokenizer(options.tokenizer), options.type)
    try:
        sections = sections_of(item, generator)
    except Exception as error:
        raise SystemExit(f"this cannot be shown with this tokenizer: {error}") from error

    if options.html:
        options.html.write_text(page(sections), encoding="utf-8")
    else:
        print_sections(sections, Console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
