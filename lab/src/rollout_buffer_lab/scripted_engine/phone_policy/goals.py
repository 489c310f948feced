"""From the words of a task to the scripts that do it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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

Slots = Mapping[str, str]
Reading = Callable[[Slots], Sequence[TaskScript]]


def scripts_for(goal: str) -> Sequence[TaskScript] | None:
    """What has to be done, in order; None for a goal that the policy does not understand."""
    for pattern, reading in _READINGS:
        match = pattern.search(goal)
        if match:
            return reading(match.groupdict())
    return None


def _switches(slots: Slots) -> Sequence[TaskScript]:
    wanted = [(slots["first"], slots["first_state"] == "on")]
    if slots.get("second"):
        wanted.append((slots["second"], slots["second_state"] == "on"))
    return [Switches(wanted=tuple(wanted)), *([OpenApp(name=slots["app"])] if slots.get("app") else [])]


def _contact(slots: Slots) -> Sequence[TaskScript]:
    first, _, last = slots["name"].partition(" ")
    return [AddContact(first=first, last=last, phone=slots["number"])]


def _note_and_message(slots: Slots) -> Sequence[TaskScript]:
    return [
        CreateNote(name=slots["name"], text=slots["text"]),
        SendMessage(number=slots["number"], text=slots["text"]),
    ]


def _header(slots: Slots) -> Sequence[TaskScript]:
    return [ChangeNote(name=slots["name"], new_name=slots["new_name"], text=slots["text"], keep_old_text=True)]


def _replacement(slots: Slots) -> Sequence[TaskScript]:
    return [ChangeNote(name=slots["name"], new_name=slots["new_name"], text=slots["text"], keep_old_text=False)]


_PATTERNS: Final[tuple[tuple[str, Reading], ...]] = (
    (
        r"^Switch (?P<first>Wi-Fi|Bluetooth) (?P<first_state>on|off)"
        r"(?:, then switch (?P<second>Wi-Fi|Bluetooth) (?P<second_state>on|off))?"
        r"(?:, then open the app (?P<app>.+?))?\.$",
        _switches,
    ),
    (r"screen brightness to its maximum", lambda slots: [SetBrightness(to_maximum=True)]),
    (r"screen brightness to its minimum", lambda slots: [SetBrightness(to_maximum=False)]),
    (r"^Open the app (?P<app>.+?)\.(?: |$)", lambda slots: [OpenApp(name=slots["app"])]),
    (r"put this text on the clipboard: (?P<text>.+)$", lambda slots: [CopyText(text=slots["text"])]),
    (
        r"timer of (?P<hours>\d+) hours, (?P<minutes>\d+) minutes and (?P<seconds>\d+) seconds",
        lambda slots: [SetTimer(**{unit: int(number) for unit, number in slots.items()})],
    ),
    (r"^Start the stopwatch", lambda slots: [Stopwatch(button="Start", button_after="Pause")]),
    (r"^Pause the stopwatch", lambda slots: [Stopwatch(button="Pause", button_after="Reset")]),
    (r"^Add a contact named (?P<name>.+) with the phone number (?P<number>\S+)\.$", _contact),
    (
        r"form for a new contact .*first name (?P<first>.+), last name (?P<last>.+), phone (?P<phone>\S+), "
        r"phone label (?P<label>\w+)\. Do NOT save",
        lambda slots: [DraftContact(**slots)],
    ),
    (
        r"send a text message to (?P<number>\S+) that says: (?P<text>.+)$",
        lambda slots: [SendMessage(number=slots["number"], text=slots["text"])],
    ),
    (
        r"reply to the text message that arrived last with the message: (?P<text>.+)$",
        lambda slots: [Reply(text=slots["text"])],
    ),
    (
        r"reply to (?P<name>.+?) with the message: (?P<text>.+)$",
        lambda slots: [Reply(name=slots["name"], text=slots["text"])],
    ),
    (r"send the message that I last sent to (?P<name>.+) once more", lambda slots: [SendAgain(name=slots["name"])]),
    (
        r"send a message to (?P<number>\S+) with what is on the clipboard",
        lambda slots: [SendMessage(number=slots["number"])],
    ),
    (
        r"text the address that (?P<from_name>.+) just sent me to (?P<to_name>.+)\.$",
        lambda slots: [ForwardReceived(**slots)],
    ),
    (
        r"create a note named (?P<name>\S+) with this text: (?P<text>.+) "
        r"Then send the same text to (?P<number>\S+) with",
        _note_and_message,
    ),
    (
        r"create a note named (?P<name>\S+) with this text: (?P<text>.+)$",
        lambda slots: [CreateNote(name=slots["name"], text=slots["text"])],
    ),
    (
        r"create a note named (?P<name>\S+) and paste into it what is on the clipboard",
        lambda slots: [CreateNote(name=slots["name"])],
    ),
    (r"create a folder named (?P<name>.+)\.$", lambda slots: [CreateFolder(name=slots["name"])]),
    (r"delete the note named (?P<name>.+)\.$", lambda slots: [DeleteFile(name=slots["name"])]),
    (r"delete the note that was changed last", lambda slots: [DeleteNewestNote()]),
    (r"delete all notes", lambda slots: [DeleteAllNotes()]),
    (
        r"move the note (?P<name>\S+) from the folder (?P<source>.+) to the folder (?P<destination>.+)\.$",
        lambda slots: [MoveFile(app="Markor", **slots)],
    ),
    (
        r"open the note (?P<name>\S+) and add this as a new line at its end: (?P<line>.+)$",
        lambda slots: [EditNote(**slots)],
    ),
    (
        r"before what stands in the note (?P<name>\S+): (?P<text>.+) Then rename the note to (?P<new_name>.+)\.$",
        _header,
    ),
    (
        r"replace what stands in the note (?P<name>\S+) by this text: (?P<text>.+) "
        r"Then rename the note to (?P<new_name>.+)\.$",
        _replacement,
    ),
    (
        r"delete the file (?P<name>\S+) in the folder (?P<folder>.+?) of the phone",
        lambda slots: [DeleteFile(**slots)],
    ),
    (
        r"move the file (?P<name>\S+) from the folder (?P<source>.+) to the folder (?P<destination>.+?) of the phone",
        lambda slots: [MoveFile(app="Files", **slots)],
    ),
    (r"^Take one photo", lambda slots: [TakePhoto()]),
    (r"^Take one video", lambda slots: [TakeVideo()]),
    (
        r"^Record some sound .* and save it(?: under the name \"(?P<name>.+)\")?\.$",
        lambda slots: [RecordSound(name=slots["name"] or "")],
    ),
    (
        r"where does the event \"(?P<title>.+)\" on .+ take place",
        lambda slots: [AnswerAboutCalendar(title=slots["title"])],
    ),
    (
        r"which event starts on (?P<date>.+) at (?P<time>\d\d:\d\d)\?",
        lambda slots: [AnswerAboutCalendar(date=slots["date"], time=slots["time"])],
    ),
    (r"what is my next event\?", lambda slots: [AnswerAboutCalendar()]),
    (
        r"do I have any events on (?P<date>.+?)\?",
        lambda slots: [AnswerAboutCalendar(date=slots["date"], yes_or_no=True)],
    ),
    (r"delete the event \"(?P<title>.+)\" on", lambda slots: [DeleteEvent(title=slots["title"])]),
)
_READINGS: Final = tuple((re.compile(pattern, re.DOTALL), reading) for pattern, reading in _PATTERNS)
