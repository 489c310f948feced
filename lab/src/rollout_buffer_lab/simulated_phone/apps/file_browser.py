"""Folders and files in Markor and Files: a long press selects, taps select more, icons act on the selection."""

from __future__ import annotations

import posixpath
from functools import partial

from rollout_buffer_lab.simulated_phone.apps.dates import date_and_time
from rollout_buffer_lab.simulated_phone.apps.page import App, ConfirmDialog, Page
from rollout_buffer_lab.simulated_phone.device_state.filesystem import FileError, valid_name
from rollout_buffer_lab.simulated_phone.layout import BarIcon, ScreenBuilder


class FolderPage(Page):
    """One folder. A subclass says what a tap on a file does, in ``open_file``."""

    def __init__(self, app: App, folder: str, root: str, root_title: str) -> None:
        super().__init__(app)
        self.folder = folder
        self._root = root
        self._root_title = root_title
        self._selected: set[str] = set()

    @property
    def title(self) -> str:
        """The folder's name; for the root folder ``root_title``."""
        return self._root_title if self.folder == self._root else posixpath.basename(self.folder)

    def open_file(self, path: str) -> None:
        """Handles a tap on a file."""

    def build(self, screen: ScreenBuilder) -> None:
        """Adds the title bar, for the folder or for the selection, then folders, then files."""
        self._selected = {path for path in self._selected if self.state.files.exists(path)}
        if self._selected:
            self._selection_bar(screen)
        else:
            screen.title_bar(self.title, on_back=None if self.folder == self._root else self.back)
        paths = self._paths()
        for path in paths:
            screen.row(
                posixpath.basename(path),
                secondary=date_and_time(self.state.files.modified_ms(path)),
                icon="folder" if self.state.files.is_folder(path) else "file",
                on_tap=partial(self._tapped, path),
                on_long_press=partial(self._toggle, path),
                selected=path in self._selected,
            )
        if not paths:
            screen.section("Empty folder")

    def back(self) -> None:
        """Clears the selection if there is one, else leaves the folder."""
        if self._selected:
            self._selected.clear()
        else:
            self.app.pop()

    def _paths(self) -> list[str]:
        files = self.state.files
        paths = [posixpath.join(self.folder, name) for name in files.names(self.folder)]
        return sorted(paths, key=lambda path: (not files.is_folder(path), path.lower()))

    def _selection_bar(self, screen: ScreenBuilder) -> None:
        icons = [
            BarIcon(icon="select_all", on_tap=self._select_all),
            BarIcon(icon="move", on_tap=self._open_move),
            BarIcon(icon="delete", on_tap=self._ask_delete),
        ]
        if len(self._selected) == 1:
            icons.insert(1, BarIcon(icon="rename", on_tap=self._ask_name))
        screen.title_bar(f"{len(self._selected)} selected", on_back=self.back, icons=icons)

    def _tapped(self, path: str) -> None:
        if self._selected:
            self._toggle(path)
        elif self.state.files.is_folder(path):
            self.app.push(self.in_folder(path))
        else:
            self.open_file(path)

    def in_folder(self, folder: str) -> FolderPage:
        """Returns the page of a folder below this one."""
        return type(self)(self.app, folder, self._root, self._root_title)

    def _toggle(self, path: str) -> None:
        self._selected ^= {path}

    def _select_all(self) -> None:
        self._selected = set(self._paths())

    def _ask_delete(self) -> None:
        names = ", ".join(sorted(posixpath.basename(path) for path in self._selected))
        self.app.push(ConfirmDialog(self.app, "Delete", f"Delete {names}?", "Delete", self._delete))

    def _delete(self) -> None:
        for path in self._selected:
            self.state.files.remove(path)
        self._selected.clear()

    def _ask_name(self) -> None:
        path = next(iter(self._selected))
        self.app.push(NameDialog(self.app, "Rename", posixpath.basename(path), partial(self._rename, path)))

    def _rename(self, path: str, name: str) -> None:
        move_quietly(self.app, path, posixpath.join(posixpath.dirname(path), name))
        self._selected.clear()

    def _open_move(self) -> None:
        self.app.push(_MoveTarget(self.app, self._root, self._root, self._root_title, tuple(self._selected)))
        self._selected = set()


class _MoveTarget(Page):
    """Asks for the folder that the selected files move to."""

    def __init__(self, app: App, folder: str, root: str, root_title: str, paths: tuple[str, ...]) -> None:
        super().__init__(app)
        self._folder, self._root, self._root_title, self._paths = folder, root, root_title, paths

    def build(self, screen: ScreenBuilder) -> None:
        here = self._root_title if self._folder == self._root else posixpath.basename(self._folder)
        screen.title_bar("Move to", on_back=self.back, buttons=[("Move here", self._move)])
        screen.section(here)
        for name in self.state.files.names(self._folder):
            path = posixpath.join(self._folder, name)
            if self.state.files.is_folder(path) and path not in self._paths:
                open_folder = partial(self.show, _MoveTarget, path, self._root, self._root_title, self._paths)
                screen.row(name, icon="folder", on_tap=open_folder)

    def _move(self) -> None:
        for path in self._paths:
            move_quietly(self.app, path, posixpath.join(self._folder, posixpath.basename(path)))
        while isinstance(self.app.page, _MoveTarget):
            self.app.pop()


class NameDialog(Page):
    """Asks for a name; its button does nothing while the name is not valid for a file."""

    def __init__(self, app: App, title: str, name: str, on_name: partial[None], button: str = "OK") -> None:
        super().__init__(app)
        self._title, self._on_name, self._button = title, on_name, button
        self.field_named("name").text = name
        self.field_named("name").selected = bool(name)
        self.focused = "name"

    def build(self, screen: ScreenBuilder) -> None:
        screen.dialog(self._title)
        screen.field("name", "Name")
        screen.button_row([("Cancel", self.back), (self._button, self._accept)])

    def _accept(self) -> None:
        name = self.field_named("name").text.strip()
        if valid_name(name):
            self.app.pop()
            self._on_name(name)


def move_quietly(app: App, source: str, target: str) -> None:
    """Moves a file if that is possible, and shows no error if not."""
    try:
        app.state.files.move(source, target)
    except FileError:
        return
