"""The data directory's disk of a crash test: a small ext4 in a file, where this machine lets it be mounted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path


class SmallDisk:
    """Mounts itself over a folder; can be filled to the last byte and emptied again. 0 megabytes are no disk."""

    def __init__(self, folder: Path, image: Path, *, megabytes: int) -> None:
        self.is_full = False
        self._folder = folder
        self._image = image
        folder.mkdir(parents=True, exist_ok=True)
        self.is_mounted = megabytes > 0 and shutil.which("mkfs.ext4") is not None and self._mount(megabytes)

    def _mount(self, megabytes: int) -> bool:
        self._image.touch()
        os.truncate(self._image, megabytes * 1024 * 1024)
        commands = (["mkfs.ext4", "-q", "-F", str(self._image)],
                    ["mount", "-o", "loop", str(self._image), str(self._folder)])  # fmt: skip
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                return False
        return True

    def fill(self) -> None:
        """Leaves no byte."""
        self.is_full = True
        found = os.statvfs(self._folder)
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, found.f_bfree * found.f_frsize)
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def empty(self) -> None:
        """Gives the room back."""
        self._ballast.unlink(missing_ok=True)
        self.is_full = False

    def close(self) -> None:
        """Unmounts it and keeps what lies on it in the folder beneath."""
        if not self.is_mounted:
            return
        self.empty()
        saved = self._image.with_name("data-of-disk")
        shutil.copytree(self._folder, saved, ignore=shutil.ignore_patterns("lost+found"))
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)
        self.is_mounted = False
        self._folder.rmdir()
        saved.rename(self._folder)
        self._image.unlink()

    @property
    def _ballast(self) -> Path:
        return self._folder / "ballast"
