"""The metrics of a batch of slime's Samples. What they are called and say is the trainer package's: ``METRICS``."""

from __future__ import annotations

from collections.abc import Iterable

from slime.rollout.agent_rollout_samples import Group, trajectories_of
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.trainer import metrics
from slime_plugins.rollout_buffer.trainer.metrics import METRICS, TrajectoryFacts, job_metrics, no_filter_metrics

__all__ = ["METRICS", "batch_metrics", "job_metrics", "no_filter_metrics"]


def batch_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Returns what the trajectories of a batch have in common, and how often one of k attempts at a task succeeds."""
    by_group = [[_facts(rows) for rows in trajectories_of([group])] for group in groups]
    of_groups = metrics.pass_at(by_group) | metrics.equal_rewards(by_group)
    return metrics.batch_metrics(fact for group in by_group for fact in group) | of_groups


def _facts(rows: list[Sample]) -> TrajectoryFacts:
    """A trajectory's own rows alone: those that fill up a step are no part of it."""
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
