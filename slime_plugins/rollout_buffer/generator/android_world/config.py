"""The settings of Android World episodes and of the device farm, validated before anything starts.

They come from ``config.yaml`` beside this file, from the file that ``ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG`` names (read
when a generator starts), and, for the keys of ``JOB_KEYS`` only, from the job's payload under ``android_world``. What
runs on the host, where programs lie, and how many devices there are is not a job's to say.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.generator.android_world.rewards import RewardSettings
from slime_plugins.rollout_buffer.image_tokens import ImageFamily, family_with

__all__ = [
    "CONFIG_VARIABLE",
    "JOB_KEYS",
    "AndroidWorldSettings",
    "ImageFormat",
    "PoolKind",
    "RolloutMode",
    "WorkerResources",
    "load_settings",
    "read_settings",
]

CONFIG_VARIABLE = "ROLLOUT_BUFFER_ANDROID_WORLD_CONFIG"
SHIPPED_CONFIG = Path(__file__).with_name("config.yaml")

JOB_KEYS = frozenset(
    {
        "rollout_mode",
        "history_images",
        "max_turns",
        "max_context_len",
        "image_pixels_per_token",
        "ban_vision_tokens",
        "reward",
    }
)
"""What a job may override. All else names programs, paths, ports or sizes of the host that runs the devices."""

_Path = tuple[str | int, ...]


class RolloutMode(StrEnum):
    """How an episode becomes prompts."""

    INCREMENTAL = "incremental"  # the token sequence only grows: one training row per episode
    HISTORY = "history"  # a new prompt for every turn, with what was done so far in words: one row per turn


class PoolKind(StrEnum):
    """Where the devices live."""

    RAY = "ray"  # in named, detached Ray actors that outlive a runner
    LOCAL = "local"  # in threads of the runner


class ImageFormat(StrEnum):
    """How screenshots are encoded; these bytes are stored, sent to the engine and trained on."""

    PNG = "png"
    JPEG = "jpeg"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WorkerResources(_Section):
    """What each device worker reserves of one node of the Ray cluster; ``memory`` in bytes, 0 for none.

    ``custom`` names resources of your own, as in ``ray start --resources '{"phone": 8}'``.
    """

    num_cpus: float = Field(default=0.1, ge=0)
    memory: int = Field(default=0, ge=0)
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)

    def as_ray_names_them(self) -> dict[str, float]:
        """Returns what is reserved, by the names under which a node's resources are listed."""
        named = {"CPU": self.num_cpus, "memory": float(self.memory), **self.custom}
        return {name: amount for name, amount in named.items() if amount > 0}


class AndroidWorldSettings(_Section):
    """Everything the generator can be told; ``config.yaml`` beside this file explains each key."""

    rollout_mode: RolloutMode = RolloutMode.INCREMENTAL
    history_images: int = Field(default=1, ge=1)
    max_turns: int | None = Field(default=None, ge=1)
    max_context_len: int = Field(default=16384, ge=1)
    image_pixels_per_token: int = Field(default=1024, ge=1)
    ban_vision_tokens: bool = True
    reward: RewardSettings = RewardSettings()

    device: str = "simulated"
    device_pool: PoolKind = PoolKind.RAY
    num_workers: int = Field(default=2, ge=1)
    spare_devices: int = Field(default=0, ge=0)
    resources_per_worker: WorkerResources = WorkerResources()
    screenshot_max_pixels: int = Field(default=648_000, ge=1024)
    image_format: ImageFormat = ImageFormat.PNG
    simulated_latency_s: float = Field(default=0.0, ge=0)

    boot_timeout_s: float = Field(default=300, gt=0)
    acquire_timeout_s: float = Field(default=3600, gt=0)
    reset_timeout_s: float = Field(default=300, gt=0)
    step_timeout_s: float = Field(default=120, gt=0)
    score_timeout_s: float = Field(default=120, gt=0)
    lease_timeout_s: float = Field(default=60, gt=0)
    max_consecutive_faults: int = Field(default=3, ge=1)
    quarantine_s: float = Field(default=60, gt=0)
    recycle_after_episodes: int | None = Field(default=None, ge=1)
    evaluation_share: float = Field(default=0.5, gt=0, lt=1)

    suite_seed: int = 30
    android_world_python: str = ""
    boot_attempts: int = Field(default=2, ge=1)
    avd_name: str = "AndroidWorldAvd"
    base_avd_name_pattern: str = "slime_aw_{}"
    base_console_port: int = Field(default=5556, ge=1024, le=65535)
    base_grpc_port: int = Field(default=8554, ge=1024, le=65535)
    base_adb_server_port: int = Field(default=5037, ge=1024, le=65535)
    android_avd_home: str = "/root/android/avd/"
    android_sdk_root: str = "/root/android/"
    emulator_path: str = "/root/android/emulator/emulator"
    adb_path: str = "/root/android/platform-tools/adb"

    @field_validator("base_avd_name_pattern")
    @classmethod
    def _pattern_has_one_place(cls, pattern: str) -> str:
        if pattern.count("{}") != 1:
            raise ValueError("must contain {} once, where the worker's number goes")
        return pattern

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if device not in ("simulated", "android_world") and device.count(":") != 1:
            raise ValueError("must be simulated, android_world, or module:function of a factory of your own")
        return device

    @property
    def image_tokens(self) -> int:
        """About the most tokens one screenshot can become: taken where family or size of it are not known."""
        return -(-self.screenshot_max_pixels // self.image_pixels_per_token)

    @property
    def image_family(self) -> ImageFamily | None:
        """The models whose image tokens cover ``image_pixels_per_token``; None when no known family's do."""
        return family_with(self.image_pixels_per_token)

    def for_devices(self) -> AndroidWorldSettings:
        """Returns the host's side alone: what jobs may differ in is set to its default."""
        return AndroidWorldSettings.model_validate(self.model_dump(exclude=set(JOB_KEYS)))


def load_settings(job_options: Mapping[str, Any]) -> AndroidWorldSettings:
    """Returns the settings for a job: the host's file, or the shipped one, with the job's overrides.

    Raises:
        ConfigError: a file cannot be read, or a key is unknown, misplaced or out of range. Names the key, and in a file
            its line.
    """
    host_path = os.environ.get(CONFIG_VARIABLE)
    settings = read_settings(Path(host_path) if host_path else SHIPPED_CONFIG)
    return _with_job_options(settings, job_options)


def read_settings(path: Path) -> AndroidWorldSettings:
    """Returns the settings of a YAML file; keys that it leaves out have their defaults.

    Raises:
        ConfigError: as ``load_settings``.
    """
    values, lines = _read_yaml(path)
    try:
        return AndroidWorldSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentences(error, f"{path.name}: ", lines)) from error


def _with_job_options(settings: AndroidWorldSettings, options: Mapping[str, Any]) -> AndroidWorldSettings:
    overrides = options.get("android_world") or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError("android_world in the payload must be an object of settings")
    refused = sorted(str(key) for key in overrides if key in AndroidWorldSettings.model_fields and key not in JOB_KEYS)
    if refused:
        raise ConfigError(
            f"android_world.{refused[0]} belongs to the host and cannot be set by a job: "
            f"set it in the file that {CONFIG_VARIABLE} names"
        )
    try:
        return AndroidWorldSettings.model_validate(_merged(settings.model_dump(), overrides))
    except ValidationError as error:
        raise ConfigError(_sentences(error, "android_world.", {})) from error


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with ``overrides`` put over it, section by section."""
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        sections = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(cast("Mapping[str, Any]", below), value) if sections else value
    return merged


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[_Path, int]]:
    """Returns the file's values, and for each key the line it stands on."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the Android World config {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the Android World config {path} is not valid YAML: {error}") from error
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError(f"the Android World config {path} must be a list of `key: value` lines")
    return values, dict(_key_lines(path, root, ()))


def _key_lines(path: Path, node: yaml.Node | None, above: _Path) -> list[tuple[_Path, int]]:
    """Returns the line of every key below ``node``; a key that stands twice would silently hide the first."""
    if not isinstance(node, yaml.MappingNode):
        return []
    found: dict[_Path, int] = {}
    for key_node, value_node in node.value:
        key, line = (*above, str(key_node.value)), key_node.start_mark.line + 1
        if key in found:
            raise ConfigError(f"{path.name}: line {line}: {key[-1]} was already set in line {found[key]}")
        found[key] = line
        found.update(_key_lines(path, value_node, key))
    return list(found.items())


def _sentences(error: ValidationError, prefix: str, lines: Mapping[_Path, int]) -> str:
    return "; ".join(_sentence(dict(problem), prefix, lines) for problem in error.errors())


def _sentence(problem: Mapping[str, Any], prefix: str, lines: Mapping[_Path, int]) -> str:
    """Says where and what in one sentence: ``config.yaml: line 3: max_turns: Input should be …, not 'x'``."""
    location = tuple(problem["loc"])
    line = lines.get(location)
    where = f"line {line}: " if line else ""
    key = ".".join(str(part) for part in location) or "the settings"
    if problem["type"] == "extra_forbidden":
        return f"{prefix}{where}{key} is not a setting"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{prefix}{where}{key}: {message}, not {problem['input']!r}"
