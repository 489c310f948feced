"""A rollout with screenshots, over real HTTP against a scripted buffer: fetched once, trained in their places."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image as PillowImage

from slime.rollout import agent_rollout
from slime.rollout.agent_rollout import reset_jobs
from slime.rollout.agent_rollout_probe import LoopbackBuffer, ScriptedReply, probe_item
from slime_plugins.rollout_buffer.errors import ConfigError, GeneratorError
from slime_plugins.rollout_buffer.simulation.trainer import RolloutRecord, TrainerStandIn, trainer_args
from slime_plugins.rollout_buffer.trainer import intake, job_feed
from slime_plugins.rollout_buffer.trainer.image_fetch import process_cache
from slime_plugins.rollout_buffer.trainer.vision import ImageFeatures

PAD = 99


def png(shade: int) -> bytes:
    file = io.BytesIO()
    PillowImage.new("L", (4, 4), shade).save(file, "PNG")
    return file.getvalue()


FIRST = png(7)
OWN = [png(100 + slot) for slot in range(2)]
HASHES = {name: hashlib.sha256(data).hexdigest() for name, data in {"first": FIRST, 0: OWN[0], 1: OWN[1]}.items()}


class ShadeVision:
    """A model whose images are three tokens each, and whose pixels are their shade."""

    placeholder_id = PAD

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def prepare(self, picture: Any) -> ImageFeatures:
        self.threads.add(threading.current_thread().name)
        return ImageFeatures(tensors={"shade": np.array([picture.getpixel((0, 0))])}, tokens=3)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Takes every row."""

    def join(self, features: Sequence[ImageFeatures]) -> dict[str, Any]:
        return {"shade": np.concatenate([one.tensors["shade"] for one in features])}


def item_with_images(instance_id: str, *, epoch: int, slot: int, group_index: int) -> dict[str, Any]:
    """Two turns: the screen that all siblings see first, then one of the slot's own."""
    item = probe_item(instance_id, epoch=epoch, slot=slot, group_index=group_index)
    first, second = item["generations"]
    first |= {"prompt_ids": [1, PAD, 2], "keep_images": 0, "images": [HASHES["first"]], "prompt_tokens": 5}
    second |= {"prompt_ids": [5, PAD, 6], "keep_images": 1, "images": [HASHES[slot]], "prompt_tokens": 12}
    return item | {"images": [HASHES["first"], HASHES[slot]]}


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job_feed, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(job_feed, "SHORTEST_POLL_S", 0.01)
    reset_jobs()
    yield
    process_cache(0)


@pytest.fixture
def vision(monkeypatch: pytest.MonkeyPatch) -> ShadeVision:
    sees = ShadeVision()
    monkeypatch.setattr(intake, "load_vision", lambda checkpoint, pixel_dtype: sees)
    return sees


@pytest.fixture
def buffer() -> Iterator[LoopbackBuffer]:
    names = [f"task-{number}" for number in range(6)]
    with LoopbackBuffer(names, make_item=item_with_images) as running:
        running.images = {HASHES["first"]: FIRST, HASHES[0]: OWN[0], HASHES[1]: OWN[1]}
        yield running


def trained(buffer: LoopbackBuffer, rollouts: int = 1, **changes: Any) -> list[RolloutRecord]:
    values: dict[str, Any] = {
        "rollout_buffer_url": buffer.url,
        "prompt_data": "tasks.jsonl",
        "hf_checkpoint": "none",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_buffer_wait_s": 0.05,
        "fetch_trajectory_retry_times": 5,
        "rollout_buffer_short_groups": "keep",
    }
    return TrainerStandIn(trainer_args(**{**values, **changes})).train(rollouts)


def asked_images(buffer: LoopbackBuffer) -> list[str]:
    return [path for path, _ in buffer.requests if path.startswith("/images/")]


def test_rows_hold_expanded_tokens_and_their_images_in_order(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    (record,) = trained(buffer)

    for slot, sample in enumerate(record.samples[:2]):
        assert sample.tokens == [1, PAD, PAD, PAD, 2, 10 + slot, 4, 5, PAD, PAD, PAD, 6, 20 + slot, 21, 4]
        assert sample.loss_mask == [1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
        assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -0.125]
        assert sample.multimodal_train_inputs is not None
        assert sample.multimodal_train_inputs["shade"].tolist() == [7, 100 + slot]
    assert record.metrics["rollout/buffer/images"] == 8
    assert record.metrics["rollout/buffer/images_fetched"] == 3


def test_an_image_is_fetched_once_in_the_life_of_a_process(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    trained(buffer, 3)

    assert sorted(asked_images(buffer)) == sorted(f"/images/{sha256}" for sha256 in HASHES.values())


def test_images_are_prepared_beside_the_event_loop(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    trained(buffer)

    assert vision.threads
    assert threading.main_thread().name not in vision.threads


def test_a_missing_image_costs_its_trajectories_and_no_other(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    del buffer.images[HASHES[1]]
    (record,) = trained(buffer)

    assert [sample.remove_sample for sample in record.samples] == [False, True, False, True]
    assert "there is no image" in record.samples[1].metadata["dummy_reason"]
    assert record.metrics["rollout/buffer/images_missing"] == 2


def test_a_wrong_byte_is_never_trained(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    buffer.images[HASHES[0]] = png(55)
    (record,) = trained(buffer)

    assert [sample.remove_sample for sample in record.samples] == [True, False, True, False]
    assert "other bytes" in record.samples[0].metadata["dummy_reason"]


def test_an_image_lost_on_the_way_is_asked_for_again(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    buffer.script(f"/images/{HASHES['first']}", ScriptedReply(status=503), ScriptedReply(lost=True))
    (record,) = trained(buffer)

    assert not any(sample.remove_sample for sample in record.samples)


def test_a_rollout_whose_images_are_all_gone_says_so(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    buffer.images.clear()

    with pytest.raises(GeneratorError, match="there is no image"):
        trained(buffer)


def test_a_model_without_eyes_fetches_nothing_and_is_warned(
    buffer: LoopbackBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent_rollout._warn_once.cache_clear()
    monkeypatch.setattr(intake, "load_vision", lambda checkpoint, pixel_dtype: None)
    with caplog.at_level(logging.WARNING):
        (record,) = trained(buffer)

    assert asked_images(buffer) == []
    assert [sample.tokens.count(PAD) for sample in record.samples] == [2] * 4
    assert any("screenshots" in line for line in caplog.messages)


def test_a_model_that_sees_is_not_warned(
    buffer: LoopbackBuffer, vision: ShadeVision, caplog: pytest.LogCaptureFixture
) -> None:
    agent_rollout._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        trained(buffer)

    assert not any("screenshots" in line for line in caplog.messages)


def test_a_pixel_type_that_means_nothing_is_refused_at_once(buffer: LoopbackBuffer) -> None:
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        trained(buffer, rollout_buffer_pixel_dtype="int4")
    assert buffer.requests == []
