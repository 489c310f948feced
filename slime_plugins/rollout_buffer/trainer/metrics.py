"""The metrics of a rollout, under ``rollout/``. Pure.

Every trajectory counts once, regardless of its number of rows; dummies count only in metrics that mention them. Names
that end in a task, an app, a reason or a state are shares or counts of that value. Metrics of the buffer are named
after its Prometheus metrics, with slashes for underscores and the label's value at the end: ``rollout_buffer_slots`` of
state ``ready`` is ``rollout/buffer/slots/ready``. ``docs/trainer.md`` describes them all.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_plugins.rollout_buffer.trainer.batch_types import RolloutTrajectory
from slime_plugins.rollout_buffer.types import version_number

Metrics = dict[str, float]

REPETITION_CHARACTERS = 10_000
REPETITION_RATIO = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryFacts:
    """The values of one trajectory that the metrics of a batch use. ``extra_info`` comes from its generator."""

    is_dummy: bool
    outcome: str | None
    stop_reason: str | None
    raw_reward: float
    response_tokens: int
    trained_tokens: int
    truncated: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    replies: str = ""
    weight_versions: Sequence[str] = ()
    extra_info: Mapping[str, Any] = field(default_factory=dict)


def facts_of(trajectory: RolloutTrajectory) -> TrajectoryFacts:
    return TrajectoryFacts(
        is_dummy=trajectory.is_dummy,
        outcome=trajectory.outcome,
        stop_reason=trajectory.stop_reason,
        raw_reward=trajectory.raw_reward,
        response_tokens=sum(row.response_length for row in trajectory.rows),
        trained_tokens=sum(row.trained_tokens for row in trajectory.rows),
        truncated=trajectory.truncated,
        prompt_tokens=sum(row.prompt_tokens for row in trajectory.rows),
        cached_tokens=sum(row.cached_tokens for row in trajectory.rows),
        replies=trajectory.replies,
        weight_versions=[version for row in trajectory.rows for version in row.weight_versions],
        extra_info=trajectory.extra_info,
    )


def no_filter_metrics(all_meta_info: Sequence[Mapping[str, Any]]) -> Metrics:
    """Returns the number of samples before filtering and their rewards, over all deliveries; {} without samples."""
    counted = [meta for meta in all_meta_info if meta.get("total_samples")]
    if not counted:
        return {}
    metrics: Metrics = {"rollout/no_filter/total_samples": sum(int(meta["total_samples"]) for meta in counted)}
    for name in ("avg_reward", "reward_std"):
        known = [(int(meta["total_samples"]), float(meta[name])) for meta in counted if is_number(meta.get(name))]
        if known:
            samples = sum(weight for weight, _ in known)
            metrics[f"rollout/no_filter/{name}"] = math.fsum(weight * value for weight, value in known) / samples
    for name, pick in (("reward_min", min), ("reward_max", max)):
        values = [float(meta[name]) for meta in counted if is_number(meta.get(name))]
        if values:
            metrics[f"rollout/no_filter/{name}"] = pick(values)
    return metrics


def batch_metrics(trajectories: Iterable[TrajectoryFacts]) -> Metrics:
    """Returns shares and means over the trajectories of a batch."""
    members = list(trajectories)
    trained = [member for member in members if not member.is_dummy]
    metrics = _shares("rollout/outcome", [member.outcome for member in members])
    if not trained:
        return metrics
    turns = [float(member.extra_info["turns"]) for member in trained if is_number(member.extra_info.get("turns"))]
    return {
        **metrics,
        **_spread("rollout/reward", [member.raw_reward for member in trained]),
        **_pick(
            _spread("rollout/response_length", [float(member.response_tokens) for member in trained]),
            "mean", "min", "max",
        ),
        "rollout/trained_tokens/mean": statistics.fmean(member.trained_tokens for member in trained),
        **_pick(_spread("rollout/turns", turns), "mean", "max"),
        "rollout/truncated/mean": statistics.fmean(member.truncated for member in trained),
        "rollout/repetition/mean": statistics.fmean(_repeats(member.replies) for member in trained),
        **_prefix_cache(trained),
        **_shares("rollout/stop_reason", [member.stop_reason for member in trained]),
        **_success([member.extra_info for member in trained]),
        **_staleness(trained),
    }  # fmt: skip


def equal_rewards(groups: Iterable[Sequence[TrajectoryFacts]]) -> Metrics:
    """Returns the share of groups with at least two played members whose rewards are all equal."""
    rewards = [[member.raw_reward for member in group if not member.is_dummy] for group in groups]
    several = [of_group for of_group in rewards if len(of_group) > 1]
    if not several:
        return {}
    return {"rollout/equal_rewards/mean": statistics.fmean(max(of_group) == min(of_group) for of_group in several)}


def pass_at(groups: Iterable[Sequence[TrajectoryFacts]]) -> Metrics:
    """Returns the unbiased estimate of pass@k over groups, for powers of two up to the size of the smallest group.

    A trajectory succeeded if its ``success`` is true or, without one, its reward is 1. Chen et al., arXiv 2107.03374,
    eq. 1.
    """
    counts = [[_succeeded(member) for member in group if not member.is_dummy] for group in groups]
    counts = [members for members in counts if members]
    most = min(map(len, counts), default=0)
    return {
        f"rollout/pass_at/{k}": statistics.fmean(
            1 - math.comb(len(members) - sum(members), k) / math.comb(len(members), k) for members in counts
        )
        for k in (2**power for power in range(most.bit_length()))
        if k <= most
    }


def _succeeded(member: TrajectoryFacts) -> bool:
    reported = member.extra_info.get("success")
    return reported if isinstance(reported, bool) else member.raw_reward == 1


def _repeats(text: str) -> bool:
    """Returns True if a text is longer than ``REPETITION_CHARACTERS`` and its end compresses by ``REPETITION_RATIO``.

    slime measures ``repetition_frac`` in the same way.
    """
    end = text[-REPETITION_CHARACTERS:].encode(errors="replace")  # text from JSON may hold lone surrogates
    return len(text) > REPETITION_CHARACTERS and len(end) > REPETITION_RATIO * len(zlib.compress(end, 9))


def _prefix_cache(trajectories: Sequence[TrajectoryFacts]) -> Metrics:
    prompt_tokens = sum(member.prompt_tokens for member in trajectories)
    cached_tokens = sum(member.cached_tokens for member in trajectories)
    return {"rollout/prefix_cache/hit_rate": cached_tokens / prompt_tokens} if prompt_tokens else {}


def job_metrics(job: Mapping[str, Any]) -> Metrics:
    """Returns the accounting of a job in the reply of ``GET /jobs/<id>``."""
    slots = {f"rollout/buffer/slots/{state}": float(count) for state, count in (job.get("slots") or {}).items()}
    outcomes = {
        f"rollout/buffer/trajectories/{outcome}": float(count) for outcome, count in (job.get("outcomes") or {}).items()
    }
    attempts = job.get("attempts") or {}
    failed = {key.partition(":")[2]: count for key, count in attempts.items() if key.startswith("failed:")}
    errors = {f"rollout/buffer/attempts/failed/{code}": float(count) for code, count in failed.items()}
    lost = {f"rollout/buffer/trajectories/{name}": float(job[name]) for name in ("late", "damaged") if name in job}
    return {**slots, **outcomes, **errors, **lost, **_measures(job.get("measures") or {})}


def _measures(measures: Mapping[str, Mapping[str, float]]) -> Metrics:
    """Returns the measures as metrics of the buffer; only ``bias``, a measure of the training, is ``rollout/bias``."""
    return {
        f"{'rollout' if name == 'bias' else 'rollout/buffer'}/{name.replace('_', '/')}/{statistic}": float(value)
        for name, statistics_of in measures.items()
        for statistic, value in statistics_of.items()
    }


def is_number(value: Any) -> bool:
    """Returns True for a finite number; a bool counts as no number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _spread(name: str, values: Sequence[float]) -> Metrics:
    if not values:
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/std": statistics.stdev(values) if len(values) > 1 else 0.0,
        f"{name}/min": min(values),
        f"{name}/max": max(values),
    }


def _pick(metrics: Metrics, *names: str) -> Metrics:
    return {name: value for name, value in metrics.items() if name.rsplit("/", 1)[1] in names}


def _shares(name: str, values: Sequence[Any]) -> Metrics:
    """Returns the share of each value among all, in which None counts as well."""
    counts = Counter(str(value) for value in values if value is not None)
    return {f"{name}/{value}": count / len(values) for value, count in sorted(counts.items())}


def _success(all_extra_info: Sequence[Mapping[str, Any]]) -> Metrics:
    known = [extra_info for extra_info in all_extra_info if isinstance(extra_info.get("success"), bool)]
    if not known:
        return {}
    solved: dict[str, list[bool]] = defaultdict(list)
    for extra_info in known:
        solved["rollout/success/mean"].append(extra_info["success"])
        for key, name in (("task_name", "task"), ("app", "app")):
            if isinstance(value := extra_info.get(key), str) and value:
                solved[f"rollout/success/{name}/{value.replace('/', '_')}"].append(extra_info["success"])
    return {name: statistics.fmean(values) for name, values in sorted(solved.items())}


def _staleness(trajectories: Sequence[TrajectoryFacts]) -> Metrics:
    """Returns the staleness relative to the newest version in the batch: the trainer's version is unknown here."""
    by_trajectory = [[version_number(str(version)) for version in member.weight_versions] for member in trajectories]
    known = [
        versions for numbers in by_trajectory if (versions := [number for number in numbers if number is not None])
    ]
    if not known:
        return {}
    newest = max(max(versions) for versions in known)
    return _pick(_spread("rollout/staleness", [float(newest - min(versions)) for versions in known]), "mean", "max")
