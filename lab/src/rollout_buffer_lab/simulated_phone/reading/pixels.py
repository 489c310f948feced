"""Converts a screenshot into a map of surfaces: for each dot (2x2 device pixels) the surface of its colour, or none.

Dots without a surface are the smoothed edges and strokes of letters: nothing else on the phone is smoothed.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.palette import Surface

INK = 0  # index of a dot that has no surface colour
_SURFACES = tuple(Surface)
_DOTS = (SCREEN_WIDTH // 2, SCREEN_HEIGHT // 2)

Indices = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A rectangle in dots; ``right`` and ``bottom`` are the first dots outside."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """Width in dots."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """Height in dots."""
        return self.bottom - self.top

    @property
    def rect(self) -> Rect:
        """The same in device pixels."""
        return Rect(left=self.left * 2, top=self.top * 2, right=self.right * 2, bottom=self.bottom * 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class SurfaceMap:
    """``indices`` (1200 rows, 540 columns) are the surface numbers of the dots, ``colors`` their colours (RGB)."""

    indices: Indices
    colors: NDArray[np.uint8]

    def mask(self, *surfaces: Surface) -> Mask:
        """Returns where one of these surfaces is."""
        return np.isin(self.indices, [index_of(surface) for surface in surfaces])

    def at(self, x: int, y: int) -> Surface | None:
        """Returns the surface of one dot."""
        index = int(self.indices[y, x])
        return None if index == INK else _SURFACES[index - 1]


def index_of(surface: Surface) -> int:
    """Returns the number of a surface in a map."""
    return _index_by_surface()[surface]


def read_surfaces(image_bytes: bytes) -> SurfaceMap:
    """Returns the screenshot's map. Letters can be read if it is a PNG at full size or halved.

    Raises:
        ValueError: the bytes are no image.
    """
    try:
        with Image.open(io.BytesIO(image_bytes)) as opened:
            image = opened.convert("RGBA")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"the screenshot is no image: {error}") from error
    if image.size == (SCREEN_WIDTH, SCREEN_HEIGHT):
        image = image.reduce(2)
    elif image.size != _DOTS:
        image = image.resize(_DOTS, Image.Resampling.NEAREST)
    pixels = np.asarray(image)
    return SurfaceMap(indices=_exact_indices(pixels), colors=pixels[:, :, :3])


def boxes(mask: Mask, *, row_gap: int = 1, column_gap: int = 1) -> list[Box]:
    """Cuts the mask along empty rows and columns as often as possible, and returns the boxes of the parts.

    Gaps smaller than ``row_gap`` rows or ``column_gap`` columns do not cut. The boxes are in reading order.
    """
    parts: list[Box] = []
    _cut(mask, 0, 0, row_gap, column_gap, parts)
    return parts


def _cut(mask: Mask, left: int, top: int, row_gap: int, column_gap: int, parts: list[Box]) -> None:
    """Cuts the mask into bands of rows, each band into columns, and each column again unless its band has only one."""
    bands = _runs(np.any(mask, axis=1), row_gap)
    for band_top, band_bottom in bands:
        band = mask[band_top:band_bottom]
        columns = _runs(np.any(band, axis=0), column_gap)
        for column_left, column_right in columns:
            if len(columns) == 1:
                box = Box(
                    left=left + column_left,
                    top=top + band_top,
                    right=left + column_right,
                    bottom=top + band_bottom,
                )
                parts.append(box)
            else:
                part = band[:, column_left:column_right]
                _cut(part, left + column_left, top + band_top, row_gap, column_gap, parts)


def _runs(filled: Mask, gap: int) -> list[tuple[int, int]]:
    """Returns start and end of each run of True; runs nearer than ``gap`` are one."""
    edges = np.flatnonzero(np.diff(filled, prepend=False, append=False))
    runs: list[tuple[int, int]] = []
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if runs and start - runs[-1][1] < gap:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


@cache
def _index_by_surface() -> dict[Surface, int]:
    return {surface: index for index, surface in enumerate(_SURFACES, start=1)}


@cache
def _sorted_colors() -> tuple[NDArray[np.uint32], Indices]:
    """Returns the surfaces' colours as one number each, in ascending order, and the index of each."""
    rgba = np.array([(*surface.rgb, 255) for surface in _SURFACES], dtype=np.uint8)
    colors = rgba.view(np.uint32).ravel()
    order = np.argsort(colors)
    return colors[order], (order + 1).astype(np.uint8)


def _exact_indices(rgba: NDArray[np.uint8]) -> Indices:
    known, indices = _sorted_colors()
    colors = np.ascontiguousarray(rgba).view(np.uint32)[:, :, 0]
    nearest = np.searchsorted(known, colors).clip(max=len(known) - 1)
    return np.where(known[nearest] == colors, indices[nearest], np.uint8(INK))
