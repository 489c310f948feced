"""qcow2 overlays of the emulator's disks: rewrites the path of their backing file in a clone.

An overlay stores the differences from a backing file, which it names by path. In a clone that path must be the clone's
own copy; otherwise the emulator would read the disk of the base. Only the header of a qcow2 file is parsed: magic (4
bytes), version (4), offset of the backing file's name (8), its length (4), all big-endian; the name lies in the first
cluster, after the other headers.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from slime_plugins.rollout_buffer.errors import DeviceError

_MAGIC = b"QFI\xfb"
_HEAD = struct.Struct(">4sIQI")
_MAX_NAME = 1023  # qcow2's limit, in bytes


def point_into_clone(base: Path, clone: Path) -> None:
    """Points every overlay of the clone to the clone's own files.

    Raises:
        DeviceError: a backing file does not exist or was not copied, or its name has an unknown form.
    """
    for path in sorted(clone.rglob("*")):
        name = backing_file(path) if path.is_file() else None
        if name is None:
            continue
        if ":" in name.partition("/")[0]:
            raise DeviceError(f"the disk {path.name} of {base} cannot be cloned: its backing file is {name[:80]!r}")
        # The name was written in the base. A relative name starts at the overlay's folder there.
        overlay_in_base = base / path.relative_to(clone)
        base_path = Path(os.path.normpath(overlay_in_base.parent / name))
        backing = clone / base_path.relative_to(base) if base_path.is_relative_to(base) else base_path
        if not backing.exists():
            raise DeviceError(
                f"the disk {path.name} of {base} cannot be cloned: its backing file {name} is not there, or belongs to "
                "a snapshot, which clones do not have; start the base once with -no-snapshot and stop it"
            )
        new_name = os.path.relpath(backing, path.parent) if backing.is_relative_to(clone) else str(backing)
        if Path(os.path.normpath(path.parent / name)) != backing:
            _write_name(path, new_name)


def backing_file(path: Path) -> str | None:
    """Returns the name of an overlay's backing file; None if the file is no overlay."""
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            return None
        _, _, offset, length = _HEAD.unpack(head)
        if not offset or not 0 < length <= _MAX_NAME:
            return None
        file.seek(offset)
        return file.read(length).decode("utf-8", "surrogateescape")


def _write_name(path: Path, name: str) -> None:
    """Writes a shorter or equally long name; the file's modification time is preserved."""
    encoded = os.fsencode(name)
    stat = path.stat()
    with path.open("r+b") as file:
        magic, version, offset, length = _HEAD.unpack(file.read(_HEAD.size))
        if len(encoded) > length:
            raise DeviceError(f"the disk {path.name} cannot be cloned: its header has no room for the name {name}")
        file.seek(offset)
        file.write(encoded.ljust(length, b"\0"))
        file.seek(0)
        file.write(_HEAD.pack(magic, version, offset, len(encoded)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
