"""Simple Calendar Pro: the agenda day by day, one event, and the form of a new event."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from rollout_buffer_lab.simulated_phone.apps.dates import day_line, long_date, time_of_day
from rollout_buffer_lab.simulated_phone.apps.page import App, ConfirmDialog, Page
from rollout_buffer_lab.simulated_phone.device_state.calendar import CalendarEvent, add_event, delete_event, events
from rollout_buffer_lab.simulated_phone.layout import BarIcon, ScreenBuilder


class CalendarApp(App):
    """Appointments."""

    def first_page(self) -> Page:
        """Returns the agenda: all events, from the earliest on."""
        return _Agenda(self)


class _Agenda(Page):
    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("Calendar")
        day = ""
        for event in events(self.state):
            if day_line(event.start) != day:
                day = day_line(event.start)
                screen.section(day)
            open_event = partial(self.show, _Event, event)
            screen.row(event.title, secondary=_times(event), on_tap=open_event)
        if not day:
            screen.section("No events")
        screen.floating_icon("add", partial(self.show, _Form))


class _Event(Page):
    def __init__(self, app: App, event: CalendarEvent) -> None:
        super().__init__(app)
        self._event = event

    def build(self, screen: ScreenBuilder) -> None:
        event = self._event
        ask = ConfirmDialog(self.app, "Delete", f"Delete the event {event.title}?", "Delete", self._delete)
        screen.title_bar("Event", on_back=self.back, icons=[BarIcon(icon="delete", on_tap=partial(self.app.push, ask))])
        for label, value in (
            ("Title", event.title),
            ("Day", day_line(event.start)),
            ("Time", _times(event)),
            ("Location", event.location),
            ("Description", event.description),
        ):
            if value:
                screen.section(label)
                screen.paragraph(value)

    def _delete(self) -> None:
        delete_event(self.state, self._event.event_id)
        self.app.pop()


class _Form(Page):
    """The form of a new event. The day is typed as 2023-10-15, times as 15:00."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        now = self.state.clock.now
        self.field_named("date").text = f"{now:%Y-%m-%d}"
        self.field_named("start").text = f"{(now.hour + 1) % 24:02}:00"
        self.field_named("end").text = f"{(now.hour + 2) % 24:02}:00"
        self._problem = ""

    def build(self, screen: ScreenBuilder) -> None:
        screen.title_bar("New event", on_back=self.back, buttons=[("Save", self._save)])
        for key, label in (
            ("title", "Title"),
            ("location", "Location"),
            ("description", "Description"),
            ("date", "Date"),
            ("start", "Start time"),
            ("end", "End time"),
        ):
            screen.field(key, label)
        if self._problem:
            screen.section(self._problem)

    def _save(self) -> None:
        start, end = self._instant("start"), self._instant("end")
        title = self.field_named("title").text.strip()
        if start is None or end is None or end < start or not title:
            self._problem = "Title, a date like 2023-10-15 and times like 15:00 are needed"
            return
        event = CalendarEvent(
            title=title,
            start=start,
            end=end,
            location=self.field_named("location").text.strip(),
            description=self.field_named("description").text.strip(),
        )
        add_event(self.state, event)
        self.app.pop()

    def _instant(self, key: str) -> datetime | None:
        text = f"{self.field_named('date').text.strip()} {self.field_named(key).text.strip()}"
        try:
            return datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
        except ValueError:
            return None


def _times(event: CalendarEvent) -> str:
    if long_date(event.start) != long_date(event.end):
        return f"{time_of_day(event.start)} - {long_date(event.end)} {time_of_day(event.end)}"
    return f"{time_of_day(event.start)} - {time_of_day(event.end)}"
