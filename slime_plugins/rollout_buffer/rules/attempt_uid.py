"""Pure: the uid of an attempt and of its trajectory."""

from __future__ import annotations

from dataclasses import dataclass

_PARTS = 5
_MAX_PART = 16
"""Digits of a part: every part that a client sends must fit into an integer column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptUid:
    """Identifies an attempt. Its ``str`` is unique in the store, and is used in trajectories and URLs."""

    job_key: int
    epoch: int
    position: int
    slot: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.job_key}.{self.epoch}.{self.position}.{self.slot}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> AttemptUid | None:
        """Parses a uid; None if the text is none."""
        parts = text.split(".")
        if len(parts) != _PARTS or not all(map(_is_number, parts)):
            return None
        job_key, epoch, position, slot, attempt = map(int, parts)
        return cls(job_key=job_key, epoch=epoch, position=position, slot=slot, attempt=attempt)


def _is_number(part: str) -> bool:
    """Returns True if ``str(int(part)) == part`` and the number is not negative."""
    return part.isascii() and part.isdigit() and len(part) <= _MAX_PART and (part == "0" or part[0] != "0")
