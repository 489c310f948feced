"""Camera and Audio Recorder, which write files to the folders of Android's apps."""

from __future__ import annotations

import io
import posixpath
from functools import cache, partial

from PIL import Image, ImageDraw

from rollout_buffer_lab.simulated_phone.apps.file_browser import NameDialog, move_quietly
from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.device_state.state import AUDIO_FOLDER, PHOTO_FOLDER, VIDEO_FOLDER, DeviceState
from rollout_buffer_lab.simulated_phone.geometry import SCREEN_WIDTH, Rect
from rollout_buffer_lab.simulated_phone.glyphs import TextSize
from rollout_buffer_lab.simulated_phone.layout import STATUS_BAR_HEIGHT, BarIcon, ScreenBuilder, Tab
from rollout_buffer_lab.simulated_phone.palette import Surface
from rollout_buffer_lab.simulated_phone.widgets import Align, Widget, WidgetKind

_HORIZON, _GROUND_END = 1300, 1920
_MPEG4_HEADER = b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom"
"""The whole content of a video or a sound record: the header by which a file is recognised as MPEG-4."""
_MODES = ("Photo", "Video")


class CameraApp(App):
    """Photos, into Pictures, and videos, into Movies."""

    def first_page(self) -> Page:
        """Returns the viewfinder."""
        return _Viewfinder(self)


class _Viewfinder(Page):
    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._mode = "Photo"
        self._recording_since: str | None = None

    def build(self, screen: ScreenBuilder) -> None:
        for top, bottom, surface in (
            (STATUS_BAR_HEIGHT, _HORIZON, Surface.VIEWFINDER_SKY),
            (_HORIZON, _GROUND_END, Surface.VIEWFINDER_GROUND),
        ):
            area = Rect(left=0, top=top, right=SCREEN_WIDTH, bottom=bottom)
            screen.place(Widget(kind=WidgetKind.FILL, bounds=area, surface=surface))
        sun = Rect(left=700, top=300, right=900, bottom=500)
        screen.place(Widget(kind=WidgetKind.BUBBLE, bounds=sun, surface=Surface.VIEWFINDER_SUN))
        if self._recording_since is None:
            screen.tabs(
                [Tab(text=mode, selected=mode == self._mode, on_tap=partial(self._choose, mode)) for mode in _MODES]
            )
        screen.space(_GROUND_END - STATUS_BAR_HEIGHT + 48)
        screen.icon_row([self._trigger()])

    def leave(self) -> None:
        """Ends a video that is being recorded."""
        super().leave()
        self._stop()

    def _trigger(self) -> BarIcon:
        if self._recording_since is not None:
            return BarIcon(icon="stop", on_tap=self._stop)
        if self._mode == "Video":
            return BarIcon(icon="record", on_tap=self._record)
        return BarIcon(icon="shutter", on_tap=self._shoot)

    def _choose(self, mode: str) -> None:
        self._mode = mode

    def _shoot(self) -> None:
        self.state.files.write(_free_path(self.state, PHOTO_FOLDER, f"IMG_{_stamp(self.state)}", ".jpg"), _photo())

    def _record(self) -> None:
        self._recording_since = _stamp(self.state)

    def _stop(self) -> None:
        if self._recording_since is not None:
            path = _free_path(self.state, VIDEO_FOLDER, f"VID_{self._recording_since}", ".mp4")
            self.state.files.write(path, _MPEG4_HEADER)
            self._recording_since = None


class AudioRecorderApp(App):
    """Sound records, as .m4a files."""

    def first_page(self) -> Page:
        """Returns the recorder, with the list of records."""
        return _Recorder(self)


class _Recorder(Page):
    def __init__(self, app: App) -> None:
        super().__init__(app)
        self._since_s: float | None = None

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Audio Recorder")
        running_s = 0 if self._since_s is None else int(self.state.clock.uptime_s - self._since_s)
        screen.space(160)
        screen.paragraph(f"{running_s // 60:02}:{running_s % 60:02}", size=TextSize.DISPLAY, align=Align.CENTER)
        screen.space(96)
        if self._since_s is None:
            screen.icon_row([BarIcon(icon="record", on_tap=self._record)])
        else:
            screen.icon_row([BarIcon(icon="stop", on_tap=self._stop)])
        screen.section("Records")
        for name in self.state.files.names(AUDIO_FOLDER):
            screen.row(name, icon="microphone")

    def _record(self) -> None:
        self._since_s = self.state.clock.uptime_s

    def _stop(self) -> None:
        self._since_s = None
        number = 1 + len(self.state.files.names(AUDIO_FOLDER))
        path = _free_path(self.state, AUDIO_FOLDER, f"Record-{number}", ".m4a")
        self.state.files.write(path, _MPEG4_HEADER)
        stem = posixpath.splitext(posixpath.basename(path))[0]
        self.app.push(NameDialog(self.app, "Save record", stem, partial(self._rename, path), button="Save"))

    def _rename(self, path: str, name: str) -> None:
        target = posixpath.join(AUDIO_FOLDER, f"{name}.m4a")
        if target != path:
            move_quietly(self.app, path, target)


def _stamp(state: DeviceState) -> str:
    return f"{state.clock.now:%Y%m%d_%H%M%S}"


def _free_path(state: DeviceState, folder: str, stem: str, extension: str) -> str:
    path, number = posixpath.join(folder, stem + extension), 2
    while state.files.exists(path):
        path, number = posixpath.join(folder, f"{stem}_{number}{extension}"), number + 1
    return path


@cache
def _photo() -> bytes:
    """Returns what the viewfinder shows, as a small JPEG."""
    image = Image.new("RGB", (96, 160), Surface.VIEWFINDER_SKY.rgb)
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 105, 95, 159), fill=Surface.VIEWFINDER_GROUND.rgb)
    pen.ellipse((62, 20, 80, 38), fill=Surface.VIEWFINDER_SUN.rgb)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
