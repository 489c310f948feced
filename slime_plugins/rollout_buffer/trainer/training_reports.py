"""Sends a trainer's report on trained rows to the buffer, in the background.

The buffer compares the trainer's log-probs with the engine's (``GET /jobs/<id>/mismatch``). The first failure is
logged; failures never stop the training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slime_plugins.rollout_buffer.client import RolloutBufferClient

logger = logging.getLogger(__name__)

MAX_ROWS_PER_REPORT = 64
"""Default limit of a job's rows in the report of a step; those with the largest ``RowReport.gap`` are sent."""
DIGITS = 5
REPORT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReport:
    """A trainer's values for one row. ``log_probs`` (the trainer's) and ``rollout_log_probs`` (the engine's) belong to
    its trained tokens, in order.

    ``entropy`` is the mean over these tokens in nats, ``loss_share`` the row's weight in the step's mean,
    ``clip_share`` the share of these tokens whose ratio was clipped.
    """

    uid: str
    row: int
    log_probs: Sequence[float] | None = None
    rollout_log_probs: Sequence[float] | None = None
    advantage: float | None = None
    entropy: float | None = None
    loss_share: float | None = None
    clip_share: float | None = None

    @property
    def gap(self) -> float:
        """Largest |train - rollout log-prob|, infinite with a NaN; -1 if a list is missing or empty, or their lengths
        differ.
        """
        if not self.log_probs or len(self.log_probs) != len(self.rollout_log_probs or ()):
            return -1.0
        gaps = [abs(ours - theirs) for ours, theirs in zip(self.log_probs, self.rollout_log_probs or (), strict=True)]
        return math.inf if any(map(math.isnan, gaps)) else max(gaps)

    def body(self) -> dict[str, Any]:
        """Returns the JSON body, with numbers rounded to five decimals."""
        body: dict[str, Any] = {"uid": self.uid, "row": self.row}
        if self.log_probs is not None:
            body["log_probs"] = [round(value, DIGITS) for value in self.log_probs]
        for name in ("advantage", "entropy", "loss_share", "clip_share"):
            value = getattr(self, name)
            if value is not None:
                body[name] = round(value, DIGITS)
        return body


class TrainingReporter:
    """Sends reports of one trainer, one at a time; a step's report is dropped while the previous one is being sent."""

    def __init__(self, url: str, *, token: str | None = None, most_rows: int = MAX_ROWS_PER_REPORT) -> None:
        """``most_rows`` limits the rows of each job in a report; 0 sends no reports."""
        self._client = RolloutBufferClient(url, token=token, timeout_s=REPORT_TIMEOUT_S)
        self._most_rows = most_rows
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training-report")
        self._pending: Future[None] | None = None
        self._has_warned = False

    def report(self, rows_by_job: Mapping[str, Sequence[RowReport]], *, step: int | None = None) -> bool:
        """Starts to send the rows with the largest gaps and returns True; returns False if nothing is sent.

        Nothing is sent without rows, or while the previous report is being sent. Does not wait and does not raise.
        """
        if not self._most_rows or not any(rows_by_job.values()):
            return False
        if self._pending is not None and not self._pending.done():
            return False
        self._pending = self._pool.submit(self._send, rows_by_job, step)
        return True

    def flush(self) -> None:
        """Waits until the pending report was sent or has failed."""
        if self._pending is not None:
            self._pending.result()

    def _send(self, rows_by_job: Mapping[str, Sequence[RowReport]], step: int | None) -> None:
        for job_id, rows in rows_by_job.items():
            try:
                worst = sorted(rows, key=lambda row: row.gap, reverse=True)[: self._most_rows]
                reply = self._client.report_training(job_id, [row.body() for row in worst], step=step)
            except Exception as error:  # noqa: BLE001 - a failed report must not stop the training
                self._warn_once("the training report could not be sent to job %s: %r", job_id, error)
            else:
                for refused in (reply.get("refused") or ())[:1]:
                    self._warn_once("job %s refused a row of the training report: %s", job_id, refused)

    def _warn_once(self, text: str, *values: Any) -> None:
        if not self._has_warned:
            logger.warning(text, *values)
        self._has_warned = True
