"""Image inputs of models of the Qwen-VL family: pixels, grids, and token positions.

A prompt holds one placeholder for each image; it becomes as many tokens as the model's image processor makes of the
image.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout_buffer_lab.sglang_routes.images import undecodable
from rollout_buffer_lab.sglang_routes.records import EngineBreakError
from slime_plugins.rollout_buffer.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt with its images. ``keys`` are its ids, with a number made of the image in place of its tokens' ids.

    ``spans`` are start and end of each image in ``ids``. ``positions`` (3, tokens) are the rotary positions; that of a
    token after the prompt is its index plus ``delta``, because an image has fewer positions than tokens.
    """

    ids: list[int]
    keys: list[int]
    spans: list[tuple[int, int]]
    pixels: list[torch.Tensor]
    grids: list[torch.Tensor]
    positions: torch.Tensor
    delta: int

    def start_of_cached(self, shared: int) -> int:
        """Returns how many of the ``shared`` leading positions can come from a cache: an image is never split."""
        return next((start for start, end in self.spans if start < shared < end), shared)

    def inputs_from(self, start: int) -> dict[str, torch.Tensor]:
        """Returns the model's inputs for the images after position ``start``."""
        after_start = [index for index, (first, _) in enumerate(self.spans) if first >= start]
        if not after_start:
            return {}
        inputs = {"pixel_values": self.pixels, "image_grid_thw": self.grids}
        return {name: torch.cat([tensors[index] for index in after_start]) for name, tensors in inputs.items()}


class VisionInputs:
    """Preprocesses the images of requests; thread-safe."""

    def __init__(self, model: Any, image_processor: Any) -> None:
        self.placeholder_id = int(model.config.image_token_id)
        self._model = model.model
        self._processor = image_processor

    def image_prompt(self, ids: Sequence[int], images: Sequence[bytes]) -> ImagePrompt | None:
        """Returns the prompt ``ids`` with its images; None without any. Surplus images are ignored, as in SGLang.

        Raises:
            BadRequestError: an image cannot be decoded, or the model's processor does not take its shape.
            EngineBreakError: there are fewer images than placeholders.
        """
        count = ids.count(self.placeholder_id)
        if not images or not count:
            return None
        if count > len(images):
            raise EngineBreakError(f"{count} image placeholders for {len(images)} images")
        prepared = [self._processed(image) for image in images[:count]]
        grids = [grid for _, grid in prepared]
        token_counts = [math.prod(grid[0].tolist()) // int(self._processor.merge_size) ** 2 for grid in grids]
        expanded, keys, spans = self._expanded(ids, images, token_counts)
        positions, delta = self._model.get_rope_index(
            torch.tensor([expanded]),
            mm_token_type_ids=torch.tensor([[int(token_id == self.placeholder_id) for token_id in expanded]]),
            image_grid_thw=torch.cat(grids),
        )
        pixels = [pixel_values for pixel_values, _ in prepared]
        return ImagePrompt(expanded, keys, spans, pixels, grids, positions[:, 0], int(delta[0, 0]))

    def _processed(self, image: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        from PIL import Image

        try:
            picture = Image.open(io.BytesIO(image)).convert("RGB")
            prepared = self._processor(images=[picture], return_tensors="pt")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise undecodable(str(error)) from error
        return prepared["pixel_values"], prepared["image_grid_thw"]

    def _expanded(
        self, ids: Sequence[int], images: Sequence[bytes], token_counts: Sequence[int]
    ) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Returns ids, keys and spans of an ``ImagePrompt`` whose images have so many tokens (``token_counts``)."""
        expanded: list[int] = []
        keys: list[int] = []
        spans: list[tuple[int, int]] = []
        images_in_order = zip(images, token_counts, strict=False)  # surplus images are ignored
        for token_id in ids:
            image, size = next(images_in_order) if token_id == self.placeholder_id else (b"", 1)
            if image:
                spans.append((len(expanded), len(expanded) + size))
            expanded += [token_id] * size
            keys += [_key(image) if image else token_id] * size
        return expanded, keys, spans


def load_vision_inputs(model: Any, path: Path) -> VisionInputs:
    """Loads a vision model's image preprocessing from its folder.

    Raises:
        ConfigError: the model is of another family, or its folder has no settings of an image processor.
    """
    from transformers import AutoImageProcessor

    if not hasattr(model.model, "get_rope_index") or not hasattr(model.config, "image_token_id"):
        raise ConfigError(
            f"{path} is a {model.config.model_type}: only vision models of the Qwen-VL family are supported"
        )
    try:
        return VisionInputs(model, AutoImageProcessor.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{path} is a vision model, but its image processor cannot be loaded: {error}") from error


def _key(image: bytes) -> int:
    """Returns the same negative number, which is no token id, for equal images."""
    return -1 - int.from_bytes(hashlib.sha256(image).digest()[:7], "big")
