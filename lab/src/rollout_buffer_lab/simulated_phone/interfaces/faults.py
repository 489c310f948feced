"""Faults that tests give to a simulated emulator."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Faults of one emulator; by default none.

    ``exit_at_start``: the process ends before it serves anything. ``never_boots``: it serves, and reports that it has
    not booted. ``boot_s``: seconds until it has. ``hangs``: adb commands to the device do not return. ``offline``: they
    fail. ``dead_forwarder``: the accessibility forwarder sends nothing any more. ``slow_trees_s``: seconds between the
    moment it looks at the screen and the moment it sends what it saw, one tree after the other. ``slow_screen_s``:
    seconds between a touch and its effect. ``crash_after_inputs``: the process ends at the touch, text or key with
    this number. ``half_screens``: ``screencap`` returns the first half of its image. ``never_idle``: ``uiautomator``
    refuses, as while the screen moves.
    """

    exit_at_start: bool = False
    never_boots: bool = False
    boot_s: float = 0.0
    hangs: bool = False
    offline: bool = False
    dead_forwarder: bool = False
    slow_trees_s: float = 0.0
    slow_screen_s: float = 0.0
    crash_after_inputs: int | None = None
    half_screens: bool = False
    never_idle: bool = False

    def to_json(self) -> str:
        """Returns the faults as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Faults:
        """Returns the faults from JSON; unknown names are an error (``TypeError``)."""
        return cls(**json.loads(text))
