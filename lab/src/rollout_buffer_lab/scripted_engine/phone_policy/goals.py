"""Converts the goal of a task into the scripts that reach it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from rollout_buffer_lab.scripted_engine.phone_policy.file_scripts import (
    ChangeNote,
    CreateFolder,
    CreateNote,
    DeleteAllNotes,
    DeleteFile,
    DeleteNewestNote,
    EditNote,
    MoveFile,
)
from rollout_buffer_lab.scripted_engine.phone_policy.media_scripts import (
    AnswerAboutCalendar,
    DeleteEvent,
    RecordSound,
    TakePhoto,
    TakeVideo,
)
from rollout_buffer_lab.scripted_engine.phone_policy.people_scripts import (
    AddContact,
    DraftContact,
    ForwardReceived,
    Reply,
    SendAgain,
    SendMessage,
)
from rollout_buffer_lab.scripted_engine.phone_policy.system_scripts import (
    CopyText,
    OpenApp,
    SetBrightness,
    SetTimer,
    Stopwatch,
    Switches,
)
from rollout_buffer_lab.scripted_engine.phone_policy.task_script import TaskScript

MakeScripts = Callable[..., TaskScript | Sequence[TaskScript]]
"""Makes scripts from the named groups of a pattern; it is a script's class if the groups are named as its fields."""


def scripts_for(goal: str) -> Sequence[TaskScript] | None:
    """Returns the scripts for a goal, in order; None for a goal that the policy does not understand."""
    for pattern, make_scripts in _COMPILED_PATTERNS:
        match = pattern.search(goal)
        if match:
            scripts = make_scripts(**match.groupdict())
            return scripts if isinstance(scripts, Sequence) else [scripts]
    return None


def _switches(
    first: str, first_state: str, second: str | None, second_state: str | None, app: str | None
) -> Sequence[TaskScript]:
    wanted = [(first, first_state == "on")]
    if second is not None:
        wanted.append((second, second_state == "on"))
    return [Switches(wanted=tuple(wanted)), *([] if app is None else [OpenApp(name=app)])]


def _timer(**units: str) -> TaskScript:
    return SetTimer(**{unit: int(number) for unit, number in units.items()})


def _contact(name: str, number: str) -> TaskScript:
    first, _, last = name.partition(" ")
    return AddContact(first=first, last=last, phone=number)


def _note_and_message(name: str, text: str, number: str) -> Sequence[TaskScript]:
    return [CreateNote(name=name, text=text), SendMessage(number=number, text=text)]


_PATTERNS: Final[tuple[tuple[str, MakeScripts], ...]] = (
    (
        r"^Switch (?P<first>Wi-Fi|Bluetooth) (?P<first_state>on|off)"
        r"(?:, then switch (?P<second>Wi-Fi|Bluetooth) (?P<second_state>on|off))?"
        r"(?:, then open the app (?P<app>.+?))?\.$",
        _switches,
    ),
    (r"screen brightness to its maximum", partial(SetBrightness, to_maximum=True)),
    (r"screen brightness to its minimum", partial(SetBrightness, to_maximum=False)),
    (r"^Open the app (?P<name>.+?)\.(?: |$)", OpenApp),
    (r"put this text on the clipboard: (?P<text>.+)$", CopyText),
    (r"timer of (?P<hours>\d+) hours, (?P<minutes>\d+) minutes and (?P<seconds>\d+) seconds", _timer),
    (r"^Start the stopwatch", partial(Stopwatch, button="Start", button_after="Pause")),
    (r"^Pause the stopwatch", partial(Stopwatch, button="Pause", button_after="Reset")),
    (r"^Add a contact named (?P<name>.+) with the phone number (?P<number>\S+)\.$", _contact),
    (
        r"form for a new contact .*first name (?P<first>.+), last name (?P<last>.+), phone (?P<phone>\S+), "
        r"phone label (?P<label>\w+)\. Do NOT save",
        DraftContact,
    ),
    (r"send a text message to (?P<number>\S+) that says: (?P<text>.+)$", SendMessage),
    (r"reply to the text message that arrived last with the message: (?P<text>.+)$", Reply),
    (r"reply to (?P<name>.+?) with the message: (?P<text>.+)$", Reply),
    (r"send the message that I last sent to (?P<name>.+) once more", SendAgain),
    (r"send a message to (?P<number>\S+) with what is on the clipboard", SendMessage),
    (r"text the address that (?P<from_name>.+) just sent me to (?P<to_name>.+)\.$", ForwardReceived),
    (
        r"create a note named (?P<name>\S+) with this text: (?P<text>.+) "
        r"Then send the same text to (?P<number>\S+) with",
        _note_and_message,
    ),
    (r"create a note named (?P<name>\S+) with this text: (?P<text>.+)$", CreateNote),
    (r"create a note named (?P<name>\S+) and paste into it what is on the clipboard", CreateNote),
    (r"create a folder named (?P<name>.+)\.$", CreateFolder),
    (r"delete the note named (?P<name>.+)\.$", DeleteFile),
    (r"delete the note that was changed last", DeleteNewestNote),
    (r"delete all notes", DeleteAllNotes),
    (
        r"move the note (?P<name>\S+) from the folder (?P<source>.+) to the folder (?P<destination>.+)\.$",
        partial(MoveFile, app="Markor"),
    ),
    (r"open the note (?P<name>\S+) and add this as a new line at its end: (?P<line>.+)$", EditNote),
    (
        r"before what stands in the note (?P<name>\S+): (?P<text>.+) Then rename the note to (?P<new_name>.+)\.$",
        partial(ChangeNote, keep_old_text=True),
    ),
    (
        r"replace what stands in the note (?P<name>\S+) by this text: (?P<text>.+) "
        r"Then rename the note to (?P<new_name>.+)\.$",
        partial(ChangeNote, keep_old_text=False),
    ),
    (r"delete the file (?P<name>\S+) in the folder (?P<folder>.+?) of the phone", DeleteFile),
    (
        r"move the file (?P<name>\S+) from the folder (?P<source>.+) to the folder (?P<destination>.+?) of the phone",
        partial(MoveFile, app="Files"),
    ),
    (r"^Take one photo", TakePhoto),
    (r"^Take one video", TakeVideo),
    (r"^Record some sound .* and save it under the name \"(?P<name>.+)\"\.$", RecordSound),
    (r"^Record some sound .* and save it\.$", RecordSound),
    (r"where does the event \"(?P<title>.+)\" on .+ take place", AnswerAboutCalendar),
    (r"which event starts on (?P<date>.+) at (?P<time>\d\d:\d\d)\?", AnswerAboutCalendar),
    (r"what is my next event\?", AnswerAboutCalendar),
    (r"do I have any events on (?P<date>.+?)\?", partial(AnswerAboutCalendar, yes_or_no=True)),
    (r"delete the event \"(?P<title>.+)\" on", DeleteEvent),
)
_COMPILED_PATTERNS: Final = tuple((re.compile(pattern, re.DOTALL), make_scripts) for pattern, make_scripts in _PATTERNS)
