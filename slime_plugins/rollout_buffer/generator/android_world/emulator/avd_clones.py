"""Clones the base virtual device for each worker, and again after the base has changed.

An interrupted copy is resumed: complete files are not copied again. The time limit of a copy is proportional to its
size. The number of concurrent copies on a host is limited, because they make disks slow.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from slime_plugins.rollout_buffer.errors import ConfigError, DeviceError
from slime_plugins.rollout_buffer.generator.android_world.emulator.avd_ownership import AvdOwnership
from slime_plugins.rollout_buffer.generator.android_world.emulator.disk_overlays import point_into_clone
from slime_plugins.rollout_buffer.generator.android_world.emulator.watchdog import dies_with

logger = logging.getLogger(__name__)

CHECKOUT = Path(__file__).resolve().parents[5]
"""The checkout or installation that runs this code."""
_MARK = "rollout_buffer_clone_of"
"""The file that marks our clones: name and digest of the base, empty while the clone is incomplete."""
_PID_FILE = "hardware-qemu.ini.lock"
_PART = ".rollout_buffer_part"
"""Suffix of a file that is not copied completely yet."""
_TEXT_FILES = ("config.ini", "hardware-qemu.ini")
"""Files in which a clone's name and folder replace those of the base."""
_MIN_COPY_S = 60.0
_CLOCK_TOLERANCE_S = 60.0
_COPY_SLOT_POLL_S = 0.2
_CLONE_RANGE = 0x40049409  # FICLONE


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyLimits:
    """Maximum time to copy a gigabyte, and maximum number of concurrent copies on a host."""

    seconds_per_gb: float = 120.0
    at_once: int = 4


def clone_avd(
    avd_home: Path, base: str, clone: str, limits: CopyLimits | None = None, *, owner: AvdOwnership | None = None
) -> None:
    """Creates the clone, unless a complete clone of the present base exists.

    The clone's files are sparse and share blocks with the base if the file system supports it. Disk overlays point to
    the clone's own files. While the base runs, an existing clone is not updated. ``owner`` is the caller's ownership of
    the clone; without it this function owns the clone while files are copied.

    Raises:
        ConfigError: there is no such base, or the clone's path exists and is no clone.
        DeviceError: the base is running, the copy failed or timed out, a disk cannot be cloned, or another process
            uses the clone.
    """
    source, target = avd_home / f"{base}.avd", avd_home / f"{clone}.avd"
    if not (source / "config.ini").is_file():
        raise ConfigError(f"there is no virtual device {base} in {avd_home}: create it, or set avd_name")
    with (avd_home / f".{clone}.lock").open("w") as lock:  # excludes other workers of this host that use this clone
        fcntl.flock(lock, fcntl.LOCK_EX)
        pid = running_emulator(source)
        mark = f"{base}\n{_digest(source)}\n"
        is_clone = (target / _MARK).is_file()
        present_mark = (target / _MARK).read_text() if is_clone else ""
        if present_mark == mark or (pid is not None and present_mark.startswith(f"{base}\n")):
            return
        if target.exists() and not is_clone:
            raise ConfigError(f"{target} exists already and is no clone: move it, or set another base_avd_name_pattern")
        if pid is not None:
            raise DeviceError(f"the base device {base} is running (process {pid}): stop it before it is cloned")
        owned = AvdOwnership(avd_home, clone, CHECKOUT) if owner is None else nullcontext()
        with owned, _copy_slot(avd_home, (limits or CopyLimits()).at_once):
            logger.info("cloning the virtual device %s as %s", base, clone)
            _copy(source, target, (limits or CopyLimits()).seconds_per_gb)
            point_into_clone(source, target)
            _rename_within(target, base, clone)
            _write_pointer(avd_home, base, clone)
            (target / _MARK).write_text(mark)


def mark_as_incomplete(avd_home: Path, clone: str) -> None:
    """Lets the next ``clone_avd`` make the clone again."""
    (avd_home / f"{clone}.avd" / _MARK).write_text("")


def running_emulator(avd: Path) -> int | None:
    """Returns the process that runs the virtual device in this folder, or None.

    Lock files alone are no evidence: an emulator that was stopped leaves some behind. The process named in one of them
    must be alive and have started before the file was written: a restarted container gives the same id to another
    process.
    """
    try:
        pid = int((avd / _PID_FILE).read_bytes().strip(b"\0 \r\n\t"))
        os.kill(pid, 0)
        if _age_s(pid) + _CLOCK_TOLERANCE_S < time.time() - (avd / _PID_FILE).stat().st_mtime:
            return None
    except PermissionError:  # it is alive and belongs to another user
        return pid
    except (OSError, ValueError, OverflowError):  # no lock file, no process id in it, or no such process
        return None
    return pid if pid > 0 else None


def _age_s(pid: int) -> float:
    """Returns for how long the process has run."""
    since_boot = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot / os.sysconf("SC_CLK_TCK")


def allocated_bytes(avd: Path) -> int:
    """Returns the disk space of a copy of the virtual device in bytes; holes in sparse files take none."""
    return sum((avd / name).lstat().st_blocks * 512 for name in _files_of(avd))


def shares_blocks(folder: Path) -> bool:
    """Returns True if copies in this folder share blocks (copy-on-write). Tries it.

    Raises:
        OSError: the folder is not writable.
    """
    with tempfile.TemporaryFile(dir=folder) as original, tempfile.TemporaryFile(dir=folder) as copied:
        original.write(b"\0" * 4096)
        original.flush()
        try:
            fcntl.ioctl(copied.fileno(), _CLONE_RANGE, original.fileno())
        except OSError:
            return False
    return True


def _digest(avd: Path) -> str:
    """Returns a digest of names, sizes and times of all files of the virtual device."""
    states = [(str(name), (avd / name).lstat()) for name in _files_of(avd)]
    return sha256(repr([(name, state.st_size, state.st_mtime_ns) for name, state in states]).encode()).hexdigest()


@contextmanager
def _copy_slot(avd_home: Path, at_once: int) -> Iterator[None]:
    """Waits until fewer than ``at_once`` copies run. The wait ends, because copies have a time limit and a killed
    process loses its lock."""
    while True:
        for number in range(at_once):
            with (avd_home / f".rollout_buffer_copy_{number}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
        time.sleep(_COPY_SLOT_POLL_S)


def _files_of(avd: Path) -> list[Path]:
    """Returns the files to copy, as relative paths, without files of a running or suspended emulator."""
    return sorted(
        path.relative_to(avd)
        for path in avd.rglob("*")
        if (path.is_file() or path.is_symlink())
        and not any(_is_runtime_file(part) for part in path.relative_to(avd).parts)
    )


def _is_runtime_file(name: str) -> bool:
    return name.endswith((".lock", _PART)) or name in ("snapshots", _MARK, "tmpAdbCmds")


def _copy(source: Path, target: Path, seconds_per_gb: float) -> None:
    """Copies file by file. Complete files of an earlier copy are reused, other files are removed."""
    target.mkdir(exist_ok=True)
    (target / _MARK).write_text("")
    wanted = _files_of(source)
    _remove_all_but(target, set(wanted))
    deadline = time.monotonic() + _MIN_COPY_S + allocated_bytes(source) / 1e9 * seconds_per_gb
    for name in wanted:
        if not _is_copied(source / name, target / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            _copy_file(source / name, target / name, deadline)


def _is_copied(source: Path, target: Path) -> bool:
    """Returns True if a current copy of the file exists; text files are always copied, because clones change them."""
    if source.name in _TEXT_FILES or not target.exists():
        return False
    original, copied = source.lstat(), target.lstat()
    return (original.st_size, original.st_mtime_ns) == (copied.st_size, copied.st_mtime_ns)


def _remove_all_but(target: Path, wanted: set[Path]) -> None:
    """Removes what is not in ``wanted``, relative paths of files; the clone's mark stays."""
    for path in sorted(target.rglob("*"), reverse=True):
        name = path.relative_to(target)
        if path.is_dir() and not path.is_symlink():
            if not any(name in file.parents for file in wanted):
                shutil.rmtree(path, ignore_errors=True)
        elif name not in wanted and path.name != _MARK:
            path.unlink(missing_ok=True)


def _copy_file(source: Path, target: Path, deadline: float) -> None:
    """Copies one file, under another name until it is complete. ``cp`` is killed with this process."""
    part = target.with_name(f"{target.name}{_PART}")
    command = ["cp", "-a", "--reflink=auto", "--sparse=always", "--", str(source), str(part)]
    remaining_s = max(deadline - time.monotonic(), 0.0)
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=remaining_s, preexec_fn=dies_with(os.getpid())
        )
        part.replace(target)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"{source.parent} could not be cloned in time: it takes longer than clone_s_per_gb allows"
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        message = str(getattr(error, "stderr", None) or error).strip()
        raise DeviceError(f"{source.parent} could not be cloned: {message}") from error


def _rename_within(target: Path, base: str, clone: str) -> None:
    """Replaces the device's name and folder in its own files."""
    for name in _TEXT_FILES:
        path = target / name
        if path.is_file():
            path.write_text(
                path.read_text().replace(f"{base}.avd", f"{clone}.avd").replace(f"={base}\n", f"={clone}\n")
            )


def _write_pointer(avd_home: Path, base: str, clone: str) -> None:
    """Writes the ``.ini`` next to the folder, by which the emulator finds the device."""
    pointer = avd_home / f"{base}.ini"
    other_lines = [
        line
        for line in (pointer.read_text().splitlines() if pointer.is_file() else [])
        if not line.startswith(("path=", "path.rel="))
    ]
    lines = [*other_lines, f"path={avd_home / f'{clone}.avd'}", f"path.rel=avd/{clone}.avd"]
    (avd_home / f"{clone}.ini").write_text("\n".join(lines) + "\n")
