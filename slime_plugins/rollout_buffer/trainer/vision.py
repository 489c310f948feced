"""Converts training rows with one placeholder per image to inputs of a vision model.

An engine gets one placeholder per image and expands it; a training row has the expanded run of tokens, together with
the outputs of the model's image processor, joined along dimension 0 in the order of the placeholders. A row whose
tokens, images and grids do not agree, or whose prompt has another number of tokens in the engine, is refused with the
reason.

torch and the processor are imported by ``load_vision`` only. To add a model family, write a class with the members of
``VisionFamily`` and add it to ``FAMILIES``.
"""

from __future__ import annotations

import functools
import io
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from slime.utils.mask_rows import Generation, TrainingRow, expand_image_tokens
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.tokenizer_loading import load_tokenizer
from slime_plugins.rollout_buffer.trainer.image_fetch import FetchedImages

logger = logging.getLogger(__name__)

IMAGE_URL_PREFIX = "sha256:"


class ImageProblemError(ValueError):
    """A trajectory cannot be trained because of its images. ``counter`` is the metric that counts it."""

    counter: ClassVar[str] = "image_mismatches"


class ImageMismatchError(ImageProblemError):
    """Tokens, images and grids do not agree, or engine and processor count different numbers of tokens."""


class ImageUnavailableError(ImageProblemError):
    """An image is missing or cannot be decoded."""

    counter: ClassVar[str] = "images_missing"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFeatures:
    """The processor's output for one image: tensors to join along dimension 0, and its number of tokens."""

    tensors: Mapping[str, Any]
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """A row with expanded placeholders, the inputs of the model (None without images), and the decoded images."""

    row: TrainingRow
    train_inputs: dict[str, Any] | None
    pictures: tuple[Any, ...]


class VisionFamily(Protocol):
    """What differs between the families of vision models. One object serves all trajectories of a process."""

    @property
    def placeholder_id(self) -> int:
        """The token for one image in a prompt, and for one image token in a training row."""
        ...

    def prepare(self, picture: Any) -> ImageFeatures:
        """Returns the output of the model's processor for one image (PIL)."""
        ...

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Checks a row with one placeholder per image.

        Raises:
            ImageMismatchError: a vision token is at a position that the model does not support.
        """
        ...

    def join(self, features: Sequence[ImageFeatures]) -> dict[str, Any]:
        """Returns the joined inputs of several images, in order.

        Raises:
            ImageMismatchError: the joined tensors do not agree.
        """
        ...


class QwenVision:
    """Qwen-VL models: ``pixel_values`` holds one row per patch, ``image_grid_thw`` one row per image.

    An image becomes ``grid.prod() / merge_size ** 2`` tokens between its two markers. The model computes positions from
    tokens and grids and expects an image after each opening marker, so that a placeholder elsewhere is refused.
    """

    def __init__(
        self,
        processor: Any,
        *,
        concat: Callable[[list[Any]], Any],
        tensor_type: str = "pt",
        cast: Callable[[Any], Any] | None = None,
    ) -> None:
        """``concat`` joins tensors of ``tensor_type`` along dimension 0; ``cast`` converts the pixels' dtype."""
        self._image_processor = processor.image_processor
        self._concat = concat
        self._tensor_type = tensor_type
        self._cast = cast
        self.placeholder_id = _token_id(processor, "<|image_pad|>")
        self._opening_id = _token_id(processor, "<|vision_start|>")
        self._video_id = _token_id(processor, "<|video_pad|>")

    def prepare(self, picture: Any) -> ImageFeatures:
        """As ``VisionFamily``."""
        output = self._image_processor(images=[picture], return_tensors=self._tensor_type)
        pixels, grid = output["pixel_values"], output["image_grid_thw"]
        patches = math.prod(int(side) for side in grid[0])
        merged = int(self._image_processor.merge_size) ** 2
        if tuple(grid.shape) != (1, 3) or patches % merged or int(pixels.shape[0]) != patches:
            raise ImageMismatchError(f"the processor made {pixels.shape[0]} patches with the grid {grid.tolist()}")
        tensors = {"pixel_values": pixels if self._cast is None else self._cast(pixels), "image_grid_thw": grid}
        return ImageFeatures(tensors=tensors, tokens=patches // merged)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """As ``VisionFamily``."""
        if self._video_id in token_ids:
            raise ImageMismatchError("the row has a video token, but no video was shown")
        for index, token_id in enumerate(token_ids):
            if token_id == self.placeholder_id and (not index or token_ids[index - 1] != self._opening_id):
                raise ImageMismatchError(f"the image placeholder at {index} does not follow <|vision_start|>")

    def join(self, features: Sequence[ImageFeatures]) -> dict[str, Any]:
        """As ``VisionFamily``."""
        names = ("pixel_values", "image_grid_thw")
        joined = {name: self._concat([image.tensors[name] for image in features]) for name in names}
        grids = joined["image_grid_thw"].tolist()
        patches = sum(math.prod(grid) for grid in grids)
        if len(grids) != len(features) or int(joined["pixel_values"].shape[0]) != patches:
            raise ImageMismatchError(f"{len(features)} images have {len(grids)} grids with {patches} patches")
        return joined


FAMILIES: Mapping[str, Callable[..., VisionFamily]] = {
    "Qwen2_5_VLProcessor": QwenVision,
    "Qwen3VLProcessor": QwenVision,
}
"""Factories by the class name of a model's processor. Each is called with the processor, ``concat`` and ``cast``."""


@functools.lru_cache(maxsize=2)
def load_vision(checkpoint: str, pixel_dtype: str | None = None) -> VisionFamily | None:
    """Returns the vision family of a model, loaded once per process; None for a text model.

    ``pixel_dtype`` (for instance ``bfloat16``) is the dtype of the pixels; None keeps that of the processor.

    Raises:
        ConfigError: the processor of a vision model cannot be loaded, or its family is not in ``FAMILIES``.
    """
    reason = "the checkpoint has none"
    try:
        name, processor = _load_processor(checkpoint)
    except Exception as error:  # noqa: BLE001 - any error means that there is no processor
        reason = str(error).strip()[:300]
    else:
        if getattr(processor, "image_processor", None) is not None:
            return _family_of(name, processor, pixel_dtype)
    if _is_vision_model(checkpoint):
        raise ConfigError(
            f"the image processor of the vision model {checkpoint} cannot be loaded where the rollout runs: {reason}; "
            "install what it needs (often torchvision), or train on tokens alone (rollout_buffer_images: tokens)"
        )
    logger.debug("no image processor can be loaded from %s: %s", checkpoint, reason)
    return None


def _is_vision_model(checkpoint: str) -> bool:
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(checkpoint)
    except (OSError, ValueError):
        return False
    return "vision_config" in config


def _load_processor(checkpoint: str) -> tuple[str, Any]:
    """Returns the class name of a model's processor, and the processor.

    If the complete processor cannot be loaded (its part for videos needs torchvision), its image processor and
    tokenizer are loaded alone.
    """
    from transformers import AutoImageProcessor, AutoProcessor, ImageProcessingMixin

    try:
        processor = AutoProcessor.from_pretrained(checkpoint, trust_remote_code=True)
    except Exception:
        settings, _ = ImageProcessingMixin.get_image_processor_dict(checkpoint)
        if "processor_class" not in settings:
            raise
        image_processor = AutoImageProcessor.from_pretrained(checkpoint, trust_remote_code=True)
        tokenizer = load_tokenizer(checkpoint, trusted=True)
        parts = SimpleNamespace(image_processor=image_processor, tokenizer=tokenizer)
        return str(settings["processor_class"]), parts
    return type(processor).__name__, processor


def _family_of(name: str, processor: Any, pixel_dtype: str | None) -> VisionFamily:
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"the image processor {name} is not supported; supported are {known}")
    import torch

    dtype = None if pixel_dtype is None else getattr(torch, pixel_dtype)
    return family(processor, concat=torch.concat, cast=None if dtype is None else lambda pixels: pixels.to(dtype))


class RowImages:
    """Attaches images to rows. One object per group: all rows that show an image share its tensors."""

    def __init__(self, vision: VisionFamily, images: FetchedImages) -> None:
        self._vision = vision
        self._images = images
        self._results: dict[str, tuple[Any, ImageFeatures] | Exception] = {}

    def prepare(self, hashes: Iterable[str], pool: Executor) -> None:
        """Converts images in the threads of ``pool``."""
        wanted = list(dict.fromkeys(hashes))
        self._results.update(zip(wanted, pool.map(self._converted, wanted), strict=True))

    def attach(self, row: TrainingRow, generations: Sequence[Generation] = ()) -> RowInputs:
        """Returns the row with expanded placeholders and inputs. ``generations`` are those that the row indexes.

        Raises:
            ImageMismatchError: the numbers of placeholders and images differ, a vision token was sampled or is at an
                unsupported position, or the engine reports another number of tokens in a prompt.
            ImageUnavailableError: an image is missing or cannot be decoded.
        """
        if row.images is None:
            raise ImageMismatchError("the generations do not name their images")
        self._vision.check_tokens(row.token_ids)
        prepared = [self._prepared(sha256) for sha256 in row.images]
        counts = [features.tokens for _, features in prepared]
        self._check_turns(row, generations)
        try:
            expanded = expand_image_tokens(row, self._vision.placeholder_id, counts)
        except ValueError as error:
            raise ImageMismatchError(str(error)) from error
        joined = self._vision.join([features for _, features in prepared]) if prepared else None
        return RowInputs(row=expanded, train_inputs=joined, pictures=tuple(picture for picture, _ in prepared))

    def _prepared(self, sha256: str) -> tuple[Any, ImageFeatures]:
        if sha256 not in self._results:
            self._results[sha256] = self._converted(sha256)
        result = self._results[sha256]
        if isinstance(result, Exception):
            raise result
        return result

    def _converted(self, sha256: str) -> tuple[Any, ImageFeatures] | Exception:
        """Returns an image with its features, or the error of the conversion."""
        try:
            picture = _picture(sha256, self._images)
            return picture, self._vision.prepare(picture)
        except Exception as error:  # noqa: BLE001 - raised for each trajectory that shows the image
            return error

    def _check_turns(self, row: TrainingRow, generations: Sequence[Generation]) -> None:
        """Compares the image tokens of each turn's prompt with those of the engine's processor."""
        for index in row.generation_indices if generations else ():
            generation = generations[index]
            placeholders = list(generation.prompt_ids).count(self._vision.placeholder_id)
            if generation.images is not None and len(generation.images) != placeholders:
                raise ImageMismatchError(  # an engine silently ignores images beyond the placeholders
                    f"the prompt of turn {index} has {placeholders} image placeholders for {len(generation.images)} "
                    "images"
                )
            if generation.is_trained and row.images is not None:
                tokens = [self._prepared(sha256)[1].tokens for sha256 in row.images[:placeholders]]
                _check_tokens_of_turn(generation, index, tokens)


def why_not_sent(generations: Sequence[Generation]) -> str:
    """Returns a message if an image of a turn differs from the image that the engine was sent; empty if none does."""
    for index, generation in enumerate(generations):
        sent = () if generation.prompt_receipt is None else generation.prompt_receipt.images
        if not sent or generation.images is None:
            continue
        for number, (ours, theirs) in enumerate(zip_longest(generation.images, sent, fillvalue="")):
            if ours != theirs:
                return (
                    f"image {number} of turn {index} is {ours[:12] or 'missing'}, and the engine was sent "
                    f"{theirs[:12] or 'none'} in its place"
                )
    return ""


def _check_tokens_of_turn(generation: Generation, index: int, tokens: Sequence[int]) -> None:
    """Compares the tokens of each image, or their sum if the engine reports only the prompt's length."""
    receipt = generation.prompt_receipt
    if receipt is not None and receipt.image_tokens is not None:
        of_engine = receipt.image_tokens
        if len(of_engine) != len(tokens):
            raise ImageMismatchError(
                f"the engine saw {len(of_engine)} images in turn {index}, which shows {len(tokens)}"
            )
        for number, (theirs, ours) in enumerate(zip(of_engine, tokens, strict=True)):
            if theirs != ours:
                raise ImageMismatchError(
                    f"the engine made {theirs} tokens of image {number} of turn {index}, "
                    f"and this image processor makes {ours}"
                )
    elif generation.prompt_tokens is not None:
        expected = len(generation.prompt_ids) - len(tokens) + sum(tokens)
        if generation.prompt_tokens != expected:
            raise ImageMismatchError(
                f"the engine counted {generation.prompt_tokens} tokens in the prompt of turn {index}, "
                f"and this image processor makes it {expected}"
            )


def tensor_bytes(vision: VisionFamily, shown: Iterable[str], images: FetchedImages) -> int:
    """Estimates the bytes of images' tensors, from the first image that can be converted and the areas of the others.

    Returns 0 if none is readable. An image that is shown several times counts each time.
    """
    areas = {sha256: area for sha256, data in images.data.items() if (area := _area(data))}
    readable = [sha256 for sha256 in shown if sha256 in areas]
    for sha256 in dict.fromkeys(readable):
        try:
            tensors = vision.prepare(_picture(sha256, images)).tensors.values()
        except Exception:  # noqa: BLE001 - trajectories that show it are refused later with the reason
            continue
        nbytes = sum(getattr(tensor, "nbytes", 0) for tensor in tensors)
        return round(nbytes / areas[sha256] * sum(areas[image] for image in readable))
    return 0


def _area(data: bytes) -> int:
    """Returns the number of pixels, read from the header; 0 if the data is not an image."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            return int(picture.width * picture.height)
    except Exception:  # noqa: BLE001 - trajectories that show it are refused later with the reason
        return 0


def image_hashes_in_messages(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the hashes of the images before the last reply of a conversation, in order.

    Images after the last reply are left out, because no generation has them in its prompt.
    """
    shown: list[str] = []
    before_last_reply = 0
    for message in messages:
        if message.get("role") == "assistant":
            before_last_reply = len(shown)
        content = message.get("content")
        shown += [_hash_of(part) for part in content if _is_image(part)] if isinstance(content, list) else []
    return tuple(shown[:before_last_reply])


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _hash_of(part: Mapping[str, Any]) -> str:
    """Returns the sha256 of an image part; a part without a hash is refused later as a missing image."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else None
    return str(url).removeprefix(IMAGE_URL_PREFIX)


def _token_id(processor: Any, token: str) -> int:
    token_id = processor.tokenizer.convert_tokens_to_ids(token)
    if token_id is None or token_id == getattr(processor.tokenizer, "unk_token_id", None):
        raise ConfigError(f"the processor's tokenizer has no {token}: it belongs to another model")
    return int(token_id)


def _picture(sha256: str, images: FetchedImages) -> Any:
    from PIL import Image

    if sha256 not in images.data:
        reason = images.missing.get(sha256, "it was not fetched")
        raise ImageUnavailableError(f"image {sha256[:12]} is missing: {reason}")
    try:
        picture = Image.open(io.BytesIO(images.data[sha256]))
        picture.load()
    except Exception as error:  # such as PIL's DecompressionBombError, whose only base class is Exception
        raise ImageUnavailableError(f"image {sha256[:12]} cannot be read: {error}") from error
    return picture
