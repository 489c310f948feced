"""The client side of a job for trainers of any framework: start it, take batches of rows, acknowledge them.

slime's rollout function uses the same parts. The methods block and may be called from any thread, also from one with a
running event loop: the feed has an event loop in a thread of its own.

    with RolloutFeed("http://127.0.0.1:8889", payload) as feed:
        feed.start(skip=consumed_before_this_run)
        batch = feed.next_batch(8, weight_version=3)
        ...                     # train on batch.rows, save the checkpoint with batch.consumed in it
        feed.ack(batch)
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from slime_plugins.rollout_buffer.client import DEFAULT_TIMEOUT_S, AsyncRolloutBufferClient
from slime_plugins.rollout_buffer.errors import ConfigError, GeneratorError
from slime_plugins.rollout_buffer.rules.stored_settings import DEFAULTS
from slime_plugins.rollout_buffer.trainer.batch_types import RolloutBatch, RolloutGroup
from slime_plugins.rollout_buffer.trainer.consumed import JobProgress
from slime_plugins.rollout_buffer.trainer.delivery_conversion import DeliveryConverter
from slime_plugins.rollout_buffer.trainer.job_feed import InputExhaustedError, JobFeed, send_start
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings
from slime_plugins.rollout_buffer.trainer.metrics import batch_metrics, facts_of, no_filter_metrics
from slime_plugins.rollout_buffer.trainer.settings import (
    DEFAULT_LEASE_S,
    DEFAULT_WAIT_S,
    FeedSettings,
    ImageSettings,
    RowSettings,
)
from slime_plugins.rollout_buffer.trainer.training_reports import RowReport, TrainingReporter
from slime_plugins.rollout_buffer.wire import RolloutData, StartReply

__all__ = ["RolloutFeed"]

Result = TypeVar("Result")


class RolloutFeed:
    """Delivers batches of one job to one trainer; a context manager.

    Groups that are not acknowledged are delivered again after their lease.
    """

    def __init__(
        self,
        buffer_url: str,
        payload: Mapping[str, Any],
        *,
        token: str | None = None,
        rows: RowSettings | None = None,
        images: ImageSettings | None = None,
        max_failures: int | None = None,
        wait_s: float = DEFAULT_WAIT_S,
        lease_s: float = DEFAULT_LEASE_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Takes the body of ``start_rollout`` as ``payload``; nothing is sent yet.

        Args:
            buffer_url: like ``http://127.0.0.1:8889``.
            payload: ``task_type``, ``input_file`` and further settings; ``job_id`` identifies the job across restarts.
            token: bearer token; None reads ``ROLLOUT_BUFFER_TOKEN`` from the environment.
            rows: how trajectories become rows; by default with ``tokenizer_path`` of the payload.
            images: how screenshots become tensors, which needs torch; None leaves one placeholder for each.
            max_failures: limit of failed calls in a row; None allows failures for 15 minutes.
            wait_s, lease_s, timeout_s: as ``FeedSettings``. A batch must be acknowledged within ``lease_s``.

        Raises:
            ConfigError: the payload has no ``job_id``, or its group size or ``max_groups_ahead`` is no number.
        """
        if not payload.get("job_id"):
            raise ConfigError("the payload needs a job_id: the name under which a restarted trainer finds its job")
        self._payload = dict(payload)
        self._settings = FeedSettings(
            buffer_url=buffer_url.rstrip("/"),
            token=token or os.environ.get("ROLLOUT_BUFFER_TOKEN") or None,
            job_id=str(payload["job_id"]),
            max_failures=max_failures,
            wait_s=wait_s,
            lease_s=lease_s,
            timeout_s=timeout_s,
        )
        self._groups_ahead = _count("max_groups_ahead", payload.get("max_groups_ahead", DEFAULTS.max_groups_ahead))
        self._row_settings = rows or _row_settings(payload)
        self._image_settings = images
        self._progress = JobProgress()
        self._open_batch = _OpenBatch()
        self._delivery_of: dict[int, str] = {}
        """The newest delivery of each group that is not acknowledged yet."""
        self._loop = _LoopThread()
        self._reporter = TrainingReporter(self._settings.buffer_url, token=self._settings.token)
        self._client: AsyncRolloutBufferClient | None = None
        self._feed: JobFeed | None = None
        self._converter: DeliveryConverter

    def __enter__(self) -> RolloutFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def job_id(self) -> str:
        """The job's name."""
        return self._settings.job_id

    def start(self, *, skip: Sequence[str] = (), fresh: bool = False) -> StartReply:
        """Starts the job or attaches to it, and resumes it if it is paused.

        Args:
            skip: instance ids of all groups that earlier runs trained, one per group: ``RolloutBatch.consumed`` of
                their batches. Delivered groups that are not among them are delivered again.
            fresh: starts a new job even if the job exists.

        Raises:
            RequestError: the buffer refuses the payload; the message names the error.
            RetriesUsedUpError: calls to the buffer failed for too long.
        """
        start = {"skip_instance_ids": list(skip), "fresh": fresh, "start_id": uuid.uuid4().hex}
        reply = send_start(self._settings, {**self._payload, **start})
        self._progress = JobProgress()
        self._open_batch = _OpenBatch()
        self._delivery_of.clear()
        self._loop.run(self._open())
        return reply

    def next_batch(self, n_groups: int, *, weight_version: int | None = None) -> RolloutBatch:
        """Waits for ``n_groups`` groups with trainable rows, and returns them.

        The last batch of a job may have fewer. Groups that were received before an error are in the batch of the next
        call. ``weight_version`` is the trainer's newest: with ``staleness_policy: drop``, too old groups are not
        delivered.

        Raises:
            InputExhaustedError: there is no group left.
            GeneratorError: the first ``n_groups`` groups of the batch have no trainable rows.
            JobEndedError: the job was cancelled or has failed.
            JobStalledError: the job was blocked for ``job_feed.MAX_STANDSTILL_S``.
            RetriesUsedUpError: calls to the buffer failed for too long.
            RuntimeError: ``start`` was not called.
        """
        return self._loop.run(self._next_batch(n_groups, weight_version))

    def ack(self, batch: RolloutBatch) -> frozenset[int]:
        """Acknowledges a batch; call it after ``batch.consumed`` is in a checkpoint.

        Returns the ``group_index`` of the groups whose lease had expired and which another consumer received, which
        trains them too. If they come back, they are acknowledged and not returned again.
        """
        return self._loop.run(self._ack(batch))

    def report(self, rows: Sequence[RowReport], *, step: int | None = None) -> bool:
        """Sends the trainer's log-probs, advantage and entropy of rows to the buffer, in the background.

        Returns False if nothing is sent: without rows, or while the previous report is being sent. Never raises.
        """
        return self._reporter.report({self.job_id: rows}, step=step)

    def pause(self) -> None:
        """Pauses the job: no episode begins until ``resume``; running ones continue."""
        self._loop.run(self._started().pause())

    def drain(self, *, stop: bool = False) -> None:
        """Pauses the job and waits until no episode runs, so that none is sampled by two weight versions.

        Running episodes are completed, or with ``stop`` given up and played again after ``resume``.
        """
        self._loop.run(self._started().drain(stop=stop))

    def resume(self) -> None:
        """Resumes the job after ``pause`` or ``drain``."""
        self._loop.run(self._started().resume())

    def close(self) -> None:
        """Waits for a pending report and closes the connections. The job continues to run until it is cancelled."""
        self._reporter.flush()
        client, self._client, self._feed = self._client, None, None
        if client is not None:
            self._loop.run(client.close())
        self._loop.close()

    async def _open(self) -> None:
        if self._client is None:
            settings = self._settings
            self._client = AsyncRolloutBufferClient(
                settings.buffer_url, token=settings.token, timeout_s=settings.timeout_s
            )
        self._feed = JobFeed(self._client, self._settings)
        self._converter = DeliveryConverter(
            self._client, self._row_settings, self._image_settings, max_failures=self._settings.max_failures
        )
        await self._feed.resume()

    def _started(self) -> JobFeed:
        if self._feed is None:
            raise RuntimeError("call start() first")
        return self._feed

    async def _next_batch(self, n_groups: int, weight_version: int | None) -> RolloutBatch:
        feed = self._started()
        feed.weight_version = weight_version
        batch = await self._open_batch_of(n_groups, weight_version)
        while batch.missing > 0:
            if self._groups_ahead is not None and feed.groups_held >= self._groups_ahead:
                feed.release()  # until then the job begins no further groups
            try:
                delivery = await feed.next_delivery(batch.missing)
            except InputExhaustedError:
                if not batch.groups:
                    raise
                break
            new = self._progress.new_part(delivery)
            items = () if new is None else new.items
            groups = await self._converter.groups(items, trainer_version=weight_version)
            feed.mark_taken(delivery)  # not before: after an error the next poll gets the same delivery
            trained = (delivery.group_numbers & self._progress.seen_groups) - self._delivery_of.keys()
            self._progress.remember(delivery)
            if delivery.delivery_id is not None and trained and trained == delivery.group_numbers:
                feed.acknowledge_later({delivery.delivery_id: trained})  # its first acknowledgement came too late
            elif delivery.delivery_id is not None:  # a redelivered group is acknowledged by its newest delivery
                self._delivery_of.update(dict.fromkeys(delivery.group_numbers, delivery.delivery_id))
            if new is not None:
                batch.add(new, groups)
        self._open_batch = _OpenBatch()
        return batch.close()

    async def _open_batch_of(self, n_groups: int, weight_version: int | None) -> _OpenBatch:
        """Returns what was received before an error; if the trainer has newer weights since, the rows are made anew,
        because ``max_token_lag`` masks other tokens."""
        if self._open_batch.weight_version != weight_version:
            batch = _OpenBatch(n_groups, weight_version)
            for delivery in self._open_batch.deliveries:
                batch.add(delivery, await self._converter.groups(delivery.items, trainer_version=weight_version))
            self._open_batch = batch
        self._open_batch.n_groups = n_groups
        return self._open_batch

    async def _ack(self, batch: RolloutBatch) -> frozenset[int]:
        feed = self._started()
        groups_of: dict[str, set[int]] = {}
        for number in batch.group_numbers:
            if number in self._delivery_of:
                groups_of.setdefault(self._delivery_of.pop(number), set()).add(number)
        feed.acknowledge_later({delivery_id: frozenset(groups) for delivery_id, groups in groups_of.items()})
        await feed.flush_acks()
        return frozenset().union(*(feed.lost.get(delivery_id, frozenset()) for delivery_id in groups_of))


class _OpenBatch:
    """A batch that is being filled up to ``n_groups``, for a trainer of ``weight_version``."""

    def __init__(self, n_groups: int = 0, weight_version: int | None = None) -> None:
        self.n_groups = n_groups
        self.weight_version = weight_version
        self.deliveries: list[RolloutData] = []
        self.groups: list[RolloutGroup] = []
        self._without_rows: list[RolloutGroup] = []

    @property
    def missing(self) -> int:
        """Number of missing groups."""
        return self.n_groups - len(self.groups)

    def add(self, delivery: RolloutData, groups: Sequence[RolloutGroup]) -> None:
        """Adds the groups of a delivery; groups without trainable rows are consumed and left out.

        Raises:
            GeneratorError: as ``RolloutFeed.next_batch``.
        """
        self.deliveries.append(delivery)
        for group in groups:
            (self.groups if group.rows else self._without_rows).append(group)
        if not self.groups and len(self._without_rows) >= self.n_groups:
            counted = Counter(str(each.dummy_reason) for group in self._without_rows for each in group.trajectories)
            reasons = "; ".join(f"{count} x {reason}" for reason, count in counted.most_common(3))
            raise GeneratorError(f"no trajectory of {len(self._without_rows)} groups can be trained: {reasons}")

    def close(self) -> RolloutBatch:
        """Returns the batch."""
        meta_info = [delivery.meta_info for delivery in self.deliveries]
        finished = Counter(str(name) for each in meta_info for name in each.get("finished_groups") or ())
        in_batch = Counter(group.instance_id for group in self.groups)
        trajectories = [trajectory for group in self.groups for trajectory in group.trajectories]
        return RolloutBatch(
            groups=tuple(self.groups),
            group_numbers=frozenset().union(*(delivery.group_numbers for delivery in self.deliveries)),
            finished_elsewhere=tuple((finished - in_batch).elements()),
            metrics={**no_filter_metrics(meta_info), **batch_metrics(map(facts_of, trajectories))},
        )


class _LoopThread:
    """An event loop in a thread, started at first use."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine and waits for its result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="rollout feed", daemon=True)
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """Stops the thread; a second call does nothing."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()


def _row_settings(payload: Mapping[str, Any]) -> RowSettings:
    """Reads the payload's group size and tokenizer, also by their short names."""
    size = _count("num_repeat_per_sample", payload.get("num_repeat_per_sample") or payload.get("samples")) or 1
    tokenizer = payload.get("tokenizer_path") or payload.get("tokenizer")
    masks = MaskSettings(tokenizer_path=tokenizer, loss_mask_type="qwen", source=None)
    return RowSettings(samples_per_group=size, masks=masks)


def _count(name: str, given: Any) -> int | None:
    """Returns a number of the payload; it may be a text, because the buffer accepts texts, too."""
    try:
        return None if given is None else int(given)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} is {given!r}; it must be a whole number") from None
