"""How each kind of task is done. An errand looks at the situation and names the next move; None when it is finished.

An errand keeps no state of its own: what was done shows on the screen or was concluded in an earlier turn. So it goes
on sensibly from wherever a mistake has left it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Final, Protocol

from slime_plugins.rollout_buffer.generator.android_world.simulated_phone.screen_reader import TextRole
from slime_plugins.rollout_buffer.stand_in_engine.phone.hands import (
    app_opened,
    button_tapped,
    ends_with_words,
    field_filled,
    field_pasted,
    find_row,
    held_row,
    icon_tapped,
    last_message,
    lines_joined,
    same_words,
    scrolled_to,
    stepped_back,
    tapped_row,
)
from slime_plugins.rollout_buffer.stand_in_engine.phone.moves import (
    BELIEF,
    Move,
    answer,
    give_up,
    open_app,
    press,
    tap,
    type_text,
)
from slime_plugins.rollout_buffer.stand_in_engine.phone.situation import Row, Situation

__all__ = [
    "AddContact",
    "AnswerAboutCalendar",
    "ChangeNote",
    "CopyText",
    "CreateFolder",
    "CreateNote",
    "DeleteAllNotes",
    "DeleteEvent",
    "DeleteFile",
    "DeleteNewestNote",
    "DraftContact",
    "EditNote",
    "Errand",
    "ForwardReceived",
    "MoveFile",
    "OpenApp",
    "RecordSound",
    "Reply",
    "SendAgain",
    "SendMessage",
    "SetBrightness",
    "SetTimer",
    "Stopwatch",
    "Switches",
    "TakePhoto",
    "TakeVideo",
]

MESSENGER: Final = "Simple SMS Messenger"
CALENDAR: Final = "Simple Calendar Pro"
RECORDER: Final = "Audio Recorder"
CHAPTERS: Final = {"Wi-Fi": "Network & internet", "Bluetooth": "Connected devices"}
DATE_FORMAT: Final = "%b %d, %Y %H:%M"


class Errand(Protocol):
    """One thing to do. ``words`` names the fields whose text the user gave, and which can be misread."""

    words: ClassVar[tuple[str, ...]]

    def next_move(self, situation: Situation) -> Move | None:
        """The next move, None when there is nothing left to do."""
        ...


# Settings, apps, clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """Brings switches into their wanted states, in order. The status bar shows how they stand."""

    words: ClassVar[tuple[str, ...]] = ()
    wanted: tuple[tuple[str, bool], ...]

    def next_move(self, situation: Situation) -> Move | None:
        screen = situation.screen
        shown = {"Wi-Fi": screen.wifi_shown, "Bluetooth": screen.bluetooth_shown}
        pending = next(((name, is_on) for name, is_on in self.wanted if shown[name] is not is_on), None)
        if pending is None:
            return None
        name, is_on = pending
        return app_opened(situation, "Settings") or self._flip(situation, name, "on" if is_on else "off")

    def _flip(self, situation: Situation, name: str, state: str) -> Move:
        switch = situation.screen.find_switch(name)
        if switch is not None:
            thought = f"The switch {name} is not {state} yet. I tap it."
            return tap(switch.center, thought, f"Switched {name} {state}.", decisive=True)
        if situation.screen.title == "Settings":
            return tapped_row(situation, CHAPTERS[name])
        return stepped_back(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetBrightness:
    """Moves the slider to one of its ends."""

    words: ClassVar[tuple[str, ...]] = ()
    to_maximum: bool

    def next_move(self, situation: Situation) -> Move | None:
        slider = situation.screen.find_slider("Brightness level")
        if slider is None:
            return app_opened(situation, "Settings") or self._towards_display(situation)
        if slider.value > 0.98 if self.to_maximum else slider.value < 0.02:
            return None
        end, name = (slider.right_end, "right") if self.to_maximum else (slider.left_end, "left")
        thought = f"The brightness slider has to be at its {name} end. I tap there."
        return tap(end, thought, f"Moved the brightness slider to its {name} end.", decisive=True)

    def _towards_display(self, situation: Situation) -> Move:
        return tapped_row(situation, "Display") if situation.screen.title == "Settings" else stepped_back(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenApp:
    """Brings an app to the front."""

    words: ClassVar[tuple[str, ...]] = ()
    name: str

    def next_move(self, situation: Situation) -> Move | None:
        if app_opened(situation, self.name) is None:
            return None
        thought = f"The app {self.name} has to be in front. I open it."
        return open_app(self.name, thought, f"Opened the app {self.name}.", decisive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyText:
    """Puts a text on the clipboard."""

    words: ClassVar[tuple[str, ...]] = ("text",)
    text: str

    def next_move(self, situation: Situation) -> Move | None:
        done = "Copied the text to the clipboard."
        if situation.did(done):
            return None
        return (
            app_opened(situation, "Clipper")
            or field_filled(situation, "Text", self.text)
            or button_tapped(situation, "Copy", done, decisive=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Enters a time of hours, minutes and seconds, key by key."""

    words: ClassVar[tuple[str, ...]] = ()
    hours: int
    minutes: int
    seconds: int

    def next_move(self, situation: Situation) -> Move | None:
        if (opened := app_opened(situation, "Clock")) is not None:
            return opened
        entered = self._entered(situation)
        if situation.screen.title != "Timer" or entered is None:
            return button_tapped(situation, "Timer")
        wanted = f"{self.hours:02}{self.minutes:02}{self.seconds:02}".lstrip("0")
        if entered == wanted:
            return None
        if not wanted.startswith(entered):
            return button_tapped(situation, "Del")
        rest = wanted[len(entered) :]
        key = "00" if rest.startswith("00") else rest[0]
        return button_tapped(situation, key, decisive=key == rest)

    def _entered(self, situation: Situation) -> str | None:
        """The digits on the display without leading zeros."""
        shown = (line.text for line in situation.screen.texts if line.role is TextRole.DISPLAY)
        match = re.search(r"(\d\d)h\s*(\d\d)m\s*(\d\d)s", " ".join(shown))
        return None if match is None else "".join(match.groups()).lstrip("0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopwatch:
    """Starts or pauses the stopwatch."""

    words: ClassVar[tuple[str, ...]] = ()
    button: str
    button_after: str

    def next_move(self, situation: Situation) -> Move | None:
        if (opened := app_opened(situation, "Clock")) is not None:
            return opened
        if situation.screen.title != "Stopwatch":
            return button_tapped(situation, "Stopwatch")
        if situation.screen.find_button(self.button_after) is not None:
            return None
        return button_tapped(situation, self.button, decisive=True)


# Contacts


@dataclass(frozen=True, kw_only=True, slots=True)
class AddContact:
    """Fills in the form and saves it."""

    words: ClassVar[tuple[str, ...]] = ("first", "last", "phone")
    first: str
    last: str
    phone: str

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Saved the contact {self.first} {self.last}."
        if situation.did(done):
            return None
        return app_opened(situation, "Contacts") or self._in_contacts(situation, done)

    def _in_contacts(self, situation: Situation, done: str) -> Move:
        if situation.screen.title == "Create contact":
            return _form_filled(situation, self.first, self.last, self.phone) or button_tapped(
                situation, "Save", done, decisive=True
            )
        return _to_contact_form(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContact:
    """Fills in the form, label first (the keyboard would cover it), and leaves it open."""

    words: ClassVar[tuple[str, ...]] = ("first", "last", "phone")
    first: str
    last: str
    phone: str
    label: str

    def next_move(self, situation: Situation) -> Move | None:
        return app_opened(situation, "Contacts") or self._in_contacts(situation)

    def _in_contacts(self, situation: Situation) -> Move | None:
        if situation.screen.title == "Phone label":
            return tapped_row(situation, self.label, f"Chose the label {self.label}.", decisive=True)
        if situation.screen.title != "Create contact":
            return _to_contact_form(situation)
        label = find_row(situation, "Phone label")
        if label is not None and label.detail != self.label:
            return tapped_row(situation, "Phone label")
        return _form_filled(situation, self.first, self.last, self.phone)


def _form_filled(situation: Situation, first: str, last: str, phone: str) -> Move | None:
    values = {"First name": first, "Last name": last, "Phone": phone}
    moves = (field_filled(situation, label, value) for label, value in values.items() if value)
    return next((move for move in moves if move is not None), None)


def _to_contact_form(situation: Situation) -> Move:
    if situation.screen.title == "Contacts":
        return icon_tapped(situation, "add", "add a contact")
    return stepped_back(situation)


# Messages


@dataclass(frozen=True, kw_only=True, slots=True)
class SendMessage:
    """Starts a conversation and sends a text; without a text, what is on the clipboard."""

    words: ClassVar[tuple[str, ...]] = ("number", "text")
    number: str
    text: str = ""

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Sent a message to {self.number}."
        if situation.did(done):
            return None
        return app_opened(situation, MESSENGER) or self._in_messenger(situation, done)

    def _in_messenger(self, situation: Situation, done: str) -> Move:
        if situation.screen.title == "Messages":
            return icon_tapped(situation, "add", "start a conversation")
        if situation.screen.title not in ("New conversation", "Edit text"):
            return stepped_back(situation)
        if situation.screen.title == "New conversation":
            numbered = field_filled(situation, "Phone number", self.number)
            if numbered is not None:
                return numbered
        return _message_entered(situation, self.text) or button_tapped(situation, "Send", done, decisive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Sends a text in a conversation that is there; without a name, in the topmost one."""

    words: ClassVar[tuple[str, ...]] = ("text",)
    name: str = ""
    text: str

    def next_move(self, situation: Situation) -> Move | None:
        if situation.did("Sent the reply."):
            return None
        return app_opened(situation, MESSENGER) or self._in_messenger(situation)

    def _in_messenger(self, situation: Situation) -> Move:
        chosen = self.name or situation.recalled(r"Opened the conversation with (.+?)\.$")
        title = situation.screen.title
        if title == "Messages":
            return _conversation_opened(situation, self.name)
        if title not in (chosen, "Edit text"):
            return stepped_back(situation)
        return _message_entered(situation, self.text) or button_tapped(
            situation, "Send", "Sent the reply.", decisive=True
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SendAgain:
    """Reads the message that one sent last to somebody, and sends it once more."""

    words: ClassVar[tuple[str, ...]] = ()
    name: str

    def next_move(self, situation: Situation) -> Move | None:
        text = situation.recalled(r'Tapped the field Message, to send this again: "(.+)"$')
        if text is None:
            return app_opened(situation, MESSENGER) or self._read(situation)
        return Reply(name=self.name, text=text).next_move(situation)

    def _read(self, situation: Situation) -> Move:
        title, field = situation.screen.title, situation.screen.find_field("Message")
        if title == "Messages":
            return _conversation_opened(situation, self.name)
        if title != self.name or field is None:
            return stepped_back(situation)
        text = last_message(situation, sent=True)
        if not text:
            return give_up(f"I see no message of mine to {self.name}.")
        conclusion = f'Tapped the field Message, to send this again: "{text}"'
        return tap(field.center, f'The last message I sent reads "{text}". I send it once more.', conclusion)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardReceived:
    """Reads the latest message from somebody, and sends its text to somebody else."""

    words: ClassVar[tuple[str, ...]] = ()
    from_name: str
    to_name: str

    def next_move(self, situation: Situation) -> Move | None:
        text = situation.recalled(rf'Read what {re.escape(self.from_name)} sent: "(.+)"$')
        if text is None:
            return app_opened(situation, MESSENGER) or self._read(situation)
        return Reply(name=self.to_name, text=text).next_move(situation)

    def _read(self, situation: Situation) -> Move:
        if situation.screen.title == "Messages":
            return _conversation_opened(situation, self.from_name)
        if situation.screen.title != self.from_name:
            return stepped_back(situation)
        text = last_message(situation, sent=False)
        if not text:
            return give_up(f"I see no message from {self.from_name}.")
        thought = f'{self.from_name} wrote "{text}". I remember that and go back to the conversations.'
        return press("Back", thought, f'Read what {self.from_name} sent: "{text}"')


def _conversation_opened(situation: Situation, name: str) -> Move:
    if not name and not situation.rows:
        return give_up("There are no conversations.")
    chosen = name or situation.rows[0].text
    return tapped_row(situation, chosen, f"Opened the conversation with {chosen}.")


def _message_entered(situation: Situation, text: str) -> Move | None:
    return field_filled(situation, "Message", text) if text else field_pasted(situation, "Message")


# Notes and files


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateNote:
    """Makes a note with a text; without a text, with what is on the clipboard."""

    words: ClassVar[tuple[str, ...]] = ("name", "text")
    name: str
    text: str = ""

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Saved the note {self.name}."
        if situation.did(done):
            return None
        return app_opened(situation, "Markor") or self._in_markor(situation, done)

    def _in_markor(self, situation: Situation, done: str) -> Move:
        title = situation.screen.title
        if title in (self.name, "Edit text"):
            entered = field_filled(situation, "Note", self.text) if self.text else field_pasted(situation, "Note")
            return entered or button_tapped(situation, "Save", done, decisive=True)
        return _new_named(situation, self.name) or button_tapped(situation, "OK")


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateFolder:
    """Makes a folder."""

    words: ClassVar[tuple[str, ...]] = ("name",)
    name: str

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Made the folder {self.name}."
        if situation.did(done):
            return None
        return (
            app_opened(situation, "Markor")
            or _new_named(situation, self.name)
            or button_tapped(situation, "Folder", done, decisive=True)
        )


def _new_named(situation: Situation, name: str) -> Move | None:
    """Opens Markor's dialog for something new and fills in its name."""
    if situation.screen.find_field("Name") is not None:
        return field_filled(situation, "Name", name)
    if situation.screen.title == "Markor":
        return icon_tapped(situation, "add", "make something new")
    return stepped_back(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class EditNote:
    """Adds a line to the end of a note."""

    words: ClassVar[tuple[str, ...]] = ("line",)
    name: str
    line: str

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Saved the note {self.name}."
        if situation.did(done):
            return None
        return app_opened(situation, "Markor") or self._in_markor(situation, done)

    def _in_markor(self, situation: Situation, done: str) -> Move:
        note = situation.screen.find_field("Note")
        if situation.screen.title == "Markor":
            return tapped_row(situation, self.name)
        if situation.screen.title != self.name or note is None:
            return stepped_back(situation)
        if ends_with_words(note.text, self.line):
            return button_tapped(situation, "Save", done, decisive=True)
        if not note.focused:
            return tap(note.center, "I tap the note, so that I can type at its end.", "Tapped the field Note.")
        return type_text(f"\n{self.line}", "I type the new line at the end.", "Typed into the field Note.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeNote:
    """Replaces what stands in a note, or puts a header before it, and renames the note."""

    words: ClassVar[tuple[str, ...]] = ("text", "new_name")
    name: str
    new_name: str
    text: str
    keep_old_text: bool

    def next_move(self, situation: Situation) -> Move | None:
        if situation.did(f"Renamed the note to {self.new_name}."):
            return None
        if (opened := app_opened(situation, "Markor")) is not None:
            return opened
        if situation.did(self._left):
            return self._rename(situation)
        return self._edit(situation)

    @property
    def _left(self) -> str:
        return f"Left the note {self.name}, which saves it."

    def _edit(self, situation: Situation) -> Move:
        note = situation.screen.find_field("Note")
        if situation.screen.title == "Markor":
            return tapped_row(situation, self.name)
        if situation.screen.title != self.name or note is None:
            return stepped_back(situation)
        old_text = situation.recalled(r'Marked the whole note, which said: "(.*)"$')
        if old_text is not None and same_words(note.text, self._wanted(old_text)):
            return self._leave(situation)
        if note.selected and old_text is not None:
            thought = "The whole note is marked. What I type takes its place."
            return type_text(self._wanted(old_text), thought, "Typed the new text of the note.")
        return self._mark(situation, lines_joined(note.lines) if old_text is None else old_text)

    def _wanted(self, old_text: str) -> str:
        return f"{self.text}\n\n{old_text}" if self.keep_old_text else self.text

    def _mark(self, situation: Situation, old_text: str) -> Move:
        icon = situation.screen.find_icon("select_all")
        if icon is None:
            return stepped_back(situation)
        thought = f'The note says "{old_text}". I mark all of it with the select_all icon.'
        return tap(icon.center, thought, f'Marked the whole note, which said: "{old_text}"')

    def _leave(self, situation: Situation) -> Move:
        if situation.screen.keyboard_visible:
            return press("Back", "The note says what it should. I hide the keyboard.", "Hid the keyboard.")
        return press("Back", "The note says what it should. Leaving it saves it.", self._left)

    def _rename(self, situation: Situation) -> Move:
        title = situation.screen.title
        if situation.screen.find_field("Name") is not None:
            done = f"Renamed the note to {self.new_name}."
            return field_filled(situation, "Name", self.new_name) or button_tapped(situation, "OK", done, decisive=True)
        if title == "1 selected" and _picked(situation) == [self.name]:
            return icon_tapped(situation, "rename", "rename the note")
        return held_row(situation, self.name) if title == "Markor" else stepped_back(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteFile:
    """Deletes a file or note by name; ``folder`` is where it lies in Files, empty for Markor's own notes."""

    words: ClassVar[tuple[str, ...]] = ()
    name: str
    folder: str = ""

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Deleted {self.name}."
        if situation.did(done):
            return None
        app = "Files" if self.folder else "Markor"
        return app_opened(situation, app) or self._in_list(situation, app, done)

    def _in_list(self, situation: Situation, root: str, done: str) -> Move:
        title = situation.screen.title
        if situation.screen.is_dialog and situation.screen.find_button("Delete") is not None:
            return button_tapped(situation, "Delete", done, decisive=True)
        if title == "1 selected" and _picked(situation) == [self.name]:
            return icon_tapped(situation, "delete", "delete it")
        if title == (self.folder or root):
            return held_row(situation, self.name)
        return tapped_row(situation, self.folder) if title == root else stepped_back(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteNewestNote:
    """Deletes the note with the latest date."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, situation: Situation) -> Move | None:
        chosen = situation.recalled(r'Pressed long on "(.+)"\.$')
        if chosen is None and situation.screen.title == "Markor":
            newest = max(situation.rows, key=_changed_at, default=None)
            return give_up("There are no notes.") if newest is None else held_row(situation, newest.text)
        return DeleteFile(name=chosen or "").next_move(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteAllNotes:
    """Picks every note and deletes them together."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, situation: Situation) -> Move | None:
        if situation.did("Deleted all notes."):
            return None
        return app_opened(situation, "Markor") or self._in_markor(situation)

    def _in_markor(self, situation: Situation) -> Move:
        title = situation.screen.title
        if situation.screen.is_dialog and situation.screen.find_button("Delete") is not None:
            return button_tapped(situation, "Delete", "Deleted all notes.", decisive=True)
        if title.endswith(" selected"):
            missing = len(_picked(situation)) < len(situation.rows)
            return icon_tapped(situation, "select_all" if missing else "delete", "pick and delete all notes")
        if title == "Markor" and situation.rows:
            return held_row(situation, situation.rows[0].text)
        return stepped_back(situation)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveFile:
    """Moves a file or note from one folder to another."""

    words: ClassVar[tuple[str, ...]] = ()
    app: str
    name: str
    source: str
    destination: str

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Moved {self.name} to {self.destination}."
        if situation.did(done):
            return None
        return app_opened(situation, self.app) or self._in_list(situation, done)

    def _in_list(self, situation: Situation, done: str) -> Move:
        title = situation.screen.title
        if title == "Move to":
            if situation.screen.find_text(self.destination, TextRole.SECONDARY) is not None:
                return button_tapped(situation, "Move here", done, decisive=True)
            return tapped_row(situation, self.destination)
        if title == "1 selected" and _picked(situation) == [self.name]:
            return icon_tapped(situation, "move", "move it")
        if title == self.source:
            return held_row(situation, self.name)
        return tapped_row(situation, self.source) if title == self.app else stepped_back(situation)


def _picked(situation: Situation) -> list[str]:
    return [row.text for row in situation.rows if row.selected]


def _changed_at(row: Row) -> datetime:
    try:
        return datetime.strptime(row.detail, DATE_FORMAT)
    except ValueError:
        return datetime.min


# Camera, sound, calendar


@dataclass(frozen=True, kw_only=True, slots=True)
class TakePhoto:
    """Takes one photo."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, situation: Situation) -> Move | None:
        if situation.did("Tapped the shutter icon."):
            return None
        return app_opened(situation, "Camera") or self._in_camera(situation)

    def _in_camera(self, situation: Situation) -> Move:
        if situation.screen.find_icon("shutter") is None:
            return button_tapped(situation, "Photo")
        return icon_tapped(situation, "shutter", "take the photo", decisive=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeVideo:
    """Takes one video."""

    words: ClassVar[tuple[str, ...]] = ()

    def next_move(self, situation: Situation) -> Move | None:
        if situation.did("Tapped the stop icon."):
            return None
        return app_opened(situation, "Camera") or self._in_camera(situation)

    def _in_camera(self, situation: Situation) -> Move:
        if situation.screen.find_icon("stop") is not None:
            return icon_tapped(situation, "stop", "end the video", decisive=True)
        if situation.screen.find_icon("record") is not None:
            return icon_tapped(situation, "record", "start the video")
        return button_tapped(situation, "Video")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSound:
    """Records some sound and saves it, under a name if one was given."""

    words: ClassVar[tuple[str, ...]] = ("name",)
    name: str = ""

    def next_move(self, situation: Situation) -> Move | None:
        if situation.did("Saved the record."):
            return None
        return app_opened(situation, RECORDER) or self._in_recorder(situation)

    def _in_recorder(self, situation: Situation) -> Move:
        if situation.screen.find_button("Save") is not None:
            named = field_filled(situation, "Name", self.name) if self.name else None
            return named or button_tapped(situation, "Save", "Saved the record.", decisive=True)
        if situation.screen.find_icon("stop") is not None:
            return icon_tapped(situation, "stop", "end the record", decisive=True)
        return icon_tapped(situation, "record", "start the record")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerAboutCalendar:
    """Answers a question: where ``title`` takes place; what starts on ``date`` at ``time``; what comes next (nothing
    given); whether there is anything on ``date``.
    """

    words: ClassVar[tuple[str, ...]] = ()
    title: str = ""
    date: str = ""
    time: str = ""
    yes_or_no: bool = False

    def next_move(self, situation: Situation) -> Move | None:
        return app_opened(situation, CALENDAR) or self._in_calendar(situation)

    def _in_calendar(self, situation: Situation) -> Move:
        if situation.screen.title == "Event" and self.title:
            return self._location(situation)
        if situation.screen.title != "Calendar":
            return stepped_back(situation)
        if self.title:
            return tapped_row(situation, self.title)
        return self._from_agenda(situation)

    def _location(self, situation: Situation) -> Move:
        lines = [line.text for line in situation.screen.texts]
        if "Location" not in lines[:-1]:
            return give_up("The event has no location.")
        location = lines[lines.index("Location") + 1]
        return answer(location, f"The event takes place here: {location}.")

    def _from_agenda(self, situation: Situation) -> Move:
        agenda = _agenda(situation)
        if self.yes_or_no:
            return self._whether(situation, any(self.date in day for day, _ in agenda))
        found = [row for day, row in agenda if self.date in day and row.detail.startswith(self.time)]
        if not found:
            return scrolled_to(situation, self.date)
        return answer(found[0].text, f'The event I look for is "{found[0].text}".')

    def _whether(self, situation: Situation, is_busy: bool) -> Move:
        if is_busy:
            return answer("yes", f"There is something on {self.date}.")
        further = scrolled_to(situation, self.date)
        if further.arguments["action"] == "swipe":
            return further
        return answer("no", f"I have seen the whole calendar, and there is nothing on {self.date}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteEvent:
    """Deletes an event by its title."""

    words: ClassVar[tuple[str, ...]] = ()
    title: str

    def next_move(self, situation: Situation) -> Move | None:
        done = f"Deleted the event {self.title}."
        if situation.did(done):
            return None
        return app_opened(situation, CALENDAR) or self._in_calendar(situation, done)

    def _in_calendar(self, situation: Situation, done: str) -> Move:
        screen = situation.screen
        if screen.is_dialog and screen.find_button("Delete") is not None:
            return button_tapped(situation, "Delete", done, decisive=True)
        if screen.title == "Event" and screen.find_text(self.title) is not None:
            return icon_tapped(situation, "delete", "delete the event")
        return tapped_row(situation, self.title) if screen.title == "Calendar" else stepped_back(situation)


def _agenda(situation: Situation) -> list[tuple[str, Row]]:
    """The events on the screen with the day they stand under."""
    rows = {row.center: row for row in situation.rows}
    day, found = "", []
    for line in situation.screen.texts:
        row = rows.get(line.center)
        if row is not None:
            found.append((day, row))
        elif line.role is TextRole.SECONDARY and re.search(r", \w+ \d+ \d{4}$", line.text):
            day = line.text
    return found


def is_believed_done(situation: Situation) -> bool:
    """Whether the last turn ended in the belief that it had done it."""
    return bool(situation.history) and situation.history[-1].endswith(BELIEF)
