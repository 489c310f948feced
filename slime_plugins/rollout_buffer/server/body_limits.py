"""Size limits of request bodies, by route; checked before the body is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from slime_plugins.rollout_buffer.errors import PayloadTooLargeError

KB: Final = 1024
MB: Final = 1024 * KB


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The size limit of a route's bodies, and advice for larger ones."""

    route: str
    """Path as in the API documentation."""
    max_bytes: int | None
    """None is ``--max-body-bytes``, the maximum for all routes."""
    instead: str

    def error(self, max_body_bytes: int) -> PayloadTooLargeError:
        """Returns the error for a larger body."""
        limit = self.within(max_body_bytes)
        return PayloadTooLargeError(
            f"the body is larger than {limit} bytes, the maximum of {self.route}: {self.instead}"
        )

    def within(self, max_body_bytes: int) -> int:
        """Returns the smaller of this limit and ``--max-body-bytes``."""
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
OTHER_ROUTES: Final = BodyLimit("this route", 64 * KB, "send a smaller body")

_PATTERNS: Final = [(re.compile(re.sub(r"\{\w+\}", ".+", limit.route), re.DOTALL), limit) for limit in BODY_LIMITS]


def body_limit(path: str) -> BodyLimit:
    """Returns the limit of a path."""
    return next((limit for pattern, limit in _PATTERNS if pattern.fullmatch(path)), OTHER_ROUTES)
