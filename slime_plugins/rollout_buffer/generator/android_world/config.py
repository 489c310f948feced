"""Settings of Android World episodes and of the device pool, validated before a job starts.

They come from ``config.yaml`` in this folder or the file named by ``ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG``. Environment
variables that begin with ``ROLLOUT_BUFFER_ANDROID_WORLD__`` override the file; they are read when a generator starts,
and the command line sets them for its child processes. A job's payload, under ``android_world``, overrides both, but
only the keys of ``JOB_KEYS``. Jobs cannot set programs, paths, or the number of devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolKind, PoolSettings
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.extensions import OF_THE_LAB, Group, installed, missing
from slime_plugins.rollout_buffer.generator import config_sources
from slime_plugins.rollout_buffer.generator.android_world.device_kinds import SHIPPED_KINDS, kind_of, read_options
from slime_plugins.rollout_buffer.generator.android_world.rewards import RewardSettings
from slime_plugins.rollout_buffer.generator.gui_agent.settings import GuiAgentSettings, ImageFormat

CONFIG_VARIABLE = "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG"
SETTING_PREFIX = "ROLLOUT_BUFFER_ANDROID_WORLD__"
COMMAND_LINE_OPTION = "--android"
SHIPPED_CONFIG = Path(__file__).with_name("config.yaml")

JOB_KEYS = GuiAgentSettings.OF_EPISODES | {"reward"}
"""Keys that a job may override. All others are the host's: programs, paths, ports, sizes."""

DEVICE_KIND = "slime_plugins.rollout_buffer.generator.android_world.device_factory:from_options"
"""Address of the factory of these devices."""
_POOL_ONLY_KEYS = set(PoolSettings.model_fields) - {"boot_timeout_s"}
"""Settings of the pool that its devices do not use."""

REAL_DEVICE = "android_world"
"""The value of ``device`` for emulators."""
KEYS_OF_EMULATORS = frozenset(
    {
        "avd_name",
        "base_avd_name_pattern",
        "base_console_port",
        "base_grpc_port",
        "base_adb_server_port",
        "android_avd_home",
        "android_sdk_root",
        "emulator_path",
        "emulator_flags",
        "adb_path",
    }
)
"""A file with one of these keys and no ``device`` means real emulators, never simulated phones."""
POOL_SIZE_KEY = "num_workers"
"""A file with this key and no ``device`` means emulators too, unless its pool is local (for tests and debugging)."""


class AndroidWorldSettings(GuiAgentSettings):
    """All settings of the generator; ``config.yaml`` in this folder explains each key."""

    reward: RewardSettings = RewardSettings()

    device: str = "simulated"
    device_options: dict[str, Any] = Field(default_factory=dict, validate_default=True)
    image_format: ImageFormat = ImageFormat.PNG
    simulated_latency_s: float = Field(default=0.0, ge=0)

    suite_seed: int = 30
    android_world_python: str = ""
    clones_at_once: int = Field(default=4, ge=1)
    clone_s_per_gb: float = Field(default=120, gt=0)
    stop_timeout_s: float = Field(default=10, ge=0)
    avd_name: str = "AndroidWorldAvd"
    base_avd_name_pattern: str = "slime_aw_{}"
    base_console_port: int = Field(default=5556, ge=1024, le=65535)
    base_grpc_port: int = Field(default=8554, ge=1024, le=65535)
    base_adb_server_port: int = Field(default=5037, ge=1024, le=65535)
    android_avd_home: str = "/root/android/avd/"
    android_sdk_root: str = "/root/android/"
    emulator_path: str = "/root/android/emulator/emulator"
    emulator_flags: str = "-no-window -no-audio -no-boot-anim -no-metrics -gpu swiftshader_indirect"
    adb_path: str = "/root/android/platform-tools/adb"

    @field_validator("base_avd_name_pattern")
    @classmethod
    def _pattern_has_the_workers_number(cls, pattern: str) -> str:
        if pattern.count("{}") != 1:
            raise ValueError("must contain {} once, for the worker's number")
        _check_avd_name(pattern.replace("{}", "0"))
        return pattern

    @field_validator("avd_name")
    @classmethod
    def _name_is_possible(cls, name: str) -> str:
        _check_avd_name(name)
        return name

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        names = (*SHIPPED_KINDS, *OF_THE_LAB[Group.DEVICES])  # the lab's device is the default, even if not installed
        if device not in names and device.count(":") != 1 and device not in installed(Group.DEVICES):
            rule = f"must be {', '.join(names)}, module:function of your own factory, or a device of a package"
            raise ValueError(f"{rule}: {missing(Group.DEVICES, device)}")
        return device

    @field_validator("device_options")
    @classmethod
    def _kind_accepts_the_options(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return read_options(info.data["device"], options) if "device" in info.data else options

    @property
    def android_timeout_s(self) -> float:
        """Time limit of Android's start. The rest of ``boot_timeout_s`` is for connecting to it."""
        return 0.8 * self.boot_timeout_s

    def for_devices(self) -> DevicePoolSettings:
        """Returns the settings of the pool and of its devices, without those of jobs."""
        pool = self.model_dump(include=set(PoolSettings.model_fields))
        options = self.model_dump(mode="json", exclude=set(JOB_KEYS) | _POOL_ONLY_KEYS)
        prepare = kind_of(self.device).prepare
        return DevicePoolSettings(kind=DEVICE_KIND, device_options=options, prepare=prepare, **pool)


def _check_avd_name(name: str) -> None:
    """Checks that the emulator accepts the name and that it is safe as part of a path."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError("may hold letters, digits, dots, hyphens and underscores only")


def load_settings(job_options: Mapping[str, Any]) -> AndroidWorldSettings:
    """Returns the settings of a job: the host's file or the shipped one, the environment, and the job's overrides.

    Raises:
        ConfigError: a file cannot be read, or a key is unknown, misplaced or out of range. Names the key, and its line
            in a file or its variable.
    """
    return config_sources.with_job_options(
        _host_settings(os.environ, []), job_options, section="android_world", keys=JOB_KEYS, variable=CONFIG_VARIABLE
    )


def environment_for(config: Path | None, assignments: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables for child processes from ``config`` and ``key=value`` texts.

    ``assignments`` come from the command line's option ``--android``.

    Raises:
        ConfigError: as ``load_settings``, for the resulting settings.
    """
    file_variable = {} if config is None else {CONFIG_VARIABLE: str(config.absolute())}
    _host_settings({**os.environ, **file_variable}, assignments)
    return {**file_variable, **config_sources.as_variables(assignments, SETTING_PREFIX)}


def read_settings(path: Path) -> AndroidWorldSettings:
    """Returns the settings of a YAML file alone; missing keys have their defaults.

    Raises:
        ConfigError: as ``load_settings``.
    """
    return _validated(_with_device([config_sources.from_file(path)]))


def is_device_settings_file(path: Path) -> bool:
    """Returns True if a YAML file holds only settings, and among them keys of real devices or a pool size."""
    try:
        values = config_sources.from_file(path).values
    except ConfigError:
        return False
    return values.keys() <= AndroidWorldSettings.model_fields.keys() and bool(
        values.keys() & {"device", POOL_SIZE_KEY, *KEYS_OF_EMULATORS}
    )


def _host_settings(environment: Mapping[str, str], assignments: Sequence[str]) -> AndroidWorldSettings:
    path = environment.get(CONFIG_VARIABLE)
    overrides = [
        config_sources.from_variables(environment, SETTING_PREFIX),
        config_sources.from_assignments(assignments, COMMAND_LINE_OPTION),
    ]
    if path:
        return _validated(_with_device([config_sources.from_file(Path(path)), *overrides]))
    shipped = config_sources.from_file(SHIPPED_CONFIG)
    # The shipped file holds defaults of simulated phones; another device in ``overrides`` has its own.
    device_defaults = _defaults_of(config_sources.merged([shipped, *overrides]))
    return _validated(config_sources.merged([shipped, device_defaults, *overrides]))


def _with_device(layers: Sequence[config_sources.Layer]) -> config_sources.Layer:
    """Merges the layers over the defaults of their device. Without ``device``, keys of emulators or a pool size imply
    ``REAL_DEVICE``."""
    layer = config_sources.merged(layers)
    has_pool_size = POOL_SIZE_KEY in layer.values and layer.values.get("device_pool") != PoolKind.LOCAL.value
    if "device" not in layer.values and (has_pool_size or KEYS_OF_EMULATORS & layer.values.keys()):
        layer = config_sources.merged([layer, config_sources.Layer(values={"device": REAL_DEVICE})])
    return config_sources.merged([_defaults_of(layer), layer])


def _defaults_of(layer: config_sources.Layer) -> config_sources.Layer:
    """Returns the defaults of the layer's kind of devices, some of which depend on other settings in the layer."""
    device = layer.values.get("device")
    return config_sources.Layer(values=dict(kind_of(device).defaults(layer.values)) if isinstance(device, str) else {})


def _validated(layer: config_sources.Layer) -> AndroidWorldSettings:
    settings = config_sources.validated(AndroidWorldSettings, layer)
    kind_of(settings.device).check(settings)
    return settings
