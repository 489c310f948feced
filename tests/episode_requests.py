"""Requests for episodes, and the file of a host's phones, as tests of generators need them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_plugins.rollout_buffer.generator.android_world.config import CONFIG_VARIABLE
from slime_plugins.rollout_buffer.types import EpisodeRequest, Instance, SamplingParams


def episode_of(
    instance_id: str, data: Mapping[str, Any], *, uid: str = "u", slot: int = 0, max_new_tokens: int, **sampling: Any
) -> EpisodeRequest:
    """The first attempt at one line of the input."""
    return EpisodeRequest(
        uid=uid,
        job_id="job",
        instance=Instance(instance_id=instance_id, data=data),
        epoch=0,
        slot=slot,
        attempt=0,
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
    )


def phone_episode(task: str, params_idx: int, uid: str, *, slot: int = 0, **sampling: Any) -> EpisodeRequest:
    """The first attempt at a task of Android World."""
    data = {"instance_id": task, "metadata": {"task_name": task, "params_idx": params_idx}}
    return episode_of(task, data, uid=uid, slot=slot, **{"max_new_tokens": 1024} | sampling)


def use_local_phones(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Writes the host's file: simulated phones in this process, four unless it says otherwise."""
    lines = {"device_pool": "local", "num_workers": 4} | settings
    config = folder / "android_world.yaml"
    config.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()), encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
