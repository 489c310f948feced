"""File systems of a test's own, which can be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """Gives a folder a small file system in memory for the time of the block; skips where nobody may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _unmount(folder)


@contextlib.contextmanager
def mounted_ext4(image: Path, folder: Path, *, megabytes: int = 0) -> Iterator[Path]:
    """Gives a folder an ext4 file system that lives in a file, made anew when a size is given; skips as ``mounted``."""
    folder.mkdir(parents=True, exist_ok=True)
    if megabytes:
        image.touch()
        os.truncate(image, megabytes * 1024 * 1024)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("a loop device with ext4 cannot be mounted: there is no mkfs.ext4")
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    _mount("-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        _unmount(folder)


def make_read_only(folder: Path) -> None:
    """Makes ext4 behave as after an error of the disk: from now on nothing can be written."""
    subprocess.run(["mount", "-o", "remount,abort", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not mount: {done.stderr.strip()}")


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave: int = 0) -> Path:
    """Writes a file until the disk of a folder holds no byte more than ``leave``; returns the file."""
    path = folder / "ballast"
    disk = os.statvfs(folder)
    room = max(0, disk.f_bavail * disk.f_frsize - leave)
    with path.open("ab") as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), path.stat().st_size, room)
    if leave == 0:
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
    return path
