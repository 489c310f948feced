"""Moved: actions to ``device_actions``, the rest to ``devices.interface``. This name goes with the next release."""

from slime_plugins.rollout_buffer.devices.interface import Device, DeviceLease, Observation, ReportsLoss
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action, ActionKind, SystemButton

__all__ = ["Action", "ActionKind", "Device", "DeviceLease", "Observation", "ReportsLoss", "SystemButton"]
