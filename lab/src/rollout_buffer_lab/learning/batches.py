"""Converts training rows into tensors: the inputs of a forward pass, and the trained tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slime_plugins.rollout_buffer.trainer.batch_types import RolloutRow, RolloutTrajectory
from slime_plugins.rollout_buffer.types import version_number

UNKNOWN_VERSION = -1
"""Version of tokens whose weights are unknown: their log-probs cannot be checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """R rows of T positions, padded on the right, and the K trained tokens in them.

    ``predicts_trained`` (R, T - 1) is true at positions whose logits predict a trained token: one before the token's
    own. ``targets`` (the token ids), ``log_probs`` (the engine's), ``trajectories`` (their numbers), ``versions`` and
    ``returns`` have one value for each trained token (K); without turn rewards a return is the trajectory's reward.
    ``images`` are the image processor's outputs for all screenshots in order, empty for a model without images.
    """

    ids: torch.Tensor
    predicts_trained: torch.Tensor
    targets: torch.Tensor
    log_probs: torch.Tensor
    trajectories: torch.Tensor
    versions: torch.Tensor
    returns: torch.Tensor
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)


def batch_of(trajectories: Sequence[RolloutTrajectory], device: str = "cpu") -> Batch:
    """Returns all rows of the trajectories as one batch. Dummies have no rows; at least one row is needed."""
    rows = [(number, each, row) for number, each in enumerate(trajectories) for row in each.rows]
    width = max(len(row.token_ids) for _, _, row in rows)
    ids = torch.tensor([_padded(row.token_ids, width, 0) for _, _, row in rows])
    predicts_trained = torch.tensor([_padded(row.loss_mask, width, 0) for _, _, row in rows])[:, 1:] > 0
    log_probs = torch.tensor([_padded(row.log_probs or [0.0] * len(row.token_ids), width, 0.0) for _, _, row in rows])
    row_of_token = predicts_trained.nonzero()[:, 0]
    versions = torch.tensor([_padded(_versions(each, row), width, 0) for _, each, row in rows])
    returns = torch.tensor([_padded(_returns(each, row), width, 0.0) for _, each, row in rows])
    return Batch(
        ids=ids.to(device),
        predicts_trained=predicts_trained.to(device),
        targets=ids[:, 1:][predicts_trained].to(device),
        log_probs=log_probs[:, 1:][predicts_trained].to(device),
        trajectories=torch.tensor([number for number, _, _ in rows])[row_of_token].to(device),
        versions=versions[:, 1:][predicts_trained].to(device),
        returns=returns[:, 1:][predicts_trained].to(device),
        images=_images([row.train_inputs for _, _, row in rows if row.train_inputs], device),
    )


def trained_logits(policy: Any, batch: Batch) -> torch.Tensor:
    """Returns the logits (K, V) of the trained tokens only, because a vocabulary is large."""
    inputs = dict(batch.images)
    if inputs:
        inputs["mm_token_type_ids"] = (batch.ids == policy.config.image_token_id).int()
    hidden = policy.model(input_ids=batch.ids, **inputs).last_hidden_state[:, :-1]
    logits: torch.Tensor = policy.lm_head(hidden[batch.predicts_trained])
    return logits


def _versions(trajectory: RolloutTrajectory, row: RolloutRow) -> list[int]:
    """Returns the weight version of each token: its span's; without spans, the trajectory's."""
    outside_spans = None if row.version_spans else trajectory.weight_version
    versions = [UNKNOWN_VERSION if outside_spans is None else outside_spans] * len(row.token_ids)
    for span in row.version_spans:
        number = version_number(span.weight_version)
        if number is not None:
            versions[span.start : span.end] = [number] * (span.end - span.start)
    return versions


def _returns(trajectory: RolloutTrajectory, row: RolloutRow) -> Sequence[float]:
    return row.returns if row.returns is not None else [trajectory.reward] * len(row.token_ids)


def _images(inputs: Sequence[Mapping[str, torch.Tensor]], device: str) -> dict[str, torch.Tensor]:
    """Returns the concatenated image inputs of all rows."""
    names = inputs[0].keys() if inputs else ()
    return {name: torch.cat([row_inputs[name] for row_inputs in inputs]).to(device) for name in names}


def _padded(values: Sequence[Any], width: int, filler: Any) -> list[Any]:
    return [*values, *[filler] * (width - len(values))]
