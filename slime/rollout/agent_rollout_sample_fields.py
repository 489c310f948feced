"""The fields of slime's Sample that differ between its versions.

slime calls a trajectory an execution. The field that its rows share is ``rollout_id``; in slime from 30 May to
4 June 2026, which includes v0.3.0, it is ``group_id``. Before 25 May 2026 slime had no such field, and weighed every
row as an execution. Token records are routed experts to replay, and top-p token ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from slime.rollout.agent_rollout_settings import wanted_records
from slime.utils.mask_rows import ROUTED_EXPERTS, TOP_P_TOKENS, TokenRecords
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutRow

RECORD_FIELDS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts")
"""Fields of a Sample that hold token records."""


def execution_field(sample_type: type[Any] = Sample) -> str | None:
    """Returns the field that the rows of one execution share; None if this slime has none."""
    known = {field.name for field in fields(sample_type)}
    return next((name for name in ("rollout_id", "group_id") if name in known), None)


def execution_of(sample: Any) -> int | None:
    """Returns the execution number of a sample; None if it is not set."""
    name = execution_field(type(sample))
    return None if name is None else getattr(sample, name)


def set_execution(sample: Any, number: int | None) -> None:
    """Sets the execution number of a sample, if this slime has the field."""
    name = execution_field(type(sample))
    if name is not None:
        setattr(sample, name, number)


def check_weighs_trajectories(rows_by_trajectory: Iterable[int], sample_type: type[Any] = Sample) -> None:
    """Checks that this slime weighs the rows of a trajectory together.

    Raises:
        ConfigError: a trajectory has several rows, and this slime weighs each row as a trajectory.
    """
    if execution_field(sample_type) is None and any(rows > 1 for rows in rows_by_trajectory):
        raise ConfigError(
            "a trajectory has several rows, and this slime weighs each row as a trajectory of its own (it has no "
            "rollout_id): train one row per trajectory (rollout_mode incremental), or use a slime from 25 May 2026 on"
        )


# --- token records ---------------------------------------------------------------------------------------------------


def record_fields(row: RolloutRow) -> dict[str, Any]:
    """Returns the Sample's fields for the row's records; no key for a kind that was not requested."""
    values: dict[str, Any] = {}
    if not row.records:
        return values
    import numpy as np

    if (top_p_ids := row.records.get(TOP_P_TOKENS)) is not None:
        values["rollout_top_p_token_ids"] = _as_array(top_p_ids).astype(np.int32)
        values["rollout_top_p_token_offsets"] = np.array([0, *top_p_ids.ends], np.int32)
    if (experts := row.records.get(ROUTED_EXPERTS)) is not None:
        values["rollout_routed_experts"] = _as_array(experts).reshape(-1, experts.width)
    return values


def without_records(sample: Sample, **changes: Any) -> Sample:
    """Returns a changed copy without token records."""
    changed = replace(sample, **changes)
    for name in RECORD_FIELDS:
        if hasattr(changed, name):  # not in slime before 2026
            setattr(changed, name, None)
    return changed


def fill_records(samples: Iterable[Sample], args: Any) -> None:
    """Pads the records of every row, in place, to the length and shape that slime expects.

    The engine never read some tokens: those of dummies, and a token that makes the length of a row even. Such a token
    gets the experts of the token before it, or in a row without records the experts 0, 1, … of each layer; no trained
    token follows it. Untrained tokens have no top-p ids.
    """
    if not (wanted := wanted_records(args)):
        return
    import numpy as np  # installed with slime

    for sample in samples:
        if TOP_P_TOKENS in wanted:
            ids = sample.rollout_top_p_token_ids
            ends = np.zeros(1, np.int32) if ids is None else sample.rollout_top_p_token_offsets
            missing = sample.response_length + 1 - len(ends)
            sample.rollout_top_p_token_ids = np.zeros(0, np.int32) if ids is None else ids
            sample.rollout_top_p_token_offsets = np.concatenate([ends, np.full(missing, ends[-1], np.int32)])
        if ROUTED_EXPERTS in wanted:
            shape = (-1, args.num_layers, args.moe_router_topk)
            experts = sample.rollout_routed_experts
            if experts is None:
                experts = np.arange(args.num_layers * args.moe_router_topk)[None] % args.moe_router_topk
            experts = experts.reshape(shape).astype(np.int32)  # more than 255 experts overflow uint8
            missing = len(sample.tokens) - 1 - len(experts)
            padded = np.concatenate([experts, np.repeat(experts[-1:], missing, axis=0)]) if missing else experts
            sample.rollout_routed_experts = padded


def _as_array(records: TokenRecords) -> Any:
    """Returns the values as a writable numpy array, which torch requires."""
    import numpy as np

    return np.array(np.frombuffer(records.values, np.dtype(f"<u{records.itemsize}")))
