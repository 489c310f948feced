"""The processes of this machine, as ``/proc`` has them."""

from __future__ import annotations

from pathlib import Path


def process_table() -> list[tuple[int, int, str]]:
    """Every process that has not ended, as (id, parent, command line)."""
    table = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except (OSError, IndexError):
                continue
            if state != "Z":
                table.append((int(folder.name), int(parent), command))
    return table


def children_of(pid: int) -> dict[int, str]:
    """The processes that this one parents, by id, with their command lines."""
    return {child: command for child, parent, command in process_table() if parent == pid}


def descendants(pid: int) -> dict[int, str]:
    """The processes below this one, its children first, with their command lines."""
    table = process_table()
    found: dict[int, str] = {}
    waiting = [pid]
    for ancestor in waiting:
        below = {child: command for child, parent, command in table if parent == ancestor}
        found |= below
        waiting += below
    return found


def processes_with(text: str) -> dict[int, str]:
    """The processes whose environment or command line has a text, with their command lines."""
    found = {}
    for pid, _, command in process_table():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if text in command or text in environment:
            found[pid] = command
    return found


def is_alive(pid: int) -> bool:
    """Returns True if a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def start_ticks_of(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError):
        return -1


def write_program(path: Path, script: str) -> Path:
    """Writes what the shell runs under this path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
