"""Finds what is not text on a surface map: buttons, tabs, fields, switches, sliders, icons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rollout_buffer_lab.simulated_phone.icons import ICON_DOTS, ICON_NAMES, icon_mask
from rollout_buffer_lab.simulated_phone.palette import APP_TILES, Surface
from rollout_buffer_lab.simulated_phone.reading.pixels import Box, SurfaceMap, boxes, index_of

_MIN_BUTTON = 20
_MIN_FIELD = 30
_ROW_ICON_GAP = 7  # rows and columns between two icons without tiles; the parts of one are nearer
_WORST_ICON_MATCH = 0.12  # share of dots that may differ


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldShape:
    """A text field's box, whether it has the focus, and whether its value is marked."""

    box: Box
    focused: bool
    selected: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SliderShape:
    """A slider's track and how far along it the thumb is, 0..1."""

    track: Box
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class IconShape:
    """A picture, by name, and the tile it stands on (its own box when it has none)."""

    name: str
    box: Box
    on_app_tile: bool = False


def button_boxes(surfaces: SurfaceMap, surface: Surface) -> list[Box]:
    """The filled shapes of one colour that are large enough for a button."""
    found = boxes(surfaces.mask(surface))
    return [box for box in found if box.width >= _MIN_BUTTON and box.height >= _MIN_BUTTON]


def fields(surfaces: SurfaceMap) -> list[FieldShape]:
    """The text fields."""
    filled = surfaces.mask(Surface.FIELD, Surface.FIELD_SELECTION)
    found = []
    for box in boxes(filled, row_gap=4, column_gap=4):
        if box.width < _MIN_FIELD or box.height < _MIN_FIELD // 2:
            continue
        edge = surfaces.indices[box.bottom : box.bottom + 4, box.left : box.right]
        inside = surfaces.indices[box.top : box.bottom, box.left : box.right]
        focused = bool((edge == index_of(Surface.FIELD_EDGE_FOCUSED)).any())
        selected = bool((inside == index_of(Surface.FIELD_SELECTION)).any())
        found.append(FieldShape(box=box, focused=focused, selected=selected))
    return found


def sliders(surfaces: SurfaceMap) -> list[SliderShape]:
    """The sliders. At an end of the track the thumb hides it, so there the thumb's middle is the end."""
    found = []
    for box in boxes(surfaces.mask(Surface.SLIDER_DONE, Surface.SLIDER_REST, Surface.SLIDER_THUMB)):
        area = surfaces.indices[box.top : box.bottom, box.left : box.right]
        thumb, done, rest = (
            _columns(area, surface) for surface in (Surface.SLIDER_THUMB, Surface.SLIDER_DONE, Surface.SLIDER_REST)
        )
        if thumb is None:
            continue
        middle = (thumb[0] + thumb[1]) / 2
        left = done[0] if done else middle
        right = rest[1] if rest else middle
        value = (middle - left) / (right - left) if right > left else 0.0
        track = Box(left=box.left + round(left), top=box.top, right=box.left + round(right), bottom=box.bottom)
        found.append(SliderShape(track=track, value=value))
    return found


def icons(surfaces: SurfaceMap, bottom: int) -> Iterator[IconShape]:
    """The pictures above the row ``bottom``, on tiles and without."""
    ink = surfaces.indices[:bottom] == index_of(Surface.ICON_INK)
    free = ink.copy()
    for surface in (Surface.ICON_BUTTON, *APP_TILES):
        for box in boxes(surfaces.indices[:bottom] == index_of(surface), row_gap=3, column_gap=3):
            if box.width < ICON_DOTS or box.height < ICON_DOTS:
                continue
            free[box.top : box.bottom, box.left : box.right] = False
            left = box.left + (box.width - ICON_DOTS) // 2
            top = box.top + (box.height - ICON_DOTS) // 2
            name = _name_on_tile(surfaces, surface, left, top)
            if name is not None:
                yield IconShape(name=name, box=box, on_app_tile=surface in APP_TILES)
    for box in boxes(free, row_gap=_ROW_ICON_GAP, column_gap=_ROW_ICON_GAP):
        name = _name_of_trimmed(free[box.top : box.bottom, box.left : box.right])
        if name is not None:
            yield IconShape(name=name, box=box)


def status_icons(surfaces: SurfaceMap) -> set[str]:
    """Which signs stand in the status bar."""
    ink = surfaces.indices[:40] == index_of(Surface.STATUS_ICON)
    found = (
        _name_of_trimmed(ink[box.top : box.bottom, box.left : box.right]) for box in boxes(ink, row_gap=9, column_gap=9)
    )
    return {name for name in found if name is not None}


def _columns(area: NDArray[np.uint8], surface: Surface) -> tuple[int, int] | None:
    """First column with the surface, and the one after the last."""
    columns = np.flatnonzero((area == index_of(surface)).any(axis=0))
    return (int(columns[0]), int(columns[-1]) + 1) if columns.size else None


@cache
def _icon_arrays() -> dict[str, NDArray[np.bool_]]:
    return {name: np.asarray(icon_mask(name)) > 0 for name in ICON_NAMES}


def _name_on_tile(surfaces: SurfaceMap, tile: Surface, left: int, top: int) -> str | None:
    """The icon whose 32x32 dots stand there; small differences do not matter."""
    least, best = round(_WORST_ICON_MATCH * ICON_DOTS * ICON_DOTS), None
    dots = _ink_dots(surfaces.colors[top : top + ICON_DOTS, left : left + ICON_DOTS], tile)
    if dots.shape != (ICON_DOTS, ICON_DOTS):
        return None
    for name, known in _icon_arrays().items():
        difference = int(np.count_nonzero(dots ^ known))
        if difference < least:
            least, best = difference, name
    return best


def _ink_dots(colors: NDArray[np.uint8], tile: Surface) -> NDArray[np.bool_]:
    """Which dots are nearer to the icons' ink than to the tile."""
    far_from_ink, far_from_tile = (
        np.abs(colors.astype(np.int16) - np.array(surface.rgb, dtype=np.int16)).sum(axis=2)
        for surface in (Surface.ICON_INK, tile)
    )
    return np.asarray(far_from_ink < far_from_tile)


def _name_of_trimmed(dots: NDArray[np.bool_]) -> str | None:
    """Names a picture by its ink alone; where in the 32x32 it stood is not known."""
    candidates = {}
    for name, known in _trimmed_arrays().items():
        if abs(known.shape[0] - dots.shape[0]) <= 1 and abs(known.shape[1] - dots.shape[1]) <= 1:
            height, width = min(known.shape[0], dots.shape[0]), min(known.shape[1], dots.shape[1])
            candidates[name] = np.count_nonzero(dots[:height, :width] ^ known[:height, :width]) / (height * width)
    best = min(candidates, key=candidates.__getitem__, default=None)
    return best if best is not None and candidates[best] <= _WORST_ICON_MATCH else None


@cache
def _trimmed_arrays() -> dict[str, NDArray[np.bool_]]:
    trimmed = {}
    for name, known in _icon_arrays().items():
        rows, columns = np.flatnonzero(known.any(axis=1)), np.flatnonzero(known.any(axis=0))
        trimmed[name] = known[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return trimmed
