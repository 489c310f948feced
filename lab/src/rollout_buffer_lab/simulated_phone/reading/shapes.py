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
_ROW_ICON_GAP = 7  # dots between two icons without tiles; the gaps between the parts of an icon are smaller


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldShape:
    """A text field's box, whether it has the focus, and whether its value is selected."""

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
    """An icon by name, with the box of its tile, or without a tile its own box."""

    name: str
    box: Box
    on_app_tile: bool = False


def button_boxes(surfaces: SurfaceMap, surface: Surface) -> list[Box]:
    """Returns the filled shapes of one colour that are large enough for a button."""
    same_color = boxes(surfaces.mask(surface))
    return [box for box in same_color if box.width >= _MIN_BUTTON and box.height >= _MIN_BUTTON]


def fields(surfaces: SurfaceMap) -> list[FieldShape]:
    """Returns the text fields."""
    filled = surfaces.mask(Surface.FIELD, Surface.FIELD_SELECTION)
    shapes = []
    for box in boxes(filled, row_gap=4, column_gap=4):
        if box.width < _MIN_FIELD or box.height < _MIN_FIELD // 2:
            continue
        edge = surfaces.indices[box.bottom : box.bottom + 4, box.left : box.right]
        inside = surfaces.indices[box.top : box.bottom, box.left : box.right]
        focused = bool((edge == index_of(Surface.FIELD_EDGE_FOCUSED)).any())
        selected = bool((inside == index_of(Surface.FIELD_SELECTION)).any())
        shapes.append(FieldShape(box=box, focused=focused, selected=selected))
    return shapes


def sliders(surfaces: SurfaceMap) -> list[SliderShape]:
    """Returns the sliders. A thumb at an end of its track hides that end: its middle is taken for it."""
    shapes = []
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
        shapes.append(SliderShape(track=track, value=value))
    return shapes


def icons(surfaces: SurfaceMap, bottom: int) -> Iterator[IconShape]:
    """Yields the icons above the row ``bottom``, on tiles and without."""
    ink = surfaces.indices[:bottom] == index_of(Surface.ICON_INK)
    ink_off_tiles = ink.copy()
    for surface in (Surface.ICON_BUTTON, *APP_TILES):
        for box in boxes(surfaces.indices[:bottom] == index_of(surface), row_gap=3, column_gap=3):
            if box.width < ICON_DOTS or box.height < ICON_DOTS:
                continue
            ink_off_tiles[box.top : box.bottom, box.left : box.right] = False
            name = _name_of(ink[box.top : box.bottom, box.left : box.right])
            if name is not None:
                yield IconShape(name=name, box=box, on_app_tile=surface in APP_TILES)
    for box in boxes(ink_off_tiles, row_gap=_ROW_ICON_GAP, column_gap=_ROW_ICON_GAP):
        name = _name_of(ink_off_tiles[box.top : box.bottom, box.left : box.right])
        if name is not None:
            yield IconShape(name=name, box=box)


def status_icons(surfaces: SurfaceMap) -> set[str]:
    """Returns the names of the icons in the status bar."""
    ink = surfaces.indices[:40] == index_of(Surface.STATUS_ICON)
    names = (_name_of(ink[box.top : box.bottom, box.left : box.right]) for box in boxes(ink, row_gap=9, column_gap=9))
    return {name for name in names if name is not None}


def _columns(area: NDArray[np.uint8], surface: Surface) -> tuple[int, int] | None:
    """Returns the first column with the surface, and the one after the last."""
    columns = np.flatnonzero((area == index_of(surface)).any(axis=0))
    return (int(columns[0]), int(columns[-1]) + 1) if columns.size else None


def _name_of(dots: NDArray[np.bool_]) -> str | None:
    """Returns the name of the icon with exactly this ink, at any position in ``dots``; None if there is none."""
    return _names_of_icons().get(_trimmed(dots))


@cache
def _names_of_icons() -> dict[tuple[tuple[int, ...], bytes], str]:
    return {_trimmed(np.asarray(icon_mask(name)) > 0): name for name in ICON_NAMES}


def _trimmed(dots: NDArray[np.bool_]) -> tuple[tuple[int, ...], bytes]:
    """Returns shape and dots without the empty rows and columns around the ink."""
    rows, columns = np.flatnonzero(dots.any(axis=1)), np.flatnonzero(dots.any(axis=0))
    trimmed = dots[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] if rows.size else dots[:0]
    return trimmed.shape, trimmed.tobytes()
