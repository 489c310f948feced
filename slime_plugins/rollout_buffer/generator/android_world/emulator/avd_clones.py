"""A virtual device of its own for each worker: cloned once from a base that is not running."""

from __future__ import annotations

import fcntl
import logging
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError

__all__ = ["clone_avd"]

logger = logging.getLogger(__name__)

_MARK = "rollout_buffer_clone_of"
"""The file in a clone that says that it is ours: the name of its base, or nothing while it is being made."""
_COPY_S = 900.0
_TEXT_FILES = ("config.ini", "hardware-qemu.ini")


def clone_avd(avd_home: Path, base: str, clone: str) -> None:
    """Makes the clone unless it is there already, whole and of this base.

    The clone's files share blocks with the base where the file system can, and stay sparse.

    Raises:
        ConfigError: there is no such base, or what bears the clone's name is no clone.
        DeviceError: the base is running, or copying it failed.
    """
    source, target = avd_home / f"{base}.avd", avd_home / f"{clone}.avd"
    if not (source / "config.ini").is_file():
        raise ConfigError(f"there is no virtual device {base} in {avd_home}: create it, or set avd_name")
    with _alone(avd_home / f".{clone}.lock"):
        if _is_clone_of(target, base):
            return
        if target.exists() and not (target / _MARK).is_file():
            raise ConfigError(
                f"{target} is there already and is no clone: move it, or set another base_avd_name_pattern"
            )
        if any(source.glob("*.lock")):
            raise DeviceError(f"the base device {base} is running (it has a lock file): stop it before it is cloned")
        logger.info("cloning the virtual device %s as %s", base, clone)
        _copy(source, target)
        _rename_within(target, base, clone)
        _write_pointer(avd_home, base, clone)
        (target / _MARK).write_text(base)


def _is_clone_of(target: Path, base: str) -> bool:
    mark = target / _MARK
    return mark.is_file() and mark.read_text() == base


@contextmanager
def _alone(lock_path: Path) -> Iterator[None]:
    """Keeps other workers of this host from cloning the same device."""
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy(source: Path, target: Path) -> None:
    """Copies without what belongs to a running or suspended emulator. What half a copy left behind goes first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / _MARK).touch()
    paths = [str(path) for path in sorted(source.iterdir()) if not _of_a_run(path)]
    command = ["cp", "-a", "--reflink=auto", "--sparse=always", *paths, str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COPY_S)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = {"stderr": str(getattr(error, "stderr", ""))}
        raise DeviceError(f"{source} could not be cloned: {error}", said) from error


def _of_a_run(path: Path) -> bool:
    return path.suffix == ".lock" or path.name in ("snapshots", _MARK, "tmpAdbCmds")


def _rename_within(target: Path, base: str, clone: str) -> None:
    """The device's own files name it and its folder."""
    for name in _TEXT_FILES:
        path = target / name
        if path.is_file():
            path.write_text(
                path.read_text().replace(f"{base}.avd", f"{clone}.avd").replace(f"={base}\n", f"={clone}\n")
            )


def _write_pointer(avd_home: Path, base: str, clone: str) -> None:
    """The ``.ini`` beside the folder, by which the emulator finds it."""
    pointer = avd_home / f"{base}.ini"
    kept = [
        line
        for line in (pointer.read_text().splitlines() if pointer.is_file() else [])
        if not line.startswith(("path=", "path.rel="))
    ]
    lines = [*kept, f"path={avd_home / f'{clone}.avd'}", f"path.rel=avd/{clone}.avd"]
    (avd_home / f"{clone}.ini").write_text("\n".join(lines) + "\n")
