"""The home screen and the list of all apps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.device_state.packages import INSTALLED_APPS, InstalledApp
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.geometry import SCREEN_HEIGHT, SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import TextSize, line_height, wrap
from rollout_buffer_lab.simulated_phone.layout import STATUS_BAR_HEIGHT, ScreenBuilder
from rollout_buffer_lab.simulated_phone.palette import APP_TILES, Surface
from rollout_buffer_lab.simulated_phone.widgets import Align, Widget, WidgetKind

LAUNCHER = InstalledApp(
    label="Home",
    package="com.google.android.apps.nexuslauncher",
    activity=".NexusLauncherActivity",
    icon="",
)
_COLUMNS, _CELL_WIDTH, _CELL_HEIGHT, _TILE = 3, 360, 400, 168
_FIRST_ROW = 240
_SWIPE_UP = 200
_ARRANGED = "home"  # the preference with the labels of an arranged home screen


def arrange_home(state: DeviceState, labels: Sequence[str]) -> None:
    """Puts the apps with these labels on the home screen, in this order, and no others."""
    state.preferences_of(LAUNCHER.package)[_ARRANGED] = "\n".join(labels)


class LauncherApp(App):
    """Home; it is never closed."""

    def __init__(self, state: DeviceState, launch: Callable[[InstalledApp], None]) -> None:
        super().__init__(LAUNCHER, state)
        self.launch = launch

    def first_page(self) -> Page:
        """Returns the home screen."""
        return _Home(self)


class _Home(Page):
    app: LauncherApp

    def build(self, screen: ScreenBuilder) -> None:
        ground = Rect(left=0, top=STATUS_BAR_HEIGHT, right=SCREEN_WIDTH, bottom=SCREEN_HEIGHT)
        screen.place(Widget(kind=WidgetKind.FILL, bounds=ground, surface=Surface.HOME))
        for cell, app in enumerate(_on_home(self.app.preferences)):
            for widget in _app_widgets(cell, app, partial(self.app.launch, app)):
                screen.place(widget)

    def back(self) -> None:
        """Does nothing: there is no page behind the home screen."""

    def swiped(self, dx: int, dy: int) -> bool:
        """Shows all apps after a swipe upward; the home screen itself does not scroll."""
        if dy < -_SWIPE_UP:
            self.app.push(_AllApps(self.app))
        return True


class _AllApps(Page):
    app: LauncherApp

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Apps", on_back=self.back)
        for app in sorted(INSTALLED_APPS, key=lambda app: app.label):
            screen.row(app.label, icon=app.icon, on_tap=partial(self.app.launch, app))


def _on_home(preferences: Mapping[str, str]) -> Sequence[InstalledApp]:
    """Returns the apps on the home screen, by cell: all apps, unless ``arrange_home`` chose some."""
    if _ARRANGED not in preferences:
        return INSTALLED_APPS
    by_label = {app.label: app for app in INSTALLED_APPS}
    return [by_label[label] for label in preferences[_ARRANGED].split("\n")]


def _app_widgets(cell_number: int, app: InstalledApp, launch: Callable[[], None]) -> list[Widget]:
    """Returns the icon on its tile, with the name in one or two lines below it; the whole cell reacts to taps.

    The tile's colour depends on the app, not on the cell.
    """
    left = cell_number % _COLUMNS * _CELL_WIDTH
    top = _FIRST_ROW + cell_number // _COLUMNS * _CELL_HEIGHT
    cell = Rect(left=left, top=top, right=left + _CELL_WIDTH, bottom=top + _CELL_HEIGHT)
    tile_left = left + (_CELL_WIDTH - _TILE) // 2
    tile = Rect(left=tile_left, top=top + 32, right=tile_left + _TILE, bottom=top + 32 + _TILE)
    widgets = [
        Widget(kind=WidgetKind.ROW, bounds=cell, on_tap=launch),
        Widget(
            kind=WidgetKind.ICON,
            bounds=tile,
            icon=app.icon,
            text=app.label,
            surface=APP_TILES[INSTALLED_APPS.index(app) % len(APP_TILES)],
            on_tap=launch,
        ),
    ]
    height = line_height(TextSize.SMALL)
    for number, line in enumerate(wrap(app.label, TextSize.SMALL, _CELL_WIDTH - 80)[:2]):
        line_top = tile.bottom + 24 + number * height
        bounds = Rect(left=left, top=line_top, right=left + _CELL_WIDTH, bottom=line_top + height)
        widgets.append(
            Widget(
                kind=WidgetKind.TEXT,
                bounds=bounds,
                text=line,
                text_size=TextSize.SMALL,
                surface=Surface.HOME,
                align=Align.CENTER,
            )
        )
    return widgets
