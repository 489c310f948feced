"""Draws a screen in 1080x2400 pixels and flat colours, then scales and encodes it as the agent's screenshot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

from PIL import Image, ImageDraw

from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import line_height, line_mask
from rollout_buffer_lab.simulated_phone.icons import ICON_DOTS, icon_mask
from rollout_buffer_lab.simulated_phone.palette import Rgb, Surface, TextColor
from rollout_buffer_lab.simulated_phone.widgets import Align, Widget, WidgetKind
from slime_plugins.rollout_buffer.generator.gui_agent.screenshots import encode_picture, fit_under_pixel_cap

_FIELD_EDGE_HEIGHT = 4
_SLIDER_TRACK_HEIGHT = 16
_SLIDER_THUMB = 56


@lru_cache(maxsize=256)
def encode_screen(widgets: tuple[Widget, ...], max_pixels: int, image_format: str) -> bytes:
    """Returns the screenshot's bytes, under the pixel cap, as ``png`` or ``jpeg``. Equal screens are drawn once."""
    return encode_picture(shrink(paint(widgets), max_pixels), image_format)


def shrink(image: Image.Image, max_pixels: int) -> Image.Image:
    """Returns the image under the pixel cap; halving averages each 2x2 block exactly."""
    size = fit_under_pixel_cap(image.width, image.height, max_pixels)
    if size == image.size:
        return image
    if (size[0] * 2, size[1] * 2) == image.size:
        return image.reduce(2)
    return image.resize(size, Image.Resampling.LANCZOS)


def paint(widgets: tuple[Widget, ...]) -> Image.Image:
    """Returns the screen at full size (RGB)."""
    image = Image.new("RGB", (SCREEN_WIDTH, SCREEN_HEIGHT), Surface.SCREEN.rgb)
    pen = ImageDraw.Draw(image)
    for widget in widgets:
        _PAINTERS[widget.kind](image, pen, widget)
    return image


def _paint_fill(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    if widget.surface is not None:
        _fill(pen, widget.bounds, widget.surface.rgb)


def _paint_text(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    _write(image, widget)


def _paint_button(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    surface = widget.surface or Surface.BUTTON
    _rounded(image, widget.bounds, 24, surface.rgb)
    _write(image, widget)


def _paint_bubble(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    surface = widget.surface or Surface.BUBBLE_IN
    _rounded(image, widget.bounds, 32, surface.rgb)


def _paint_icon(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    if widget.surface is not None:
        _rounded(image, widget.bounds, 24, widget.surface.rgb)
    side = ICON_DOTS * 2
    left = _even(widget.bounds.left + (widget.bounds.width - side) // 2)
    top = _even(widget.bounds.top + (widget.bounds.height - side) // 2)
    ink = Surface.STATUS_ICON if widget.icon in ("wifi", "bluetooth") else Surface.ICON_INK
    image.paste(ink.rgb, (left, top), _doubled_icon(widget.icon))


def _paint_switch(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    track, thumb = (
        (Surface.SWITCH_ON, Surface.SWITCH_ON_THUMB)
        if widget.checked
        else (Surface.SWITCH_OFF, Surface.SWITCH_OFF_THUMB)
    )
    bounds = widget.bounds
    _rounded(image, bounds, bounds.height // 2, track.rgb)
    side = bounds.height - 16
    left = bounds.right - 8 - side if widget.checked else bounds.left + 8
    thumb_bounds = Rect(left=left, top=bounds.top + 8, right=left + side, bottom=bounds.top + 8 + side)
    _rounded(image, thumb_bounds, side // 2, thumb.rgb)


def _paint_slider(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    bounds = widget.bounds
    middle = _even(bounds.center[1])
    split = bounds.left + _even(round(widget.value * bounds.width))
    half_track, half_thumb = _SLIDER_TRACK_HEIGHT // 2, _SLIDER_THUMB // 2
    done = Rect(left=bounds.left, top=middle - half_track, right=split, bottom=middle + half_track)
    rest = Rect(left=split, top=middle - half_track, right=bounds.right, bottom=middle + half_track)
    for part, surface in ((done, Surface.SLIDER_DONE), (rest, Surface.SLIDER_REST)):
        _fill(pen, part, surface.rgb)
    thumb = Rect(left=split - half_thumb, top=middle - half_thumb, right=split + half_thumb, bottom=middle + half_thumb)
    _rounded(image, thumb, half_thumb, Surface.SLIDER_THUMB.rgb)


def _paint_field(image: Image.Image, pen: ImageDraw.ImageDraw, widget: Widget) -> None:
    bounds = widget.bounds
    edge = Surface.FIELD_EDGE_FOCUSED if widget.focused else Surface.FIELD_EDGE
    _fill(pen, bounds, Surface.FIELD.rgb)
    edge_height = _FIELD_EDGE_HEIGHT * (2 if widget.focused else 1)
    bottom = Rect(left=bounds.left, top=bounds.bottom - edge_height, right=bounds.right, bottom=bounds.bottom)
    _fill(pen, bottom, edge.rgb)


_Painter = Callable[[Image.Image, ImageDraw.ImageDraw, Widget], None]
_PAINTERS: dict[WidgetKind, _Painter] = {
    WidgetKind.FILL: _paint_fill,
    WidgetKind.ROW: _paint_fill,
    WidgetKind.TEXT: _paint_text,
    WidgetKind.BUTTON: _paint_button,
    WidgetKind.BUBBLE: _paint_bubble,
    WidgetKind.ICON: _paint_icon,
    WidgetKind.SWITCH: _paint_switch,
    WidgetKind.SLIDER: _paint_slider,
    WidgetKind.FIELD: _paint_field,
}


def _write(image: Image.Image, widget: Widget) -> None:
    if not widget.text.strip():
        return
    mask = line_mask(widget.text, widget.text_size)
    bounds = widget.bounds
    left = bounds.left
    if widget.align is Align.CENTER:
        left += max(0, (bounds.width - mask.width) // 2)
    elif widget.align is Align.RIGHT:
        left += max(0, bounds.width - mask.width)
    top = bounds.top + (bounds.height - line_height(widget.text_size)) // 2
    color = TextColor.LIGHT if widget.surface in (Surface.BUTTON, Surface.HOME) else widget.text_color
    image.paste(color.rgb, (_even(left), _even(top)), mask)


def _fill(pen: ImageDraw.ImageDraw, bounds: Rect, color: Rgb) -> None:
    if bounds.width > 0 and bounds.height > 0:
        pen.rectangle((bounds.left, bounds.top, bounds.right - 1, bounds.bottom - 1), fill=color)


def _rounded(image: Image.Image, bounds: Rect, radius: int, color: Rgb) -> None:
    image.paste(color, (bounds.left, bounds.top), _rounded_mask(bounds.width // 2, bounds.height // 2, radius // 2))


@lru_cache(maxsize=512)
def _rounded_mask(width: int, height: int, radius: int) -> Image.Image:
    """Returns a rounded rectangle in dots of 2x2 pixels, so that halving keeps it exact."""
    mask = Image.new("L", (max(1, width), max(1, height)))
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, width - 1, height - 1), radius, fill=255)
    return mask.resize((mask.width * 2, mask.height * 2), Image.Resampling.NEAREST)


@cache
def _doubled_icon(name: str) -> Image.Image:
    return icon_mask(name).resize((ICON_DOTS * 2, ICON_DOTS * 2), Image.Resampling.NEAREST)


def _even(pixels: int) -> int:
    return pixels - pixels % 2
