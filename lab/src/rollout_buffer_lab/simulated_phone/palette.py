"""The phone's colours: one for each kind of area, so that ``screen_reader`` can tell the kind from the colour.

``Surface`` colours fill areas and shapes and are drawn without smoothing. ``TextColor`` colours are for letters, whose
smoothed edges are blends with the surface below; no blend of an allowed pair is a surface colour (a test checks this).
"""

from __future__ import annotations

from enum import Enum

Rgb = tuple[int, int, int]


class Surface(Enum):
    """The kind of an area or a shape, and its colour."""

    SCREEN = (253, 251, 255)  # background of an app
    STATUS_BAR = (236, 230, 243)
    STATUS_ICON = (62, 58, 77)  # Wi-Fi and Bluetooth signs in the status bar
    TITLE_BAR = (225, 217, 240)
    DIVIDER = (211, 204, 220)  # line between rows
    ROW_SELECTED = (255, 236, 179)  # a row picked by long press
    BUTTON = (92, 74, 166)
    TAB = (229, 240, 232)
    TAB_SELECTED = (168, 218, 186)
    FIELD = (240, 243, 250)
    FIELD_EDGE = (137, 128, 149)
    FIELD_EDGE_FOCUSED = (28, 96, 210)  # also the cursor
    FIELD_SELECTION = (176, 203, 255)  # behind the selected text of a field
    SWITCH_ON = (46, 125, 50)
    SWITCH_ON_THUMB = (226, 247, 227)
    SWITCH_OFF = (170, 150, 168)
    SWITCH_OFF_THUMB = (255, 240, 246)
    SLIDER_DONE = (103, 58, 183)  # the part of the track left of the thumb
    SLIDER_REST = (209, 196, 233)
    SLIDER_THUMB = (49, 27, 146)
    ICON_BUTTON = (214, 206, 238)
    ICON_INK = (40, 30, 80)  # the lines of an icon
    BUBBLE_IN = (224, 238, 228)  # a message received
    BUBBLE_OUT = (205, 229, 255)  # a message sent
    DIALOG = (255, 249, 240)
    SCRIM = (70, 66, 78)  # the dark background of a dialog
    KEYBOARD = (208, 213, 221)
    KEY = (242, 250, 246)
    HOME = (38, 50, 86)  # wallpaper of the home screen
    VIEWFINDER_SKY = (135, 190, 235)
    VIEWFINDER_GROUND = (106, 153, 78)
    VIEWFINDER_SUN = (255, 214, 10)
    TILE_VIOLET = (179, 157, 219)
    TILE_GREEN = (129, 199, 132)
    TILE_ORANGE = (255, 183, 77)
    TILE_BLUE = (100, 181, 246)
    TILE_RED = (239, 154, 154)
    TILE_TEAL = (77, 208, 200)

    @property
    def rgb(self) -> Rgb:
        """The colour itself."""
        return self.value


APP_TILES = (
    Surface.TILE_VIOLET,
    Surface.TILE_GREEN,
    Surface.TILE_ORANGE,
    Surface.TILE_BLUE,
    Surface.TILE_RED,
    Surface.TILE_TEAL,
)


class TextColor(Enum):
    """The kind of a line of text, and its colour."""

    PRIMARY = (29, 27, 32)
    SECONDARY = (98, 91, 113)
    HINT = (11, 87, 208)  # label of a field
    LIGHT = (254, 254, 253)  # on buttons and on the wallpaper

    @property
    def rgb(self) -> Rgb:
        """The colour itself."""
        return self.value


_DARK = (TextColor.PRIMARY, TextColor.SECONDARY)
_PRIMARY = (TextColor.PRIMARY,)

TEXT_COLORS_ON: dict[Surface, tuple[TextColor, ...]] = {
    Surface.SCREEN: _DARK,
    Surface.ROW_SELECTED: _DARK,
    Surface.DIALOG: _DARK,
    Surface.BUBBLE_IN: _DARK,
    Surface.BUBBLE_OUT: _DARK,
    Surface.STATUS_BAR: _PRIMARY,
    Surface.TITLE_BAR: _PRIMARY,
    Surface.TAB: _PRIMARY,
    Surface.TAB_SELECTED: _PRIMARY,
    Surface.FIELD: (TextColor.PRIMARY, TextColor.HINT),
    Surface.FIELD_SELECTION: _PRIMARY,
    Surface.KEY: _PRIMARY,
    Surface.BUTTON: (TextColor.LIGHT,),
    Surface.HOME: (TextColor.LIGHT,),
}
"""The text colours that each surface may have. Drawing and reading both follow this table."""
