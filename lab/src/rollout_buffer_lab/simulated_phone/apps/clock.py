"""Clock: tabs for alarms, the time, a timer and a stopwatch. Their state is stored in the app's preferences."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial

from rollout_buffer_lab.simulated_phone.apps.dates import day_line, time_of_day
from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.glyphs import TextSize
from rollout_buffer_lab.simulated_phone.layout import ScreenBuilder, Tab
from rollout_buffer_lab.simulated_phone.widgets import Align

STOPWATCH_RESET, STOPWATCH_RUNNING, STOPWATCH_PAUSED = "reset", "running", "paused"
_TABS = ("Alarm", "Clock", "Timer", "Stopwatch")
_KEY_ROWS = (("1", "2", "3"), ("4", "5", "6"), ("7", "8", "9"), ("00", "0", "Del"))


def timer_digits(preferences: MutableMapping[str, str]) -> str:
    """Returns the six digits hhmmss of the timer."""
    return preferences.get("timer_digits", "").rjust(6, "0")


class ClockApp(App):
    """Alarm, clock, timer, stopwatch."""

    def first_page(self) -> Page:
        """Returns the page of tabs, with the tab that was last shown, or the clock."""
        return _Tabs(self)


class _Tabs(Page):
    def build(self, screen: ScreenBuilder) -> None:
        chosen = self.app.preferences.setdefault("tab", "Clock")
        screen.title_bar(chosen)
        screen.tabs([Tab(text=tab, selected=tab == chosen, on_tap=partial(self._show, tab)) for tab in _TABS])
        {"Alarm": self._alarm, "Clock": self._clock, "Timer": self._timer, "Stopwatch": self._stopwatch}[chosen](screen)

    @property
    def is_moving(self) -> bool:
        """True while the stopwatch or the timer on the screen runs."""
        running = {"Timer": self.app.preferences.get("timer_running") == "1"}
        running["Stopwatch"] = _Stopwatch(self.app).state == STOPWATCH_RUNNING
        return running.get(self.app.preferences.get("tab", ""), False)

    def _show(self, tab: str) -> None:
        self.app.preferences["tab"] = tab
        self.scroll = 0

    def _alarm(self, screen: ScreenBuilder) -> None:
        for time in ("08:30", "09:00"):
            is_on = self.app.preferences.get(f"alarm_{time}") == "1"
            screen.switch_row(time, is_on, partial(self._set_alarm, time, "0" if is_on else "1"))

    def _set_alarm(self, time: str, value: str) -> None:
        self.app.preferences[f"alarm_{time}"] = value

    def _clock(self, screen: ScreenBuilder) -> None:
        now = self.state.clock.now
        screen.space(200)
        screen.paragraph(time_of_day(now), size=TextSize.DISPLAY, align=Align.CENTER)
        screen.paragraph(day_line(now), align=Align.CENTER)

    def _timer(self, screen: ScreenBuilder) -> None:
        preferences = self.app.preferences
        digits = timer_digits(preferences)
        screen.space(80)
        shown = f"{digits[:2]}h {digits[2:4]}m {digits[4:]}s"
        screen.paragraph(shown, size=TextSize.DISPLAY, align=Align.CENTER)
        screen.space(48)
        if preferences.get("timer_running") == "1":
            screen.button_row([("Stop", lambda: preferences.update(timer_running="0"))])
            return
        for keys in _KEY_ROWS:
            screen.button_row([(key, partial(self._press, key)) for key in keys], height=176)
        screen.space(48)
        if digits != "000000":
            screen.button_row([("Start", lambda: preferences.update(timer_running="1"))])

    def _press(self, key: str) -> None:
        digits = self.app.preferences.get("timer_digits", "")
        digits = digits[:-1] if key == "Del" else (digits + key).lstrip("0")
        if len(digits) <= 6:
            self.app.preferences["timer_digits"] = digits

    def _stopwatch(self, screen: ScreenBuilder) -> None:
        stopwatch = _Stopwatch(self.app)
        screen.space(160)
        screen.paragraph(stopwatch.shown(), size=TextSize.DISPLAY, align=Align.CENTER)
        screen.space(96)
        if stopwatch.state == STOPWATCH_RUNNING:
            screen.button_row([("Pause", stopwatch.pause), ("Lap", stopwatch.lap)], height=176)
        elif stopwatch.state == STOPWATCH_PAUSED:
            screen.button_row([("Start", stopwatch.start), ("Reset", stopwatch.reset)], height=176)
        else:
            screen.button_row([("Start", stopwatch.start)], height=176)
        for index, lap in enumerate(stopwatch.laps(), start=1):
            screen.row(f"Lap {index}", secondary=lap)


class _Stopwatch:
    """The stopwatch over the app's preferences; it runs on the device's uptime."""

    def __init__(self, app: App) -> None:
        self._preferences = app.preferences
        self._uptime_s = app.state.clock.uptime_s
        self.state = self._preferences.get("stopwatch_state", STOPWATCH_RESET)

    def start(self) -> None:
        self._preferences.update(stopwatch_state=STOPWATCH_RUNNING, stopwatch_since_s=str(self._uptime_s))

    def pause(self) -> None:
        self._preferences.update(stopwatch_state=STOPWATCH_PAUSED, stopwatch_elapsed_s=str(self._elapsed_s()))

    def reset(self) -> None:
        self._preferences.update(stopwatch_state=STOPWATCH_RESET, stopwatch_elapsed_s="0", stopwatch_laps="")

    def lap(self) -> None:
        self._preferences["stopwatch_laps"] = " ".join([*self.laps(), self.shown()])

    def laps(self) -> list[str]:
        return self._preferences.get("stopwatch_laps", "").split()

    def shown(self) -> str:
        elapsed_s = self._elapsed_s()
        return f"{int(elapsed_s // 60):02}:{elapsed_s % 60:05.2f}"

    def _elapsed_s(self) -> float:
        elapsed_s = float(self._preferences.get("stopwatch_elapsed_s", "0"))
        if self.state == STOPWATCH_RUNNING:
            elapsed_s += self._uptime_s - float(self._preferences.get("stopwatch_since_s", "0"))
        return elapsed_s
