"""Random numbers that can be drawn again: the same subject gives the same numbers, in every process."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionRng:
    """The random numbers of one session. Each member of a group has its own session, and makes its own mistakes."""

    seed: int
    session: str

    def about(self, *subject: object) -> random.Random:
        """Returns a generator that depends on nothing but the seed, the session and ``subject``."""
        text = "\x1f".join(map(str, (self.seed, self.session, *subject)))
        return random.Random(hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest())
