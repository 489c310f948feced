"""slime's rollout function for agents: ``--rollout-function-path slime.rollout.agent_rollout.generate_rollout``.

The straight line of one training rollout: start the job once (``start_rollout``), poll for exactly the groups that are
missing, turn each item into Samples, put the groups into slime's data buffer and take a batch out of it, write down
which instances were consumed, acknowledge, log. An evaluation plays its files once, as jobs of their own.

What was trained only the trainer's checkpoint knows. The ids of consumed groups go into the data source's metadata,
under the rollout that returned them; the first call of a process sends those of earlier rollouts as the skip list, and
the buffer hands out the others again.
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
from slime.rollout.agent_rollout_argument_checks import ESTIMATORS_WITHOUT_DUMMIES, check_arguments, sees_images
from slime.rollout.agent_rollout_batch import make_odd_dummies, rule_of
from slime.rollout.agent_rollout_data_source import GroupStore
from slime.rollout.agent_rollout_eval import evaluate
from slime.rollout.agent_rollout_postprocess import (
    drop_unknown_log_probs,
    speaks_for_its_rows,
    take_weight_off_dummies,
)
from slime.rollout.agent_rollout_reports import RowName, report_rows
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
)
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.client import AsyncRolloutBufferClient
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

LOOKING_TIMEOUT_S = 10.0
"""How long a finished batch waits for numbers and pictures beside it."""
REQUIRED_ITEM_KEYS = frozenset({"uid", "instance_id", "messages", "reward", "extra_info"})
MAX_WAIT_OF_ONE_POLL_S = 20.0
MAX_GROUPS_FOR_ONE = 4
"""At most so many times the groups of a batch are taken to fill it; then dummies stay in it."""
TASKS_WITH_SCREENSHOTS = frozenset({"android_world", "miniwob"})
"""For these a vision model's image processor is loaded before the job starts, for others with the first screenshot."""
COUNTED = (
    "dummies",
    "engine_image_mismatches",
    "image_mismatches",
    "image_tensor_bytes",
    "images",
    "images_missing",
    "malformed_items",
    "old_tokens",
    "old_trajectories",
    "record_problems",
    "row_tokens",
    "rows",
    "surplus_items",
    "tokens_from_generations",
    "tokens_from_messages",
    "turn_rewards",
    "untrained_trajectories",
    "without_log_probs",
)
"""What a rollout counts of the items it received, logged as ``rollout/buffer/<name>``."""

if (_advice := advice_on_two_slimes()) is not None:
    logger.warning("%s", _advice)

_progress_by_job: dict[tuple[str, str], JobProgress] = {}
"""What this process started, per (URL, job). Losing it costs one more start, which attaches to the job."""
_last_started: dict[str, str] = {}
"""The job that ``start_rollout`` started last, per URL: the one that ``get_rollout_data`` is meant to fetch."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Returns the samples of one rollout to slime: exactly the groups it asked for, or an error that says why not."""
    return _run(generate_agent_rollout(args, rollout_id, data_source, evaluation))


async def generate_agent_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Plays one rollout and returns ``rollout_batch_size`` groups of ``n_samples_per_prompt``, or an evaluation.

    Args:
        args: slime's arguments; ``agent_rollout_settings`` says which are read.
        rollout_id: number of the rollout. A number that was already returned means that the trainer went back to a
            checkpoint: the job is started again with what was consumed before it.
        data_buffer: slime's data source. Groups that it still holds are used first.
        evaluation: plays the evaluation sets once instead.

    Raises:
        ConfigError: an argument is missing or means nothing.
        InputExhaustedError: the input is used up and ``rollout_buffer_on_exhausted`` is ``error``.
        JobEndedError: the job was cancelled or has failed.
        RetriesUsedUpError: the buffer failed more often in a row than ``--fetch-trajectory-retry-times`` allows.
        RequestError: the buffer refuses the job and says why.
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
    timeout: float = 100.0,  # noqa: ASYNC109 - part of the documented signature
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the items that are ready, at most ``num`` of them (whole groups), and the meta information beside them.

    Of the job that ``start_rollout`` started last in this process at that address, else of the only one there is.
    A group comes whole where all its members could be played; ``meta_info["short_groups"]`` names the others. A ``num``
    below one group is rounded up, and ``meta_info["note"]`` says so.

    For loops of your own; ``generate_agent_rollout`` leases its groups by job. The items are leased here too and
    acknowledged before they are returned, so that a reply lost on the way is not lost data.

    Raises:
        aiohttp.ClientError: the network failed, or the buffer refuses the request; then it is a RolloutBufferError too.
        ValueError: the reply, or one of its items, is not what the protocol says.
        asyncio.TimeoutError: nothing was ready within ``timeout`` seconds; says what the buffer said last.
        RequestError: the buffer refuses the request and says why, for instance because several jobs are open.
    """
    poll_s = min(MAX_WAIT_OF_ONE_POLL_S, 0.8 * timeout)  # the first one is answered in time to say what is
    job_id, last_message = _last_started.get(api_base_url.rstrip("/")), "the buffer has not answered"
    try:
        async with (
            asyncio.timeout(timeout) as limit,
            AsyncRolloutBufferClient(api_base_url, token=buffer_token(None), timeout_s=timeout) as client,
        ):
            while True:
                asked = time.monotonic()
                data = await client.get_rollout_data(
                    job_id=job_id, batch_size=num, wait_s=poll_s, lease_s=max(60.0, timeout), dummies=False
                )
                if data.items:
                    _check_items(data)
                    if data.delivery_id is not None and (await client.ack([data.delivery_id])).get("expired"):
                        continue  # the lease ran out on the way, and somebody else has them now
                    return [dict(item.raw) for item in data.items], dict(data.meta_info)
                last_message = data.message
                await asyncio.sleep(max(0.0, min(0.5, poll_s) - (time.monotonic() - asked)))
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
    """Starts the job, or attaches to it, and returns the buffer's answer: ``job_id``, ``state``, ``message``.

    ``metadata`` is the data source's: lists of consumed instance ids by rollout. They are the skip list. ``fresh`` asks
    for a new job even when one of that id exists; the same ``start_id`` sent twice is one start.

    Raises:
        RequestError: the buffer refuses the payload; its sentence says what to fix.
        RetriesUsedUpError: it could not be reached as often as ``--fetch-trajectory-retry-times`` allows.
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
    _last_started[settings.buffer_url.rstrip("/")] = reply["job_id"]
    return reply


def log_raw_info(args: Any, all_meta_info: list[dict[str, Any]], rollout_id: int) -> None:
    """Logs what the buffer saw before any filter, to W&B as well when ``args.use_wandb``; never stops the training."""
    metrics = no_filter_metrics(all_meta_info)
    if not metrics:
        return
    step = _rollout_step(args, rollout_id)
    logger.info("rollout %d before filtering: %s", rollout_id, {**metrics, STEP: step})
    tracker_for(read_tracking_settings(args)).log_before_filter(metrics, step)


def post_process_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """slime's ``--custom-reward-post-process-path``: GRPO per group that counts each trajectory once and no dummy.

    slime's own normalisation goes by position: it falls back to one baseline for the whole batch as soon as one
    trajectory has several rows, counts dummies, and yields NaN for groups of one.
    """
    return group_normalized_rewards(args, samples)


def post_process_rollout_data(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """slime's ``--rollout-data-postprocess-path``: on each training rank, takes the weight off dummies.

    And tells the buffer what slime computed of the rows, in the background: ``rollout-buffer mismatch`` shows it.

    Without it dummies make the mean of a step smaller; ``post_process_rewards`` undoes that for the policy's part of
    the loss alone, which is all of it where there is no KL or entropy term.
    """
    take_weight_off_dummies(rollout_data)
    drop_unknown_log_probs(rollout_data)
    try:
        if speaks_for_its_rows():
            report_rows(args, rollout_id, rollout_data)
    except Exception as error:  # noqa: BLE001 - a look at the training must not end it
        _warn_once(f"what was trained is not reported to the buffer: {error!r}")


def turn_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """slime's ``--custom-advantage-function-path``: on each rank, advantages by token where turns earned rewards.

    A row whose trajectory has none gets what slime's GRPO gives it.
    """
    set_advantages(args, rollout_data)


def reset_jobs() -> None:
    """Makes the next rollout start its job again, as in a new process."""
    _progress_by_job.clear()
    _last_started.clear()


class _TrainingRollout:
    """One call for training: collects a batch from the job, through restarts of the buffer and passes of the input."""

    def __init__(
        self,
        args: Any,
        rollout_id: int,
        data_source: Any,
        settings: RolloutSettings,
        client: AsyncRolloutBufferClient,
    ) -> None:
        self._args = args
        self._rollout_id = rollout_id
        self._settings = settings
        self._client = client
        self._store = GroupStore(data_source)
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
        self._examples: list[RolloutItem] = []
        self._finished_elsewhere: dict[int, list[str]] = {}
        self._all_meta_info: list[dict[str, Any]] = []

    async def play(self) -> RolloutFnTrainOutput:
        """Returns the batch, after what was consumed is written down and acknowledged."""
        if sees_images(self._args) and self._args.rollout_task_type in TASKS_WITH_SCREENSHOTS:
            await self._converter.load_vision()
        try:
            await self._open_job()
            groups = await self._collect()
        except JobEndedError:
            # The next call starts the job again: the buffer reopens one that has failed.
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
            self._progress = JobProgress(pass_number=pass_before(self._store.metadata(), self._rollout_id))
            await self._start(fresh=self._rollout_id == 0)
            _progress_by_job[self._key] = self._progress
        else:
            self._progress = progress
        self._feed = self._feed_of_job()
        self._feed.weight_version = await weight_version_of(engine_url(self._args))
        try:
            await self._feed.resume()
        except NotFoundError:
            logger.warning("the buffer does not know job %s any more; it is started again", self._feed.job_id)
            await self._start(fresh=False)
            await self._feed.resume()

    async def _start(self, *, fresh: bool) -> None:
        consumed = consumed_before(self._store.metadata(), self._rollout_id, self._progress.pass_number)
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

    def _feed_of_job(self) -> JobFeed:
        return JobFeed(self._client, self._settings, self._job_id())

    @property
    def _key(self) -> tuple[str, str]:
        return self._settings.buffer_url, self._settings.job_id

    def _job_id(self) -> str:
        passes = self._progress.pass_number
        return f"{self._settings.job_id}-pass-{passes}" if passes else self._settings.job_id

    async def _collect(self) -> list[Group]:
        """Fetches until the batch has as many played trajectories as slime trains, or the input has no more."""
        seen: list[Group] = []
        while missing := self._missing(seen):
            taken = await self._take(missing, have=len(seen))
            seen += taken
            if not taken and self._missing(seen):
                raise InputExhaustedError(f"rollout {self._rollout_id}: the input is used up, and its filter took none")
            self._converter.counts["without_log_probs"] += make_odd_dummies(seen)
            if not self._missing(seen):
                seen = await self._acknowledged(seen)
        return self._rule.batch(seen)

    def _missing(self, seen: Sequence[Group]) -> int:
        """Returns how many groups more are wanted. Places that could not be played are refilled while there is hope."""
        needed = self._settings.groups_per_rollout
        if len(seen) >= needed:
            _refuse_batch_without_training(seen)
        if self._exhausted or len(seen) >= MAX_GROUPS_FOR_ONE * needed:
            return max(0, needed - len(seen))
        return self._rule.missing(seen)

    async def _take(self, missing: int, *, have: int) -> list[Group]:
        """Returns the next groups that slime's buffer filter lets through, at least one while the input has some."""
        beyond = 0
        while True:
            while (short := missing + beyond - self._store.held()) > 0 and not self._exhausted:
                await self._fetch(short, have=have)
            taken = self._store.take(missing)
            if taken or self._exhausted:
                return taken
            # A filter that takes nothing of enough groups wants a larger choice.
            beyond = max(0, self._store.held() - missing + 1)

    async def _acknowledged(self, batch: list[Group]) -> list[Group]:
        """Writes down what is consumed and acknowledges it; returns the batch without what others got meanwhile."""
        _refuse_batch_without_training(batch)
        _refuse_dummies(self._args, self._rule.batch(batch))
        self._record(batch)
        if self._settings.on_policy:
            await self._feed.drain(stop=True)
            self._feed.release()
        await self._feed.flush_acks()
        self._progress.lose(self._feed.lost)
        self._received = [group for group in self._received if self._owns(group)]
        left = [group for group in batch if self._owns(group)]
        if self._settings.on_policy and self._missing(left):
            await self._feed.resume()
        return left

    def _owns(self, group: Group) -> bool:
        return self._progress.owns((_first_members([group])[0][0].metadata or {}).get("delivery_id"))

    async def _fetch(self, max_groups: int, *, have: int) -> None:
        if self._feed.groups_held >= self._settings.groups_per_rollout:
            self._feed.release()  # on-policy, and a filter wants a larger choice: the weights are still the same
        try:
            delivery = await self._feed.next_delivery(max_groups)
        except InputExhaustedError as error:
            await self._after_exhaustion(error, have)
            return
        self._progress.lose(self._feed.lost)
        new = self._progress.new_part(delivery)
        if new is not None:
            await self._keep(new)
        if self._settings.on_policy:
            self._feed.taken(delivery)  # leased, they keep others from being begun
        else:
            self._feed.received(delivery)

    async def _keep(self, delivery: RolloutData) -> None:
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
        self._store.add(groups)
        self._progress.remember(delivery)
        self._examples = chosen_examples([*self._examples, *delivery.items])
        self._received += groups
        self._note(delivery, groups)
        self._record(self._received)

    async def _after_exhaustion(self, error: InputExhaustedError, have: int) -> None:
        """Starts the next pass over the input, or says that there is none."""
        needed = self._settings.groups_per_rollout
        so_far = f"rollout {self._rollout_id} has {have + self._store.held()} of {needed} groups and {error.message}"
        repeats = self._settings.on_exhausted is OnExhausted.REPEAT and not error.detail.get("cause")
        if have + self._store.held() >= needed and not (repeats and self._progress.groups_in_pass):
            logger.warning("%s: nothing is left to refill it, dummies stay in the places that were not played", so_far)
            self._exhausted = True
            return
        if cause := error.detail.get("cause"):  # more epochs would give as little
            raise InputExhaustedError(f"{so_far}, and nothing of it could be trained: {cause}", error.detail) from error
        if self._settings.on_exhausted is OnExhausted.ERROR:
            advice = "raise --num-epoch, or set rollout_buffer_on_exhausted: repeat"
            raise InputExhaustedError(f"{so_far}: {advice}", error.detail) from error
        if not self._progress.groups_in_pass:
            raise InputExhaustedError(f"{so_far}; a whole pass over it gave no group", error.detail) from error
        self._progress.begin_next_pass()
        logger.info("%s; pass %d begins", so_far, self._progress.pass_number)
        await self._start(fresh=True)
        self._feed.release()
        await self._feed.flush_acks()
        before, self._feed = self._feed, self._feed_of_job()
        self._feed.weight_version = before.weight_version

    def _note(self, delivery: RolloutData, groups: Sequence[Group]) -> None:
        """Keeps what the buffer says beside the items: statistics, and groups that ended without being delivered."""
        self._all_meta_info.append(dict(delivery.meta_info))
        self._progress.groups_in_pass += len(groups)
        finished = Counter(str(instance_id) for instance_id in delivery.meta_info.get("finished_groups") or ())
        delivered = Counter(trajectory[0].metadata["instance_id"] for trajectory in _first_members(groups))
        self._finished_elsewhere.setdefault(self._progress.pass_number, []).extend((finished - delivered).elements())

    def _record(self, groups: Sequence[Group]) -> None:
        ids_by_pass = {number: list(ids) for number, ids in self._finished_elsewhere.items()}
        for trajectory in _first_members(groups):
            metadata = trajectory[0].metadata
            ids_by_pass.setdefault(metadata["input_pass"], []).append(metadata["instance_id"])
        self._store.update_metadata(
            consumed_metadata(self._store.metadata(), self._rollout_id, ids_by_pass, self._progress.pass_number)
        )

    async def _accounting(self) -> dict[str, float]:
        """Returns the job's accounting beside the batch, none when the buffer does not tell them soon."""
        try:
            async with asyncio.timeout(LOOKING_TIMEOUT_S):
                job = await self._client.job(self._feed.job_id)
            warn_of_prompts(job)
            return job_metrics(job)
        except Exception as error:  # noqa: BLE001 - the batch is acknowledged: numbers beside it must not lose it
            logger.info("the accounting of job %s could not be read: %r", self._feed.job_id, error)
            return {}

    async def _track(self, metrics: Mapping[str, float]) -> None:
        """Sends the rollout's metrics, and now and then examples, to the sinks that slime does not have."""
        tracker, step = tracker_for(self._tracking), _rollout_step(self._args, self._rollout_id)
        tracker.log_rollout(metrics, step)
        if self._tracking.wants_examples(self._rollout_id):
            screenshots = await self._screenshots()
            tracker.log_examples([example_of(item, screenshots) for item in self._examples], step)

    async def _screenshots(self) -> Mapping[str, bytes]:
        """Returns the examples' first and last screenshots; none when the buffer does not hand them out soon."""
        hashes = [sha256 for item in self._examples for sha256 in (*item.images[:1], *item.images[-1:])]
        try:
            async with asyncio.timeout(LOOKING_TIMEOUT_S):
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
            **{f"rollout/buffer/{name}": counts[name] for name in COUNTED},
        }


# --- helpers ---------------------------------------------------------------------------------------------------------


def _rollout_step(args: Any, rollout_id: int) -> int:
    """The step that slime logs a rollout under."""
    if not getattr(args, "wandb_always_use_train_step", False):
        return rollout_id
    return int(rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)


def _check_items(data: RolloutData) -> None:
    for item in data.items:
        missing = sorted(REQUIRED_ITEM_KEYS - item.raw.keys())
        if missing:
            raise ValueError(f"item {item.uid} of the buffer's reply has no {', '.join(missing)}")
        if item.error is not None:
            raise ValueError(f"item {item.uid} of the buffer's reply is malformed: {item.error}")


def _first_members(groups: Sequence[Group]) -> list[list[Sample]]:
    return [trajectories_of([group])[0] for group in groups]


def _refuse_batch_without_training(batch: Sequence[Group]) -> None:
    """A batch of dummies alone means that something is broken for every episode; training on it would hide that."""
    samples = [rows[0] for rows in trajectories_of(batch)]
    if all(sample.remove_sample for sample in samples):
        reasons = Counter(str(sample.metadata["dummy_reason"]) for sample in samples)
        raise GeneratorError(f"no trajectory of this rollout can be trained: {reasons.most_common(3)}")


def _refuse_dummies(args: Any, batch: Sequence[Group]) -> None:
    """slime's reinforce_plus_plus stops at a sequence without a trained token."""
    dummies = sum(rows[0].remove_sample for rows in trajectories_of(batch))
    if dummies and getattr(args, "advantage_estimator", None) in ESTIMATORS_WITHOUT_DUMMIES:
        raise InputExhaustedError(
            f"{dummies} trajectories of this rollout were not played, nothing is left to take their places, and "
            f"--advantage-estimator {args.advantage_estimator} takes no dummies: raise --num-epoch, or set "
            "rollout_buffer_on_exhausted: repeat"
        )


def _warn_about_arguments(args: Any, batch: Sequence[Group]) -> None:
    """Says once what slime will do to this batch that its user may not expect."""
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
    if any(_misses_its_images(row) for rows in trajectories_of(batch) for row in rows):
        _warn_once("trajectories have screenshots, which reach the trainer as tokens only: a vision model misses them")
    if getattr(args, "rollout_global_dataset", True) is False:
        _warn_once("--disable-rollout-global-dataset: consumed ids are not in the checkpoint; a resumed run repeats")


def _misses_its_images(sample: Sample) -> bool:
    shown = bool(sample.metadata.get("has_images"))
    return shown and not sample.remove_sample and sample.multimodal_train_inputs is None


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end, also where the calling thread has an event loop already."""
    try:
        asyncio.get_running_loop()
        is_free = False
    except RuntimeError:
        is_free = True
    if is_free:  # outside of the handler: what the coroutine raises has nothing to do with that error
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
