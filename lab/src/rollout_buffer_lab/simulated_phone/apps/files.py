"""Files: the shared storage, folder by folder."""

from __future__ import annotations

import posixpath

from rollout_buffer_lab.simulated_phone.apps.file_browser import FolderPage
from rollout_buffer_lab.simulated_phone.apps.page import App, Page
from rollout_buffer_lab.simulated_phone.device_state.state import STORAGE
from rollout_buffer_lab.simulated_phone.layout import ScreenBuilder

_SHOWN_CHARACTERS = 4000


class FilesApp(App):
    """The file manager."""

    def first_page(self) -> Page:
        """Returns the root folder of the storage."""
        return _Storage(self, STORAGE, STORAGE, "Files")


class _Storage(FolderPage):
    def open_file(self, path: str) -> None:
        self.app.push(_Viewer(self.app, path))


class _Viewer(Page):
    """Shows a file: its text, or its size if it is no text."""

    def __init__(self, app: App, path: str) -> None:
        super().__init__(app)
        self._path = path

    def build(self, screen: ScreenBuilder) -> None:
        data = self.state.files.read(self._path)
        screen.title_bar(posixpath.basename(self._path), on_back=self.back)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = f"{len(data)} bytes that are no text"
        screen.paragraph(text[:_SHOWN_CHARACTERS])
