"""slime's rollout function for agents: ``--rollout-function-path slime.rollout.agent_rollout.generate_rollout``.

A training rollout starts the job if this process has not done so (``start_rollout``), polls until its batch is full,
converts the items to Samples, passes the groups through slime's data buffer, records the ids of consumed instances,
acknowledges the deliveries, and logs. An evaluation plays each of its files once, each as a job of its own.

The ids of consumed groups are stored by rollout in the metadata of the data source, which is part of the trainer's
checkpoint. The first call of a process sends the ids of earlier rollouts as the skip list; the buffer delivers all
other groups again.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slime.rollout.agent_rollout_advantages import (
    give_turn_advantages,
    group_normalized_rewards,
    normalizes,
    set_advantages,
)
from slime.rollout.agent_rollout_argument_checks import (
    ESTIMATORS_WITHOUT_DUMMIES,
    check_arguments,
    is_tokenizer_alone,
    sees_images,
)
from slime.rollout.agent_rollout_batch import played, replace_trajectories_without_log_probs, rule_of
from slime.rollout.agent_rollout_data_postprocess import (
    RowName,
    drop_unknown_log_probs,
    is_reporting_rank,
    report_rows,
    take_weight_off_dummies,
)
from slime.rollout.agent_rollout_data_source import SlimeDataSource
from slime.rollout.agent_rollout_eval import evaluate
from slime.rollout.agent_rollout_samples import Group, batch_metrics, finish_batch, samples_of_group, trajectories_of
from slime.rollout.agent_rollout_settings import (
    ADVANTAGE_PATH,
    OnExhausted,
    RolloutSettings,
    buffer_token,
    engine_url,
    read_image_settings,
    read_mask_settings,
    read_row_settings,
    read_settings,
    read_tracking_settings,
    start_payload,
    step_size,
    trajectories_of_rollout,
)
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.client import DEFAULT_TIMEOUT_S, AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import GeneratorError, NotFoundError
from slime_plugins.rollout_buffer.install_hints import advice_on_two_slimes
from slime_plugins.rollout_buffer.trainer.consumed import (
    JobProgress,
    consumed_before,
    consumed_metadata,
    pass_before,
    skip_list,
)
from slime_plugins.rollout_buffer.trainer.delivery_conversion import DeliveryConverter
from slime_plugins.rollout_buffer.trainer.engine_weight_version import weight_version_of
from slime_plugins.rollout_buffer.trainer.job_feed import (
    InputExhaustedError,
    JobEndedError,
    JobFeed,
    send_start,
    warn_of_prompts,
)
from slime_plugins.rollout_buffer.trainer.mask_selection import check_masks
from slime_plugins.rollout_buffer.trainer.metrics import job_metrics, no_filter_metrics
from slime_plugins.rollout_buffer.trainer.settings import DEFAULT_WAIT_S
from slime_plugins.rollout_buffer.trainer.tracking import STEP, chosen_examples, example_of, tracker_for
from slime_plugins.rollout_buffer.wire import RolloutData, RolloutItem

__all__ = [
    "generate_agent_rollout",
    "generate_rollout",
    "get_rollout_data",
    "log_raw_info",
    "post_process_rewards",
    "post_process_rollout_data",
    "reset_jobs",
    "start_rollout",
    "turn_advantages",
]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LOGGING_TIMEOUT_S = 10.0
"""Time in which the buffer must send metrics and example screenshots for a finished batch."""
REQUIRED_ITEM_KEYS = frozenset({"uid", "instance_id", "messages", "reward", "extra_info"})
MAX_REFILL_FACTOR = 4
"""At most this many times ``rollout_batch_size`` groups are fetched for one batch; then dummies stay in it."""
TASKS_WITH_SCREENSHOTS = frozenset({"android_world", "miniwob"})
"""For these the image processor is loaded before the job starts, for others with the first screenshot."""
LOGGED_COUNTERS = (
    "dummies",
    "engine_image_mismatches",
    "image_mismatches",
    "image_tensor_bytes",
    "images",
    "images_missing",
    "left_out_trajectories",
    "malformed_items",
    "old_tokens",
    "old_trajectories",
    "record_problems",
    "repeated_tokens",
    "row_tokens",
    "rows",
    "short_groups",
    "surplus_items",
    "tokens_from_generations",
    "tokens_from_messages",
    "turn_rewards",
    "untrained_trajectories",
    "without_log_probs",
)
"""Counters of the received items, logged as ``rollout/buffer/<name>``."""

if (_advice := advice_on_two_slimes()) is not None:
    logger.warning("%s", _advice)

_progress_by_job: dict[tuple[str, str], JobProgress] = {}
"""Jobs that this process started, by (URL, job). Without an entry the job is started again, which attaches to it."""
_last_started: dict[str, str] = {}
"""The job that ``start_rollout`` started last, by URL: ``get_rollout_data`` fetches from it."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Returns the samples of one rollout; as ``generate_agent_rollout``, for callers that do not await."""
    return _run(generate_agent_rollout(args, rollout_id, data_source, evaluation))


async def generate_agent_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Collects one rollout and returns ``rollout_batch_size`` groups of ``n_samples_per_prompt``, or an evaluation.

    Args:
        args: slime's arguments; ``agent_rollout_settings`` lists those that are read.
        rollout_id: number of the rollout. If it was returned before, the trainer has resumed from a checkpoint: the job
            is started again with the groups consumed before it as the skip list.
        data_buffer: slime's data source. Its groups are used first.
        evaluation: True plays the evaluation sets once instead of a training rollout.

    Raises:
        ConfigError: an argument is missing or invalid.
        InputExhaustedError: the input is used up and ``rollout_buffer_on_exhausted`` is ``error``.
        JobEndedError: the job was cancelled or has failed.
        JobStalledError: the job was blocked for ``job_feed.MAX_STANDSTILL_S``.
        GeneratorError: no trajectory of the batch, of one of its steps or of an evaluation set can be used.
        RetriesUsedUpError: calls to the buffer failed more often in a row than ``--fetch-trajectory-retry-times``
            allows, or, with -1, for ``job_feed.MAX_OUTAGE_S``.
        RequestError: the buffer refuses the job.
    """
    settings = read_settings(args)
    if not evaluation:
        check_arguments(args)
    await asyncio.to_thread(check_masks, read_mask_settings(args))
    async with AsyncRolloutBufferClient(
        settings.buffer_url, token=settings.token, timeout_s=settings.timeout_s
    ) as client:
        if evaluation:
            return await evaluate(args, rollout_id, settings, client)
        return await _TrainingRollout(args, rollout_id, data_buffer, settings, client).play()


async def get_rollout_data(
    api_base_url: str,
    num: int | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,  # noqa: ASYNC109 - part of the documented signature
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns ready items, at most ``num`` in whole groups, and the ``meta_info`` of the delivery.

    The job is the one that ``start_rollout`` started last in this process at that address, or else the only open one.
    A group is complete if all its members could be played; ``meta_info["short_groups"]`` names the others. A ``num``
    below one group is rounded up, with a note in ``meta_info["note"]``.

    For custom training loops; ``generate_agent_rollout`` does not use it. The items are leased and acknowledged before
    they are returned, so that a lost reply loses no data.

    Raises:
        aiohttp.ClientError: the network failed, or the buffer refuses the request (then also a RolloutBufferError).
        ValueError: the reply, or one of its items, violates the protocol.
        asyncio.TimeoutError: no group was ready within ``timeout`` seconds; the message has the buffer's last reply.
        RequestError: the buffer refuses the request, for instance because several jobs are open.
    """
    poll_s = min(DEFAULT_WAIT_S, 0.8 * timeout)  # so that the first reply arrives before the timeout
    job_id, last_message = _last_started.get(api_base_url.rstrip("/")), "the buffer has not answered"
    try:
        async with (
            asyncio.timeout(timeout) as limit,
            AsyncRolloutBufferClient(api_base_url, token=buffer_token(None), timeout_s=timeout) as client,
        ):
            while True:
                polled_at = time.monotonic()
                data = await client.get_rollout_data(
                    job_id=job_id, batch_size=num, wait_s=poll_s, lease_s=max(60.0, timeout), dummies=False
                )
                if data.items:
                    _check_items(data)
                    if data.delivery_id is not None and (await client.ack([data.delivery_id])).get("expired"):
                        continue  # the lease has expired, and another consumer has the groups
                    return [dict(item.raw) for item in data.items], dict(data.meta_info)
                last_message = data.message
                await asyncio.sleep(max(0.0, min(0.5, poll_s) - (time.monotonic() - polled_at)))
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"no group came within {timeout:g} s: {last_message}") from error


def start_rollout(
    api_base_url: str,
    args: Any,
    metadata: Mapping[str, Any],
    *,
    job_id: str | None = None,
    fresh: bool = False,
    start_id: str | None = None,
) -> dict[str, Any]:
    """Starts the job or attaches to it, and returns ``job_id``, ``state`` and ``message`` of the buffer's reply.

    ``metadata`` is the data source's: lists of consumed instance ids by rollout, which become the skip list. ``fresh``
    starts a new job even if one of that id exists; repeating a ``start_id`` repeats the same start.

    Raises:
        RequestError: the buffer refuses the payload; the message names the error.
        RetriesUsedUpError: as ``generate_agent_rollout``.
        ConfigError: an argument is missing or invalid.
    """
    args = copy.copy(args)
    args.agent_rollout_buffer_url = api_base_url
    settings = read_settings(args)
    payload = start_payload(
        args,
        job_id=job_id or settings.job_id,
        skip_instance_ids=skip_list(metadata),
        fresh=fresh,
        start_id=start_id or uuid.uuid4().hex,
    )
    reply = send_start(settings, payload)
    _last_started[settings.buffer_url] = reply.job_id
    return {"job_id": reply.job_id, "state": reply.state, "message": reply.message}


def log_raw_info(args: Any, all_meta_info: list[dict[str, Any]], rollout_id: int) -> None:
    """Logs the buffer's metrics before filtering, to W&B as well if ``args.use_wandb``.

    A failure of W&B is logged and not raised.
    """
    metrics = no_filter_metrics(all_meta_info)
    if not metrics:
        return
    step = _rollout_step(args, rollout_id)
    logger.info("rollout %d before filtering: %s", rollout_id, {**metrics, STEP: step})
    tracker_for(read_tracking_settings(args)).log_before_filter(metrics, step)


def post_process_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Returns raw and normalised rewards; for slime's ``--custom-reward-post-process-path``.

    It normalises within each group, counts each trajectory once and does not count dummies.

    slime's own normalisation is by position: it uses one baseline for the whole batch if a trajectory has several rows,
    counts dummies, and returns NaN for groups of one.
    """
    return group_normalized_rewards(args, samples)


def post_process_rollout_data(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Removes the weight of dummies on a training rank; for slime's ``--rollout-data-postprocess-path``.

    It also sends slime's values for the rows to the buffer, in the background, for ``rollout-buffer mismatch``.

    Without this function dummies reduce the mean of a step; ``post_process_rewards`` corrects that only for the policy
    loss, which is sufficient without KL and entropy terms.
    """
    take_weight_off_dummies(rollout_data)
    drop_unknown_log_probs(rollout_data)
    try:
        if is_reporting_rank():
            report_rows(args, rollout_id, rollout_data)
    except Exception as error:  # noqa: BLE001 - a failed report must not stop the training
        _warn_once(f"the training report could not be sent to the buffer: {error!r}")


def turn_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets advantages per token for rows with rewards of turns; for slime's ``--custom-advantage-function-path``.

    Other rows get the advantage of slime's GRPO.
    """
    set_advantages(args, rollout_data)


def reset_jobs() -> None:
    """Makes the next rollout start its job again, as in a new process."""
    _progress_by_job.clear()
    _last_started.clear()


class _TrainingRollout:
    """Collects the batch of one training rollout, across restarts of the buffer and passes over the input."""

    def __init__(
        self, args: Any, rollout_id: int, data_source: Any, settings: RolloutSettings, client: AsyncRolloutBufferClient
    ) -> None:
        self._args = args
        self._rollout_id = rollout_id
        self._settings = settings
        self._client = client
        self._data_source = SlimeDataSource(data_source)
        self._rule = rule_of(args)
        self._exhausted = False
        self._tracking = read_tracking_settings(args)
        self._converter = DeliveryConverter(
            client,
            read_row_settings(args, settings.samples_per_group),
            read_image_settings(args),
            max_failures=settings.max_failures,
            trajectories=settings.groups_per_rollout * settings.samples_per_group,
        )
        self._received: list[Group] = []
        """All groups that this rollout has received, also those that stay in slime's buffer for the next one."""
        self._examples: list[RolloutItem] = []
        self._finished_elsewhere: dict[int, list[str]] = {}
        """Instance ids of groups that finished without being delivered, by pass over the input."""
        self._all_meta_info: list[dict[str, Any]] = []

    async def play(self) -> RolloutFnTrainOutput:
        """Returns the batch, after the consumed ids are recorded and the groups acknowledged."""
        if sees_images(self._args) and self._args.rollout_task_type in TASKS_WITH_SCREENSHOTS:
            await self._converter.load_vision()
        try:
            await self._open_job()
            groups = await self._collect()
        except JobEndedError:
            # The next call starts the job again: the buffer reopens a failed job.
            _progress_by_job.pop(self._key, None)
            raise
        batch = finish_batch(groups, self._rollout_id, self._args)
        if getattr(self._args, "custom_advantage_function_path", None) == ADVANTAGE_PATH:
            give_turn_advantages(self._args, [row for rows in trajectories_of(batch) for row in rows])
        if self._settings.pause_between_rollouts:
            await self._feed.pause()
        log_raw_info(self._args, self._all_meta_info, self._rollout_id)
        metrics = {**self._metrics(), **batch_metrics(batch), **await self._accounting()}
        await self._track(metrics)
        self._progress.last_returned = self._rollout_id
        _warn_about_arguments(self._args, batch)
        return RolloutFnTrainOutput(samples=batch, metrics=metrics)

    async def _open_job(self) -> None:
        """Starts the job on the first call of a process, and again when the trainer went back to a checkpoint."""
        progress = _progress_by_job.get(self._key)
        if progress is None or progress.went_back_to(self._rollout_id):
            self._progress = JobProgress(pass_number=pass_before(self._data_source.metadata(), self._rollout_id))
            await self._start(fresh=self._rollout_id == 0)  # rollout 0 begins a new training
            _progress_by_job[self._key] = self._progress
        else:
            self._progress = progress
        self._feed = JobFeed(self._client, self._settings, self._job_id())
        self._feed.weight_version = await weight_version_of(engine_url(self._args))
        try:
            await self._feed.resume()
        except NotFoundError:
            logger.warning("the buffer has no job %s any more; it is started again", self._feed.job_id)
            self._progress.forget_groups()
            await self._start(fresh=False)
            await self._feed.resume()

    async def _start(self, *, fresh: bool) -> None:
        consumed = consumed_before(self._data_source.metadata(), self._rollout_id, self._progress.pass_number)
        reply = await asyncio.to_thread(
            start_rollout,
            self._settings.buffer_url,
            self._args,
            consumed,
            job_id=self._job_id(),
            fresh=fresh,
            start_id=uuid.uuid4().hex,
        )
        skipped = len(skip_list(consumed))
        logger.info("job %s: %s; %d groups were consumed before", reply["job_id"], reply["message"], skipped)

    @property
    def _key(self) -> tuple[str, str]:
        return self._settings.buffer_url, self._settings.job_id

    def _job_id(self) -> str:
        number = self._progress.pass_number
        return f"{self._settings.job_id}-pass-{number}" if number else self._settings.job_id

    async def _collect(self) -> list[Group]:
        """Fetches groups until the batch is full of played trajectories, or the input is used up."""
        fetched: list[Group] = []
        while missing := self._missing(fetched):
            taken = await self._take(missing, batch_groups=len(fetched))
            fetched += taken
            if not taken and self._missing(fetched):
                raise InputExhaustedError(
                    f"rollout {self._rollout_id}: the input is used up: no group passed the filter"
                )
            self._converter.counts["without_log_probs"] += replace_trajectories_without_log_probs(fetched)
            if not self._missing(fetched):
                fetched = await self._acknowledge(fetched)
        batch = self._rule.batch(fetched)
        counts = self._converter.counts
        counts["short_groups"] = sum(played(group) < self._rule.members for group in fetched)
        counts["left_out_trajectories"] = sum(map(played, fetched)) - sum(map(played, batch))
        return batch

    def _missing(self, fetched: Sequence[Group]) -> int:
        """Returns the number of missing groups, including replacements for members that could not be played.

        Raises:
            GeneratorError: there are groups enough for a batch, and all their members are dummies.
        """
        needed = self._settings.groups_per_rollout
        if len(fetched) >= needed:
            _refuse_batch_without_training(fetched)
        if self._exhausted or len(fetched) >= MAX_REFILL_FACTOR * needed:
            return max(0, needed - len(fetched))
        return self._rule.missing(fetched)

    async def _take(self, missing: int, *, batch_groups: int) -> list[Group]:
        """Returns the next groups that pass slime's buffer filter, at least one until the input is used up.

        ``batch_groups`` is the number of groups that the batch has already.
        """
        surplus = 0
        while True:
            while (lacking := missing + surplus - self._data_source.waiting_count()) > 0 and not self._exhausted:
                await self._fetch(lacking, batch_groups=batch_groups)
            taken = self._data_source.take(missing)
            if taken or self._exhausted:
                return taken
            # The filter rejected all groups: give it more to choose from.
            surplus = max(0, self._data_source.waiting_count() - missing + 1)

    async def _acknowledge(self, batch: list[Group]) -> list[Group]:
        """Records and acknowledges consumed groups; returns the batch without groups that went to another consumer.

        On-policy, running attempts are given up before, so that none is sampled by two weight versions.
        """
        _refuse_dummies(self._args, self._rule.batch(batch))
        self._record(batch)
        if self._settings.on_policy:
            await self._feed.drain(stop=True)
            self._feed.release()
        await self._feed.flush_acks()
        self._drop_lost_groups()
        ours = [group for group in batch if self._is_ours(group)]
        if self._settings.on_policy and self._missing(ours):
            await self._feed.resume()
        return ours

    def _drop_lost_groups(self) -> None:
        self._progress.lose(self._feed.lost)
        self._received = [group for group in self._received if self._is_ours(group)]

    def _is_ours(self, group: Group) -> bool:
        delivery_id = _first_trajectories([group])[0][0].metadata.get("delivery_id")
        return delivery_id not in self._progress.lost_deliveries

    async def _fetch(self, max_groups: int, *, batch_groups: int) -> None:
        if self._feed.groups_held >= self._settings.groups_per_rollout:
            self._feed.release()  # only on-policy: the job plays no further groups while max_groups_ahead are leased
        try:
            delivery = await self._feed.next_delivery(max_groups)
        except InputExhaustedError as error:
            await self._after_exhaustion(error, batch_groups)
            return
        self._drop_lost_groups()
        new = self._progress.new_part(delivery)
        self._note_newest_delivery(delivery)
        if new is not None:
            await self._add_groups(new)
        if self._settings.on_policy:
            self._feed.mark_taken(delivery)  # not acknowledged yet: while it is leased, the job plays no further groups
        else:
            self._feed.mark_received(delivery)

    def _note_newest_delivery(self, delivery: RolloutData) -> None:
        """Writes the delivery's id into those of its groups that were received before: now its ack is theirs, too."""
        redelivered = {item.uid for item in delivery.items if item.group_index in self._progress.seen_groups}
        for sample in (row for rows in trajectories_of(self._received) for row in rows):
            if sample.prompt in redelivered:  # a Sample's prompt is the uid of its trajectory
                sample.metadata["delivery_id"] = delivery.delivery_id

    async def _add_groups(self, delivery: RolloutData) -> None:
        """Converts the groups of a delivery to Samples and adds them to slime's data source."""
        groups = [
            samples_of_group(group)
            for group in await self._converter.groups(delivery.items, trainer_version=self._feed.weight_version)
        ]
        for sample in (row for rows in trajectories_of(groups) for row in rows):
            sample.metadata["input_pass"] = self._progress.pass_number
            sample.metadata["delivery_id"] = delivery.delivery_id
            sample.index = RowName.of(
                sample.index, job_id=self._job_id(), uid=str(sample.prompt), row=sample.metadata["row"]
            )
        self._data_source.add(groups)
        self._progress.remember(delivery)
        self._examples = chosen_examples([*self._examples, *delivery.items])
        self._received += groups
        self._record_meta_info(delivery, groups)
        self._record(self._received)  # off-policy, the next poll acknowledges the delivery: it must be recorded before

    async def _after_exhaustion(self, error: InputExhaustedError, batch_groups: int) -> None:
        """Starts the next pass over the input, if the settings allow it, or else completes the batch with dummies.

        Raises:
            InputExhaustedError: there is no next pass, and the batch has too few groups.
        """
        needed = self._settings.groups_per_rollout
        count = batch_groups + self._data_source.waiting_count()
        so_far = f"rollout {self._rollout_id} has {count} of {needed} groups and {error.message}"
        repeats = self._settings.on_exhausted is OnExhausted.REPEAT and not error.detail.get("cause")
        if count >= needed and not (repeats and self._progress.groups_in_pass):
            logger.warning("%s: no group is left to refill the batch, and dummies replace the missing members", so_far)
            self._exhausted = True
            return
        if cause := error.detail.get("cause"):  # another pass would fail as well
            raise InputExhaustedError(f"{so_far}, and no group could be trained: {cause}", error.detail) from error
        if self._settings.on_exhausted is OnExhausted.ERROR:
            advice = "raise --num-epoch, or set rollout_buffer_on_exhausted: repeat"
            raise InputExhaustedError(f"{so_far}: {advice}", error.detail) from error
        if not self._progress.groups_in_pass:
            raise InputExhaustedError(f"{so_far}; a complete pass gave no group", error.detail) from error
        self._progress.begin_next_pass()
        logger.info("%s; pass %d begins", so_far, self._progress.pass_number)
        await self._start(fresh=True)
        self._feed.release()
        await self._feed.flush_acks()
        self._drop_lost_groups()
        self._feed.job_id = self._job_id()

    def _record_meta_info(self, delivery: RolloutData, groups: Sequence[Group]) -> None:
        """Records the delivery's ``meta_info``: statistics, and groups that finished without being delivered."""
        self._all_meta_info.append(dict(delivery.meta_info))
        self._progress.groups_in_pass += len(groups)
        finished = Counter(str(instance_id) for instance_id in delivery.meta_info.get("finished_groups") or ())
        delivered = Counter(trajectory[0].metadata["instance_id"] for trajectory in _first_trajectories(groups))
        self._finished_elsewhere.setdefault(self._progress.pass_number, []).extend((finished - delivered).elements())

    def _record(self, groups: Sequence[Group]) -> None:
        """Writes the consumed ids of this rollout into the metadata: of ``groups``, and of those finished elsewhere."""
        ids_by_pass = {number: list(ids) for number, ids in self._finished_elsewhere.items()}
        for trajectory in _first_trajectories(groups):
            metadata = trajectory[0].metadata
            ids_by_pass.setdefault(metadata["input_pass"], []).append(metadata["instance_id"])
        self._data_source.update_metadata(
            consumed_metadata(self._data_source.metadata(), self._rollout_id, ids_by_pass, self._progress.pass_number)
        )

    async def _accounting(self) -> dict[str, float]:
        """Returns the job's metrics; {} if the buffer does not reply within ``LOGGING_TIMEOUT_S``."""
        try:
            async with asyncio.timeout(LOGGING_TIMEOUT_S):
                job = await self._client.job(self._feed.job_id)
            warn_of_prompts(job)
            return job_metrics(job)
        except Exception as error:  # noqa: BLE001 - the batch is acknowledged already and must be returned
            logger.info("the accounting of job %s could not be read: %r", self._feed.job_id, error)
            return {}

    async def _track(self, metrics: Mapping[str, float]) -> None:
        """Logs the rollout's metrics, and examples at their interval, to the sinks that slime does not have."""
        tracker, step = tracker_for(self._tracking), _rollout_step(self._args, self._rollout_id)
        tracker.log_rollout(metrics, step)
        if self._tracking.logs_examples(self._rollout_id):
            screenshots = await self._screenshots()
            tracker.log_examples([example_of(item, screenshots) for item in self._examples], step)

    async def _screenshots(self) -> Mapping[str, bytes]:
        """Returns the examples' first and last screenshots; {} if they cannot be fetched in time."""
        hashes = [sha256 for item in self._examples for sha256 in (*item.images[:1], *item.images[-1:])]
        try:
            async with asyncio.timeout(LOGGING_TIMEOUT_S):
                return (await self._converter.images.fetch(hashes)).data
        except Exception as error:  # noqa: BLE001 - as for the accounting
            logger.info("the screenshots of the examples could not be fetched: %r", error)
            return {}

    def _metrics(self) -> dict[str, float]:
        counts = self._converter.counts
        drift = {f"rollout/{name}": count for name, count in counts.items() if name.startswith("token_drift/")}
        return {
            **no_filter_metrics(self._all_meta_info),
            **drift,
            "rollout/buffer/wait_s": self._feed.waited_s,
            "rollout/buffer/images_fetched": self._converter.images.fetched,
            **{f"rollout/buffer/{name}": counts[name] for name in LOGGED_COUNTERS},
        }


# --- helpers ---------------------------------------------------------------------------------------------------------


def _rollout_step(args: Any, rollout_id: int) -> int:
    """Returns the step under which slime logs a rollout."""
    if not getattr(args, "wandb_always_use_train_step", False):
        return rollout_id
    return rollout_id * trajectories_of_rollout(args) // step_size(args)


def _check_items(data: RolloutData) -> None:
    for item in data.items:
        missing = sorted(REQUIRED_ITEM_KEYS - item.raw.keys())
        if missing:
            raise ValueError(f"item {item.uid} of the buffer's reply has no {', '.join(missing)}")
        if item.error is not None:
            raise ValueError(f"item {item.uid} of the buffer's reply is malformed: {item.error}")


def _first_trajectories(groups: Sequence[Group]) -> list[list[Sample]]:
    return [trajectories_of([group])[0] for group in groups]


def _refuse_batch_without_training(batch: Sequence[Group]) -> None:
    """Refuses a batch of dummies alone.

    Raises:
        GeneratorError: the batch has only dummies; the message names their three most frequent reasons.
    """
    samples = [rows[0] for rows in trajectories_of(batch)]
    if all(sample.remove_sample for sample in samples):
        reasons = Counter(str(sample.metadata["dummy_reason"]) for sample in samples)
        raise GeneratorError(f"no trajectory of this rollout can be trained: {reasons.most_common(3)}")


def _refuse_dummies(args: Any, batch: Sequence[Group]) -> None:
    """Refuses a batch with dummies if the advantage estimator does not support them.

    Raises:
        InputExhaustedError: no group is left to replace the dummies.
    """
    dummies = sum(rows[0].remove_sample for rows in trajectories_of(batch))
    if dummies and getattr(args, "advantage_estimator", None) in ESTIMATORS_WITHOUT_DUMMIES:
        raise InputExhaustedError(
            f"{dummies} trajectories of this rollout were not played, no group is left to replace them, and "
            f"--advantage-estimator {args.advantage_estimator} supports no dummies: raise --num-epoch, or set "
            "rollout_buffer_on_exhausted: repeat"
        )


def _warn_about_arguments(args: Any, batch: Sequence[Group]) -> None:
    """Warns of unwanted effects of slime's arguments on this batch, of each once per process."""
    by_slime = normalizes(args) and not getattr(args, "custom_reward_post_process_path", None)
    if by_slime and any(isinstance(member, list) for group in batch for member in group):
        _warn_once(
            "some trajectories have several rows, so slime's own reward normalisation uses one baseline for the whole "
            "batch: set --custom-reward-post-process-path slime.rollout.agent_rollout.post_process_rewards"
        )
    if by_slime and args.n_samples_per_prompt == 1:
        _warn_once(
            "groups of one have no baseline: normalised rewards are NaN in slime, or 0 with post_process_rewards"
        )
    without_tensors = any(_lacks_image_tensors(row) for rows in trajectories_of(batch) for row in rows)
    if without_tensors and not is_tokenizer_alone(args):
        _warn_once("trajectories have screenshots, but rows have only placeholder tokens: a vision model needs tensors")
    if getattr(args, "rollout_global_dataset", True) is False:
        _warn_once("--disable-rollout-global-dataset: consumed ids are not in the checkpoint; a resumed run repeats")


def _lacks_image_tensors(sample: Sample) -> bool:
    shown = bool(sample.metadata.get("has_images"))
    return shown and not sample.remove_sample and sample.multimodal_train_inputs is None


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine, also in a thread with a running event loop."""
    try:
        asyncio.get_running_loop()
        has_loop = True
    except RuntimeError:
        has_loop = False
    if not has_loop:  # outside of the handler, so that errors are not chained to the RuntimeError
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
