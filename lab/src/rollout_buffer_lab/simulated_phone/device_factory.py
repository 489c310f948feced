"""Makes a simulated phone from Android World's settings, for ``device: simulated``."""

from __future__ import annotations

from rollout_buffer_lab.simulated_phone.phone import SimulatedPhone, SimulatedPhoneConfig
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action


def create_simulated_phone(settings: AndroidWorldSettings, _index: int) -> Device[Action]:
    """Returns a phone with the screenshots and the latency of the settings; phones do not depend on their index."""
    config = SimulatedPhoneConfig(
        screenshot_max_pixels=settings.screenshot_max_pixels,
        image_format=settings.image_format.value,
        step_latency_s=settings.simulated_latency_s,
    )
    return SimulatedPhone(config)
