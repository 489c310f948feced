"""Markor: notes as files in Documents/Markor, and their editor."""

from __future__ import annotations

import posixpath

from rollout_buffer_lab.simulated_phone.apps.file_browser import FolderPage
from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.device_state.filesystem import FileError, valid_name
from rollout_buffer_lab.simulated_phone.device_state.state import MARKOR_FOLDER
from rollout_buffer_lab.simulated_phone.fields import TextField
from rollout_buffer_lab.simulated_phone.layout import BarIcon, ScreenBuilder


class MarkorApp(App):
    """Notes."""

    def first_page(self) -> Page:
        """Returns the folder of notes."""
        return _Notes(self, MARKOR_FOLDER, MARKOR_FOLDER, "Markor")


class _Notes(FolderPage):
    def build(self, screen: ScreenBuilder) -> None:
        super().build(screen)
        screen.floating_icon("add", self._add)

    def open_file(self, path: str) -> None:
        self.app.push(_Editor(self.app, path))

    def _add(self) -> None:
        self.app.push(_NewDialog(self.app, self.folder))


class _NewDialog(Page):
    """Asks for the name of a new note or folder. A note without an extension becomes a ``.md`` file."""

    def __init__(self, app: App, folder: str) -> None:
        super().__init__(app)
        self._folder = folder
        self.focused = "name"

    def build(self, screen: ScreenBuilder) -> None:
        screen.dialog("New file or folder")
        screen.field("name", "Name")
        screen.button_row([("Folder", self._make_folder), ("Cancel", self.back), ("OK", self._make_note)])

    def _make_folder(self) -> None:
        name = self.field_named("name").text.strip()
        path = posixpath.join(self._folder, name)
        if valid_name(name) and not self.state.files.exists(path):
            self.state.files.make_folders(path)
            self.app.pop()

    def _make_note(self) -> None:
        name = self.field_named("name").text.strip()
        if "." not in name:
            name += ".md" if name else ""
        path = posixpath.join(self._folder, name)
        if not valid_name(name) or self.state.files.is_folder(path):
            return
        if not self.state.files.exists(path):
            self.state.files.write(path, b"")
        self.app.replace(_Editor(self.app, path, focused=True))


class _Editor(Page):
    """Edits one note, and saves it by its button, when it is left, and when the app goes to the background."""

    def __init__(self, app: App, path: str, *, focused: bool = False) -> None:
        super().__init__(app)
        self._path = path
        self._saved = self.state.files.read_text(path)
        self.fields["note"] = TextField(text=self._saved, multi_line=True)
        self.focused = "note" if focused else None

    def build(self, screen: ScreenBuilder) -> None:
        icons = [BarIcon(icon="select_all", on_tap=self._select_all)]
        screen.title_bar(posixpath.basename(self._path), on_back=self.back, icons=icons, buttons=[("Save", self._save)])
        screen.field("note", "Note", fill_page=True)

    def leave(self) -> None:
        """Saves the note."""
        super().leave()
        self._save()

    def _select_all(self) -> None:
        self.focus("note")
        field = self.field_named("note")
        field.selected = bool(field.text)

    def _save(self) -> None:
        text = self.field_named("note").text
        if text != self._saved:
            try:
                self.state.files.write(self._path, text.encode("utf-8"))
            except FileError:
                return
            self._saved = text
