"""Planned faults, in files next to the phones' sockets: for a boot, or for when a word is typed.

``faults.json`` has the faults of every emulator that starts. ``next_boots.jsonl`` has one line of faults for each of
the next starts; a start takes the first line instead of ``faults.json``, and removes it. ``triggers.json`` maps a word
to faults that begin when exactly this word is typed on a phone, so that an episode can cause a fault in its middle, on
whatever phone it is played.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_buffer_lab.simulated_phone.interfaces.faults import Faults


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultTrigger:
    """What a typed word causes: faults, for how many seconds (0: for good), and faults of any phones' next boots."""

    faults: Faults
    for_s: float = 0.0
    next_boots: Sequence[Faults] = ()


class FaultPlan:
    """The plan in one folder; read again each time, as it may change while emulators run."""

    def __init__(self, folder: Path) -> None:
        self._always = folder / "faults.json"
        self._next = folder / "next_boots.jsonl"
        self._triggers = folder / "triggers.json"

    def set_boot_faults(self, faults: Faults) -> None:
        """Sets the faults of every emulator started from now on."""
        self._always.write_text(faults.to_json())

    def add_next_boots(self, faults: Sequence[Faults]) -> None:
        """Sets the faults of the next starts, one each."""
        with self._next.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.writelines(each.to_json() + "\n" for each in faults)

    def set_triggers(self, triggers: Mapping[str, FaultTrigger]) -> None:
        """Sets the faults that typed words trigger."""
        self._triggers.write_text(json.dumps({word: asdict(trigger) for word, trigger in triggers.items()}))

    def of_this_boot(self) -> Faults:
        """Returns the faults of an emulator that starts now."""
        line = self._take_line()
        if line:
            return Faults.from_json(line)
        return Faults.from_json(self._always.read_text()) if self._always.exists() else Faults()

    def trigger(self, word: str) -> FaultTrigger | None:
        """Returns what typing the word triggers; None for other words."""
        if not self._triggers.exists():
            return None
        entry: dict[str, Any] | None = json.loads(self._triggers.read_text()).get(word)
        if entry is None:
            return None
        return FaultTrigger(
            faults=Faults(**entry["faults"]),
            for_s=entry["for_s"],
            next_boots=tuple(Faults(**values) for values in entry["next_boots"]),
        )

    def _take_line(self) -> str:
        if not self._next.exists():
            return ""
        with self._next.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            first, *rest = [*file.read().splitlines(), ""]
            file.seek(0)
            file.truncate()
            file.writelines(line + "\n" for line in rest if line)
        return first
