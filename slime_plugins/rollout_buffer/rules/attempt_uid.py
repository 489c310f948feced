"""Pure: the uid of an attempt and of its trajectory."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A part has at most 16 digits: clients send uids, and each part must fit into an integer column.
_UID = re.compile(r"\.".join(["(0|[1-9][0-9]{0,15})"] * 5))


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
        """Parses a uid; returns None if the text is no uid."""
        found = _UID.fullmatch(text)
        if found is None:
            return None
        job_key, epoch, position, slot, attempt = map(int, found.groups())
        return cls(job_key=job_key, epoch=epoch, position=position, slot=slot, attempt=attempt)
