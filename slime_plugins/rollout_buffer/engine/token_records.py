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

from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS, TokenRecords
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.types import Image, SamplingParams

EXPERTS_KEY: Final = "return_routed_experts"
"""The key that requests routed experts. A job has it in its ``sampling_params``, SGLang's request body beside them."""
EXPERTS_START_KEY: Final = "routed_experts_start_len"
"""The key of the first position whose experts are returned, in request and reply."""
CUSTOM_KEY: Final = "custom_params"
TOP_P_KEY: Final = "return_top_p_token_ids"
"""The key that requests the ids kept by top-p, within ``custom_params`` of the sampling parameters."""
TOP_P_IDS: Final = ("top_p_token_ids", "top_p_kept_token_ids")
TOP_P_OFFSETS: Final = ("top_p_token_offsets", "top_p_kept_token_offsets")
"""Keys of the kept ids and of their offsets in a reply, each with its alias."""
MAX_EXPERT: Final = 65535
"""Largest index of an expert: an index is stored in at most two bytes."""
MAX_SESSIONS: Final = 16384
"""Maximum number of remembered sessions; a forgotten session requests its whole sequence again."""
_FORKS: Final = (4, 8, 12)
EXPERTS_PROBES: Final = (tuple(range(1, 17)), *((*range(1, fork + 1), *range(40, 56 - fork)) for fork in _FORKS))
"""Prompts of ids that every model has. Each later prompt equals the first up to one of ``_FORKS``, and then differs."""
MAX_SHARE_OF_NOISE: Final = 0.25
"""Allowed share of differing experts in one position of two prompts with equal prefixes: kernels round differently."""


def asked_records(params: SamplingParams) -> frozenset[str]:
    """Returns the kinds of records that the sampling parameters request."""
    custom = params.extra.get(CUSTOM_KEY)
    kinds = [ROUTED_EXPERTS] if params.extra.get(EXPERTS_KEY) else []
    kinds += [TOP_P_TOKENS] if isinstance(custom, Mapping) and custom.get(TOP_P_KEY) else []
    return frozenset(kinds)


def records_of_reply(meta: Mapping[str, Any], sampled_count: int) -> dict[str, TokenRecords]:
    """Returns the records in the ``meta_info`` of a reply with ``sampled_count`` sampled tokens.

    Raises:
        EngineError: the records do not match the tokens.
    """
    experts, kept_ids = meta.get(ROUTED_EXPERTS), _first_present(meta, TOP_P_IDS)
    if not sampled_count or (experts is None and kept_ids is None):
        return {}
    prompt_count = meta.get("prompt_tokens")
    if type(prompt_count) is not int or prompt_count < 1:
        raise EngineError("the engine sent per-token records without the number of prompt tokens")
    records = {}
    if experts is not None:
        records[ROUTED_EXPERTS] = _experts(experts, meta.get(EXPERTS_START_KEY) or 0, prompt_count + sampled_count)
    if kept_ids is not None:
        records[TOP_P_TOKENS] = _kept_ids(kept_ids, _first_present(meta, TOP_P_OFFSETS), prompt_count, sampled_count)
    return records


@dataclass(frozen=True, slots=True)
class _SessionExperts:
    """How far a session's experts were reported: a sequence of ``id_count`` ids and ``image_count`` images, its digest,
    the index ``end`` after the last token with experts, and the number of experts per token.
    """

    id_count: int
    image_count: int
    digest: bytes
    end: int
    width: int


class ReportedExperts:
    """Remembers, for each session, up to which position experts were reported. The caller stores those experts."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _SessionExperts] = OrderedDict()

    def first_missing(self, session_id: str, ids: Sequence[int], images: Sequence[Image]) -> int:
        """Returns the first position of a prompt whose experts are still to be reported."""
        earlier = self._sessions.get(session_id)
        if earlier is None or len(ids) < earlier.id_count or len(images) < earlier.image_count:
            return 0
        if _digest(ids[: earlier.id_count], images[: earlier.image_count]) != earlier.digest:
            return 0
        return earlier.end - 1  # the pass at this position gives the experts of token ``end``, see ``_experts``

    def note(self, session_id: str, ids: Sequence[int], images: Sequence[Image], records: TokenRecords) -> None:
        """Records that the experts of a sequence (prompt with its images, and sampled ids) were reported.

        Raises:
            EngineError: the number of layers or experts per token differs from that of the session's earlier records.
        """
        earlier = self._sessions.pop(session_id, None)
        if earlier is not None and earlier.width != records.width:
            raise EngineError(
                f"the engine sent {records.width} experts per token, after {earlier.width} in earlier turns: "
                "layers or experts per token changed"
            )
        digest = _digest(ids, images)
        self._sessions[session_id] = _SessionExperts(len(ids), len(images), digest, records.end, records.width)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)


def why_misplaced(reported: Sequence[TokenRecords]) -> str:
    """Returns, as a predicate of "the engine", why experts of ``EXPERTS_PROBES`` are at wrong positions; empty if they
    are at the right ones.

    Routing depends on earlier tokens only: the first position that differs must be that of the first differing id.
    """
    if len({(len(records), records.width) for records in reported}) > 1 or len(reported) < len(EXPERTS_PROBES):
        return f"returns {ROUTED_EXPERTS} of different sizes for prompts of one length"
    first, *others = [records.split() for records in reported]
    differs_at = [_first_difference(first, other) for other in others]
    # The median, so that one prompt in which noise hides or makes a difference does not decide.
    if statistics.median_low([position - fork for position, fork in zip(differs_at, _FORKS, strict=True)]) == 0:
        return ""
    return (
        f"returns {ROUTED_EXPERTS} of other positions than it states: prompts that differ from tokens "
        f"{', '.join(map(str, _FORKS))} on have other experts from {', '.join(map(str, differs_at))} on"
    )


def _first_difference(experts: Sequence[array[int]], others: Sequence[array[int]]) -> int:
    """Returns the first token whose experts differ by more than noise; the number of tokens if there is none."""
    for position, (ours, theirs) in enumerate(zip(experts, others, strict=True)):
        if sum(a != b for a, b in zip(ours, theirs, strict=True)) > MAX_SHARE_OF_NOISE * len(ours):
            return position
    return len(experts)


def _digest(ids: Sequence[int], images: Sequence[Image]) -> bytes:
    image_hashes = "".join(image.sha256 for image in images).encode()
    return hashlib.blake2b(array("q", ids).tobytes() + image_hashes, digest_size=16).digest()


def _first_present(meta: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((meta[key] for key in keys if meta.get(key) is not None), None)


def _experts(value: Any, start: Any, token_count: int) -> TokenRecords:
    """Reads the routed experts of a sequence from position ``start`` on.

    The engine reports them by its forward passes: the pass at position p samples the token at p + 1, whose experts they
    are. No pass has read the last token.
    """
    data = _int32_bytes(value, ROUTED_EXPERTS)
    passes = token_count - 1 - start if type(start) is int and start >= 0 else 0
    width, rest = divmod(len(data) // 4, passes) if passes > 0 else (0, 0)
    if rest or not width:
        raise EngineError(
            f"the engine sent {len(data) // 4} {ROUTED_EXPERTS} from position {start} on for {token_count} tokens: "
            "that is not the same number for each token"
        )
    records = _records(ROUTED_EXPERTS, start + 1, data, width=width)
    if records.itemsize > 2:
        raise EngineError(f"the engine sent {ROUTED_EXPERTS} beyond {MAX_EXPERT}")
    return records


def _kept_ids(value: Any, offsets: Any, prompt_count: int, sampled_count: int) -> TokenRecords:
    """Reads the ids kept by top-p: those of sampled token n are between the offsets n and n + 1."""
    bounds = array("i", _int32_bytes(offsets, TOP_P_OFFSETS[0]))
    if len(bounds) != sampled_count + 1 or bounds[0] != 0 or any(after < before for before, after in pairwise(bounds)):
        raise EngineError(
            f"the engine's {TOP_P_OFFSETS[0]} are {len(bounds)} numbers that do not divide {sampled_count} tokens"
        )
    return _records(TOP_P_TOKENS, prompt_count, _int32_bytes(value, TOP_P_IDS[0]), ends=bounds[1:])


def _records(name: str, start: int, data: bytes, *, width: int = 0, ends: Sequence[int] = ()) -> TokenRecords:
    try:
        return TokenRecords.of_int32(start, data, width=width, ends=ends)
    except ValueError as error:
        raise EngineError(f"the engine's {name} are invalid: {error}") from error


def _int32_bytes(value: Any, name: str) -> bytes:
    """Decodes SGLang's base64; a list of numbers is accepted too."""
    try:
        data = pybase64.b64decode(value, validate=True) if isinstance(value, str) else array("i", value).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise EngineError(f"the engine's {name} are neither base64 nor int32 numbers") from error
    if len(data) % 4:
        raise EngineError(f"the engine's {name} are {len(data)} bytes, which are no int32 numbers")
    return data
