"""Evaluation during training: every evaluation set is played once, as a new job.

``agent_rollout_settings.eval_sets`` reads the sets, each with its group size and sampling parameters, from slime's
arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime.rollout.agent_rollout_samples import Group, finish_batch, samples_of_group, trajectories_of
from slime.rollout.agent_rollout_settings import EvalSet, RolloutSettings, eval_payload, eval_sets, read_row_settings
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import GeneratorError
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutGroup
from slime_plugins.rollout_buffer.trainer.delivery_conversion import DeliveryConverter
from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError, JobFeed, send_start, with_retries


async def evaluate(
    args: Any, rollout_id: int, settings: RolloutSettings, client: AsyncRolloutBufferClient
) -> RolloutFnEvalOutput:
    """Plays every evaluation set once and returns slime's eval output, without failed episodes.

    Raises:
        GeneratorError: an evaluation set has no trajectory with a reward.
    """
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for eval_set in eval_sets(args):
        groups, planned = await _play_eval_set(args, rollout_id, eval_set, settings, client)
        trajectories = _played_trajectories(args, eval_set, groups)
        if not trajectories:
            raise GeneratorError(f"evaluation set {eval_set.name} has no trajectory with a reward")
        data[eval_set.name] = {
            "rewards": [float(rows[-1].metadata["raw_reward"]) for rows in trajectories],
            "truncated": [rows[-1].status is Sample.Status.TRUNCATED for rows in trajectories],
            "samples": [rows[-1] for rows in trajectories],
        }
        metrics[f"eval/{eval_set.name}-left_out"] = planned - len(trajectories)
        metrics |= _success(eval_set.name, trajectories)
        metrics |= _weight_versions(eval_set.name, trajectories)
    return RolloutFnEvalOutput(data=data, metrics=metrics)


async def _play_eval_set(
    args: Any, rollout_id: int, eval_set: EvalSet, settings: RolloutSettings, client: AsyncRolloutBufferClient
) -> tuple[list[Group], int]:
    """Plays a set as a job of its own; returns its delivered groups and its planned number of trajectories.

    The groups have no tensors of screenshots; failed groups are left out. After an error or a cancellation the job is
    cancelled, to free its devices and the engine.
    """
    job_id = f"{settings.job_id}-eval-{eval_set.name}-{rollout_id}"
    payload = eval_payload(args, eval_set, job_id=job_id, start_id=uuid.uuid4().hex)
    rows = replace(read_row_settings(args, eval_set.samples_per_group), records=())  # only trained rows need them
    converter = DeliveryConverter(client, rows, None, max_failures=settings.max_failures)
    starting = asyncio.ensure_future(asyncio.to_thread(send_start, settings, payload))
    try:
        await asyncio.shield(starting)
        groups = await _all_groups(JobFeed(client, settings, job_id), converter)
        job = await with_retries("jobs", settings.max_failures, lambda: client.job(job_id))
    except BaseException:  # the reply to a start that the buffer has executed may be lost
        await asyncio.wait({starting})  # a start after the cancellation would leave the job running
        with contextlib.suppress(Exception):
            await client.cancel(job_id)
        raise
    planned = sum(job["groups"].values()) * eval_set.samples_per_group
    return finish_batch([samples_of_group(group) for group in groups], rollout_id), planned


async def _all_groups(feed: JobFeed, converter: DeliveryConverter) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = []
    while True:
        try:
            delivery = await feed.next_delivery()
        except InputExhaustedError:
            return groups
        groups += await converter.groups(delivery.items)
        feed.mark_received(delivery)


def _success(name: str, trajectories: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns the success rate of the trajectories that report success; a shaped reward is not used for it."""
    reported = [rows[-1].metadata.get("success") for rows in trajectories]
    known = [success for success in reported if isinstance(success, bool)]
    return {f"eval/{name}-success": sum(known) / len(known)} if known else {}


def _weight_versions(name: str, trajectories: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Returns how many weight versions sampled the set, and how many trajectories have more than one of them.

    {} if the engine reports no versions.
    """
    by_trajectory = [{str(version) for row in rows for version in row.weight_versions} for rows in trajectories]
    if not (all_versions := set[str]().union(*by_trajectory)):
        return {}
    spanning = sum(len(versions) > 1 for versions in by_trajectory)
    return {f"eval/{name}-weight_versions": len(all_versions), f"eval/{name}-spanning_a_change": spanning}


def _played_trajectories(args: Any, eval_set: EvalSet, groups: Sequence[Group]) -> list[list[Sample]]:
    """Returns the played trajectories; only those of complete groups if slime computes pass rates."""
    needs_whole_groups = getattr(args, "log_passrate", False) and eval_set.samples_per_group > 1
    trajectories = []
    for group in groups:
        played = [rows for rows in trajectories_of([group]) if not rows[0].remove_sample]
        if not needs_whole_groups or len(played) == len(group):
            trajectories += played
    return trajectories
