"""What a trainer wants of its buffer, as records. Who reads them from where is the trainer's business."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from slime_plugins.rollout_buffer.trainer.mask_selection import MaskSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedSettings:
    """Where the buffer is, which job is fetched, and for how long. ``max_failures`` None bounds time.

    ``wait_s`` is how long one poll waits for a group, ``lease_s`` how long a delivery may stay unacknowledged before it
    comes back, ``timeout_s`` how long one call may take beyond what it waits.
    """

    buffer_url: str
    token: str | None = None
    job_id: str
    max_failures: int | None = None
    wait_s: float = 20.0
    lease_s: float = 600.0
    timeout_s: float = 100.0

    @property
    def consumer_id(self) -> str:
        """Names this trainer to the buffer; the same after a restart."""
        return f"trainer-{hashlib.sha256(self.job_id.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """How trajectories become training rows.

    ``log_probs_wanted_by`` names what computes the loss from the engine's log-probs, None where nothing does: then
    trajectories without them are trained as well. ``keep_pictures`` leaves pictures beside the tensors made of them.
    ``turn_discount`` makes the returns of rows whose turns earned rewards; None leaves the trajectory's reward alone.
    ``max_token_lag`` masks tokens of weights that are more versions older than the trainer's; None masks none.
    ``records`` are the kinds of token records (``slime.utils.mask_token_records``) without which nothing is trained;
    ``experts_width`` is how many experts the model chooses for one token in all its layers, None when it is unknown.
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
    """How screenshots reach the trainer. ``pixel_dtype`` None leaves pixels as the image processor makes them.

    ``threads`` make tensors of them at once.
    """

    cache_bytes: int = 512_000_000
    fetches_at_once: int = 16
    threads: int = 2
    pixel_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingSettings:
    """Which sinks there are. ``example_interval`` rollouts lie between two tables of examples; 0 makes none."""

    use_wandb: bool = False
    json_lines: Path | None = None
    tensorboard: Path | None = None
    example_interval: int = 10

    def wants_examples(self, rollout_id: int) -> bool:
        """Returns True if this rollout shows examples to anybody."""
        heard = self.use_wandb or self.json_lines is not None or self.tensorboard is not None
        return heard and self.example_interval > 0 and rollout_id % self.example_interval == 0
