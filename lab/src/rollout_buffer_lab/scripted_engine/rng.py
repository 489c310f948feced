"""Randomness that can be asked again: the same question gives the same answer, in every process."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionRng:
    """The rng of one session. Siblings of a group have sessions of their own, so they err in different places."""

    seed: int
    session: str

    def about(self, *subject: object) -> random.Random:
        """A generator that depends on nothing but the seed, the session and ``subject``."""
        text = "\x1f".join(map(str, (self.seed, self.session, *subject)))
        return random.Random(hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest())
