"""Tasks about the calendar: questions that are answered, and an event to delete."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from typing import Any

from rollout_buffer_lab.simulated_phone.apps.dates import long_date, time_of_day
from rollout_buffer_lab.simulated_phone.device_state.calendar import CalendarEvent, add_event, events
from rollout_buffer_lab.simulated_phone.device_state.clock import START_TIME
from rollout_buffer_lab.simulated_phone.device_state.state import DeviceState
from rollout_buffer_lab.simulated_phone.tasks.base import Params, Success, Task, all_hold
from rollout_buffer_lab.simulated_phone.tasks.words import full_name, sentence, subject

_TODAY = START_TIME.replace(hour=0, minute=0, second=0)
_ROOMS = ("Blue room", "Cafeteria", "City library", "Office 4", "Sports hall", "Town park")


def _draw_events(rng: random.Random) -> list[dict[str, Any]]:
    """Draws five to eight events with different titles at different hours of the coming days."""
    slots = rng.sample([(day, hour) for day in range(1, 5) for hour in range(8, 19, 2)], rng.randint(5, 8))
    entries, titles = [], set()
    for day, hour in sorted(slots):
        title = f"{subject(rng)} with {full_name(rng).split()[0]}"
        while title in titles:
            title = f"{subject(rng)} with {full_name(rng).split()[0]}"
        titles.add(title)
        minutes = rng.choice((30, 45, 60, 90))
        entries.append({"title": title, "day": day, "hour": hour, "minutes": minutes, "location": rng.choice(_ROOMS)})
    return entries


def _start(entry: dict[str, Any]) -> datetime:
    return _TODAY + timedelta(days=entry["day"], hours=entry["hour"])


def _draw_question(rng: random.Random) -> Params:
    """Draws a calendar, and the event in it that the question is about."""
    entries = _draw_events(rng)
    target = rng.choice(entries)
    return {
        "row_objects": entries,
        "title": target["title"],
        "location": target["location"],
        "date": long_date(_start(target)),
        "time": time_of_day(_start(target)),
        "first_title": entries[0]["title"],
    }


def _draw_day(rng: random.Random) -> Params:
    entries = _draw_events(rng)
    day = rng.randint(1, 5)
    answer = "yes" if any(entry["day"] == day for entry in entries) else "no"
    return {"row_objects": entries, "date": long_date(_TODAY + timedelta(days=day)), "answer": answer}


def _write_events(state: DeviceState, params: Params, rng: random.Random) -> None:
    for entry in params["row_objects"]:
        start = _start(entry)
        event = CalendarEvent(
            title=entry["title"],
            start=start,
            end=start + timedelta(minutes=entry["minutes"]),
            location=entry["location"],
            description=sentence(rng),
        )
        add_event(state, event)


def _answered(key: str) -> Success:
    return lambda state, params, answer: all_hold(answer is not None and _plain(answer) == _plain(params[key]))


def _plain(answer: str) -> str:
    return " ".join(answer.casefold().strip().strip(".!\"'").split())


def _target_deleted(state: DeviceState, params: Params, answer: str | None) -> float:
    expected = [entry["title"] for entry in params["row_objects"] if entry["title"] != params["title"]]
    return all_hold(sorted(expected) == sorted(event.title for event in events(state)))


_IN_CALENDAR = "In Simple Calendar Pro: "

APPOINTMENT_TASKS = (
    Task(
        name="SimpleCalendarLocationOfEvent",
        step_budget=10,
        goal=_IN_CALENDAR + 'where does the event "{title}" on {date} take place? Answer with the location only.',
        make_params=_draw_question,
        set_up=_write_events,
        success=_answered("location"),
    ),
    Task(
        name="SimpleCalendarEventOnDateAtTime",
        step_budget=10,
        goal=_IN_CALENDAR + "which event starts on {date} at {time}? Answer with its title only.",
        make_params=_draw_question,
        set_up=_write_events,
        success=_answered("title"),
    ),
    Task(
        name="SimpleCalendarNextEvent",
        step_budget=10,
        goal=_IN_CALENDAR + "what is my next event? Answer with its title only.",
        make_params=_draw_question,
        set_up=_write_events,
        success=_answered("first_title"),
    ),
    Task(
        name="SimpleCalendarAnyEventsOnDate",
        step_budget=10,
        goal=_IN_CALENDAR + "do I have any events on {date}? Answer with yes or no only.",
        make_params=_draw_day,
        set_up=_write_events,
        success=_answered("answer"),
    ),
    Task(
        name="SimpleCalendarDeleteOneEvent",
        step_budget=12,
        goal=_IN_CALENDAR + 'delete the event "{title}" on {date} at {time}.',
        make_params=_draw_question,
        set_up=_write_events,
        success=_target_deleted,
    ),
)
