"""How large the body of a request may be, by its route: one table, looked at before a byte of the body is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from slime_plugins.rollout_buffer.errors import PayloadTooLargeError

KB: Final = 1024
MB: Final = 1024 * KB


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """What the body of a route may be, and what to do with more."""

    route: str
    """As the documentation of the API has it."""
    max_bytes: int | None
    """None is ``--max-body-bytes``, which no route exceeds."""
    instead: str

    def error(self, max_body_bytes: int) -> PayloadTooLargeError:
        """Returns what is answered to more."""
        limit = self.within(max_body_bytes)
        return PayloadTooLargeError(f"the body is larger than {limit} bytes, which {self.route} takes: {self.instead}")

    def within(self, max_body_bytes: int) -> int:
        """Returns the limit under ``--max-body-bytes``."""
        return max_body_bytes if self.max_bytes is None else min(self.max_bytes, max_body_bytes)


BODY_LIMITS: Final = (
    BodyLimit("/buffer/write", None, "write fewer items at once, or raise --max-body-bytes"),
    BodyLimit("/jobs/{job_id}/buffer/write", None, "write fewer items at once, or raise --max-body-bytes"),
    BodyLimit("/start_rollout", None, "name an input_file, start several jobs on slices, or raise --max-body-bytes"),
    BodyLimit("/images/{sha256}", None, "send a smaller image, or raise --max-body-bytes"),
    BodyLimit("/jobs/{job_id}/trainer_rows", 16 * MB, "report fewer rows at once"),
    BodyLimit("/get_rollout_data", 4 * MB, "acknowledge fewer deliveries at once"),
    BodyLimit("/ack", 4 * MB, "acknowledge fewer deliveries at once"),
)
OTHER_ROUTES: Final = BodyLimit("this route", 64 * KB, "it has no use for so much")

_PATTERNS: Final = [(re.compile(re.sub(r"\{\w+\}", ".+", limit.route), re.DOTALL), limit) for limit in BODY_LIMITS]


def body_limit(path: str) -> BodyLimit:
    """Returns the limit of a path."""
    return next((limit for pattern, limit in _PATTERNS if pattern.fullmatch(path)), OTHER_ROUTES)
