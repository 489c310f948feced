"""Android World episodes in slime's own rollout, without the buffer: ``--custom-generate-function-path``.

slime calls ``generate_incremental`` or ``generate_history``, as the option names it, for each member of a group, on
one event loop. Episodes are played by ``AndroidWorldGenerator`` with its pool, budgets and rewards. This file converts
slime's arguments into a job's options, and trajectories into Samples like those of an agent rollout.

Features of the buffer are missing: retries by other workers, replay after a crash, complete groups. An episode whose
attempts all failed becomes a Sample that is not trained, with the last error in its metadata.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import io
import logging
import os
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image as PillowImage

from slime.rollout.agent_rollout_sample_fields import RECORD_FIELDS, execution_of, fill_records, set_execution
from slime.rollout.agent_rollout_samples import SampleConverter, rows_of
from slime.rollout.agent_rollout_settings import buffer_attributes, engine_url, params_for_records, read_image_settings
from slime.utils.mask_rows import pack_training_rows
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.chat_tokens import ChatTokens
from slime_plugins.rollout_buffer.devices.leased_device import LeasedDevice
from slime_plugins.rollout_buffer.devices.pool import DevicePool
from slime_plugins.rollout_buffer.devices.pool_factory import create_device_pool
from slime_plugins.rollout_buffer.engine.base import Engine
from slime_plugins.rollout_buffer.engine.factory import make_engine
from slime_plugins.rollout_buffer.engine.settings import EngineSettings
from slime_plugins.rollout_buffer.errors import EpisodeError
from slime_plugins.rollout_buffer.generator.android_world.config import (
    CONFIG_VARIABLE,
    AndroidWorldSettings,
    is_device_settings_file,
    load_settings,
)
from slime_plugins.rollout_buffer.generator.android_world.interaction_env import AndroidWorldEnv
from slime_plugins.rollout_buffer.generator.android_world.task_needs import needs_of
from slime_plugins.rollout_buffer.generator.android_world_generator import AndroidWorldGenerator
from slime_plugins.rollout_buffer.generator.base_generator import GeneratorContext
from slime_plugins.rollout_buffer.generator.gui_agent.settings import RolloutMode
from slime_plugins.rollout_buffer.generator.gui_agent.task_runner import task_of
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.vision import load_vision
from slime_plugins.rollout_buffer.types import (
    DEFAULT_TEMPERATURE,
    EpisodeRequest,
    Instance,
    Outcome,
    SamplingParams,
    Trajectory,
)
from slime_plugins.rollout_buffer.wire import RolloutItem

logger = logging.getLogger(__name__)

SET_BY_THE_CLIENT = frozenset(
    {"max_new_tokens", "temperature", "top_p", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
)
"""Sampling parameters that do not go into ``extra``: ``SamplingParams`` has fields for three of them, and the engine's
client sets the others itself."""

ATTEMPTS = 3
"""Maximum number of attempts at an episode: an error may be that of a single device."""

_Env = TypeVar("_Env", bound=AndroidWorldEnv)


async def generate_incremental(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample:
    """Plays one episode as one growing token sequence, and returns it as one Sample.

    Raises:
        ConfigError, DeviceError: a setting is invalid, or no device came up.
    """
    rows = await _generate(RolloutMode.INCREMENTAL, args, sample, sampling_params, evaluation)
    return rows[-1]


async def generate_history(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Plays one episode with a new prompt for every turn, and returns a list with one Sample per turn.

    All of them share reward and ``rollout_id``. An evaluation returns the last turn's Sample only, because slime counts
    each row as an episode there.

    Raises:
        ConfigError, DeviceError: as ``generate_incremental``.
    """
    rows = await _generate(RolloutMode.HISTORY, args, sample, sampling_params, evaluation)
    return rows[-1] if evaluation else rows


def build_env(
    sample: Sample,
    args: Any,
    *,
    kind: type[_Env] = AndroidWorldEnv,  # type: ignore[assignment]  # mypy takes no default for a type variable
) -> _Env:
    """Returns slime's environment interface of a Sample's task, on a device of the running event loop's pool.

    Call it on the event loop that plays the episode. ``kind`` is the class of the environment.

    Raises:
        ConfigError: a setting is invalid.
        EnvironmentSetupError: the Sample's metadata names no task.
    """
    settings = _settings(args)
    task = task_of(sample.metadata, instance_id=str(sample.index))

    async def acquire() -> LeasedDevice:
        return await lend_device(args, needs_of(task.name))

    chat = ChatTokens(_tokenizer(args.hf_checkpoint), getattr(args, "apply_chat_template_kwargs", None))
    return kind(task=task, acquire=acquire, settings=settings, count_tokens=chat.count)


async def lend_device(args: Any, needs: frozenset[str] = frozenset()) -> LeasedDevice:
    """Waits for a free device of the running event loop's pool and returns it. The first call starts the pool.

    ``needs`` are the capabilities that the device must have. Its ``give_back`` returns it to the pool.

    Raises:
        ConfigError, DeviceError: a setting is invalid, or no device came up.
    """
    pool = _loop_resources().pool_for(_settings(args), args)
    await pool.start()
    return await pool.acquire(needs=needs)


async def close_resources() -> None:
    """Disconnects this event loop's devices and engines, for tests; a trainer's exit disconnects them, too."""
    resources = _resources_by_loop.pop(asyncio.get_running_loop(), None)
    if resources is not None:
        await resources.close()


# ---- shared by all episodes ------------------------------------------------------------------------------------------


class _LoopResources:
    """The devices, engines and generators of one event loop, each created once."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._pool: DevicePool | None = None
        self._engines: dict[str, Engine] = {}
        self._generators: dict[str, AndroidWorldGenerator] = {}

    def pool_for(self, settings: AndroidWorldSettings, args: Any) -> DevicePool:
        """Returns the loop's only pool, which no generator closes. Settings of later calls are ignored."""
        if self._pool is None:
            ray_address = buffer_attributes(args).rollout_buffer_ray_address or "auto"
            self._pool = create_device_pool(
                settings.for_devices(), job_id=f"slime-{os.getpid()}", ray_address=ray_address
            )
        return self._pool

    async def generator(self, args: Any, options: Mapping[str, Any]) -> AndroidWorldGenerator:
        """Returns a started generator for these options."""
        address = str(engine_url(args))
        key = repr((address, args.hf_checkpoint, options))
        async with self._lock:
            if key not in self._generators:
                self._generators[key] = await self._start_generator(args, options, address)
        return self._generators[key]

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        if self._pool is not None:
            await self._pool.close()

    async def _start_generator(self, args: Any, options: Mapping[str, Any], address: str) -> AndroidWorldGenerator:
        if address not in self._engines:
            # slime aborts surplus samples and waits for their end: the client must not resume them.
            self._engines[address] = make_engine(address, EngineSettings(resume_aborted=False))
        generator = AndroidWorldGenerator(self.pool_for(load_settings(options), args))
        context = GeneratorContext(
            job_id=f"slime-{os.getpid()}",
            engine=self._engines[address],
            tokenizer=_tokenizer(args.hf_checkpoint),
            concurrency=getattr(args, "sglang_server_concurrency", None) or 512,
            options=options,
        )
        await generator.start(context)
        return generator


_resources_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopResources] = weakref.WeakKeyDictionary()


def _loop_resources() -> _LoopResources:
    """Returns the resources of the running event loop; slime has one loop for all rollouts."""
    return _resources_by_loop.setdefault(asyncio.get_running_loop(), _LoopResources())


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path, trusted=True)


# ---- from slime's arguments to an episode ----------------------------------------------------------------------------


async def _generate(
    mode: RolloutMode, args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool
) -> list[Sample]:
    generator = await _loop_resources().generator(args, _options(args, mode))
    request = _episode_request(args, sample, sampling_params, evaluation)
    for attempt in range(ATTEMPTS):
        try:
            trajectory = await generator.play(replace(request, attempt=attempt))
            return await asyncio.to_thread(_samples, args, sample, trajectory, evaluation=evaluation)
        except EpisodeError as error:
            logger.warning("the episode of %s failed: %s: %s", request.instance.instance_id, error.code, error.message)
            last_error = error
    return [_failed(args, sample, request, last_error)]


def _settings(args: Any) -> AndroidWorldSettings:
    return load_settings(_options(args, None))


def _options(args: Any, mode: RolloutMode | None) -> dict[str, Any]:
    """Returns the options of a job: ``args.android_world``, overridden by the mode and by slime's limits."""
    _use_device_settings_of(getattr(args, "custom_config_path", None))
    settings = dict(getattr(args, "android_world", None) or {})
    context_limits = (getattr(args, name, None) for name in ("max_context_len", "rollout_max_context_len"))
    overrides = {
        "rollout_mode": None if mode is None else mode.value,
        "max_turns": getattr(args, "max_turns", None),
        "max_context_len": next((limit for limit in context_limits if limit), None),
    }
    settings |= {key: value for key, value in overrides.items() if value is not None}
    return {
        "android_world": settings,
        "apply_chat_template_kwargs": getattr(args, "apply_chat_template_kwargs", None) or {},
    }


def _use_device_settings_of(path: str | None) -> None:
    """Uses slime's ``--custom-config-path`` as the host's settings file if it is such a file, and no other is named."""
    if path and not os.environ.get(CONFIG_VARIABLE) and is_device_settings_file(Path(path)):
        logger.info("the device settings are read from %s", path)
        os.environ[CONFIG_VARIABLE] = str(Path(path).absolute())


def _episode_request(args: Any, sample: Sample, sampling_params: Mapping[str, Any], evaluation: bool) -> EpisodeRequest:
    metadata = sample.metadata or {}
    instance_id = str(metadata.get("instance_id", sample.index))
    session = sample.session_id or uuid.uuid4().hex
    return EpisodeRequest(
        uid=f"{instance_id}/{session}",
        job_id="slime",
        instance=Instance(instance_id=instance_id, data={"metadata": metadata}),
        epoch=0,
        slot=0,
        attempt=0,
        sampling_params=_sampling({**sampling_params, **({} if evaluation else params_for_records(args))}),
        evaluation=evaluation,
    )


def _sampling(params: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=int(params["max_new_tokens"]),
        temperature=float(params.get("temperature", DEFAULT_TEMPERATURE)),
        top_p=float(params.get("top_p", 1.0)),
        extra={key: value for key, value in params.items() if key not in SET_BY_THE_CLIENT and value is not None},
    )


# ---- from a trajectory to slime's Samples ----------------------------------------------------------------------------


def _samples(args: Any, sample: Sample, trajectory: Trajectory, *, evaluation: bool) -> list[Sample]:
    """Returns one Sample per training row, each a copy of slime's Sample with the row."""
    settings = read_image_settings(args)
    vision = None if settings is None else load_vision(args.hf_checkpoint, settings.pixel_dtype)
    fetched = FetchedImages(data={image.sha256: image.data for image in trajectory.images})
    converter = SampleConverter(args, samples_per_group=1, evaluation=evaluation)
    # One trajectory is the only member of the only group.
    rows = rows_of(converter.groups([_item(trajectory)], vision, fetched)[0][0])
    images = _images_of_rows(trajectory)
    if len(images) != len(rows):
        images = [[] for _ in rows]  # a dummy row of a trajectory without a trained token
    filled = [_copy_with_row(sample, row, row_images) for row, row_images in zip(rows, images, strict=True)]
    fill_records(filled, args)
    tokenizer = _tokenizer(args.hf_checkpoint)
    for copied in filled:
        # Not tokens[-response_length:], which is everything if the response is empty.
        copied.response = tokenizer.decode(copied.tokens[len(copied.tokens) - copied.response_length :])
    return filled


def _item(trajectory: Trajectory) -> RolloutItem:
    """Returns the trajectory in the form that a buffer delivers to a trainer."""
    return RolloutItem(
        uid=trajectory.uid,
        instance_id=trajectory.instance_id,
        messages=trajectory.messages,
        reward=trajectory.reward,
        raw_reward=trajectory.raw_reward,
        extra_info=trajectory.extra_info,
        generations=trajectory.generations,
        images=[image.sha256 for image in trajectory.images],
        outcome=trajectory.outcome.value,
        stop_reason=trajectory.stop_reason.value,
        raw={"timings_s": dict(trajectory.timings_s)},
    )


def _images_of_rows(trajectory: Trajectory) -> list[list[PillowImage.Image]]:
    """Returns the screenshots of each training row, one per placeholder; pixels are decoded on use."""
    opened = {image.sha256: PillowImage.open(io.BytesIO(image.data)) for image in trajectory.images}
    rows = pack_training_rows(trajectory.generations)
    return [[opened[sha256] for sha256 in row.images or ()] for row in rows]


def _copy_with_row(sample: Sample, row: Sample, images: Sequence[PillowImage.Image]) -> Sample:
    """Returns a copy of slime's Sample with the fields of the row and its screenshots."""
    filled = copy.copy(sample)
    filled.tokens = row.tokens
    filled.response_length = row.response_length
    filled.loss_mask = row.loss_mask
    filled.rollout_log_probs = row.rollout_log_probs or [0.0] * row.response_length
    filled.weight_versions = row.weight_versions
    filled.reward = row.reward
    filled.status = row.status
    filled.remove_sample = row.remove_sample
    filled.metadata = {**(sample.metadata or {}), **row.metadata}
    filled.non_generation_time = row.non_generation_time
    execution = execution_of(sample)
    # The index of an agent rollout's Sample is a string; slime made this one, and its index is a number.
    set_execution(filled, sample.index if execution is None else execution)  # type: ignore[arg-type]  # see above
    filled.multimodal_train_inputs = row.multimodal_train_inputs
    filled.multimodal_inputs = {"images": list(images)} if images else None
    for name in RECORD_FIELDS:
        if hasattr(row, name):
            setattr(filled, name, getattr(row, name))
    return filled


def _failed(args: Any, sample: Sample, request: EpisodeRequest, error: EpisodeError) -> Sample:
    """Returns the Sample of a failed episode, which is not trained: with two tokens, a mask of zeros, and the error."""
    item = RolloutItem(
        uid=request.uid,
        instance_id=request.instance.instance_id,
        outcome=Outcome.FAILED.value,
        remove_sample=True,
        extra_info={"remove_reason": error.message, "error": {"code": error.code, "message": error.message}},
    )
    (dummy,) = rows_of(SampleConverter(args, samples_per_group=1).groups([item])[0][0])
    failed = _copy_with_row(sample, dummy, ())
    fill_records([failed], args)
    return failed
