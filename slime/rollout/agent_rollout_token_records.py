"""What an engine told of single tokens, as fields of slime's Samples: experts to replay, and ids that top_p kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from slime.rollout.agent_rollout_settings import wanted_records
from slime.utils.mask_token_records import ROUTED_EXPERTS, TOP_P_TOKENS, TokenRecords
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutRow

RECORD_FIELDS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")


def record_fields(row: RolloutRow) -> dict[str, Any]:
    """What the engine told of the row's tokens; no key where nobody asked."""
    found: dict[str, Any] = {}
    if not row.records:
        return found
    import numpy as np

    if (kept := row.records.get(TOP_P_TOKENS)) is not None:
        found["rollout_top_p_token_ids"] = _as_array(kept).astype(np.int32)
        found["rollout_top_p_token_offsets"] = np.array([0, *kept.ends], np.int32)
    if (experts := row.records.get(ROUTED_EXPERTS)) is not None:
        found["rollout_routed_experts"] = _as_array(experts).reshape(-1, experts.width)
    return found


def without_records(sample: Sample, **changes: Any) -> Sample:
    """Returns another row, of which no engine told anything."""
    changed = replace(sample, **changes)
    for name in RECORD_FIELDS:
        if hasattr(changed, name):  # slime has them since 2026
            setattr(changed, name, None)
    return changed


def fill_records(samples: Iterable[Sample], args: Any) -> None:
    """Gives every row as many records as slime wants of it, in place, and in its form.

    What an engine told stays. Tokens that no pass of it read (of dummies, and one that fills up a row) have the experts
    of the token before them, or the first ones; nothing that is trained comes after them. Tokens that are not trained
    have no kept ids.
    """
    if not (wanted := wanted_records(args)):
        return
    import numpy as np  # slime brings it; whoever replays nothing needs none

    for sample in samples:
        if TOP_P_TOKENS in wanted:
            ids = sample.rollout_top_p_token_ids
            ends = np.zeros(1, np.int32) if ids is None else sample.rollout_top_p_token_offsets
            missing = sample.response_length + 1 - len(ends)
            sample.rollout_top_p_token_ids = np.zeros(0, np.int32) if ids is None else ids
            sample.rollout_top_p_token_offsets = np.concatenate([ends, np.full(missing, ends[-1], np.int32)])
        if ROUTED_EXPERTS in wanted:
            shape = (-1, args.num_layers, args.moe_router_topk)
            told = sample.rollout_routed_experts
            if told is None:
                told = np.arange(args.num_layers * args.moe_router_topk)[None] % args.moe_router_topk
            told = told.reshape(shape).astype(np.int32)  # slime counts beyond 255 in the type that it is given
            missing = len(sample.tokens) - 1 - len(told)
            padded = np.concatenate([told, np.repeat(told[-1:], missing, axis=0)]) if missing else told
            sample.rollout_routed_experts = padded


def _as_array(records: TokenRecords) -> Any:
    """Returns the numbers of records as an array of numpy, which may be written to, as torch wants it."""
    import numpy as np

    return np.array(np.frombuffer(records.values, np.dtype(f"<u{records.itemsize}")))
