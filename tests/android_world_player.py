"""Solutions of AndroidWorld's own tasks on the simulated phone, where the solutions of the phone's tasks do not fit.

As in ``simulated_phone_player``: a solution knows the task's parameters, sees screenshots, and acts by touch and
typing alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rollout_buffer_lab.simulated_phone.screen_records import TextRole
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import ActionKind
from tests.simulated_phone_player import SOLUTIONS as PHONE_SOLUTIONS
from tests.simulated_phone_player import Player, Solution, delete_row, look_at_stopwatch, new_note, rename, write_over

NOW = datetime(2023, 10, 15, 15, 34)
MAX_SCREENS = 60


# ---- notes -----------------------------------------------------------------------------------------------------------


def _note_text(player: Player, name: str) -> str:
    """Opens the note and reads it; the note stays open."""
    player.tap_row(name)
    return " ".join(player.field("Note").lines)


def _edit_note(player: Player, params: Any) -> None:
    player.open("Markor")
    text = _note_text(player, params["file_name"])
    edits = {
        "header": lambda: f"{params['header']}\n{text}",
        "footer": lambda: f"{text}\n{params['footer']}",
        "replace": lambda: str(params["replace_text"]),
    }
    write_over(player, edits[params["edit_type"]]())


def _add_header(player: Player, params: Any) -> None:
    player.open("Markor")
    text = _note_text(player, params["original_name"])
    write_over(player, f"{params['header']}\n\n{text}\n")
    rename(player, params["original_name"], params["new_name"])


def _delete_newest_note(player: Player, params: Any) -> None:
    player.open("Markor")
    lines = player.screen.texts
    names = [line.text for line in lines if line.role is TextRole.PRIMARY]
    dates = [line.text for line in lines if line.role is TextRole.SECONDARY]
    changed = [datetime.strptime(date, "%b %d, %Y %H:%M") for date in dates]
    delete_row(player, names[changed.index(max(changed))])


def _merge_notes(player: Player, params: Any) -> None:
    player.open("Markor")
    texts = []
    for number in (1, 2, 3):
        texts.append(_note_text(player, params[f"file{number}_name"]))
        player.tap_icon("back")
    new_note(player, params["new_file_name"])
    player.fill("Note", "\n\n".join(texts))
    player.tap_icon("back")
    rename(player, f"{params['new_file_name']}.md", params["new_file_name"])


def _create_note_and_send(player: Player, params: Any) -> None:
    PHONE_SOLUTIONS["MarkorCreateNote"](player, params)
    PHONE_SOLUTIONS["SimpleSmsSend"](player, {"number": params["number"], "message": params["text"]})


def _resend(player: Player, params: Any) -> None:
    """AndroidWorld sends the message through the app itself, so the conversation may be open already."""
    player.open("Simple SMS Messenger")
    if player.screen.find_field("Message") is None:
        player.tap_row(params["name"])
    message = " ".join(line.text for line in player.screen.texts if line.sent)
    player.fill("Message", message)
    player.tap_button("Send")


def _forward_address(player: Player, params: Any) -> None:
    player.open("Simple SMS Messenger")
    player.tap_row(params["name2"])
    lines = [line.text for line in player.screen.texts if line.role is TextRole.PRIMARY and not line.sent]
    player.tap_icon("back")
    player.tap_icon("add")
    player.tap_row(params["name1"])
    player.fill("Message", " ".join(lines))
    player.tap_button("Send")


def _open_from_home(player: Player, params: Any) -> None:
    label = {"dialer": "Phone"}.get(params["app_name"], params["app_name"].capitalize())
    icon = player.screen.find_app(label)
    assert icon is not None, f"no app {label}"
    player.tap(icon.center)


# ---- calendar --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenEvent:
    start: datetime
    title: str
    center: tuple[int, int]


def _agenda(player: Player) -> Iterator[SeenEvent]:
    """Opens the calendar at its top and scrolls down; each event is on the screen when it is yielded."""
    player.open("Simple Calendar Pro")
    known: list[SeenEvent] = []
    for _ in range(MAX_SCREENS):
        before = player.observation.screenshot.data
        for event in _on_screen(player, known):
            if (event.start, event.title) not in [(earlier.start, earlier.title) for earlier in known]:
                known.append(event)
                yield event
        player.act(ActionKind.SWIPE, point=(540, 1900), end_point=(540, 900))
        if player.observation.screenshot.data == before:
            return


def _on_screen(player: Player, known: list[SeenEvent]) -> Iterator[SeenEvent]:
    """Yields the events on the screen.

    A row above the first date header gets the day that the same row had on an earlier screen, or the last known day.
    """
    day: datetime | None = None
    title, center = "", (0, 0)
    for line in player.screen.texts:
        header = _day_of(line.text)
        if line.role is TextRole.PRIMARY:
            title, center = line.text, line.center
        elif header is not None:
            day = header
        elif title and (times := re.match(r"(\d\d):(\d\d) - ", line.text)):
            clock = timedelta(hours=int(times[1]), minutes=int(times[2]))
            day = day or _day_seen(known, title, clock)
            if day is not None:
                yield SeenEvent(start=day + clock, title=title, center=center)
            title = ""


def _day_seen(known: list[SeenEvent], title: str, clock: timedelta) -> datetime | None:
    days = [event.start.replace(hour=0, minute=0) for event in known]
    same = [day for day, event in zip(days, known, strict=True) if event.title == title and event.start == day + clock]
    candidates = same or days
    return candidates[-1] if candidates else None


def _day_of(text: str) -> datetime | None:
    tail = text.split(", ", 1)[-1]
    for form in ("%B %d %Y", "%B %d, %Y"):
        try:
            return datetime.strptime(tail, form)
        except ValueError:
            continue
    return None


def _date(params: Any) -> datetime:
    return datetime.strptime(params["date"], "%B %d %Y")


def _clock(text: str) -> timedelta:
    """Parses a time such as 11:00am, 4pm or 21:45."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?(am|pm)?", text)
    assert match is not None
    hour = int(match[1])
    if match[3]:
        hour = hour % 12 + (12 if match[3] == "pm" else 0)
    return timedelta(hours=hour, minutes=int(match[2] or 0))


Wanted = Callable[[Any, SeenEvent], bool]


def _answer_titles(wanted: Wanted, most: int | None = None) -> Solution:
    def solve(player: Player, params: Any) -> None:
        titles: list[str] = []
        for event in _agenda(player):
            if wanted(params, event) and (most is None or len(titles) < most):
                titles.append(event.title)
        player.answer(", ".join(titles))

    return solve


def _on_date(params: Any, event: SeenEvent) -> bool:
    return event.start.date() == _date(params).date()


def _at_time(params: Any, event: SeenEvent) -> bool:
    return event.start == _date(params) + _clock(params["time"])


def _after_time(params: Any, event: SeenEvent) -> bool:
    return event.start >= _date(params) + _clock(params["time"])


def _in_range(params: Any, event: SeenEvent) -> bool:
    return _date(params) + _clock(params["start_time"]) <= event.start <= _date(params) + timedelta(hours=20)


def _next_week(params: Any, event: SeenEvent) -> bool:
    return datetime(2023, 10, 16) <= event.start < datetime(2023, 10, 23)


def _answer_meeting(player: Player, params: Any) -> None:
    for event in _agenda(player):
        if event.start >= NOW and params["person"] in event.title:
            player.answer(f"{event.start:%B} {event.start.day} {event.start.year} {event.start:%H:%M}")
            return
    raise AssertionError("no such meeting")


def _answer_location(player: Player, params: Any) -> None:
    for event in _agenda(player):
        if event.title == params["title"] and _on_date(params, event):
            player.tap(event.center)
            texts = [line.text for line in player.screen.texts]
            player.answer(texts[texts.index("Location") + 1])
            return
    raise AssertionError("no such event")


def _delete_events(wanted: Wanted) -> Solution:
    """Deletes the wanted events, ten at most; looks for each from the top of the calendar."""

    def solve(player: Player, params: Any) -> None:
        for _ in range(10):
            event = next((event for event in _agenda(player) if wanted(params, event)), None)
            if event is None:
                return
            player.tap(event.center)
            player.tap_icon("delete")
            player.tap_button("Delete")
            player.back()

    return solve


def _on_named_day(params: Any, event: SeenEvent) -> bool:
    return (event.start.month, event.start.day) == (params["month"], params["day"])


def _the_event(params: Any, event: SeenEvent) -> bool:
    named = _on_named_day(params, event) and event.start.hour == params["hour"]
    return named and event.title == params["event_title"]


def _add_event(player: Player, params: Any) -> None:
    wanted = params["row_objects"][0]
    start, end = wanted.start_datetime, wanted.end_datetime
    player.open("Simple Calendar Pro")
    player.tap_icon("add")
    player.fill("Title", wanted.title)
    player.fill("Description", wanted.description)
    for label, text in (("Date", f"{start:%Y-%m-%d}"), ("Start time", f"{start:%H:%M}"), ("End time", f"{end:%H:%M}")):
        _replace(player, label, text)
    player.tap_button("Save")


def _replace(player: Player, label: str, text: str) -> None:
    """Selects the field's value through its menu and types over it; scrolls down to the field if need be."""
    field = player.screen.find_field(label)
    for _ in range(3):
        if field is not None:
            break
        player.act(ActionKind.SWIPE, point=(540, 1300), end_point=(540, 900))
        field = player.screen.find_field(label)
    assert field is not None, f"no field {label}"
    player.hold(field.center)
    player.tap_row("Select all")
    player.type(text)


SOLUTIONS: dict[str, Solution] = {
    **PHONE_SOLUTIONS,
    "ClockStopWatchPausedVerify": look_at_stopwatch,  # it does not run when AndroidWorld's task begins
    "SimpleSmsResend": _resend,
    "SimpleSmsSendReceivedAddress": _forward_address,
    "OpenAppTaskEval": _open_from_home,
    "MarkorEditNote": _edit_note,
    "MarkorAddNoteHeader": _add_header,
    "MarkorDeleteNewestNote": _delete_newest_note,
    "MarkorMergeNotes": _merge_notes,
    "MarkorCreateNoteAndSms": _create_note_and_send,
    "SimpleCalendarAddOneEvent": _add_event,
    "SimpleCalendarAddOneEventInTwoWeeks": _add_event,
    "SimpleCalendarAddOneEventRelativeDay": _add_event,
    "SimpleCalendarAddOneEventTomorrow": _add_event,
    "SimpleCalendarDeleteOneEvent": _delete_events(_the_event),
    "SimpleCalendarDeleteEvents": _delete_events(_on_named_day),
    "SimpleCalendarDeleteEventsOnRelativeDay": _delete_events(_on_named_day),
    "SimpleCalendarEventsOnDate": _answer_titles(_on_date),
    "SimpleCalendarAnyEventsOnDate": _answer_titles(_on_date),
    "SimpleCalendarEventOnDateAtTime": _answer_titles(_at_time),
    "SimpleCalendarFirstEventAfterStartTime": _answer_titles(_after_time, most=1),
    "SimpleCalendarEventsInTimeRange": _answer_titles(_in_range),
    "SimpleCalendarEventsInNextWeek": _answer_titles(_next_week),
    "SimpleCalendarNextEvent": _answer_titles(lambda params, event: event.start >= NOW, most=1),
    "SimpleCalendarNextMeetingWithPerson": _answer_meeting,
    "SimpleCalendarLocationOfEvent": _answer_location,
}
