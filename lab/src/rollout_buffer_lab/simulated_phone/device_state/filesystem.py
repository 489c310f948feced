"""The device's files in memory: folders, files with modification times, and mounted databases.

Removing a database only unmounts it, because an app keeps the file that it has open. A file that is written to the same
path later replaces the content of the app's database.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from rollout_buffer_lab.simulated_phone.device_state.clock import DeviceClock

_MAX_NAME_BYTES = 255
_LINKS = ("/sdcard", "/data/media/0")  # other names of /storage/emulated/0


class FileError(OSError):
    """An operation fails as it would in a shell on the device: no such file, file exists, is a directory."""


class ByteStore(Protocol):
    """A file whose bytes are stored elsewhere: a database."""

    def read(self) -> bytes:
        """Returns the file as it would be pulled."""
        ...

    def write(self, data: bytes) -> None:
        """Replaces the file by the bytes that were pushed."""
        ...


@dataclass(kw_only=True, slots=True)
class _File:
    data: bytes
    modified_ms: int


def valid_name(name: str) -> bool:
    """Returns True if a file or folder may have this name."""
    named = bool(name.strip()) and name not in (".", "..")
    return named and not set(name) & {"/", "\0", "\n"} and len(name.encode("utf-8", "replace")) <= _MAX_NAME_BYTES


class FileSystem:
    """Files and folders of one device. Paths are absolute; ``/sdcard`` is a link to ``/storage/emulated/0``."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._files: dict[str, _File] = {}
        self._folders: dict[str, int] = {"/": clock.now_ms}
        self._mounts: dict[str, ByteStore] = {}
        self._unmounted: dict[str, ByteStore] = {}

    def mount(self, path: str, store: ByteStore) -> None:
        """Makes the database a file at the path."""
        path = _normal(path)
        self.make_folders(posixpath.dirname(path))
        self._mounts[path] = store

    def make_folders(self, path: str) -> None:
        """Makes the folder and those above it; those that exist stay.

        Raises:
            FileError: a file is in the way.
        """
        path = _normal(path)
        if path in self._files or path in self._mounts:
            raise FileError(f"{path}: File exists")
        if path in self._folders:
            return
        self.make_folders(posixpath.dirname(path))
        self._folders[path] = self._clock.now_ms

    def write(self, path: str, data: bytes, modified_ms: int | None = None) -> None:
        """Writes the whole file, making its folder if need be.

        Raises:
            FileError: there is a folder of this name.
        """
        path = _normal(path)
        if path in self._unmounted:
            self.mount(path, self._unmounted.pop(path))
        if path in self._mounts:
            self._mounts[path].write(data)
            return
        if path in self._folders:
            raise FileError(f"{path}: Is a directory")
        self.make_folders(posixpath.dirname(path))
        self._files[path] = _File(data=data, modified_ms=self._clock.now_ms if modified_ms is None else modified_ms)

    def read(self, path: str) -> bytes:
        """Returns the file's bytes.

        Raises:
            FileError: there is no such file.
        """
        path = _normal(path)
        if path in self._mounts:
            return self._mounts[path].read()
        if path not in self._files:
            raise FileError(f"{path}: No such file or directory")
        return self._files[path].data

    def read_text(self, path: str) -> str:
        """Returns the file as UTF-8, with replacement characters for other bytes."""
        return self.read(path).decode("utf-8", "replace")

    def exists(self, path: str) -> bool:
        """Returns True for a file or a folder."""
        path = _normal(path)
        return path in self._files or path in self._folders or path in self._mounts

    def is_folder(self, path: str) -> bool:
        """Returns True for a folder."""
        return _normal(path) in self._folders

    def modified_ms(self, path: str) -> int:
        """Returns the time of the last write in milliseconds since 1970; 0 for a database or a missing path."""
        path = _normal(path)
        if path in self._files:
            return self._files[path].modified_ms
        return self._folders.get(path, 0)

    def names(self, folder: str) -> list[str]:
        """Returns the names in the folder, sorted; an empty list if there is no such folder."""
        folder = _normal(folder)
        return sorted({posixpath.basename(path) for path in self._paths() if _parent_is(path, folder)})

    def files_under(self, folder: str) -> list[str]:
        """Returns the paths of all files in the folder and its folders, sorted."""
        prefix = _normal(folder).rstrip("/") + "/"
        return sorted(path for path in (*self._files, *self._mounts) if path.startswith(prefix))

    def remove(self, path: str) -> None:
        """Removes a file, or a folder with all in it; a missing path is no error."""
        path = _normal(path)
        prefix = path.rstrip("/") + "/"
        for name in [name for name in self._mounts if name == path or name.startswith(prefix)]:
            self._unmounted[name] = self._mounts[name]
        for table in (self._files, self._folders, self._mounts):
            for name in [name for name in table if name == path or name.startswith(prefix)]:
                if name != "/":
                    del table[name]

    def move(self, source: str, target: str) -> None:
        """Moves a file, or a folder with all in it, without its databases; modification times stay.

        Raises:
            FileError: there is no such source, or the target exists or is inside the source.
        """
        source, target = _normal(source), _normal(target)
        if not self.exists(source):
            raise FileError(f"{source}: No such file or directory")
        if self.exists(target) or target.startswith(source.rstrip("/") + "/"):
            raise FileError(f"cannot move {source} to {target}")
        self.make_folders(posixpath.dirname(target))
        for path in [path for path in self._files if path == source or path.startswith(source + "/")]:
            self._files[target + path[len(source) :]] = self._files.pop(path)
        for path in [path for path in self._folders if path == source or path.startswith(source + "/")]:
            self._folders[target + path[len(source) :]] = self._folders.pop(path)

    def _paths(self) -> Iterator[str]:
        yield from self._files
        yield from self._folders
        yield from self._mounts


def _parent_is(path: str, folder: str) -> bool:
    return path != "/" and posixpath.dirname(path) == folder


def _normal(path: str) -> str:
    normal = posixpath.normpath("/" + path.lstrip("/"))
    for link in _LINKS:
        if normal == link or normal.startswith(link + "/"):
            return "/storage/emulated/0" + normal[len(link) :]
    return normal
