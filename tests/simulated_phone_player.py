"""Plays tasks of the simulated phone by looking at screenshots; AndroidWorld's own are solved in the same way.

A solution sees the goal's parameters and the screen as ``read_screen`` reads it, and acts in the agent's 0..999
coordinates, so that what it can do an agent can do too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_buffer_lab.simulated_phone.screen_reader import read_screen
from rollout_buffer_lab.simulated_phone.screen_records import Field, ReadScreen, TextRole
from slime_plugins.rollout_buffer.devices.interface import Device, Observation
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton


class Player:
    """Reads the screen of a device and acts on it; counts its actions."""

    def __init__(self, device: Device[Action], first_look: Observation) -> None:
        self._device = device
        self.observation = first_look
        self.actions = 0

    @property
    def screen(self) -> ReadScreen:
        return read_screen(self.observation.screenshot.data)

    def act(self, kind: ActionKind, **details: Any) -> None:
        """Does one action, and expects the phone to find nothing wrong with it."""
        self.observation = self._device.step(Action(kind=kind, **details))
        self.actions += 1
        assert self.observation.note == ""

    def open(self, app: str) -> None:
        self.act(ActionKind.OPEN, text=app)

    def tap(self, center: tuple[int, int]) -> None:
        self.act(ActionKind.CLICK, point=self._pixels(center))

    def hold(self, center: tuple[int, int]) -> None:
        self.act(ActionKind.LONG_PRESS, point=self._pixels(center), duration_s=1.0)

    def type(self, text: str) -> None:
        self.act(ActionKind.TYPE, text=text)

    def back(self) -> None:
        self.act(ActionKind.SYSTEM_BUTTON, button=SystemButton.BACK)

    def answer(self, text: str) -> None:
        self.act(ActionKind.ANSWER, text=text)

    def row(self, text: str) -> tuple[int, int]:
        """Where the row with this text is; scrolls down until it shows."""
        for _ in range(8):
            line = self.screen.find_text(text, TextRole.PRIMARY)
            if line is not None:
                return line.center
            self.act(ActionKind.SWIPE, point=(540, 1900), end_point=(540, 700))
        raise AssertionError(f"no row {text!r} among {[line.text for line in self.screen.texts]}")

    def tap_row(self, text: str) -> None:
        self.tap(self.row(text))

    def tap_button(self, text: str) -> None:
        button = self.screen.find_button(text)
        assert button is not None, f"no button {text!r} among {[one.text for one in self.screen.buttons]}"
        self.tap(button.center)

    def tap_icon(self, name: str) -> None:
        icon = self.screen.find_icon(name)
        assert icon is not None, f"no icon {name!r} among {[one.name for one in self.screen.icons]}"
        self.tap(icon.center)

    def field(self, label: str) -> Field:
        field = self.screen.find_field(label)
        assert field is not None, f"no field {label!r} among {[one.label for one in self.screen.fields]}"
        return field

    def fill(self, label: str, text: str) -> None:
        """Types into the field with this label, focusing it if need be."""
        field = self.field(label)
        if not field.focused:
            self.tap(field.center)
        self.type(text)

    def paste_into(self, label: str) -> None:
        """Puts the clipboard into a field through its menu."""
        self.hold(self.field(label).center)
        self.tap_row("Paste")

    def _pixels(self, center: tuple[int, int]) -> tuple[int, int]:
        width, height = self.observation.screen_width, self.observation.screen_height
        return round(center[0] / 999 * (width - 1)), round(center[1] / 999 * (height - 1))


Solution = Callable[[Player, Any], None]


def _flip(chapter: str, switch: str) -> Solution:
    def solve(player: Player, params: Any) -> None:
        player.open("Settings")
        _toggle(player, chapter, switch)

    return solve


def _toggle(player: Player, chapter: str, label: str) -> None:
    player.tap_row(chapter)
    switch = player.screen.find_switch(label)
    assert switch is not None
    player.tap(switch.center)


def _slide_brightness(to_right: bool) -> Solution:
    def solve(player: Player, params: Any) -> None:
        player.open("Settings")
        player.tap_row("Display")
        slider = player.screen.find_slider("Brightness level")
        assert slider is not None
        player.tap(slider.right_end if to_right else slider.left_end)

    return solve


def _wifi_off_bluetooth_on(player: Player, params: Any) -> None:
    player.open("Settings")
    _toggle(player, "Network & internet", "Wi-Fi")
    player.tap_icon("back")
    _toggle(player, "Connected devices", "Bluetooth")


def _wifi_on_and_open(player: Player, params: Any) -> None:
    _flip("Network & internet", "Wi-Fi")(player, params)
    player.open(params["app_name"])


def _copy_to_clipboard(player: Player, params: Any) -> None:
    player.open("Clipper")
    player.fill("Text", params["clipboard_content"])
    player.tap_button("Copy")


def _enter_timer(player: Player, params: Any) -> None:
    player.open("Clock")
    player.tap_button("Timer")
    for digit in f"{params['hours']:02}{params['minutes']:02}{params['seconds']:02}".lstrip("0"):
        player.tap_button(digit)


def _start_stopwatch(player: Player, params: Any) -> None:
    look_at_stopwatch(player, params)
    player.tap_button("Start")


def look_at_stopwatch(player: Player, params: Any) -> None:
    player.open("Clock")
    player.tap_button("Stopwatch")


def _add_contact(player: Player, params: Any) -> None:
    first, last = params["name"].split()
    player.open("Contacts")
    player.tap_icon("add")
    player.fill("First name", first)
    player.fill("Last name", last)
    player.fill("Phone", params["number"])
    player.tap_button("Save")


def _draft_contact(player: Player, params: Any) -> None:
    player.open("Contacts")
    player.tap_icon("add")
    player.fill("First name", params["first"])
    player.fill("Last name", params["last"])
    player.fill("Phone", params["phone"])
    player.tap_row("Phone label")
    player.tap_row(params["phone_label"])


def _send_new(player: Player, params: Any) -> None:
    player.open("Simple SMS Messenger")
    player.tap_icon("add")
    player.fill("Phone number", params["number"])
    player.fill("Message", params["message"])
    player.tap_button("Send")


def _send_pasted(player: Player, params: Any) -> None:
    player.open("Simple SMS Messenger")
    player.tap_icon("add")
    player.fill("Phone number", params["number"])
    player.paste_into("Message")
    player.tap_button("Send")


def _reply_to(player: Player, who: str, message: str) -> None:
    player.tap_row(who)
    player.fill("Message", message)
    player.tap_button("Send")


def _reply(player: Player, params: Any) -> None:
    player.open("Simple SMS Messenger")
    _reply_to(player, params["number"], params["message"])


def _reply_to_latest(player: Player, params: Any) -> None:
    player.open("Simple SMS Messenger")
    latest = next(line for line in player.screen.texts if line.role is TextRole.PRIMARY)
    _reply_to(player, latest.text, params["message"])


def new_note(player: Player, name: str) -> None:
    player.tap_icon("add")
    player.fill("Name", name)
    player.tap_button("OK")


def _create_note(player: Player, params: Any) -> None:
    player.open("Markor")
    new_note(player, params["file_name"])
    player.fill("Note", params["text"])
    player.tap_button("Save")


def _create_note_from_clipboard(player: Player, params: Any) -> None:
    player.open("Markor")
    new_note(player, params["file_name"])
    player.paste_into("Note")
    player.tap_button("Save")


def _create_folder(player: Player, params: Any) -> None:
    player.open("Markor")
    player.tap_icon("add")
    player.fill("Name", params["folder_name"])
    player.tap_button("Folder")


def delete_row(player: Player, name: str) -> None:
    player.hold(player.row(name))
    player.tap_icon("delete")
    player.tap_button("Delete")


def _delete_note(player: Player, params: Any) -> None:
    player.open("Markor")
    delete_row(player, params["file_name"])


def _delete_all_notes(player: Player, params: Any) -> None:
    player.open("Markor")
    names = [line for line in player.screen.texts if line.role is TextRole.PRIMARY]
    player.hold(names[0].center)
    for line in names[1:]:
        player.tap(line.center)
    player.tap_icon("delete")
    player.tap_button("Delete")


def _move_within(app: str) -> Solution:
    def solve(player: Player, params: Any) -> None:
        player.open(app)
        player.tap_row(params["source_folder"])
        player.hold(player.row(params["file_name"]))
        player.tap_icon("move")
        player.tap_row(params["destination_folder"])
        player.tap_button("Move here")

    return solve


def rename(player: Player, old: str, new: str) -> None:
    player.hold(player.row(old))
    player.tap_icon("rename")
    player.fill("Name", new)
    player.tap_button("OK")


def _add_footer(player: Player, params: Any) -> None:
    player.open("Markor")
    player.tap_row(params["file_name"])
    player.fill("Note", "\n" + params["footer"])
    player.tap_button("Save")


def write_over(player: Player, text: str) -> None:
    player.tap_icon("select_all")
    player.type(text)
    player.tap_icon("back")


def _change_content(player: Player, params: Any) -> None:
    player.open("Markor")
    player.tap_row(params["original_name"])
    write_over(player, params["updated_content"])
    rename(player, params["original_name"], params["new_name"])


def _delete_file(player: Player, params: Any) -> None:
    player.open("Files")
    player.tap_row(params["subfolder"])
    delete_row(player, params["file_name"])


def _take_photo(player: Player, params: Any) -> None:
    player.open("Camera")
    player.tap_icon("shutter")


def _take_video(player: Player, params: Any) -> None:
    player.open("Camera")
    player.tap_button("Video")
    player.tap_icon("record")
    player.tap_icon("stop")


def _record(player: Player, params: Any) -> None:
    player.open("Audio Recorder")
    player.tap_icon("record")
    player.tap_icon("stop")
    if params.get("file_name"):
        player.fill("Name", params["file_name"])
    player.tap_button("Save")


SOLUTIONS: dict[str, Solution] = {
    "SystemWifiTurnOn": _flip("Network & internet", "Wi-Fi"),
    "SystemWifiTurnOff": _flip("Network & internet", "Wi-Fi"),
    "SystemBluetoothTurnOn": _flip("Connected devices", "Bluetooth"),
    "SystemBluetoothTurnOff": _flip("Connected devices", "Bluetooth"),
    "SystemBrightnessMax": _slide_brightness(to_right=True),
    "SystemBrightnessMin": _slide_brightness(to_right=False),
    "TurnOffWifiAndTurnOnBluetooth": _wifi_off_bluetooth_on,
    "TurnOnWifiAndOpenApp": _wifi_on_and_open,
    "SystemCopyToClipboard": _copy_to_clipboard,
    "ClockTimerEntry": _enter_timer,
    "ClockStopWatchRunning": _start_stopwatch,
    "ContactsAddContact": _add_contact,
    "ContactsNewContactDraft": _draft_contact,
    "SimpleSmsSend": _send_new,
    "SimpleSmsReply": _reply,
    "SimpleSmsReplyMostRecent": _reply_to_latest,
    "SimpleSmsSendClipboardContent": _send_pasted,
    "MarkorCreateNote": _create_note,
    "MarkorCreateNoteFromClipboard": _create_note_from_clipboard,
    "MarkorCreateFolder": _create_folder,
    "MarkorDeleteNote": _delete_note,
    "MarkorDeleteAllNotes": _delete_all_notes,
    "MarkorMoveNote": _move_within("Markor"),
    "MarkorEditNote": _add_footer,
    "MarkorChangeNoteContent": _change_content,
    "FilesDeleteFile": _delete_file,
    "FilesMoveFile": _move_within("Files"),
    "CameraTakePhoto": _take_photo,
    "CameraTakeVideo": _take_video,
    "AudioRecorderRecordAudio": _record,
    "AudioRecorderRecordAudioWithFileName": _record,
}
