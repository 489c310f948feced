"""Settings of the trainer side, as records. Each trainer's binding reads them from its own configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.client import DEFAULT_TIMEOUT_S
from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings

DEFAULT_WAIT_S = 20.0
DEFAULT_LEASE_S = 600.0
"""Defaults of ``FeedSettings``, of ``RolloutFeed`` and of slime's arguments, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSettings:
    """The buffer's address, the job, and timeouts in seconds.

    ``token`` is the bearer token. ``max_failures`` limits failed calls in a row; None allows failures for
    ``job_feed.MAX_OUTAGE_S``. ``wait_s`` limits the wait of one poll for a group, ``lease_s`` the time until a delivery
    must be acknowledged, and ``timeout_s`` one call, in addition to ``wait_s``.
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
        """The trainer's ``consumer_id`` in polls. It depends on the job only, so that a restarted trainer has the
        same."""
        return f"trainer-{hashlib.sha256(self.job_id.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How trajectories become training rows.

    A group is padded or cut to ``samples_per_group`` members. ``max_row_tokens`` limits the tokens in all rows of a
    trajectory that are rebuilt from messages: above it, the whole conversation becomes one row. ``report_drift``
    measures how far sampled tokens would differ if they were rebuilt from messages. ``keep_pictures`` keeps decoded
    images next to their tensors. ``log_probs_wanted_by`` names the option of the trainer that computes the loss from
    the engine's log-probs; trajectories without them are then not trained. ``turn_discount`` is the discount for
    returns of turns with rewards; None uses the trajectory's reward only. Tokens whose weights are more than
    ``max_token_lag`` versions older than the trainer's are masked; None masks none. ``records`` are the required kinds
    of token records (``slime.utils.mask_rows``); ``experts_width`` is the number of experts per token over all layers,
    None if unknown.
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

    ``cache_bytes`` limits the cache of encoded images of the process; ``fetches_at_once`` limits concurrent downloads.
    ``pixel_dtype`` None keeps the dtype of the image processor. ``threads`` convert images in parallel.
    """

    cache_bytes: int = 512_000_000
    fetches_at_once: int = 16
    threads: int = 2
    pixel_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingSettings:
    """Sinks of metrics: W&B, a JSONL file, a folder of TensorBoard events.

    Example trajectories are logged every ``example_interval`` rollouts; 0 logs none.
    """

    use_wandb: bool = False
    json_lines: Path | None = None
    tensorboard: Path | None = None
    example_interval: int = 10

    def logs_examples(self, rollout_id: int) -> bool:
        """Returns True if examples of this rollout are logged."""
        has_sink = self.use_wandb or self.json_lines is not None or self.tensorboard is not None
        return has_sink and self.example_interval > 0 and rollout_id % self.example_interval == 0
