"""Reads lines of text off a screenshot that lost something: compressed as JPEG, or resized to another scale.

The letters are cut as in ``ocr``, but compared by how much of each dot they cover, with a dot of tolerance in size
and place. Good down to about 500,000 pixels; below that letters run into each other.
Typographic signs that look like dirt are not looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rollout_buffer_lab.simulated_phone.glyphs import (
    BOX,
    DRAWABLE,
    TextSize,
    cell_padding,
    glyph_mask,
    space_width,
)
from rollout_buffer_lab.simulated_phone.palette import (
    TEXT_COLORS_ON,
    Surface,
    TextColor,
)
from rollout_buffer_lab.simulated_phone.reading.ocr import (
    UNREADABLE,
    Line,
    TextStyle,
    sizes_on,
)
from rollout_buffer_lab.simulated_phone.reading.pixels import (
    INK,
    Box,
    SurfaceMap,
    index_of,
)

_MARGIN = 2
_NOISE_AREA = 2.2  # dots; the least letter, a full stop, covers more
_ALPHABET = sorted(character for character in (*DRAWABLE, BOX) if character.isascii() or character == BOX)
_COVERED = 0.3  # a dot covered less than this counts as empty
_STRAY_COLOR = 45.0  # a dot this far from every blend of text and ground is not text (the cursor)
_WORST_MATCH = 0.45  # squared differences, as a share of the letter's own squares
_SIZE_SLACK = {TextSize.SMALL: 1, TextSize.BODY: 1, TextSize.TITLE: 2, TextSize.DISPLAY: 3}
_TALLEST, _WIDEST = 84, 84

Coverage = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """One known letter, cut to its ink."""

    character: str
    coverage: Coverage
    top: int
    indent: int
    cell_width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    left: int
    right: int
    top: int
    coverage: Coverage


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guess:
    shape: _Shape
    size: TextSize
    top: int  # of the line's cells, if this is the letter
    mismatch: float


def read_faded_line(surfaces: SurfaceMap, box: Box) -> Line | None:
    """Returns the line in the box; None when no text is there."""
    surface = _ground(surfaces, box)
    if surface is None:
        return None
    wider = _widened(surfaces, box)
    pieces = list(_pieces(_coverage(surfaces, wider, surface), wider))
    guesses = [_guesses(piece, surface) for piece in pieces]
    look = _best_look(guesses)
    if look is None:
        return None
    size, top = look
    fitting = [_under(candidates, size, top) for candidates in guesses]
    known = [index for index, guess in enumerate(fitting) if guess is not None]
    pieces, fitting = pieces[known[0] : known[-1] + 1], fitting[known[0] : known[-1] + 1]  # dirt on both sides cut off
    text = _spell(pieces, fitting, size)
    if len(text) == 1 and not text.isalnum():
        return None  # the rounded corner of a button looks like a full stop
    return Line(
        text=text,
        box=Box(left=pieces[0].left, top=box.top, right=pieces[-1].right, bottom=box.bottom),
        surface=surface,
        look=TextStyle(size, _color_of(surface, size).name, top),
    )


def _widened(surfaces: SurfaceMap, box: Box) -> Box:
    """The box with a margin: the faintest dots of its outer letters were taken for ground."""
    height, width = surfaces.indices.shape
    return Box(
        left=max(0, box.left - _MARGIN),
        top=max(0, box.top - _MARGIN),
        right=min(width, box.right + _MARGIN),
        bottom=min(height, box.bottom + _MARGIN),
    )


def _ground(surfaces: SurfaceMap, box: Box) -> Surface | None:
    """The surface that most dots in and around the box have."""
    area = surfaces.indices[max(0, box.top - 2) : box.bottom + 2, max(0, box.left - 2) : box.right + 2]
    counts = np.bincount(area.ravel(), minlength=len(Surface) + 1)
    counts[INK] = 0
    best = max(TEXT_COLORS_ON, key=lambda surface: int(counts[index_of(surface)]))
    return best if counts[index_of(best)] else None


def _color_of(surface: Surface, size: TextSize) -> TextColor:
    """Small text is secondary where that exists; shades are too near to each other to tell by colour."""
    colors = TEXT_COLORS_ON[surface]
    return colors[-1] if size is TextSize.SMALL else colors[0]


def _coverage(surfaces: SurfaceMap, box: Box, surface: Surface) -> Coverage:
    """How much of each dot is text, 0..1, whatever the text's shade is."""
    ground = np.array(surface.rgb, dtype=np.float32)
    offsets = surfaces.colors[box.top : box.bottom, box.left : box.right].astype(np.float32) - ground
    coverage = np.zeros(offsets.shape[:2], dtype=np.float32)
    for color in TEXT_COLORS_ON[surface]:
        direction = np.array(color.rgb, dtype=np.float32) - ground
        along = offsets @ direction / float(direction @ direction)
        astray = np.linalg.norm(offsets - along[:, :, None] * direction, axis=2)
        along[astray > _STRAY_COLOR] = 0.0
        coverage = np.maximum(coverage, along)
    darkest = float(np.quantile(coverage[coverage > coverage.max() / 2], 0.8)) if coverage.max() > 0 else 1.0
    return np.asarray(np.clip(coverage / max(darkest, 0.05), 0.0, 1.0), dtype=np.float32)


def _pieces(coverage: Coverage, box: Box) -> Iterator[_Piece]:
    edges = np.flatnonzero(np.diff(coverage.max(axis=0) > _COVERED, prepend=False, append=False)).tolist()
    for left, right in zip(edges[::2], edges[1::2], strict=True):
        rows = np.flatnonzero(coverage[:, left:right].max(axis=1) > _COVERED)
        top, bottom = int(rows[0]), int(rows[-1]) + 1
        part = coverage[top:bottom, left:right]
        if right - left < _WIDEST and bottom - top < _TALLEST and part.sum() > _NOISE_AREA:
            yield _Piece(left=box.left + left, right=box.left + right, top=box.top + top, coverage=part)


def _guesses(piece: _Piece, surface: Surface) -> list[_Guess]:
    """The letters that it may be, of any size, best first."""
    found = []
    height, width = piece.coverage.shape
    for size in sizes_on(surface):
        slack = _SIZE_SLACK[size]
        for shape in _shapes(size):
            known_height, known_width = shape.coverage.shape
            if abs(known_height - height) > slack or abs(known_width - width) > slack:
                continue
            mismatch, dy = _mismatch(piece.coverage, shape.coverage)
            if mismatch < _WORST_MATCH:
                found.append(_Guess(shape=shape, size=size, top=piece.top + dy - shape.top, mismatch=mismatch))
    return sorted(found, key=lambda guess: guess.mismatch)


def _mismatch(seen: Coverage, known: Coverage) -> tuple[float, int]:
    """The least difference over shifts by a dot, and by how many rows the known one is shifted for it."""
    height, width = max(seen.shape[0], known.shape[0]) + 2, max(seen.shape[1], known.shape[1]) + 2
    canvas = np.zeros((height, width), dtype=np.float32)
    canvas[1 : 1 + seen.shape[0], 1 : 1 + seen.shape[1]] = seen
    weight = float((known * known).sum()) + 1e-6
    total = float((canvas * canvas).sum())
    best, best_dy = float("inf"), 0
    for dy in range(min(3, height - known.shape[0] + 1)):
        for dx in range(min(3, width - known.shape[1] + 1)):
            window = canvas[dy : dy + known.shape[0], dx : dx + known.shape[1]]
            difference = (total - 2 * float((window * known).sum()) + weight) / weight
            if difference < best:
                best, best_dy = difference, dy - 1
    return best, best_dy


def _best_look(guesses: Sequence[Sequence[_Guess]]) -> tuple[TextSize, int] | None:
    """The size and top under which the pieces match best."""
    looks = {(guess.size, guess.top) for candidates in guesses for guess in candidates[:6]}

    def merit(look: tuple[TextSize, int]) -> float:
        return sum(1.0 - best.mismatch for one in guesses if (best := _under(one, *look)) is not None)

    return max(sorted(looks), key=merit, default=None)


def _under(guesses: Sequence[_Guess], size: TextSize, top: int) -> _Guess | None:
    """The best guess that fits the line's size and place."""
    return next((guess for guess in guesses if guess.size is size and abs(guess.top - top) <= 1), None)


def _spell(pieces: Sequence[_Piece], guesses: Sequence[_Guess | None], size: TextSize) -> str:
    text, cell_end = "", None
    padding, blank = cell_padding(size) // 2, space_width(size) // 2
    for piece, guess in zip(pieces, guesses, strict=True):
        cell_start = piece.left - (guess.shape.indent if guess else padding)
        if cell_end is not None:
            text += " " * max(0, round((cell_start - cell_end) / blank))
        text += guess.shape.character if guess else UNREADABLE
        cell_end = cell_start + guess.shape.cell_width if guess else piece.right + padding
    return text.replace("''", '"').replace("...", "…")


@cache
def _shapes(size: TextSize) -> tuple[_Shape, ...]:
    """All letters of one piece."""
    shapes = []
    for character in _ALPHABET:
        coverage = np.asarray(glyph_mask(character, size).reduce(2), dtype=np.float32) / np.float32(255)
        columns = np.flatnonzero(coverage.max(axis=0) > _COVERED)
        rows = np.flatnonzero(coverage.max(axis=1) > _COVERED)
        if columns[-1] - columns[0] + 1 != len(columns):
            continue
        shapes.append(
            _Shape(
                character=character,
                coverage=coverage[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1],
                top=int(rows[0]),
                indent=int(columns[0]),
                cell_width=coverage.shape[1],
            )
        )
    return tuple(shapes)
