"""A rollout with screenshots, over real HTTP against a scripted buffer: fetched once, trained in their places."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_buffer_lab.mock_trainer import MockTrainer, RolloutRecord
from slime.rollout import agent_rollout
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer import delivery_conversion
from slime_plugins.rollout_buffer.trainer.delivery_conversion import available_bytes
from slime_plugins.rollout_buffer.trainer.vision import ImageFeatures
from tests.loopback_buffer import LoopbackBuffer, probe_item
from tests.pictures import png

PAD = 99
FIRST = png((4, 4), 7, mode="L")
OWN = [png((4, 4), 100 + slot, mode="L") for slot in range(2)]
HASHES = {name: hashlib.sha256(data).hexdigest() for name, data in {"first": FIRST, 0: OWN[0], 1: OWN[1]}.items()}


class ShadeVision:
    """A model whose images are three tokens each, and whose pixels are their shade."""

    placeholder_id = PAD

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.calls = 0
        self.company: threading.Event | None = None
        """Set by a call that begins while another one waits for it."""

    def prepare(self, picture: Any) -> ImageFeatures:
        self.threads.add(threading.current_thread().name)
        self.calls += 1
        if self.company is not None and self.calls > 1:  # the first one is that of the memory check
            if self.calls > 2:
                self.company.set()
            assert self.company.wait(20)
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


@pytest.fixture
def vision(monkeypatch: pytest.MonkeyPatch) -> ShadeVision:
    sees = ShadeVision()
    monkeypatch.setattr(delivery_conversion, "load_vision", lambda checkpoint, pixel_dtype: sees)
    return sees


@pytest.fixture
def buffer() -> Iterator[LoopbackBuffer]:
    names = [f"task-{number}" for number in range(6)]
    with LoopbackBuffer(names, make_item=item_with_images) as running:
        running.images = {HASHES["first"]: FIRST, HASHES[0]: OWN[0], HASHES[1]: OWN[1]}
        yield running


def trained(buffer: LoopbackBuffer, rollouts: int = 1, **changes: Any) -> list[RolloutRecord]:
    changes = {"rollout_buffer_short_groups": "keep", **changes}
    return MockTrainer(buffer.trainer_args(**changes)).train(rollouts)


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


def test_a_missing_image_costs_its_trajectories_and_no_other(buffer: LoopbackBuffer, vision: ShadeVision) -> None:
    del buffer.images[HASHES[1]]
    (record,) = trained(buffer)

    assert [sample.remove_sample for sample in record.samples] == [False, True, False, True]
    assert "there is no image" in record.samples[1].metadata["dummy_reason"]
    assert record.metrics["rollout/buffer/images_missing"] == 2


def test_a_text_model_fetches_no_screenshots_and_a_warning_says_so(
    buffer: LoopbackBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent_rollout._warn_once.cache_clear()
    monkeypatch.setattr(delivery_conversion, "load_vision", lambda checkpoint, pixel_dtype: None)
    with caplog.at_level(logging.WARNING):
        (record,) = trained(buffer)

    assert not any(path.startswith("/images/") for path, _ in buffer.requests)
    assert [sample.tokens.count(PAD) for sample in record.samples] == [2] * 4
    assert any("screenshots" in line for line in caplog.messages)


@pytest.fixture
def vision_checkpoint(tmp_path: Path) -> str:
    """The folder of a vision model whose processor cannot be loaded."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text("garbled")
    return str(tmp_path)


@pytest.mark.parametrize(("task_type", "started"), [("android_world", False), ("custom", True)])
def test_a_vision_model_without_its_processor_stops_before_anything_is_trained_blind(
    buffer: LoopbackBuffer, vision_checkpoint: str, task_type: str, started: bool
) -> None:
    with pytest.raises(ConfigError, match=r"the image processor of the vision model .* cannot be loaded"):
        trained(buffer, hf_checkpoint=vision_checkpoint, rollout_task_type=task_type)
    assert bool(buffer.requests) is started


def test_pictures_of_a_group_become_tensors_in_several_threads_and_each_once(
    buffer: LoopbackBuffer, vision: ShadeVision
) -> None:
    vision.company = threading.Event()
    trained(buffer, rollout_batch_size=1, rollout_buffer_image_threads=2)

    assert len([name for name in vision.threads if name.startswith("images_")]) == 2
    assert vision.calls == 1 + len(HASHES)


def test_a_delivery_whose_tensors_do_not_fit_the_memory_is_refused_before_they_are_made(
    buffer: LoopbackBuffer, vision: ShadeVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_conversion, "available_bytes", lambda: 20)
    with pytest.raises(ConfigError, match=r"screenshots of . trajectories become .* of memory are left"):
        trained(buffer)
    assert vision.calls == 1


def test_a_batch_that_will_not_fit_the_memory_is_said_with_its_first_delivery(
    buffer: LoopbackBuffer, vision: ShadeVision, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shade_bytes, screens, played = 8, 2, 2  # of a group: fewer than the batch has
    monkeypatch.setattr(delivery_conversion, "available_bytes", lambda: shade_bytes * screens * played + 1)
    buffer.most_groups_of_a_poll = 1
    with caplog.at_level(logging.WARNING):
        trained(buffer)
    assert len([line for line in caplog.messages if "and the whole batch about" in line]) == 1


MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "left"),
    [("max", 8 * MIB), (str(10 * MIB), 10 * MIB - 5 * MIB + 2 * MIB), (str(4 * MIB), MIB), (None, 8 * MIB)],
)
def test_the_smaller_of_machine_and_control_group_counts(tmp_path: Path, limit: str | None, left: int) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * 1024} kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(str(5 * MIB))
        (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {2 * MIB}\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == left
