"""Converts rows to slime's Samples, assembles batches, and computes their metrics. Pure.

A trajectory becomes one Sample per training row. A trajectory that cannot be trained becomes a dummy: two untrained
tokens with ``remove_sample``. A dummy has the mean reward of its group's other members, so that it changes neither the
baseline of slime's own normalisation nor the logged mean.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from slime.rollout.agent_rollout_argument_checks import needs_even_row_lengths, rows_divisor
from slime.rollout.agent_rollout_data_postprocess import POSTPROCESS_PATH
from slime.rollout.agent_rollout_sample_fields import (
    check_weighs_trajectories,
    fill_records,
    record_fields,
    set_execution,
    without_records,
)
from slime.rollout.agent_rollout_settings import read_row_settings, trains_without_log_probs
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.rules.reward_normalization import mean
from slime_plugins.rollout_buffer.trainer import metrics
from slime_plugins.rollout_buffer.trainer.batch_types import (
    RolloutGroup,
    RolloutRow,
    RolloutTrajectory,
    RowSource,
    TokenSource,
)
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.metrics import TrajectoryFacts
from slime_plugins.rollout_buffer.trainer.row_builder import RowBuilder
from slime_plugins.rollout_buffer.trainer.vision import VisionFamily
from slime_plugins.rollout_buffer.wire import RolloutItem

logger = logging.getLogger(__name__)

Group = list[Any]
"""The members of a group; a member is a Sample, or a list of Samples if its trajectory has several rows."""

DUMMY_TOKENS = (0, 0)
MAX_TRAJECTORIES = 2**20
"""Number of execution numbers that are reserved for one rollout."""


class SampleConverter:
    """Converts delivered items to groups of ``samples_per_group`` members."""

    def __init__(self, args: Any, *, samples_per_group: int, evaluation: bool = False) -> None:
        """An ``evaluation`` needs no token records."""
        settings = read_row_settings(args, samples_per_group)
        self._rows = RowBuilder(replace(settings, records=()) if evaluation else settings)

    @property
    def counts(self) -> Counter[str]:
        """Counters of rows, tokens, images, dummies and problems."""
        return self._rows.counts

    def groups(
        self, items: Iterable[RolloutItem], vision: VisionFamily | None = None, images: FetchedImages | None = None
    ) -> list[Group]:
        """Returns the groups of one delivery, each padded with dummies or cut to ``samples_per_group`` members.

        ``vision`` converts ``images``; without it rows keep one placeholder per image.
        """
        return [samples_of_group(group) for group in self._rows.groups(items, vision, images)]


def samples_of_group(group: RolloutGroup) -> Group:
    """Returns a group in the form of slime's data source: flat, except for trajectories with several rows."""
    members = [_samples(trajectory) for trajectory in group.trajectories]
    return [rows if len(rows) > 1 else rows[0] for rows in members]


# --- one batch -------------------------------------------------------------------------------------------------------


def finish_batch(groups: Sequence[Group], rollout_id: int, args: Any = None) -> list[Group]:
    """Combines the groups of one rollout into a batch for slime's RolloutManager.

    ``group_index`` and ``rollout_id`` become ints that are unique in the run; the rows of one trajectory share them.
    All metadata have the same keys, and values that slime reads have the same type on every sample. Either all samples
    have log-probs or none. If any trajectory has several rows, every trajectory is a list.
    """
    first = rollout_id * MAX_TRAJECTORIES
    trajectories = 0
    for position, group in enumerate(groups):
        for member in group:
            for sample in rows_of(member):
                sample.group_index = first + position
                set_execution(sample, first + trajectories)
            trajectories += 1
    samples = [sample for group in groups for member in group for sample in rows_of(member)]
    _share_metadata_keys(samples)
    _agree_on_round_number(samples)
    _agree_on_source_name(samples)
    _agree_on_log_probs(samples, args)
    if needs_even_row_lengths(args):
        _make_lengths_even(samples)
    if len(samples) == trajectories:
        fill_records(samples, args)
        return [[rows_of(member)[0] for member in group] for group in groups]
    check_weighs_trajectories(len(rows_of(member)) for group in groups for member in group)
    batch: list[Group] = [[rows_of(member) for member in group] for group in groups]
    _fill_steps([rows for group in batch for rows in group], args)
    fill_records([sample for group in batch for rows in group for sample in rows], args)
    return batch


def _fill_steps(trajectories: Sequence[list[Sample]], args: Any) -> None:
    """Adds untrained rows to steps whose rows cannot be divided evenly among slime's ranks.

    slime fails on such steps with fixed micro-batches; ``--use-dynamic-batch-size`` accepts any number of rows.
    """
    size, divisor = getattr(args, "global_batch_size", None), rows_divisor(args)
    if not size or divisor <= 1:
        return
    for start in range(0, len(trajectories) - size + 1, size):
        step = trajectories[start : start + size]
        missing = -sum(map(len, step)) % divisor
        step[-1].extend([_filler(step[-1][0]) for _ in range(missing)])
        if missing:
            _warn_of_fillers()


def _filler(sample: Sample) -> Sample:
    """Returns an untrained row of the same trajectory."""
    log_probs = None if sample.rollout_log_probs is None else [0.0]
    return _untrained(sample, "it fills up a training step", rollout_log_probs=log_probs)


@functools.lru_cache(maxsize=1)
def _warn_of_fillers() -> None:
    logger.warning(
        "trajectories with several rows make steps that fixed micro-batches do not divide: rows of two untrained "
        "tokens are added; --use-dynamic-batch-size needs none"
    )


def rows_of(member: Any) -> list[Sample]:
    """Returns the Samples of one member of a group, which is a Sample or a list of them."""
    return list(member) if isinstance(member, list) else [member]


def trajectories_of(groups: Iterable[Group]) -> list[list[Sample]]:
    """Returns the rows of every trajectory of the groups, in order."""
    return [rows_of(member) for group in groups for member in group]


def is_agent_group(group: Any) -> bool:
    """Returns False for the prompts with which slime's data source pads a short buffer."""
    first = group
    while isinstance(first, list) and first:
        first = first[0]
    return isinstance(first, Sample) and "token_source" in (first.metadata or {})


def _make_lengths_even(samples: Iterable[Sample]) -> None:
    """Appends an untrained token to rows of odd length, in place."""
    for sample in samples:
        if len(sample.tokens) % 2 == 0:
            continue
        sample.tokens = [*sample.tokens, DUMMY_TOKENS[0]]
        sample.loss_mask = [*(sample.loss_mask or ()), 0]
        sample.response_length += 1
        if sample.rollout_log_probs is not None:
            sample.rollout_log_probs = [*sample.rollout_log_probs, 0.0]


def _share_metadata_keys(samples: Sequence[Sample]) -> None:
    """Gives all samples the same metadata keys: slime reads the keys of the first sample from all samples."""
    keys = list(dict.fromkeys(key for sample in samples for key in sample.metadata))
    for sample in samples:
        sample.metadata = {key: sample.metadata.get(key) for key in keys}


def _agree_on_round_number(samples: Sequence[Sample]) -> None:
    """Gives samples without a round number, such as dummies, the mean: slime sums it over all samples."""
    numbers: list[tuple[Sample, Any]] = [(sample, sample.metadata.get("round_number")) for sample in samples]
    known = [(sample, value) for sample, value in numbers if metrics.is_number(value) and not sample.remove_sample]
    if not known:
        for sample in samples:
            sample.metadata.pop("round_number", None)
        return
    whole = all(isinstance(value, int) for _, value in known)
    average = mean([float(value) for _, value in known])
    by_sample = {id(sample): value for sample, value in known}
    for sample in samples:
        value = by_sample.get(id(sample), average)
        sample.metadata["round_number"] = round(value) if whole else float(value)


def _agree_on_source_name(samples: Sequence[Sample]) -> None:
    """Gives every sample a source name, which slime requires to be a text; a dummy gets that of its group."""
    if not any("source_name" in sample.metadata for sample in samples):
        return
    by_group: dict[Any, Any] = {}
    for sample in samples:
        by_group[sample.group_index] = by_group.get(sample.group_index) or sample.metadata["source_name"]
    for sample in samples:
        name = sample.metadata["source_name"] or by_group[sample.group_index] or "unknown"
        sample.metadata["source_name"] = str(name)


def _agree_on_log_probs(samples: Sequence[Sample], args: Any) -> None:
    """Gives log-probs to all samples or to none: slime reads them of every sample if the first one has them.

    If slime's loss needs only their shape (``trains_without_log_probs``), unknown ones become NaN, which the hook on
    the training ranks removes, or without this hook 0.
    """
    trained = [sample for sample in samples if not sample.remove_sample]
    lacking = [sample for sample in trained if sample.rollout_log_probs is None]
    if lacking and trains_without_log_probs(args):
        drops_nan = getattr(args, "rollout_data_postprocess_path", None) == POSTPROCESS_PATH
        if not drops_nan:
            _warn_of_unknown_log_probs()
        for sample in lacking:
            sample.rollout_log_probs = [math.nan if drops_nan else 0.0] * sample.response_length
    elif lacking or not trained:
        if len(lacking) < len(trained):
            logger.warning("some trajectories of this batch have no log-probs: they are removed from all others")
        for sample in samples:
            sample.rollout_log_probs = None
        return
    for sample in samples:
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = [0.0] * sample.response_length


@functools.lru_cache(maxsize=1)
def _warn_of_unknown_log_probs() -> None:
    logger.warning(
        "rows have no log-probs of the engine, and slime needs their shape with one step per rollout and no KL "
        "penalty: they are set to 0, which the loss does not use, and train_rollout_logprob_abs_diff is meaningless; "
        "--rollout-data-postprocess-path %s removes them",
        POSTPROCESS_PATH,
    )


# --- one trajectory --------------------------------------------------------------------------------------------------


def _samples(trajectory: RolloutTrajectory) -> list[Sample]:
    if trajectory.is_dummy:
        return [_dummy(trajectory)]
    return [_sample(trajectory, row) for row in trajectory.rows]


def _sample(trajectory: RolloutTrajectory, row: RolloutRow) -> Sample:
    """Returns a row as a Sample, whose mask and log-probs cover only the response."""
    start = row.response_start
    return Sample(
        index=trajectory.instance_id,
        prompt=trajectory.uid,
        tokens=list(row.token_ids),
        multimodal_inputs={"images": list(row.pictures)} if row.pictures else None,
        multimodal_train_inputs=None if row.train_inputs is None else dict(row.train_inputs),
        response_length=row.response_length,
        reward=trajectory.reward,
        loss_mask=list(row.loss_mask[start:]),
        rollout_log_probs=None if row.log_probs is None else list(row.log_probs[start:]),
        weight_versions=list(row.weight_versions),
        status=Sample.Status.TRUNCATED if trajectory.truncated else Sample.Status.COMPLETED,
        metadata={**_metadata(trajectory, row=row.number), **_returns(trajectory, row)},
        response=trajectory.replies,
        prefix_cache_info=Sample.PrefixCacheInfo(
            cached_tokens=row.cached_tokens, total_prompt_tokens=row.prompt_tokens
        ),
        non_generation_time=_non_generation_time(trajectory),
        **record_fields(row),
    )


def _dummy(trajectory: RolloutTrajectory) -> Sample:
    """Returns the smallest sample that slime accepts and does not train."""
    return Sample(
        index=trajectory.instance_id,
        prompt=trajectory.uid,
        tokens=list(DUMMY_TOKENS),
        response_length=1,
        reward=trajectory.reward,
        loss_mask=[0],
        status=Sample.Status.ABORTED,
        remove_sample=True,
        metadata=_metadata(trajectory, row=0),
    )


def as_dummy(member: Any, reason: str) -> Sample:
    """Returns a dummy that replaces a played member, with the reason."""
    first, status = rows_of(member)[0], Sample.Status.ABORTED
    dummy = _untrained(first, reason, rollout_log_probs=None, weight_versions=[], status=status)
    dummy.metadata |= {"row_source": RowSource.DUMMY.value, "rows": 1}
    return dummy


def _untrained(sample: Sample, reason: str, **changes: Any) -> Sample:
    """Returns a changed copy of a row, with the fewest tokens that slime accepts, which is not trained."""
    return without_records(
        sample,
        tokens=list(DUMMY_TOKENS),
        response_length=1,
        loss_mask=[0],
        multimodal_inputs=None,
        multimodal_train_inputs=None,
        response="",
        prefix_cache_info=Sample.PrefixCacheInfo(),
        remove_sample=True,
        metadata={**sample.metadata, "token_source": TokenSource.DUMMY.value, "dummy_reason": reason},
        **changes,
    )


def _metadata(trajectory: RolloutTrajectory, *, row: int) -> dict[str, Any]:
    return {
        **trajectory.extra_info,
        "uid": trajectory.uid,
        "instance_id": trajectory.instance_id,
        "epoch": trajectory.epoch,
        "slot": trajectory.slot,
        "outcome": trajectory.outcome,
        "stop_reason": trajectory.stop_reason,
        "raw_reward": trajectory.raw_reward,
        "token_source": trajectory.token_source.value,
        "row_source": trajectory.row_source.value,
        "row": row,
        "rows": max(1, len(trajectory.rows)),
        "dummy_reason": trajectory.dummy_reason,
        "has_images": trajectory.has_images,
    }


def _returns(trajectory: RolloutTrajectory, row: RolloutRow) -> dict[str, Any]:
    """Returns the metadata with the returns of response tokens and of turns; {} without rewards of turns."""
    if row.returns is None:
        return {}
    of_response = [*row.returns[row.response_start :]]
    return {"token_returns": of_response, "turn_returns": list(trajectory.turn_returns or ())}


def _non_generation_time(trajectory: RolloutTrajectory) -> float:
    phases = trajectory.timings_s.items()
    return float(sum(s for phase, s in phases if phase != "generate" and isinstance(s, int | float)))


# --- metrics ----------------------------------------------------------------------------------------------------------


def batch_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Returns the metrics of a batch, in which each trajectory counts once, with pass@k and the groups of equal
    rewards."""
    by_group = [[_facts(rows) for rows in trajectories_of([group])] for group in groups]
    of_groups = metrics.pass_at(by_group) | metrics.equal_rewards(by_group)
    return metrics.batch_metrics(fact for group in by_group for fact in group) | of_groups


def _facts(rows: list[Sample]) -> TrajectoryFacts:
    """Returns the values of a trajectory from its own rows, without the rows that fill up a step."""
    trained = [row for row in rows if not row.remove_sample]
    metadata = rows[0].metadata
    return TrajectoryFacts(
        is_dummy=rows[0].remove_sample,
        outcome=metadata.get("outcome"),
        stop_reason=metadata.get("stop_reason"),
        raw_reward=float(metadata["raw_reward"]),
        response_tokens=sum(row.response_length for row in trained),
        trained_tokens=sum(sum(row.loss_mask or ()) for row in trained),
        truncated=rows[0].status == Sample.Status.TRUNCATED,
        prompt_tokens=sum(row.prefix_cache_info.total_prompt_tokens for row in trained),
        cached_tokens=sum(row.prefix_cache_info.cached_tokens for row in trained),
        replies=rows[0].response,
        weight_versions=[version for row in trained for version in row.weight_versions or ()],
        extra_info=metadata,
    )
