"""Metric sinks, in ``slime_plugins.rollout_buffer.trainer.tracking``; this name goes with the next release."""

from slime.rollout.agent_rollout_settings import read_tracking_settings
from slime_plugins.rollout_buffer.trainer.settings import TrackingSettings
from slime_plugins.rollout_buffer.trainer.tracking import (
    STEP,
    Example,
    JsonLinesSink,
    MetricSink,
    TensorBoardSink,
    Tracker,
    WandbSink,
    chosen_examples,
    example_of,
    tracker_for,
)

__all__ = [
    "STEP",
    "Example",
    "JsonLinesSink",
    "MetricSink",
    "TensorBoardSink",
    "Tracker",
    "TrackingSettings",
    "WandbSink",
    "chosen_examples",
    "example_of",
    "read_tracking_settings",
    "tracker_for",
]
