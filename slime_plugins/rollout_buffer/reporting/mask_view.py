"""Shows which tokens of a sequence are trained: coloured in a terminal, or as a self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text

Decode = Callable[[list[int]], str]


class Category(StrEnum):
    TRAINED = "trained"  # the loss is computed on it
    CONTEXT = "not"  # the model only reads it
    IMAGE = "image"  # stands for a picture
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
            known = tuple(log_probs[start:end]) if log_probs and categories[start] is Category.TRAINED else ()
            yield Piece(text, categories[start], start, tuple(ids), known)
            start = end


def coloured_text(sections: Sequence[Section], width: int = 120) -> str:
    """Returns the output of ``print_sections`` with ANSI colours."""
    written = io.StringIO()
    print_sections(sections, Console(file=written, force_terminal=True, width=width, color_system="256"))
    return written.getvalue()


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
