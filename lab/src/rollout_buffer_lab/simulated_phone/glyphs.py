"""The phone's font: each letter is drawn in a cell at even pixels, so that it looks the same at every position.

The outlines are those of Pillow's built-in font; a character that it lacks is drawn as an empty box. Every cell has a
margin, so that letters never touch and a halved screenshot is as readable as a full one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache, lru_cache

from PIL import Image, ImageDraw, ImageFont

BOX = "\N{WHITE SQUARE}"
DRAWABLE = frozenset(map(chr, range(33, 127))) | frozenset("©«°±´·»‘’“”…‹›™")
_ELLIPSIS = "…"
_TAB_WIDTH = 4


class TextSize(IntEnum):
    """Font sizes in pixels."""

    SMALL = 36
    BODY = 44
    TITLE = 56
    DISPLAY = 112


_LINE_HEIGHT = {TextSize.SMALL: 56, TextSize.BODY: 64, TextSize.TITLE: 80, TextSize.DISPLAY: 160}


def line_height(size: TextSize) -> int:
    """Returns the pixels from one line's top to the next one's."""
    return _LINE_HEIGHT[size]


def cell_padding(size: TextSize) -> int:
    """Returns the empty pixels on each side of a letter's ink."""
    return 4 if size is TextSize.DISPLAY else 2


def space_width(size: TextSize) -> int:
    """Returns the width of a blank in pixels."""
    return 2 * round(size * 0.14)


def drawable(character: str) -> str:
    """Returns the character itself if the font has it, else the box."""
    return character if character in DRAWABLE or character == " " else BOX


@dataclass(frozen=True, kw_only=True, slots=True)
class _Face:
    """A font in one size; ``baseline`` is its distance in pixels from the top of a line."""

    font: ImageFont.FreeTypeFont
    baseline: int


@cache
def _face(size: TextSize) -> _Face:
    font = ImageFont.load_default(int(size))
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType: the simulated phone cannot draw its letters")
    return _Face(font=font, baseline=int(size))


@cache
def glyph_mask(character: str, size: TextSize) -> Image.Image:
    """Returns the coverage ("L") of one drawable character, one line high, with even width."""
    if character == " ":
        return Image.new("L", (space_width(size), line_height(size)))
    if character == BOX:
        return _box_mask(size)

    face = _face(size)
    left, _, right, _ = face.font.getbbox(character, anchor="ls")
    padding = cell_padding(size)
    ink_width = int(right - left)
    mask = Image.new("L", (ink_width + ink_width % 2 + 2 * padding, line_height(size)))
    ImageDraw.Draw(mask).text((padding - left, face.baseline), character, font=face.font, fill=255, anchor="ls")
    return mask


def _box_mask(size: TextSize) -> Image.Image:
    padding, baseline = cell_padding(size), _face(size).baseline
    width = 2 * round(size * 0.3)
    mask = Image.new("L", (width + 2 * padding, line_height(size)))
    top = baseline - 2 * round(size * 0.36)
    ImageDraw.Draw(mask).rectangle((padding, top, padding + width - 1, baseline - 1), outline=255, width=2)
    return mask


def text_width(text: str, size: TextSize) -> int:
    """Returns the width of one line of text in pixels."""
    return sum(glyph_mask(drawable(character), size).width for character in text)


@lru_cache(maxsize=4096)
def line_mask(text: str, size: TextSize) -> Image.Image:
    """Returns the coverage ("L") of a whole line."""
    masks = [glyph_mask(drawable(character), size) for character in text]
    line = Image.new("L", (max(2, sum(mask.width for mask in masks)), line_height(size)))
    x = 0
    for mask in masks:
        line.paste(mask, (x, 0))
        x += mask.width
    return line


def shorten(text: str, size: TextSize, max_width: int) -> str:
    """Returns one line that fits: line feeds become blanks, and a text that is too long ends in an ellipsis."""
    line = " ".join(text[:400].expandtabs(_TAB_WIDTH).splitlines())
    if text_width(line, size) <= max_width:
        return line
    room = max_width - text_width(_ELLIPSIS, size)
    return line[: _fitting(line, size, room)].rstrip() + _ELLIPSIS


@lru_cache(maxsize=1024)
def wrap(text: str, size: TextSize, max_width: int) -> tuple[str, ...]:
    """Returns the lines of a paragraph: broken at line feeds, then at blanks, then anywhere. At least one line."""
    lines: list[str] = []
    for paragraph in text.expandtabs(_TAB_WIDTH).split("\n"):
        lines.extend(_wrap_paragraph(paragraph, size, max_width))
    return tuple(lines)


def _wrap_paragraph(paragraph: str, size: TextSize, max_width: int) -> list[str]:
    lines = []
    while (fitting := max(1, _fitting(paragraph, size, max_width))) < len(paragraph):
        blank = paragraph.rfind(" ", 1, fitting + 1)
        cut = blank if blank > 0 else fitting
        lines.append(paragraph[:cut])
        paragraph = paragraph[cut:].removeprefix(" ") if blank > 0 else paragraph[cut:]
    return [*lines, paragraph]


def _fitting(text: str, size: TextSize, max_width: int) -> int:
    """Returns how many leading characters fit."""
    used = 0
    for index, character in enumerate(text):
        used += glyph_mask(drawable(character), size).width
        if used > max_width:
            return index
    return len(text)
