"""Reads lines of text off a surface map: cuts a line into letters and looks each up by how it looks on its ground."""

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
_ROW_GAP = 5  # rows between two lines, in dots; the dot of an i is nearer
_COLUMN_GAP = 30  # columns between two texts side by side; a blank is narrower


@dataclass(frozen=True, slots=True, order=True)
class TextStyle:
    """How a line is set: its size, its colour, and the row where its cells begin."""

    size: TextSize
    color_name: str
    top: int

    @property
    def color(self) -> TextColor:
        """The colour of the letters."""
        return TextColor[self.color_name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line as read. ``box`` is its ink."""

    text: str
    box: Box
    surface: Surface
    look: TextStyle | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """A stretch of ink without an empty column in it; most letters are one piece, quotes are two."""

    left: int
    right: int
    top: int
    key: tuple[int, int, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Letter:
    """How a character looks: its first piece is found by key, the others stand ``offsets`` to the right of that."""

    character: str
    size: TextSize
    color: TextColor
    top: int  # from the top of its cell to its first piece's ink
    indent: int  # from the left of its cell to its ink
    width: int  # of its cell
    later_keys: tuple[tuple[int, int, bytes], ...]
    offsets: tuple[int, ...]


def sizes_on(surface: Surface) -> tuple[TextSize, ...]:
    """Which sizes of text the phone puts on this surface."""
    if surface is Surface.SCREEN:
        return tuple(TextSize)
    if surface in (Surface.TITLE_BAR, Surface.DIALOG):
        return (TextSize.SMALL, TextSize.BODY, TextSize.TITLE)
    return (TextSize.SMALL, TextSize.BODY)


def line_boxes(surfaces: SurfaceMap, bottom: int) -> list[Box]:
    """Returns where there is text above the row ``bottom``, in reading order."""
    return boxes(surfaces.indices[:bottom] == INK, row_gap=_ROW_GAP, column_gap=_COLUMN_GAP)


def read_line(surfaces: SurfaceMap, box: Box) -> Line | None:
    """Returns the line in the box of a lossless screenshot; None when no text belongs on what is there."""
    surface = surfaces.at(max(0, box.left - 1), (box.top + box.bottom) // 2)
    if surface not in TEXT_COLORS_ON:
        return None
    pieces = list(_pieces(surfaces, box))
    look = _common_look(pieces, surface)
    return Line(text=_spell(pieces, surface, look), box=box, surface=surface, look=look)


def _pieces(surfaces: SurfaceMap, box: Box) -> Iterator[_Piece]:
    ink = surfaces.indices[box.top : box.bottom, box.left : box.right] == INK
    shades = surfaces.colors[box.top : box.bottom, box.left : box.right, 1]
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


def _common_look(pieces: Sequence[_Piece], surface: Surface) -> TextStyle | None:
    """The look that most pieces agree on; a single dot or dash alone fits several, then the smallest wins."""
    table = _letters(surface)
    votes: Counter[TextStyle] = Counter()
    for piece in pieces:
        votes.update({TextStyle(one.size, one.color.name, piece.top - one.top) for one in table.get(piece.key, ())})
    if not votes:
        return None
    most = max(votes.values())
    return min(look for look, count in votes.items() if count == most)


def _spell(pieces: Sequence[_Piece], surface: Surface, look: TextStyle | None) -> str:
    if look is None:
        return UNREADABLE * len(pieces)
    text, cell_end, index = "", None, 0
    padding, blank = cell_padding(look.size) // 2, space_width(look.size) // 2
    while index < len(pieces):
        piece = pieces[index]
        letter = _letter_at(pieces, index, surface, look)
        cell_start = piece.left - (letter.indent if letter else padding)
        if cell_end is not None:
            text += " " * max(0, round((cell_start - cell_end) / blank))
        text += letter.character if letter else UNREADABLE
        cell_end = cell_start + letter.width if letter else piece.right + padding
        index += 1 + (len(letter.later_keys) if letter else 0)
    return text


def _letter_at(pieces: Sequence[_Piece], index: int, surface: Surface, look: TextStyle) -> _Letter | None:
    piece = pieces[index]
    for letter in _letters(surface).get(piece.key, ()):
        if (letter.size, letter.color, piece.top - letter.top) != (look.size, look.color, look.top):
            continue
        later = pieces[index + 1 : index + 1 + len(letter.later_keys)]
        if [one.key for one in later] != list(letter.later_keys):
            continue
        if all(one.left - piece.left == offset for one, offset in zip(later, letter.offsets, strict=True)):
            return letter
    return None


@cache
def _letters(surface: Surface) -> dict[tuple[int, int, bytes], list[_Letter]]:
    """Every letter that may stand on the surface by its first piece; those of more pieces come first."""
    table: dict[tuple[int, int, bytes], list[_Letter]] = {}
    for color in TEXT_COLORS_ON[surface]:
        for size in sizes_on(surface):
            for character in sorted({*DRAWABLE, BOX}):
                key, letter = _look_of(character, size, color, surface)
                table.setdefault(key, []).append(letter)
    for letters in table.values():
        letters.sort(key=lambda letter: -len(letter.later_keys))
    return table


def _look_of(
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
