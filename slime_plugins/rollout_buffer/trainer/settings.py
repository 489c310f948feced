"""Settings of the trainer side, as records. Each trainer's binding reads them from its own configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings

DEFAULT_WAIT_S = 20.0
DEFAULT_LEASE_S = 600.0
DEFAULT_TIMEOUT_S = 100.0
"""Defaults of ``FeedSettings``, of ``RolloutFeed`` and of slime's arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSettings:
    """The buffer's address, the job, and timeouts.

    ``max_failures`` limits failed calls in a row; None limits the time instead. ``wait_s`` is how long one poll waits
    for a group, ``lease_s`` how long a delivery may stay unacknowledged before it is redelivered, ``timeout_s`` how
    long one call may take in addition to ``wait_s``.
    """

    buffer_url: str
    token: str | None = None
    job_id: str
    max_failures: int | None = None
    wait_s: float = DEFAULT_WAIT_S
    lease_s: float = DEFAULT_LEASE_S
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def consumer_id(self) -> str:
        """The trainer's id at the buffer, equal after a restart."""
        return f"trainer-{hashlib.sha256(self.job_id.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How trajectories become training rows.

    ``log_probs_wanted_by`` names the option that computes the loss from the engine's log-probs; None if there is none,
    so that trajectories without log-probs are trained as well. ``keep_pictures`` keeps images next to their tensors.
    ``turn_discount`` is the discount for returns of turns with rewards; None uses the trajectory's reward only.
    ``max_token_lag`` masks tokens whose weights are more versions older than the trainer's; None masks none.
    ``records`` are the required kinds of token records (``slime.utils.mask_token_records``); ``experts_width`` is the
    number of experts per token over all layers, None if unknown.
    """

    samples_per_group: int
    masks: MaskSettings
    max_row_tokens: int | None = None
    report_drift: bool = True
    keep_pictures: bool = False
    log_probs_wanted_by: str | None = None
    turn_discount: float | None = None
    max_token_lag: int | None = None
    records: tuple[str, ...] = ()
    experts_width: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """How screenshots are fetched and converted.

    ``pixel_dtype`` None keeps the dtype of the image processor. ``threads`` convert images in parallel.
    """

    cache_bytes: int = 512_000_000
    fetches_at_once: int = 16
    threads: int = 2
    pixel_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingSettings:
    """Sinks of metrics. Examples are logged every ``example_interval`` rollouts; 0 logs none."""

    use_wandb: bool = False
    json_lines: Path | None = None
    tensorboard: Path | None = None
    example_interval: int = 10

    def logs_examples(self, rollout_id: int) -> bool:
        """Returns True if examples of this rollout are logged."""
        has_sink = self.use_wandb or self.json_lines is not None or self.tensorboard is not None
        return has_sink and self.example_interval > 0 and rollout_id % self.example_interval == 0
