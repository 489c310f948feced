"""Settings of MiniWoB++ episodes and of their browsers, validated before a job starts.

They come from ``config.yaml`` in this folder or the file named by ``ROLLOUT_BUFFER_MINIWOB_CONFIG``. Environment
variables that begin with ``ROLLOUT_BUFFER_MINIWOB__`` override the file. A job's payload, under ``miniwob``, overrides
both, but only the keys of ``JOB_KEYS``. Jobs cannot set browsers, host limits, or the number of pages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from slime_plugins.rollout_buffer.devices.settings import DevicePoolSettings, PoolKind, PoolSettings, WorkerResources
from slime_plugins.rollout_buffer.generator import config_sources
from slime_plugins.rollout_buffer.generator.gui_agent.settings import GuiAgentSettings, ObservationMode

CONFIG_VARIABLE = "ROLLOUT_BUFFER_MINIWOB_CONFIG"
SETTING_PREFIX = "ROLLOUT_BUFFER_MINIWOB__"
SHIPPED_CONFIG = Path(__file__).with_name("config.yaml")
DEVICE_KIND = "slime_plugins.rollout_buffer.generator.miniwob.device:from_options"
"""Address of the factory of these devices."""
JOB_KEYS = GuiAgentSettings.OF_EPISODES | {"observation"}
"""Keys that a job may override."""
POINTS = (160, 210)
"""Width and height of a task's page in CSS points."""


class DataMode(StrEnum):
    """The distribution from which a page draws its tasks."""

    TRAIN = "train"
    TEST = "test"


class MiniWobSettings(GuiAgentSettings):
    """All settings of the generator; ``config.yaml`` in this folder explains each key."""

    observation: ObservationMode = ObservationMode.SCREENSHOT
    max_turns: int | None = Field(default=15, ge=1)

    data_mode: DataMode = DataMode.TRAIN
    time_limit_s: float | None = Field(default=None, gt=0, le=86_400)
    time_penalty: bool = False
    pixels_per_point: int = Field(default=2, ge=1, le=8)

    chromium: str = ""
    pages_per_browser: int = Field(default=16, ge=1)

    device_pool: PoolKind = PoolKind.LOCAL
    num_workers: int = Field(default=4, ge=1)
    resources_per_worker: WorkerResources = WorkerResources(num_cpus=0.5)
    boots_at_once: int = Field(default=4, ge=1)
    boot_attempts: int = Field(default=3, ge=1)
    boot_pause_s: float = Field(default=2, ge=0)
    boot_timeout_s: float = Field(default=120, gt=0)
    reset_timeout_s: float = Field(default=60, gt=0)
    step_timeout_s: float = Field(default=60, gt=0)
    score_timeout_s: float = Field(default=30, gt=0)
    quarantine_s: float = Field(default=10, gt=0)

    @model_validator(mode="after")
    def _check_combinations(self) -> MiniWobSettings:
        if self.time_penalty and self.time_limit_s is None:
            raise ValueError("time_penalty needs a time_limit_s: the penalty is a share of it")
        width, height = POINTS
        if width * height * self.pixels_per_point**2 > self.screenshot_max_pixels:
            raise ValueError("pixels_per_point makes screenshots larger than screenshot_max_pixels")
        return self

    def for_devices(self) -> DevicePoolSettings:
        pool = self.model_dump(include=set(PoolSettings.model_fields))
        options = self.model_dump(mode="json", exclude=set(JOB_KEYS) | set(PoolSettings.model_fields))
        return DevicePoolSettings(farm="miniwob", kind=DEVICE_KIND, device_options=options, **pool)


def load_settings(job_options: Mapping[str, Any]) -> MiniWobSettings:
    """Returns the settings of a job: the host's file or the shipped one, the environment, and the job's overrides.

    Raises:
        ConfigError: a file cannot be read, or a key is unknown, misplaced or out of range. Names the key, and its line
            in a file or its variable.
    """
    file = config_sources.from_file(Path(os.environ.get(CONFIG_VARIABLE) or SHIPPED_CONFIG))
    layer = config_sources.merged([file, config_sources.from_variables(os.environ, SETTING_PREFIX)])
    host = config_sources.validated(MiniWobSettings, layer)
    return config_sources.with_job_options(
        host, job_options, section="miniwob", keys=JOB_KEYS, variable=CONFIG_VARIABLE
    )
