"""Scripts for notes in Markor, and for files."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final

from rollout_buffer_lab.scripted_engine.phone_policy.actions import (
    app_opened,
    button_tapped,
    ends_with_words,
    field_filled,
    field_pasted,
    held_row,
    icon_tapped,
    lines_joined,
    same_words,
    stepped_back,
    tapped_row,
    titled,
)
from rollout_buffer_lab.scripted_engine.phone_policy.moves import Move, give_up, press, tap, type_text
from rollout_buffer_lab.scripted_engine.phone_policy.policy_observation import PolicyObservation, Row
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import AppScript, TaskScript
from rollout_buffer_lab.simulated_phone.screen_records import TextRole

DATE_FORMAT: Final = "%b %d, %Y %H:%M"


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateNote(AppScript):
    """Makes a note with a text; without a text it pastes the clipboard."""

    words: ClassVar[tuple[str, ...]] = ("name", "text")
    app = "Markor"
    done = "Saved the note {0.name}."
    name: str
    text: str = ""

    def in_app(self, observation: PolicyObservation) -> Move:
        if titled(observation, self.name, "Edit text"):
            entered = field_filled(observation, "Note", self.text) if self.text else field_pasted(observation, "Note")
            return entered or button_tapped(observation, "Save", self.conclusion, decisive=True)
        return _new_named(observation, self.name) or button_tapped(observation, "OK")


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateFolder(AppScript):
    """Makes a folder."""

    words: ClassVar[tuple[str, ...]] = ("name",)
    app = "Markor"
    done = "Made the folder {0.name}."
    name: str

    def in_app(self, observation: PolicyObservation) -> Move:
        named = _new_named(observation, self.name)
        return named or button_tapped(observation, "Folder", self.conclusion, decisive=True)


def _new_named(observation: PolicyObservation, name: str) -> Move | None:
    """Opens Markor's dialog for something new and fills in its name."""
    if observation.screen.find_field("Name") is not None:
        return field_filled(observation, "Name", name)
    if observation.screen.title == "Markor":
        return icon_tapped(observation, "add", "make something new")
    return stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class EditNote(AppScript):
    """Adds a line to the end of a note."""

    words: ClassVar[tuple[str, ...]] = ("line",)
    app = "Markor"
    done = "Saved the note {0.name}."
    name: str
    line: str

    def in_app(self, observation: PolicyObservation) -> Move:
        note = observation.screen.find_field("Note")
        if observation.screen.title == "Markor":
            return tapped_row(observation, self.name)
        if not titled(observation, self.name) or note is None:
            return stepped_back(observation)
        if ends_with_words(note.text, self.line):
            return button_tapped(observation, "Save", self.conclusion, decisive=True)
        if not note.focused:
            return tap(note.center, "I tap the note, so that I can type at its end.", "Tapped the field Note.")
        return type_text(f"\n{self.line}", "I type the new line at the end.", "Typed into the field Note.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeNote(TaskScript):
    """Replaces the text of a note, or puts a header before it, and renames the note."""

    words: ClassVar[tuple[str, ...]] = ("text", "new_name")
    name: str
    new_name: str
    text: str
    keep_old_text: bool

    def next_move(self, observation: PolicyObservation) -> Move | None:
        if observation.did(f"Renamed the note to {self.new_name}."):
            return None
        if (opened := app_opened(observation, "Markor")) is not None:
            return opened
        if observation.did(self._left):
            return self._rename(observation)
        return self._edit(observation)

    @property
    def _left(self) -> str:
        return f"Left the note {self.name}, which saves it."

    def _edit(self, observation: PolicyObservation) -> Move:
        note = observation.screen.find_field("Note")
        if observation.screen.title == "Markor":
            return tapped_row(observation, self.name)
        if not titled(observation, self.name) or note is None:
            return stepped_back(observation)
        old_text = observation.recalled(r'Marked the whole note, which said: "(.*)"\.$')
        if old_text is not None and same_words(note.text, self._new_text(old_text)):
            return self._leave(observation)
        if note.selected and old_text is not None:
            thought = "The whole note is marked. What I type takes its place."
            return type_text(self._new_text(old_text), thought, "Typed the new text of the note.")
        return self._mark(observation, lines_joined(note.lines) if old_text is None else old_text)

    def _new_text(self, old_text: str) -> str:
        return f"{self.text}\n\n{old_text}" if self.keep_old_text else self.text

    def _mark(self, observation: PolicyObservation, old_text: str) -> Move:
        icon = observation.screen.find_icon("select_all")
        if icon is None:
            return stepped_back(observation)
        thought = f'The note says "{old_text}". I mark all of it with the select_all icon.'
        return tap(icon.center, thought, f'Marked the whole note, which said: "{old_text}".')

    def _leave(self, observation: PolicyObservation) -> Move:
        if observation.screen.keyboard_visible:
            return press("Back", "The note says what it should. I hide the keyboard.", "Hid the keyboard.")
        return press("Back", "The note says what it should. Leaving it saves it.", self._left)

    def _rename(self, observation: PolicyObservation) -> Move:
        title = observation.screen.title
        if observation.screen.find_field("Name") is not None:
            done = f"Renamed the note to {self.new_name}."
            return field_filled(observation, "Name", self.new_name) or button_tapped(
                observation, "OK", done, decisive=True
            )
        if title == "1 selected" and _selected_names(observation) == [self.name]:
            return icon_tapped(observation, "rename", "rename the note")
        return held_row(observation, self.name) if title == "Markor" else stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteFile(TaskScript):
    """Deletes a file or note by name; ``folder`` is its folder in Files, empty for a note in Markor."""

    name: str
    folder: str = ""

    def next_move(self, observation: PolicyObservation) -> Move | None:
        done = f"Deleted {self.name}."
        if observation.did(done):
            return None
        app = "Files" if self.folder else "Markor"
        return app_opened(observation, app) or self._in_list(observation, app, done)

    def _in_list(self, observation: PolicyObservation, root: str, done: str) -> Move:
        title = observation.screen.title
        if observation.screen.is_dialog and observation.screen.find_button("Delete") is not None:
            return button_tapped(observation, "Delete", done, decisive=True)
        if title == "1 selected" and _selected_names(observation) == [self.name]:
            return icon_tapped(observation, "delete", "delete it")
        if title == (self.folder or root):
            return held_row(observation, self.name)
        return tapped_row(observation, self.folder) if title == root else stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteNewestNote(TaskScript):
    """Deletes the note with the latest date."""

    def next_move(self, observation: PolicyObservation) -> Move | None:
        chosen = observation.recalled(r'Pressed long on "(.+)"\.$')
        if chosen is None and observation.screen.title == "Markor":
            newest = max(observation.rows, key=_changed_at, default=None)
            return give_up("There are no notes.") if newest is None else held_row(observation, newest.text)
        return DeleteFile(name=chosen or "").next_move(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteAllNotes(AppScript):
    """Selects all notes and deletes them together."""

    app = "Markor"
    done = "Deleted all notes."

    def in_app(self, observation: PolicyObservation) -> Move:
        title = observation.screen.title
        if observation.screen.is_dialog and observation.screen.find_button("Delete") is not None:
            return button_tapped(observation, "Delete", self.conclusion, decisive=True)
        if title.endswith(" selected"):
            some_unselected = len(_selected_names(observation)) < len(observation.rows)
            return icon_tapped(observation, "select_all" if some_unselected else "delete", "pick and delete all notes")
        if title == "Markor" and observation.rows:
            return held_row(observation, observation.rows[0].text)
        return stepped_back(observation)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveFile(TaskScript):
    """Moves a file or note from one folder to another."""

    app: str
    name: str
    source: str
    destination: str

    def next_move(self, observation: PolicyObservation) -> Move | None:
        done = f"Moved {self.name} to {self.destination}."
        if observation.did(done):
            return None
        return app_opened(observation, self.app) or self._in_list(observation, done)

    def _in_list(self, observation: PolicyObservation, done: str) -> Move:
        title = observation.screen.title
        if title == "Move to":
            if observation.screen.find_text(self.destination, TextRole.SECONDARY) is not None:
                return button_tapped(observation, "Move here", done, decisive=True)
            return tapped_row(observation, self.destination)
        if title == "1 selected" and _selected_names(observation) == [self.name]:
            return icon_tapped(observation, "move", "move it")
        if title == self.source:
            return held_row(observation, self.name)
        return tapped_row(observation, self.source) if title == self.app else stepped_back(observation)


def _selected_names(observation: PolicyObservation) -> list[str]:
    return [row.text for row in observation.rows if row.selected]


def _changed_at(row: Row) -> datetime:
    try:
        return datetime.strptime(row.detail, DATE_FORMAT)
    except ValueError:
        return datetime.min
