"""Generated per-token records of the scripted engine: experts and top-p ids, as functions of the token.

Every pass has experts of its own, made of the token that it read, its place and the weights, so that records that were
moved by one token, or told by another pass, are seen to be others.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

LAYERS: Final = 2
TOP_K: Final = 2
EXPERTS: Final = 8


def experts_of_passes(ids: Sequence[int], weight_version: str) -> list[list[int]]:
    """Returns, for each token but the last, the experts of the pass that read it, layer by layer."""
    return [_experts(token_id, place, weight_version) for place, token_id in enumerate(ids[:-1])]


def kept_ids(output_ids: Sequence[int]) -> list[list[int]]:
    """Returns a set of kept ids for each sampled token, with that token in it."""
    return [[token_id, *(token_id + more for more in range(1, 1 + token_id % 3))] for token_id in output_ids]


def _experts(token_id: int, place: int, weight_version: str) -> list[int]:
    """Two different ones of each layer."""
    chosen = []
    for layer in range(LAYERS):
        draw = zlib.crc32(f"{token_id}/{place}/{weight_version}/{layer}".encode())
        first = draw % EXPERTS
        chosen += [first, (first + 1 + draw // EXPERTS % (EXPERTS - 1)) % EXPERTS]
    return chosen
