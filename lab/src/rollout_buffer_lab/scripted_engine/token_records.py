"""Made-up token records of the scripted engine: routed experts and top_p ids.

The experts of a token are a function of its id, its position and the weight version, so that a test notices records
that were moved by one token, or that another forward pass made.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

LAYERS: Final = 2
TOP_K: Final = 2
EXPERTS: Final = 8


def experts_of_passes(ids: Sequence[int], weight_version: str) -> list[list[int]]:
    """Returns, for each token but the last, the experts of the forward pass that read it, layer by layer."""
    return [_experts(token_id, position, weight_version) for position, token_id in enumerate(ids[:-1])]


def kept_ids(output_ids: Sequence[int]) -> list[list[int]]:
    """Returns for each sampled token the ids that ``top_p`` kept: the token, and up to two others."""
    return [list(range(token_id, token_id + 1 + token_id % 3)) for token_id in output_ids]


def _experts(token_id: int, position: int, weight_version: str) -> list[int]:
    """Returns two different experts of each layer."""
    experts = []
    for layer in range(LAYERS):
        draw = zlib.crc32(f"{token_id}/{position}/{weight_version}/{layer}".encode())
        first = draw % EXPERTS
        experts += [first, (first + 1 + draw // EXPERTS % (EXPERTS - 1)) % EXPERTS]
    return experts
