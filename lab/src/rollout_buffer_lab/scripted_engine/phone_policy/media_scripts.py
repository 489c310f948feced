"""Scripts for camera, sound recorder and calendar."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from rollout_buffer_lab.scripted_engine.phone_policy.actions import (
    app_opened,
    button_tapped,
    field_filled,
    icon_tapped,
    scrolled_to,
    stepped_back,
    tapped_row,
)
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, answer, give_up
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation, Row
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import AppScript, TaskScript
from rollout_buffer_lab.simulated_phone.screen_records import TextRole

CALENDAR: Final = "Simple Calendar Pro"


@dataclass(frozen=True, kw_only=True, slots=True)
class TakePhoto(AppScript):
    """Takes one photo."""

    app = "Camera"
    done = "Tapped the shutter icon."

    def in_app(self, observation: PolicyObservation) -> Move:
        if observation.screen.find_icon("shutter") is None:
            return button_tapped(observation, "Photo")
        return icon_tapped(observation, "shutter", "take the photo", decisive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeVideo(AppScript):
    """Takes one video."""

    app = "Camera"
    done = "Tapped the stop icon."

    def in_app(self, observation: PolicyObservation) -> Move:
        if observation.screen.find_icon("stop") is not None:
            return icon_tapped(observation, "stop", "end the video", decisive=True)
        if observation.screen.find_icon("record") is not None:
            return icon_tapped(observation, "record", "start the video")
        return button_tapped(observation, "Video")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSound(AppScript):
    """Records some sound and saves it, under a name if one was given."""

    words: ClassVar[tuple[str, ...]] = ("name",)
    app = "Audio Recorder"
    done = "Saved the record."
    name: str = ""

    def in_app(self, observation: PolicyObservation) -> Move:
        if observation.screen.find_button("Save") is not None:
            named = field_filled(observation, "Name", self.name) if self.name else None
            return named or button_tapped(observation, "Save", self.conclusion, decisive=True)
        if observation.screen.find_icon("stop") is not None:
            return icon_tapped(observation, "stop", "end the record", decisive=True)
        return icon_tapped(observation, "record", "start the record")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerAboutCalendar(TaskScript):
    """Answers a question about the calendar, which depends on the fields that are set.

    ``title``: where the event takes place. ``date`` and ``time``: which event starts then. ``date`` and ``yes_or_no``:
    whether there is an event on that day. No field: which event is next.
    """

    title: str = ""
    date: str = ""
    time: str = ""
    yes_or_no: bool = False

    def next_move(self, observation: PolicyObservation) -> Move | None:
        return app_opened(observation, CALENDAR) or self._in_calendar(observation)

    def _in_calendar(self, observation: PolicyObservation) -> Move:
        if observation.screen.title == "Event" and self.title:
            return self._location(observation)
        if observation.screen.title != "Calendar":
            return stepped_back(observation)
        if self.title:
            return tapped_row(observation, self.title)
        return self._from_agenda(observation)

    def _location(self, observation: PolicyObservation) -> Move:
        lines = [line.text for line in observation.screen.texts]
        if "Location" not in lines[:-1]:
            return give_up("The event has no location.")
        location = lines[lines.index("Location") + 1]
        return answer(location, f"The event takes place here: {location}.")

    def _from_agenda(self, observation: PolicyObservation) -> Move:
        agenda = _agenda(observation)
        if self.yes_or_no:
            return self._answer_yes_or_no(observation, any(self.date in day for day, _ in agenda))
        matching = [row for day, row in agenda if self.date in day and row.detail.startswith(self.time)]
        if not matching:
            return scrolled_to(observation, self.date)
        return answer(matching[0].text, f'The event I look for is "{matching[0].text}".')

    def _answer_yes_or_no(self, observation: PolicyObservation, is_busy: bool) -> Move:
        if is_busy:
            return answer("yes", f"There is something on {self.date}.")
        further = scrolled_to(observation, self.date)
        if further.arguments["action"] == "swipe":
            return further
        return answer("no", f"I have seen the whole calendar, and there is nothing on {self.date}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteEvent(AppScript):
    """Deletes an event by its title."""

    app = CALENDAR
    done = "Deleted the event {0.title}."
    title: str

    def in_app(self, observation: PolicyObservation) -> Move:
        screen = observation.screen
        if screen.is_dialog and screen.find_button("Delete") is not None:
            return button_tapped(observation, "Delete", self.conclusion, decisive=True)
        if screen.title == "Event" and screen.find_text(self.title) is not None:
            return icon_tapped(observation, "delete", "delete the event")
        return tapped_row(observation, self.title) if screen.title == "Calendar" else stepped_back(observation)


def _agenda(observation: PolicyObservation) -> list[tuple[str, Row]]:
    """Returns the events on the screen, each with the day above it."""
    rows = {row.center: row for row in observation.rows}
    day, agenda = "", []
    for line in observation.screen.texts:
        row = rows.get(line.center)
        if row is not None:
            agenda.append((day, row))
        elif line.role is TextRole.SECONDARY and re.search(r", \w+ \d+ \d{4}$", line.text):
            day = line.text
    return agenda
