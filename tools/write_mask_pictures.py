"""Draws the pictures of ``docs/masks.md``: for each token, whether it is trained.

``--check`` writes nothing and only checks that the pictures are up to date. Only the conversations are written by hand:
masks come from ``MultiTurnLossMaskGenerator`` and ``pack_training_rows`` with the small tokenizer of this package.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.mask_utils import Generation, MultiTurnLossMaskGenerator, TrainingRow, pack_training_rows
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, MARGIN, LINE, CHARACTER = 660, 14, 26, 7.25
QUESTION = {"role": "user", "content": "What is 15 * 23?"}
CALL = "I use the tool. multiply(15, 23)"
RESULT = {"role": "tool", "content": "345"}
ANSWER = "It is 345."


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """One sequence with its caption: the ids for a trainer, and for each whether it is trained."""

    caption: str
    token_ids: Sequence[int]
    loss_mask: Sequence[int]


class MaskTools:
    """What all pictures need: a tokenizer, its chat template, the mask generator."""

    def __init__(self) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH)
        self.chat = ChatTokens(self.tokenizer)
        self.masks = MultiTurnLossMaskGenerator(self.tokenizer, tokenizer_type="qwen")

    def sampled(self, prompt_ids: Sequence[int], text: str, *, ended: bool = True) -> Generation:
        """Returns a turn as an engine returns it, with its end-of-turn token unless it was cut."""
        ids = self.tokenizer.encode(text + ("<|im_end|>" if ended else ""), add_special_tokens=False)
        return Generation(
            prompt_ids=tuple(prompt_ids), output_ids=tuple(ids), finish_reason="stop" if ended else "length"
        )

    def after(self, generation: Generation, message: Mapping[str, Any]) -> list[int]:
        """Returns the next prompt of a conversation that only grows."""
        closed = self.chat.is_closed(generation.output_ids)
        return [
            *generation.prompt_ids,
            *generation.output_ids,
            *self.chat.bridge(dict(message), turn_is_closed=closed),
        ]


def _conversation(tools: MaskTools) -> list[Strip]:
    messages = [QUESTION, {"role": "assistant", "content": CALL}, RESULT, {"role": "assistant", "content": ANSWER}]
    ids, mask = tools.masks.get_loss_mask(messages)
    return [Strip(caption="One conversation of two turns, rebuilt from its messages", token_ids=ids, loss_mask=mask)]


def _growing(tools: MaskTools) -> list[Strip]:
    first = tools.sampled(tools.chat.prompt([QUESTION]), CALL)
    second = tools.sampled(tools.after(first, RESULT), ANSWER)
    return [*_rows("Two generations; the second prompt continues the first", [first, second])]


def _edited(tools: MaskTools) -> list[Strip]:
    notes = {"role": "user", "content": "Read the page."}
    first = tools.sampled(tools.chat.prompt([notes]), "It says 345.")
    second = tools.sampled(tools.after(first, {"role": "user", "content": "Forget it."}), "deleteContext(0)")
    view = [{"role": "user", "content": "(deleted)"}, {"role": "assistant", "content": "It says 345."}, QUESTION]
    third = tools.sampled(tools.chat.prompt(view), ANSWER)
    return [*_rows("three generations, an edit before the third", [first, second, third])]


def _cut(tools: MaskTools) -> list[Strip]:
    generation = tools.sampled(tools.chat.prompt([QUESTION]), "I think that", ended=False)
    ids, mask = tools.masks.get_loss_mask([QUESTION, {"role": "assistant", "content": "I think that"}])
    return [
        *_rows("A turn cut by its token limit, from its generation", [generation]),
        Strip(
            caption="The same turn rebuilt from its messages",
            token_ids=ids,
            loss_mask=mask,
        ),
    ]


def _rows(caption: str, generations: Sequence[Generation]) -> Iterator[Strip]:
    rows: list[TrainingRow] = pack_training_rows(generations)
    for number, row in enumerate(rows, 1):
        which = f"Row {number} of {len(rows)}, " if len(rows) > 1 else ""
        yield Strip(caption=f"{which}{caption}", token_ids=row.token_ids, loss_mask=row.loss_mask)


PICTURES: Mapping[str, Callable[[MaskTools], list[Strip]]] = {
    "mask_conversation.svg": _conversation,
    "mask_growing.svg": _growing,
    "mask_edited.svg": _edited,
    "mask_cut.svg": _cut,
}
"""Each picture by its file name, with the function that computes its masks."""

STYLE = """
.page { fill: #ffffff; } .caption { font: 600 13px system-ui, sans-serif; fill: #1f2328; }
.token { font: 12px ui-monospace, 'SF Mono', Menlo, Consolas, monospace; fill: #1f2328; }
.trained { fill: #9be7a4; stroke: #2da44e; } .context { fill: #eef1f4; stroke: #d0d7de; }
.legend { font: 12px system-ui, sans-serif; fill: #57606a; }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; } .caption, .token { fill: #e6edf3; } .legend { fill: #9198a1; }
  .trained { fill: #1d6b2c; stroke: #3fb950; } .context { fill: #21262d; stroke: #30363d; }
}
"""


def strips_of(name: str, tools: MaskTools) -> list[Strip]:
    """Returns the sequences of a picture."""
    return PICTURES[name](tools)


def picture_svg(strips: Sequence[Strip], decode: Callable[[list[int]], str]) -> str:
    """Returns the picture as SVG text: a box per token, green if it is trained."""
    parts, y = list(_legend()), 46
    for strip in strips:
        parts.append(f'<text class="caption" x="{MARGIN}" y="{y}">{html.escape(strip.caption)}: {_count(strip)}</text>')
        chips, y = _chips(strip, decode, y + 10)
        parts += chips
        y += LINE + 12
    height = y - 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Trained tokens">\n'
        f'<style>{STYLE}</style>\n<rect class="page" width="{WIDTH}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _legend() -> Iterator[str]:
    for x, kind, label in ((MARGIN, "trained", "mask 1: trained"), (MARGIN + 150, "context", "mask 0: only read")):
        yield f'<rect class="{kind}" x="{x}" y="9" width="14" height="14" rx="3"/>'
        yield f'<text class="legend" x="{x + 20}" y="20">{label}</text>'


def _count(strip: Strip) -> str:
    return f"{sum(strip.loss_mask)} of {len(strip.token_ids)} tokens trained"


def _chips(strip: Strip, decode: Callable[[list[int]], str], top: int) -> tuple[list[str], int]:
    """Returns boxes in lines; a token with a line break ends its line."""
    parts: list[str] = []
    x, y = float(MARGIN), top
    for token_id, mask in zip(strip.token_ids, strip.loss_mask, strict=True):
        text = decode([token_id])
        shown = text.replace("\n", "⏎").replace(" ", "·")
        width = len(shown) * CHARACTER + 8
        if x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + LINE
        kind = "trained" if mask else "context"
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" rx="3"/>')
        parts.append(f'<text class="token" x="{x + 4:.1f}" y="{y + 14}">{html.escape(shown)}</text>')
        x += width + 3
        if text.endswith("\n"):
            x, y = float(MARGIN), y + LINE
    return parts, y if x == MARGIN else y + LINE


def main() -> int:
    """Writes the pictures, or with ``--check`` checks that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when one is out of date")
    check = parser.parse_args().check
    tools = MaskTools()
    stale = []
    for name in PICTURES:
        wanted, path = picture_svg(strips_of(name, tools), tools.tokenizer.decode), FOLDER / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != wanted):
            stale.append(name)
        elif not check:
            path.write_text(wanted, encoding="utf-8")
    if stale:
        sys.stderr.write(f"{', '.join(stale)} out of date: python tools/write_mask_pictures.py draws them\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
