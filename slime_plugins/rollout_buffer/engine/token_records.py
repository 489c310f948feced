"""Per-token records of SGLang besides ids and log-probs: routed experts and the token ids kept by top-p.

SGLang returns experts for a whole sequence, and the next turn of a conversation repeats the sequence so far.
``ReportedExperts`` remembers how far the last reply of each session reached; the next request asks for later ones only.
"""

from __future__ import annotations

import hashlib
import statistics
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pybase64

from slime.utils.mask_token_records import ROUTED_EXPERTS, TOP_P_TOKENS, TokenRecords
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import Image, SamplingParams

EXPERTS_KEY: Final = "return_routed_experts"
"""In ``sampling_params`` of a job; SGLang takes it beside them."""
EXPERTS_START_KEY: Final = "routed_experts_start_len"
CUSTOM_KEY: Final = "custom_params"
TOP_P_KEY: Final = "return_top_p_token_ids"
TOP_P_IDS: Final = ("top_p_token_ids", "top_p_kept_token_ids")
TOP_P_OFFSETS: Final = ("top_p_token_offsets", "top_p_kept_token_offsets")
MAX_EXPERT: Final = 65535
MAX_SESSIONS: Final = 16384
"""Sessions whose last answer is remembered; another one is asked for its whole sequence again."""
_FORKS: Final = (4, 8, 12)
EXPERTS_PROBES: Final = (tuple(range(1, 17)), *((*range(1, fork + 1), *range(40, 56 - fork)) for fork in _FORKS))
"""Prompts of any model's ids: each but the first has other ids than the first from one of ``_FORKS`` on."""
MAX_SHARE_OF_NOISE: Final = 0.25
"""Of the experts of one pass that may differ between two prompts that are equal up to its token: kernels round."""


def asked_records(params: SamplingParams) -> frozenset[str]:
    """Returns the kinds of records that the sampling parameters ask for."""
    custom = params.extra.get(CUSTOM_KEY)
    kinds = [ROUTED_EXPERTS] if params.extra.get(EXPERTS_KEY) else []
    kinds += [TOP_P_TOKENS] if isinstance(custom, Mapping) and custom.get(TOP_P_KEY) else []
    return frozenset(kinds)


def records_of_reply(meta: Mapping[str, Any], sampled: int) -> dict[str, TokenRecords]:
    """Returns the records in the ``meta_info`` of a reply that sampled so many tokens.

    Raises:
        EngineError: they are not those of its tokens.
    """
    experts, kept = meta.get(ROUTED_EXPERTS), _first(meta, TOP_P_IDS)
    if not sampled or (experts is None and kept is None):
        return {}
    prompt = meta.get("prompt_tokens")
    if type(prompt) is not int or prompt < 1:
        raise EngineError("the engine tells records of tokens, and not how many tokens its prompt has")
    records = {}
    if experts is not None:
        records[ROUTED_EXPERTS] = _experts(experts, meta.get(EXPERTS_START_KEY) or 0, prompt + sampled)
    if kept is not None:
        records[TOP_P_TOKENS] = _kept_ids(kept, _first(meta, TOP_P_OFFSETS), prompt, sampled)
    return records


@dataclass(frozen=True, slots=True)
class _SessionExperts:
    ids: int
    images: int
    digest: bytes
    end: int
    width: int


class ReportedExperts:
    """How far the experts of each session were told. Whoever has a session's last answer has those before ``start``."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _SessionExperts] = OrderedDict()

    def start(self, session_id: str, ids: Sequence[int], images: Sequence[Image]) -> int:
        """Returns from which pass on a prompt's experts are still to be told; 0 is from the first one on."""
        told = self._sessions.get(session_id)
        if told is None or len(ids) < told.ids or len(images) < told.images:
            return 0
        return told.end - 1 if _digest(ids[: told.ids], images[: told.images]) == told.digest else 0

    def note(self, session_id: str, ids: Sequence[int], images: Sequence[Image], records: TokenRecords) -> None:
        """Notes the experts of a sequence: prompt with its images, and what was sampled.

        Raises:
            EngineError: they are of another number of layers or experts per token than those before.
        """
        told = self._sessions.pop(session_id, None)
        if told is not None and told.width != records.width:
            raise EngineError(
                f"the engine told {records.width} experts for each token, and {told.width} for those before: "
                "they are not of the places that were asked for"
            )
        digest = _digest(ids, images)
        self._sessions[session_id] = _SessionExperts(len(ids), len(images), digest, records.end, records.width)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def why_misplaced(told: Sequence[TokenRecords]) -> str:
    """Says that experts are not those of their tokens, as told of ``EXPERTS_PROBES``; empty where they are.

    What a token is routed by depends on no later one: the first pass that differs is that of the first other id.
    """
    first, *others = [one.split() for one in told]
    seen = [_first_difference(first, other) for other in others]
    off = statistics.median_low([at - fork for at, fork in zip(seen, _FORKS, strict=True)])
    if not off:
        return ""
    return (
        f"tells {ROUTED_EXPERTS} of other tokens than those that it names: prompts that differ from tokens "
        f"{', '.join(map(str, _FORKS))} on have other experts from {', '.join(map(str, seen))} on"
    )


def _first_difference(one: Sequence[array[int]], other: Sequence[array[int]]) -> int:
    for at, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        if sum(a != b for a, b in zip(ours, theirs, strict=True)) > MAX_SHARE_OF_NOISE * len(ours):
            return at
    return len(one)


def _digest(ids: Sequence[int], images: Sequence[Image]) -> bytes:
    shown = "".join(image.sha256 for image in images).encode()
    return hashlib.blake2b(array("q", ids).tobytes() + shown, digest_size=16).digest()


def _first(meta: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((meta[key] for key in keys if meta.get(key) is not None), None)


def _experts(value: Any, start: Any, tokens: int) -> TokenRecords:
    """A pass at place p samples the token at p + 1; the last token was read by no pass."""
    data = _int32_bytes(value, ROUTED_EXPERTS)
    passes = tokens - 1 - start if type(start) is int and start >= 0 else 0
    width, rest = divmod(len(data) // 4, passes) if passes > 0 else (0, 1)
    if rest or not width:
        raise EngineError(
            f"the engine told {len(data) // 4} {ROUTED_EXPERTS} from place {start} on of {tokens} tokens: "
            "that is not the same number for each"
        )
    records = _records(ROUTED_EXPERTS, start + 1, data, width=width)
    if records.itemsize > 2:
        raise EngineError(f"the engine told {ROUTED_EXPERTS} beyond {MAX_EXPERT}")
    return records


def _kept_ids(value: Any, offsets: Any, prompt: int, sampled: int) -> TokenRecords:
    bounds = array("i", _int32_bytes(offsets, TOP_P_OFFSETS[0]))
    if len(bounds) != sampled + 1 or bounds[0] != 0 or any(after < before for before, after in pairwise(bounds)):
        raise EngineError(
            f"the engine's {TOP_P_OFFSETS[0]} are {len(bounds)} numbers that do not part {sampled} tokens"
        )
    return _records(TOP_P_TOKENS, prompt, _int32_bytes(value, TOP_P_IDS[0]), ends=bounds[1:])


def _records(name: str, start: int, data: bytes, *, width: int = 0, ends: Sequence[int] = ()) -> TokenRecords:
    try:
        return TokenRecords.of_int32(start, data, width=width, ends=ends)
    except ValueError as error:
        raise EngineError(f"the engine's {name} are none: {error}") from error


def _int32_bytes(value: Any, name: str) -> bytes:
    """SGLang sends base64; a list of numbers is taken as well."""
    try:
        data = pybase64.b64decode(value, validate=True) if isinstance(value, str) else array("i", value).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise EngineError(f"the engine's {name} are neither base64 nor int32 numbers") from error
    if len(data) % 4:
        raise EngineError(f"the engine's {name} are {len(data)} bytes, which are no int32 numbers")
    return data
