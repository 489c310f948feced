"""Reads lines of text from a surface map: cuts a line into pieces of ink, and looks up the letters by their pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rollout_buffer_lab.simulated_phone.glyphs import BOX, DRAWABLE, TextSize, cell_padding, glyph_mask, space_width
from rollout_buffer_lab.simulated_phone.palette import TEXT_COLORS_ON, Surface, TextColor
from rollout_buffer_lab.simulated_phone.reading.pixels import INK, Box, SurfaceMap, boxes

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_ROW_GAP = 5  # in dots, between two lines; that between an i and its dot is smaller
_COLUMN_GAP = 30  # in dots, between two texts side by side; a blank is narrower


@dataclass(frozen=True, slots=True, order=True)
class TextStyle:
    """The style of a line: its size, its colour, and the row where its cells begin."""

    size: TextSize
    color_name: str
    top: int

    @property
    def color(self) -> TextColor:
        """The colour of the letters."""
        return TextColor[self.color_name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line as read. ``box`` encloses its ink; ``style`` is None if no letter was recognized."""

    text: str
    box: Box
    surface: Surface
    style: TextStyle | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Adjacent columns with ink. Most letters are one piece, a double quote is two. ``key`` is its size and pixels."""

    left: int
    right: int
    top: int
    key: tuple[int, int, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Letter:
    """The pixels of a character: ``_letters`` has it by its first piece's key; later pieces have keys and offsets."""

    character: str
    size: TextSize
    color: TextColor
    top: int  # from the top of its cell to its first piece's ink
    indent: int  # from the left of its cell to its ink
    width: int  # of its cell
    later_keys: tuple[tuple[int, int, bytes], ...]
    offsets: tuple[int, ...]


def sizes_on(surface: Surface) -> tuple[TextSize, ...]:
    """Returns the sizes of text that the phone draws on this surface."""
    if surface is Surface.SCREEN:
        return tuple(TextSize)
    if surface in (Surface.TITLE_BAR, Surface.DIALOG):
        return (TextSize.SMALL, TextSize.BODY, TextSize.TITLE)
    return (TextSize.SMALL, TextSize.BODY)


def line_boxes(surfaces: SurfaceMap, bottom: int) -> list[Box]:
    """Returns the boxes of text above the row ``bottom``, in reading order."""
    return boxes(surfaces.indices[:bottom] == INK, row_gap=_ROW_GAP, column_gap=_COLUMN_GAP)


def read_line(surfaces: SurfaceMap, box: Box) -> Line | None:
    """Returns the line in the box of a lossless screenshot; None if the surface there can have no text."""
    surface = surfaces.at(max(0, box.left - 1), (box.top + box.bottom) // 2)
    if surface not in TEXT_COLORS_ON:
        return None
    pieces = list(_pieces(surfaces, box))
    style = _common_style(pieces, surface)
    return Line(text=_text_of(pieces, surface, style), box=box, surface=surface, style=style)


def _pieces(surfaces: SurfaceMap, box: Box) -> Iterator[_Piece]:
    ink = surfaces.indices[box.top : box.bottom, box.left : box.right] == INK
    shades = surfaces.colors[box.top : box.bottom, box.left : box.right, 1]  # green tells all shades apart
    for left, right, top, key in _cut_pieces(ink, shades):
        yield _Piece(left=box.left + left, right=box.left + right, top=box.top + top, key=key)


def _cut_pieces(
    ink: NDArray[np.bool_], shades: NDArray[np.uint8]
) -> Iterator[tuple[int, int, int, tuple[int, int, bytes]]]:
    edges = np.flatnonzero(np.diff(ink.any(axis=0), prepend=False, append=False)).tolist()
    for left, right in zip(edges[::2], edges[1::2], strict=True):
        rows = np.flatnonzero(ink[:, left:right].any(axis=1))
        top, bottom = int(rows[0]), int(rows[-1]) + 1
        yield left, right, top, (right - left, bottom - top, shades[top:bottom, left:right].tobytes())


def _common_style(pieces: Sequence[_Piece], surface: Surface) -> TextStyle | None:
    """Returns the style that most pieces agree on. A single dot or dash fits several, of which the smallest wins."""
    table = _letters(surface)
    votes: Counter[TextStyle] = Counter()
    for piece in pieces:
        votes.update({TextStyle(each.size, each.color.name, piece.top - each.top) for each in table.get(piece.key, ())})
    if not votes:
        return None
    most = max(votes.values())
    return min(style for style, count in votes.items() if count == most)


def _text_of(pieces: Sequence[_Piece], surface: Surface, style: TextStyle | None) -> str:
    if style is None:
        return UNREADABLE * len(pieces)
    text, cell_end, index = "", None, 0
    padding, blank = cell_padding(style.size) // 2, space_width(style.size) // 2
    while index < len(pieces):
        piece = pieces[index]
        letter = _letter_at(pieces, index, surface, style)
        cell_start = piece.left - (letter.indent if letter else padding)
        if cell_end is not None:
            text += " " * max(0, round((cell_start - cell_end) / blank))
        text += letter.character if letter else UNREADABLE
        cell_end = cell_start + letter.width if letter else piece.right + padding
        index += 1 + (len(letter.later_keys) if letter else 0)
    return text


def _letter_at(pieces: Sequence[_Piece], index: int, surface: Surface, style: TextStyle) -> _Letter | None:
    piece = pieces[index]
    for letter in _letters(surface).get(piece.key, ()):
        if (letter.size, letter.color, piece.top - letter.top) != (style.size, style.color, style.top):
            continue
        later = pieces[index + 1 : index + 1 + len(letter.later_keys)]
        if [each.key for each in later] != list(letter.later_keys):
            continue
        if all(each.left - piece.left == offset for each, offset in zip(later, letter.offsets, strict=True)):
            return letter
    return None


@cache
def _letters(surface: Surface) -> dict[tuple[int, int, bytes], list[_Letter]]:
    """Returns every letter that may be on the surface, by its first piece; those with more pieces come first."""
    table: dict[tuple[int, int, bytes], list[_Letter]] = {}
    for color in TEXT_COLORS_ON[surface]:
        for size in sizes_on(surface):
            for character in sorted({*DRAWABLE, BOX}):
                key, letter = _letter_and_key(character, size, color, surface)
                table.setdefault(key, []).append(letter)
    for letters in table.values():
        letters.sort(key=lambda letter: -len(letter.later_keys))
    return table


def _letter_and_key(
    character: str, size: TextSize, color: TextColor, surface: Surface
) -> tuple[tuple[int, int, bytes], _Letter]:
    mask = glyph_mask(character, size)
    cell = Image.new("RGB", mask.size, surface.rgb)
    cell.paste(color.rgb, (0, 0), mask)
    dots = np.asarray(cell.reduce(2))
    ink = (dots != np.array(surface.rgb, dtype=np.uint8)).any(axis=2)
    pieces = list(_cut_pieces(ink, dots[:, :, 1]))
    first_left, _, first_top, first_key = pieces[0]
    letter = _Letter(
        character=character,
        size=size,
        color=color,
        top=first_top,
        indent=first_left,
        width=mask.width // 2,
        later_keys=tuple(key for _, _, _, key in pieces[1:]),
        offsets=tuple(left - first_left for left, _, _, _ in pieces[1:]),
    )
    return first_key, letter
