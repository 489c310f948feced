"""Reads a screenshot as a person does: texts and their positions, what is on or off, what can be tapped.

``read_screen(image_bytes) -> ReadScreen`` uses pixels alone. It knows the phone's font, colours and icons, as a person
who has used the phone does; the screenshot has no hidden marks.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout_buffer_lab.simulated_phone.glyphs import TextSize, line_height
from rollout_buffer_lab.simulated_phone.keyboard import KEYBOARD_TOP
from rollout_buffer_lab.simulated_phone.palette import Surface, TextColor
from rollout_buffer_lab.simulated_phone.reading import shapes
from rollout_buffer_lab.simulated_phone.reading.ocr import Line, line_boxes, read_line
from rollout_buffer_lab.simulated_phone.reading.pixels import SurfaceMap, read_surfaces
from rollout_buffer_lab.simulated_phone.screen_records import (
    Button,
    Field,
    Icon,
    ReadScreen,
    Slider,
    Switch,
    TextLine,
    TextRole,
)

_BACKGROUND_DOT = (4, 60)  # just under the status bar: wallpaper, scrim or page
_KEYBOARD_DOT = (1, KEYBOARD_TOP // 2 + 4)
_SWITCH_REACH = 80  # pixels between the middle of a switch and the middle of its label
_SLIDER_REACH = 160
_LABEL_REACH = 160
_ROLE_BY_SURFACE = {
    Surface.STATUS_BAR: TextRole.STATUS,
    Surface.TITLE_BAR: TextRole.TITLE,
    Surface.BUTTON: TextRole.BUTTON,
    Surface.TAB: TextRole.BUTTON,
    Surface.TAB_SELECTED: TextRole.BUTTON,
    Surface.FIELD: TextRole.VALUE,
    Surface.FIELD_SELECTION: TextRole.VALUE,
}


def read_screen(image_bytes: bytes) -> ReadScreen:
    """Returns what a PNG of 1080x2400 or half of it shows. In a JPEG or another size no text can be read.

    Raises:
        ValueError: the bytes are no image.
    """
    surfaces = read_surfaces(image_bytes)
    keyboard_visible = surfaces.at(*_KEYBOARD_DOT) is Surface.KEYBOARD
    bottom = KEYBOARD_TOP // 2 if keyboard_visible else surfaces.indices.shape[0]
    lines = (read_line(surfaces, box) for box in line_boxes(surfaces, bottom))
    texts = tuple(_text_line(line) for line in lines if line is not None and line.text)
    status_icons = shapes.status_icons(surfaces)
    background = surfaces.at(*_BACKGROUND_DOT)
    return ReadScreen(
        title=_first_text(texts, TextRole.TITLE),
        texts=texts,
        buttons=_buttons(surfaces, texts),
        icons=_icons(surfaces, texts, bottom),
        switches=_switches(surfaces, texts),
        sliders=_sliders(surfaces, texts),
        fields=_fields(surfaces, texts),
        keyboard_visible=keyboard_visible,
        is_dialog=background is Surface.SCRIM,
        is_home=background is Surface.HOME,
        clock_text=_first_text(texts, TextRole.STATUS),
        wifi_shown="wifi" in status_icons,
        bluetooth_shown="bluetooth" in status_icons,
    )


def _text_line(line: Line) -> TextLine:
    return TextLine(
        text=line.text,
        bounds=line.box.rect,
        role=_role(line),
        selected=line.surface is Surface.ROW_SELECTED,
        sent=line.surface is Surface.BUBBLE_OUT,
    )


def _role(line: Line) -> TextRole:
    color = line.style.color if line.style else TextColor.PRIMARY
    size = line.style.size if line.style else TextSize.BODY
    if color is TextColor.HINT:
        return TextRole.HINT
    if line.surface in _ROLE_BY_SURFACE:
        return _ROLE_BY_SURFACE[line.surface]
    if color is TextColor.SECONDARY:
        return TextRole.SECONDARY
    if size is TextSize.DISPLAY:
        return TextRole.DISPLAY
    return TextRole.TITLE if line.surface is Surface.DIALOG and size is TextSize.TITLE else TextRole.PRIMARY


def _first_text(texts: Sequence[TextLine], role: TextRole) -> str:
    return next((line.text for line in texts if line.role is role), "")


def _buttons(surfaces: SurfaceMap, texts: Sequence[TextLine]) -> tuple[Button, ...]:
    labels = [line for line in texts if line.role is TextRole.BUTTON]
    buttons = []
    for surface in (Surface.BUTTON, Surface.TAB, Surface.TAB_SELECTED):
        for box in shapes.button_boxes(surfaces, surface):
            text = " ".join(line.text for line in labels if box.rect.encloses(line.bounds))
            buttons.append(Button(text=text, bounds=box.rect, selected=surface is Surface.TAB_SELECTED))
    return tuple(sorted(buttons, key=lambda button: (button.bounds.top, button.bounds.left)))


def _icons(surfaces: SurfaceMap, texts: Sequence[TextLine], bottom: int) -> tuple[Icon, ...]:
    icons = []
    for shape in shapes.icons(surfaces, bottom):
        bounds = shape.box.rect
        label = ""
        if shape.on_app_tile:
            below = (
                line.text
                for line in texts
                if 0 <= line.bounds.top - bounds.bottom < _LABEL_REACH
                and abs(line.bounds.center[0] - bounds.center[0]) < bounds.width // 2
            )
            label = " ".join(below)
        icons.append(Icon(name=shape.name, bounds=bounds, label=label))
    return tuple(sorted(icons, key=lambda icon: (icon.bounds.top, icon.bounds.left)))


def _switches(surfaces: SurfaceMap, texts: Sequence[TextLine]) -> tuple[Switch, ...]:
    switches = []
    for surface, is_on in ((Surface.SWITCH_ON, True), (Surface.SWITCH_OFF, False)):
        for box in shapes.button_boxes(surfaces, surface):
            left_of = [
                line
                for line in texts
                if line.role is TextRole.PRIMARY
                and line.bounds.right <= box.rect.left
                and abs(line.bounds.center[1] - box.rect.center[1]) < _SWITCH_REACH
            ]
            switches.append(Switch(label=left_of[0].text if left_of else "", is_on=is_on, bounds=box.rect))
    return tuple(sorted(switches, key=lambda switch: switch.bounds.top))


def _sliders(surfaces: SurfaceMap, texts: Sequence[TextLine]) -> tuple[Slider, ...]:
    sliders = []
    for shape in shapes.sliders(surfaces):
        bounds = shape.track.rect
        above = [
            line
            for line in texts
            if line.role is TextRole.PRIMARY and 0 <= bounds.top - line.bounds.bottom < _SLIDER_REACH
        ]
        sliders.append(Slider(label=above[-1].text if above else "", value=shape.value, bounds=bounds))
    return tuple(sliders)


def _fields(surfaces: SurfaceMap, texts: Sequence[TextLine]) -> tuple[Field, ...]:
    fields = []
    for shape in shapes.fields(surfaces):
        inside = [line for line in texts if shape.box.rect.encloses(line.bounds)]
        fields.append(
            Field(
                label=_first_text(inside, TextRole.HINT),
                lines=_lines_with_gaps([line for line in inside if line.role is TextRole.VALUE]),
                bounds=shape.box.rect,
                focused=shape.focused,
                selected=shape.selected,
            )
        )
    return tuple(fields)


def _lines_with_gaps(lines: Sequence[TextLine]) -> tuple[str, ...]:
    """Returns the texts, with an empty one for each blank line between two of them."""
    result: list[str] = []
    for index, line in enumerate(lines):
        if index:
            distance = line.bounds.center[1] - lines[index - 1].bounds.center[1]
            result.extend([""] * (round(distance / line_height(TextSize.BODY)) - 1))
        result.append(line.text)
    return tuple(result)
