"""``device: android_world``: emulators of this project's own, on clones of a base device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from slime_plugins.rollout_buffer.devices.capabilities import Capability
from slime_plugins.rollout_buffer.devices.interface import Device
from slime_plugins.rollout_buffer.devices.settings_section import SettingsSection
from slime_plugins.rollout_buffer.generator import config_sources
from slime_plugins.rollout_buffer.generator.android_world.config import AndroidWorldSettings
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import AndroidKind
from slime_plugins.rollout_buffer.generator.android_world.restored_state import StatePart
from slime_plugins.rollout_buffer.generator.android_world.task_needs import check_of_tasks
from slime_plugins.rollout_buffer.generator.gui_agent.device_actions import Action

MIN_MEMORY_OF_AN_EMULATOR = 8 * 1024**3
MEMORY_BESIDE_THE_GUEST = 3 * 1024**3
"""Memory of an emulator besides that of Android (its flag ``-memory``), together with its worker's memory."""


class EmulatorOptions(SettingsSection):
    """``device_options`` of emulators."""

    check_restored: list[StatePart] = Field(default_factory=list)


def _read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    layer = config_sources.Layer(values=dict(options))
    return config_sources.validated(EmulatorOptions, layer).model_dump(mode="json", exclude_defaults=True)


def _defaults_of_emulators(values: Mapping[str, Any]) -> Mapping[str, Any]:
    guest_mb = re.search(r"-memory\s+(\d+)", str(values.get("emulator_flags", "")))
    needed = int(guest_mb[1]) * 1024**2 + MEMORY_BESIDE_THE_GUEST if guest_mb else 0
    resources = {"num_cpus": 4, "memory": max(MIN_MEMORY_OF_AN_EMULATOR, needed)}
    return {"num_workers": 64, "resources_per_worker": resources, "boot_stagger_s": 1}


def _create(settings: AndroidWorldSettings, index: int) -> Device[Action]:
    from slime_plugins.rollout_buffer.generator.android_world.emulator.device import AndroidWorldDevice
    from slime_plugins.rollout_buffer.generator.android_world.emulator.emulator_process import EmulatorProcess

    return AndroidWorldDevice(settings, index, EmulatorProcess(settings, index))


KIND = AndroidKind(
    create=_create,
    uses_package=True,
    boots_emulators=True,
    read_options=_read_options,
    defaults=_defaults_of_emulators,
    prepare="slime_plugins.rollout_buffer.generator.android_world.device_factory:make_virtual_device",
    examine=lambda _: [check_of_tasks("tasks of each emulator", frozenset(Capability))],
)
