"""Time to preprocess images, with one thread and with two, by the trainer's code and Qwen3-VL's processor.

    python -m benchmarks.bench_images --json images.json

Contenders alternate within each round. Needs torch, torchvision and transformers, which ``scripts/bench`` does not. On
a busy machine use the ratio, not the milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image
from rich.console import Console
from transformers import AutoTokenizer

from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages
from slime_plugins.rollout_buffer.trainer.vision import QwenVision, RowImages

SIZE = (540, 1200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vision, pictures = qwen_vision(), noise(options.pictures)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(options.rounds):
        for threads, rounds in seconds.items():
            rounds.append(time_per_picture(vision, pictures, threads))
    ratios = [one / two for one, two in zip(*seconds.values(), strict=True)]
    tensors = vision.prepare(Image.open(io.BytesIO(next(iter(pictures.values()))))).tensors.values()
    report = {
        "ms_a_picture": {threads: statistics.median(rounds) * 1000 for threads, rounds in seconds.items()},
        "one_thread_to_two": {"median": statistics.median(ratios), "rounds": ratios},
        "mb_a_picture": sum(tensor.nbytes for tensor in tensors) / 1e6,
    }
    Console().print_json(data=report)
    if options.json is not None:
        options.json.write_text(json.dumps(report), encoding="utf-8")


def qwen_vision() -> QwenVision:
    """Returns Qwen3-VL's preprocessing with its own image processor."""
    import torch
    from transformers import Qwen2VLImageProcessor

    processor = SimpleNamespace(
        image_processor=Qwen2VLImageProcessor(patch_size=16, merge_size=2),
        tokenizer=AutoTokenizer.from_pretrained(DEMO_TOKENIZER_PATH),
    )
    return QwenVision(processor, concat=torch.concat)


def noise(count: int) -> dict[str, bytes]:
    """Returns different PNG files by their hash."""
    files = []
    for _ in range(count):
        file = io.BytesIO()
        Image.effect_noise((SIZE[0] // 10, SIZE[1] // 10), 60).resize(SIZE).convert("RGB").save(file, "PNG")
        files.append(file.getvalue())
    return {hashlib.sha256(data).hexdigest(): data for data in files}


def time_per_picture(vision: Any, pictures: Mapping[str, bytes], threads: int) -> float:
    """Returns the seconds per image, with ``threads`` threads."""
    images = RowImages(vision, FetchedImages(data=pictures))
    with ThreadPoolExecutor(threads) as pool:
        begun = time.perf_counter()
        images.prepare(pictures, pool)
        return (time.perf_counter() - begun) / len(pictures)


if __name__ == "__main__":
    main()
