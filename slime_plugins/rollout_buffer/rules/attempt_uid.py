"""Pure: the name of an attempt and of the trajectory that it may bring, written and read in one place."""

from __future__ import annotations

from dataclasses import astuple, dataclass

_PARTS = 5
_MAX_PART = 16
"""So that every part fits into a column of the store, whatever a client sends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptUid:
    """Which attempt it is. ``str`` of it is unique in the whole store, and stands in trajectories and addresses."""

    job_key: int
    epoch: int
    position: int
    slot: int
    attempt: int

    def __str__(self) -> str:
        return ".".join(str(part) for part in astuple(self))

    @classmethod
    def parse(cls, text: str) -> AttemptUid | None:
        """Returns the attempt of that name; None when it names none."""
        parts = text.split(".")
        if len(parts) != _PARTS or not all(map(_is_number, parts)):
            return None
        job_key, epoch, position, slot, attempt = map(int, parts)
        return cls(job_key=job_key, epoch=epoch, position=position, slot=slot, attempt=attempt)


def _is_number(part: str) -> bool:
    """Returns True if a part is spelled as ``str`` spells a number that is not negative."""
    return part.isascii() and part.isdigit() and len(part) <= _MAX_PART and (part == "0" or part[0] != "0")
