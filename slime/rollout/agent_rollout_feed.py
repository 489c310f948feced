"""The feed of one job, in ``slime_plugins.rollout_buffer.trainer.job_feed``; this name goes with the next release."""

from slime_plugins.rollout_buffer.trainer.job_feed import (
    FailureTally,
    InputExhaustedError,
    JobEndedError,
    JobFeed,
    RetriesUsedUpError,
    send_start,
)

__all__ = [
    "FailureTally",
    "InputExhaustedError",
    "JobEndedError",
    "JobFeed",
    "RetriesUsedUpError",
    "send_start",
]
